"""Wrong solutions of homework 9. EXPECTED: the misconception that the grader must name for each."""

import sys

EXPECTED = {
    "step_seconds__backward_once": "backward counted like forward",
    "step_seconds__recompute_in_place_of_backward": "backward counted like forward",
    "step_seconds__forward_only": "backward forgotten",
    "step_seconds__always_three": "recomputation not counted in time",
    "step_seconds__six_n": "attention's scores forgotten",
    "step_seconds__causal_half": "attention's scores forgotten",
    "step_seconds__half_the_operations": "operations of a product halved",
    "step_seconds__weights_halved": "operations of a product halved",
    "step_seconds__one_microbatch": "one microbatch",
    "step_seconds__all_layers": "all layers on one GPU",
    "step_seconds__one_all_reduce_a_layer": "all-reduces counted once",
    "step_seconds__all_reduces_of_forward": "all-reduces counted once",
    "step_seconds__four_all_reduces": "recomputation's all-reduces forgotten",
    "step_seconds__node_bandwidth": "node's bandwidth for each GPU",
    "step_seconds__node_bandwidth_in_bits": "node's bandwidth for each GPU",
    "step_seconds__bits": "bits taken for bytes",
    "step_seconds__nvlink_always": "NVLink beyond the node",
    "step_seconds__nvlink_by_dp_alone": "NVLink beyond the node",
    "step_seconds__network_always": "network inside the node",
    "step_seconds__no_factor": "ring's factor",
    "step_seconds__one_way": "half of the gradients' bytes",
    "step_seconds__whole_gradient": "gradients of the whole model",
    "step_seconds__gradient_not_cut_by_tp": "gradients of the whole model",
    "step_seconds__bf16_gradients": "half of the gradients' bytes",
    "step_seconds__bubble_of_the_step": "bubble as a share of the step",
    "step_seconds__bubble_of_the_step_chunks": "bubble as a share of the step",
    "step_seconds__no_chunks": "bubble not divided by the chunks",
    "step_seconds__p_waits": "bubble of P stages",
    "step_seconds__hfu": "recomputation counted in MFU",
    "step_seconds__one_replica": "one replica's work over all GPUs",
    "step_seconds__of_what_is_reached": "relative to what products reach",
    "step_seconds__zeros": None,
    "step_seconds__half_ring": "ring's factor",
    "step_seconds__constant": None,
    "step_seconds__asks_the_grader": None,
    "step_seconds__six_n_d": "attention's scores forgotten",
    "step_seconds__pipeline_efficiency": "bubble as a share of the step",
    "step_seconds__two_mistakes": "backward counted like forward",
}
POINTS = {
    "step_seconds__hfu": 8.0,
    "step_seconds__bits": 6.0,
    "step_seconds__zeros": 0.0,
    "step_seconds__constant": 0.0,
    "step_seconds__asks_the_grader": 0.0,
}


def estimate(
    shape,
    layout,
    cluster,
    *,
    passes=lambda again: 3 + again,
    weights=24,
    scores=4,
    microbatches=None,
    stages=None,
    all_reduces=lambda again: 4 + 2 * again,
    link=None,
    ring=lambda n: 2 * (n - 1) / n,
    gradient=lambda layout: 4 / layout.pp / layout.tp,
    bubble=lambda P, M, v: (P - 1) / (v * M),
    model=lambda again: 3,
    samples=lambda layout: layout.microbatch * layout.microbatches * layout.dp,
    peak=lambda cluster: cluster.flops,
):
    """The right estimate, of which one thing can be changed."""
    s, h, again = shape.time, shape.width, layout.recompute == "full"
    token = weights * h**2 + scores * s * h
    visits = (microbatches or layout.microbatches) * shape.layers / (stages or layout.pp)
    tokens = layout.microbatch * s

    def right_link(cluster, n, reach):
        return (
            cluster.nvlink * 1e9 if reach <= cluster.node else cluster.network / cluster.node / 8e-9
        )

    def all_reduce(nbytes, n, reach):
        return ring(n) * nbytes / (link or right_link)(cluster, n, reach) if n > 1 else 0.0

    work = visits * passes(again) * tokens * token
    matmul = work / layout.tp / cluster.flops / cluster.efficiency
    tp = (
        layout.microbatches * shape.layers / layout.pp * all_reduces(again)
        * all_reduce(2 * tokens * h, layout.tp, layout.tp)
    )  # fmt: skip
    dp = all_reduce(gradient(layout) * 12 * h**2 * shape.layers, layout.dp, layout.tp * layout.dp)
    wait = bubble(layout.pp, layout.microbatches, layout.chunks) * (matmul + tp)
    needed = model(again) * samples(layout) * s * shape.layers * (24 * h**2 + 4 * s * h)
    gpus = layout.dp * layout.tp * layout.pp
    mfu = needed / (matmul + tp + dp + wait) / gpus / peak(cluster)
    return {"matmul": matmul, "tp": tp, "bubble": wait, "dp": dp, "mfu": mfu}


