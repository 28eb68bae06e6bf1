"""Pictures, drawn from the record of a run.

    collective.py         who sent what to whom, and what each rank then holds
                          (with diagram, graph, matrix, many_ranks, captions, timing)
    collective_run.py     one collective on virtual ranks, for the explorer and the atlas
    before_after.py       what each rank was given and returned, in blocks
    forward_backward.py   a collective and its backward, side by side
    sharded_product.py    which blocks each rank holds in a sharded product
    matrices.py           how tensor parallelism cuts a model
    rows.py               the engine of the pictures with rows over time, which are:
    timeline.py           every rank's spans and messages over time, and how much they overlap
    pipeline_timeline.py  what each rank of a pipeline computes, and when
    axis_timeline.py      which axis of a mesh communicates when
    memory_over_step.py   the activations that each rank keeps for backward, over a step
    memory_per_rank.py    bytes that each rank holds
    between_ranks.py      how long each two ranks waited for each other, and what they sent
    deadlock.py           who waits for whom
    node_links.py         what connects the GPUs of a node
    loss_curves.py        loss curves, also live
    plots.py              measurements and models over a swept size
    run_table.py          the tables of `parallel101 run`

    grid.py               the engine of grids with a row for each rank
    palette.py            colours
    chromium.py           a scene as PNG or GIF, drawn by Chromium

Each gives a `Scene` (scene.py), which displays itself in a notebook and plays in an HTML page
without a kernel or a network (player.js). `watch` runs a function on values that carry their
origin. The explorers in explore/ run again when a control is moved. What a record means, such as
whose data is in a message, is computed in `laboratory.analysis`.
"""
