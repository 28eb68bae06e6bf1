"""Wrong solutions of homework 9. EXPECTED: the misconception that the grader must name for each."""

EXPECTED = {
    "memory__numbers": "numbers taken for bytes",
    "memory__not_cut": "model not cut by tp",
    "memory__optimizer_not_cut": "model not cut by tp",
    "memory__all_layers": "all layers on one stage",
    "memory__no_embedding": "embedding forgotten",
    "memory__even_share": "embedding cut over the stages",
    "memory__bf16_gradients": "gradients in 16 bit",
    "memory__no_master_weights": "master weights forgotten",
    "memory__no_zero": "ZeRO forgotten",
    "memory__zero_1_for_2": "ZeRO forgotten",
    "memory__zero_2_for_1": "ZeRO cuts too much",
    "memory__zero_3": "ZeRO cuts too much",
    "memory__one_in_flight": "one microbatch in flight",
    "memory__gpipe": "all microbatches in flight",
    "memory__always_p": "more in flight than there are",
    "memory__no_penalty": "interleaving keeps as much as 1F1B",
    "memory__all_cut": "tensor parallel cuts everything",
    "memory__never_sequence_parallel": "sequence parallel forgotten",
    "memory__nothing_cut": "activations not cut",
    "memory__inputs_only": "recomputed layer forgotten",
    "memory__no_recomputation": "recomputation forgotten",
    "memory__fp32": "activations in fp32",
    "memory__constant": None,
    "memory__sixteen_bytes": "gradients in 16 bit",
    "memory__as_on_the_last_stage": "one microbatch in flight",
}
POINTS = {"memory__constant": 0.0, "memory__gpipe": 6.0, "memory__no_zero": 6.0}


def count(
    shape,
    layout,
    *,
    parameters=None,
    nbytes=(2, 4, 12),
    cut=(3, 2, 1),
    in_flight=None,
    outside=None,
    inside=None,
    recomputed=True,
    again=True,
    item=2,
):
    """The right count, of which one thing can be changed."""
    h, t, layers = shape.width, layout.tp, shape.layers / layout.pp
    if parameters is None:
        parameters = (shape.vocabulary * h + 12 * h**2 * layers) / t
    sbh = shape.time * layout.microbatch * h
    if outside is None:
        outside = t if layout.sequence_parallel else 1
    whole = item * sbh * (4 / outside + 12 / (inside or t))
    if in_flight is None:
        in_flight = min(layout.pp, layout.microbatches)
        if layout.chunks > 1:
            in_flight = layout.pp + (layout.pp - 1) / layout.chunks
    full = layout.recompute == "full" and recomputed
    kept = item * sbh / outside if full else whole
    states = [
        parameters * size / (layout.dp if layout.zero_stage >= stage else 1)
        for size, stage in zip(nbytes, cut)
    ]
    return {
        **dict(zip(("weights", "gradients", "optimizer"), states)),
        "activations": in_flight * layers * kept + whole * (full and again),
    }


def memory__numbers(shape, layout):
    return count(shape, layout, nbytes=(1, 1, 3))


def memory__not_cut(shape, layout):
    layers = shape.layers / layout.pp
    parameters = shape.vocabulary * shape.width + 12 * shape.width**2 * layers
    return count(shape, layout, parameters=parameters)


def memory__optimizer_not_cut(shape, layout):
    return count(shape, layout, nbytes=(2, 4, 12 * layout.tp))


def memory__all_layers(shape, layout):
    parameters = shape.vocabulary * shape.width + 12 * shape.width**2 * shape.layers
    return count(shape, layout, parameters=parameters / layout.tp)


def memory__no_embedding(shape, layout):
    parameters = 12 * shape.width**2 * shape.layers / layout.pp / layout.tp
    return count(shape, layout, parameters=parameters)


def memory__even_share(shape, layout):
    """All parameters, divided by tp and pp."""
    parameters = shape.vocabulary * shape.width + 12 * shape.width**2 * shape.layers
    return count(shape, layout, parameters=parameters / layout.tp / layout.pp)


def memory__bf16_gradients(shape, layout):
    return count(shape, layout, nbytes=(2, 2, 12))


def memory__no_master_weights(shape, layout):
    return count(shape, layout, nbytes=(2, 4, 8))


def memory__no_zero(shape, layout):
    return count(shape, layout, cut=(9, 9, 9))


def memory__zero_1_for_2(shape, layout):
    return count(shape, layout, cut=(9, 9, 1))


def memory__zero_2_for_1(shape, layout):
    return count(shape, layout, cut=(3, 1, 1))


def memory__zero_3(shape, layout):
    return count(shape, layout, cut=(1, 2, 1))


def memory__one_in_flight(shape, layout):
    return count(shape, layout, in_flight=1)


def memory__gpipe(shape, layout):
    return count(shape, layout, in_flight=layout.microbatches)


def memory__always_p(shape, layout):
    held = layout.pp + ((layout.pp - 1) / layout.chunks if layout.chunks > 1 else 0)
    return count(shape, layout, in_flight=held)


def memory__no_penalty(shape, layout):
    return count(shape, layout, in_flight=min(layout.pp, layout.microbatches))


def memory__all_cut(shape, layout):
    return count(shape, layout, outside=layout.tp)


def memory__never_sequence_parallel(shape, layout):
    return count(shape, layout, outside=1)


def memory__nothing_cut(shape, layout):
    return count(shape, layout, outside=1, inside=1)


def memory__inputs_only(shape, layout):
    return count(shape, layout, again=False)


def memory__no_recomputation(shape, layout):
    return count(shape, layout, recomputed=False)


def memory__fp32(shape, layout):
    return count(shape, layout, item=4)


def memory__constant(shape, layout):
    return {"weights": 4e9, "gradients": 8e9, "optimizer": 24e9, "activations": 30e9}


def memory__sixteen_bytes(shape, layout):
    """The 2 + 2 + 12 bytes of the ZeRO paper, by loops over the layers."""
    numbers = shape.vocabulary * shape.width
    for _ in range(shape.layers // layout.pp):
        numbers += 4 * shape.width**2 + 2 * shape.width * 4 * shape.width
    numbers /= layout.tp
    right = count(shape, layout)
    return {
        "weights": numbers * 2,
        "gradients": numbers * 2 / (layout.dp if layout.zero_stage == 2 else 1),
        "optimizer": numbers * 12 / (layout.dp if layout.zero_stage else 1),
        "activations": right["activations"],
    }


def memory__as_on_the_last_stage(shape, layout):
    """There, each forward is followed by its backward."""
    tokens, h, t = shape.time * layout.microbatch, shape.width, layout.tp
    rows = [4 * h if not layout.sequence_parallel else 4 * h / t, 4 * h / t, 8 * h / t]
    layer = 2 * tokens * sum(rows)
    stage = shape.layers // layout.pp * layer
    if layout.recompute == "full":
        inputs = 2 * tokens * h / (t if layout.sequence_parallel else 1)
        stage = shape.layers // layout.pp * inputs + layer
    return count(shape, layout) | {"activations": stage}