def step_seconds__backward_once(shape, layout, cluster):
    return estimate(shape, layout, cluster, passes=lambda again: 2 + again)


def step_seconds__recompute_in_place_of_backward(shape, layout, cluster):
    """Two passes, recomputation or not."""
    return estimate(shape, layout, cluster, passes=lambda again: 2)


def step_seconds__forward_only(shape, layout, cluster):
    return estimate(shape, layout, cluster, passes=lambda again: 1)


def step_seconds__always_three(shape, layout, cluster):
    return estimate(shape, layout, cluster, passes=lambda again: 3)


def step_seconds__six_n(shape, layout, cluster):
    """Six operations for each weight and token."""
    return estimate(shape, layout, cluster, scores=0)


def step_seconds__causal_half(shape, layout, cluster):
    return estimate(shape, layout, cluster, scores=2)


def step_seconds__half_the_operations(shape, layout, cluster):
    return estimate(shape, layout, cluster, weights=12, scores=2)


def step_seconds__weights_halved(shape, layout, cluster):
    return estimate(shape, layout, cluster, weights=12)


def step_seconds__one_microbatch(shape, layout, cluster):
    return estimate(shape, layout, cluster, microbatches=1)


def step_seconds__all_layers(shape, layout, cluster):
    return estimate(shape, layout, cluster, stages=1)


def step_seconds__one_all_reduce_a_layer(shape, layout, cluster):
    return estimate(shape, layout, cluster, all_reduces=lambda again: 2 + again)


def step_seconds__all_reduces_of_forward(shape, layout, cluster):
    return estimate(shape, layout, cluster, all_reduces=lambda again: 2 + 2 * again)


def step_seconds__four_all_reduces(shape, layout, cluster):
    return estimate(shape, layout, cluster, all_reduces=lambda again: 4)


def step_seconds__node_bandwidth(shape, layout, cluster):
    def link(cluster, n, reach):
        return 1e9 * (cluster.nvlink if reach <= cluster.node else cluster.network / 8)

    return estimate(shape, layout, cluster, link=link)


def step_seconds__node_bandwidth_in_bits(shape, layout, cluster):
    """Two mistakes with the same number."""

    def link(cluster, n, reach):
        return 1e9 * (cluster.nvlink if reach <= cluster.node else cluster.network)

    return estimate(shape, layout, cluster, link=link)


def step_seconds__bits(shape, layout, cluster):
    def link(cluster, n, reach):
        return 1e9 * (cluster.nvlink if reach <= cluster.node else cluster.network / cluster.node)

    return estimate(shape, layout, cluster, link=link)


def step_seconds__nvlink_always(shape, layout, cluster):
    return estimate(shape, layout, cluster, link=lambda cluster, n, reach: cluster.nvlink * 1e9)


def step_seconds__nvlink_by_dp_alone(shape, layout, cluster):
    """As if the ranks along dp were neighbours."""

    def link(cluster, n, reach):
        share = cluster.network / 8 / cluster.node
        return 1e9 * (cluster.nvlink if n <= cluster.node else share)

    return estimate(shape, layout, cluster, link=link)


def step_seconds__network_always(shape, layout, cluster):
    def link(cluster, n, reach):
        return cluster.network * 1e9 / 8 / cluster.node

    return estimate(shape, layout, cluster, link=link)


def step_seconds__no_factor(shape, layout, cluster):
    return estimate(shape, layout, cluster, ring=lambda n: 1)


def step_seconds__one_way(shape, layout, cluster):
    """Half of an all-reduce along dp."""
    right = estimate(shape, layout, cluster)
    found = estimate(shape, layout, cluster, ring=lambda n: (n - 1) / n)
    seconds = sum(right[name] for name in ("matmul", "tp", "bubble")) + found["dp"]
    whole = sum(right[name] for name in ("matmul", "tp", "bubble", "dp"))
    return right | {"dp": found["dp"], "mfu": right["mfu"] * whole / seconds}


