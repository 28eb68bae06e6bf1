"""What a record says about a run. Nothing here draws.

provenance.py decodes whose data is in a message, and chunks.py finds what moved together. steps.py
and topology.py find the steps and the shape of an algorithm. replay.py puts these together: what
each rank held after each step. verdict.py names the collective, and what is wrong with its result.
overlap.py measures how much communication overlaps with compute. pipeline.py finds the bubbles and
the activations held of schedules and of recorded pipelines. axes.py counts the traffic of each axis
of a mesh. sharding.py says which blocks each rank of a sharded product held, and terms.py which
terms of its sum are in a block. waiting.py says how long ranks waited, for whom, and in which
lines.
"""
