"""Pictures, drawn from the record of a run.

    collective.py   who sent what to whom, and what each rank then holds      (with diagram, graph, matrix, many_ranks, captions, timing)
    timeline.py     every rank's spans, messages and collectives over time    lanes.py   how much communication overlaps with compute
    pipeline.py     what each rank of a pipeline computes, and when           axes.py    which axis of a mesh communicates when
    memory.py       bytes that each rank holds                                matrices.py   how tensor parallelism cuts a model
    before_after.py what each rank was given and returned, in blocks
    deadlock.py     who waits for whom                                        run_table.py   the tables of `parallel101 run`
    between_ranks.py   what lies between each two ranks: waiting, bytes       waiting_overview.py   the timeline of a long run
    sharding.py     which blocks each rank holds in a sharded product
    loss.py         loss curves, also live                                    plots.py   measurements and models over a swept size

    raster.py   a scene as PNG or GIF, drawn by Chromium (chromium.py)

Each gives a `Scene` (scene.py), which displays itself in a notebook and plays in an HTML page
without a kernel or a network (player.js). `watch` runs a function on values that carry their
origin. The explorers in explore/ run again when a control is moved. What a record means, such as
whose data is in a message, is computed in `parallel101.analysis`.
"""
