"""Trainers: one process's training, computed by many ranks.

The ideas, each in one file that is read from top to bottom, and that the trainers run:

    data_parallel.py        naive, bucketed, overlapped: gradients are summed over the ranks
    zero_1_2_3.py           ZeRO-1, ZeRO-2, ZeRO-3: each rank keeps 1/n
    tensor_parallel.py      column and row layers, heads, the vocabulary: both directions
    expert_parallel.py      each has some of the experts; rows travel to them and back
    pipeline_parallel.py    one loop over actions, which runs 1F1B and every other schedule
    context_parallel.py     ring attention: each rank has a part of the time; context/ has Ulysses
    step.py                 the step that joins them, and its random numbers
    schedules/              gpipe_1f1b_zero_bubble.py; schedules as data, checked and timed

Behind them:

    hybrid.py, one_axis.py    the public trainers: HybridTrainer, and it on one axis
    options.py, expect.py, batches.py, losses.py    what they are given, checked
    training_loop.py, checkpoint.py, sharded_optimizer.py, memory.py    besides a step
    axis.py, layout.py      what an axis does to a model; where every parameter is
    gradient_sync.py, flat.py, model_layers.py    the axis dp: what gradients need; odd models
    context/                the axis cp: a batch cut along time, Ulysses
    tensor/                 the axis tp: which layers a plan cuts; sequence parallel
    pipeline/               the axis pp: stages, and the messages between them
    weight_gradients.py     ∂W, computed later than ∂x
    recompute.py            activations that backward computes again
    torch_functions.py      torch's functions replaced inside a block, and nodes of its graph
    precision.py            16 bit, and master weights
    agreement.py            what the ranks agree on, errors included
    verify/                 before the first step: equal to one process?
"""
