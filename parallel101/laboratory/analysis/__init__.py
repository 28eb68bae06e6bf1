"""Computes what a record says about a run. Nothing here draws.

provenance.py           whose data is in a message
chunks.py               which elements always moved together
steps.py                the steps of an algorithm
logical_topology.py     who sent to whom: a ring, a tree, a grid, …
replay.py               these together: what each rank held after each step, and was given
                        and returned
verdict.py              which collective it was, and what is wrong with its result
held_blocks.py          which blocks each rank of a sharded product held, and which terms of them
waiting.py              how long ranks waited, for whom, and in which lines
run_window.py           when a run took place, its training steps, and a part of its record
critical_path.py        what the run time depended on
overlap.py              how much communication overlaps with compute
pipeline_times.py       bubbles and activations held, of schedules and of recorded pipelines
traffic.py              messages and bytes: of each axis of a mesh, from rank to rank, …
"""