def step_seconds__whole_gradient(shape, layout, cluster):
    return estimate(shape, layout, cluster, gradient=lambda layout: 4)


def step_seconds__gradient_not_cut_by_tp(shape, layout, cluster):
    return estimate(shape, layout, cluster, gradient=lambda layout: 4 / layout.pp)


def step_seconds__bf16_gradients(shape, layout, cluster):
    return estimate(shape, layout, cluster, gradient=lambda layout: 2 / layout.pp / layout.tp)


def step_seconds__bubble_of_the_step(shape, layout, cluster):
    return estimate(shape, layout, cluster, bubble=lambda P, M, v: (P - 1) / (v * M + P - 1))


def step_seconds__bubble_of_the_step_chunks(shape, layout, cluster):
    return estimate(shape, layout, cluster, bubble=lambda P, M, v: (P - 1) / (M + P - 1) / v)


def step_seconds__no_chunks(shape, layout, cluster):
    return estimate(shape, layout, cluster, bubble=lambda P, M, v: (P - 1) / M)


def step_seconds__p_waits(shape, layout, cluster):
    return estimate(shape, layout, cluster, bubble=lambda P, M, v: P / (v * M))


def step_seconds__hfu(shape, layout, cluster):
    return estimate(shape, layout, cluster, model=lambda again: 3 + again)


def step_seconds__one_replica(shape, layout, cluster):
    def samples(layout):
        return layout.microbatch * layout.microbatches

    return estimate(shape, layout, cluster, samples=samples)


def step_seconds__of_what_is_reached(shape, layout, cluster):
    def peak(cluster):
        return cluster.flops * cluster.efficiency

    return estimate(shape, layout, cluster, peak=peak)


def step_seconds__half_ring(shape, layout, cluster):
    return estimate(shape, layout, cluster, ring=lambda n: (n - 1) / n)


def step_seconds__zeros(shape, layout, cluster):
    return dict.fromkeys(("matmul", "tp", "bubble", "dp", "mfu"), 0.0)


def step_seconds__constant(shape, layout, cluster):
    return {"matmul": 1.0, "tp": 0.1, "bubble": 0.1, "dp": 0.1, "mfu": 0.5}


def step_seconds__two_mistakes(shape, layout, cluster):
    """The first one in the order of the parts is named."""
    return estimate(
        shape, layout, cluster, passes=lambda again: 2 + again, model=lambda again: 3 + again
    )


def step_seconds__six_n_d(shape, layout, cluster):
    """6ND everywhere: for the products and for MFU."""
    right = estimate(shape, layout, cluster)
    weights = 12 * shape.layers * shape.width**2
    tokens = layout.dp * layout.microbatch * layout.microbatches * shape.time
    gpus = layout.dp * layout.tp * layout.pp
    needed = 6 * weights * tokens
    done = needed + (2 * weights * tokens if layout.recompute == "full" else 0)
    matmul = done / (gpus * cluster.flops * cluster.efficiency)
    wait = (layout.pp - 1) * (matmul + right["tp"]) / layout.microbatches / layout.chunks
    seconds = matmul + right["tp"] + wait + right["dp"]
    mfu = needed / seconds / (gpus * cluster.flops)
    return right | {"matmul": matmul, "bubble": wait, "mfu": mfu}


def step_seconds__pipeline_efficiency(shape, layout, cluster):
    """The pipeline's efficiency is M / (M + P − 1); the rest is called the bubble."""
    right = estimate(shape, layout, cluster)
    many = layout.microbatches * layout.chunks
    efficiency = many / (many + layout.pp - 1)
    busy = right["matmul"] + right["tp"]
    bubble = busy - efficiency * busy
    seconds = busy + bubble + right["dp"]
    before = busy + right["bubble"] + right["dp"]
    return right | {"bubble": bubble, "mfu": right["mfu"] * before / seconds}


def step_seconds__asks_the_grader(shape, layout, cluster):
    """Looks for the checks of the exercise in this process, and calls their formulas."""
    frame, said = sys._getframe(), {}
    while "exercise" not in frame.f_locals:
        frame = frame.f_back
    facts = {**vars(shape), **vars(layout), **vars(cluster)}
    for check in frame.f_locals["exercise"].checks:
        part = check.wrong.__closure__[0].cell_contents
        said[part.name] = part.right(facts, said)
    return said
