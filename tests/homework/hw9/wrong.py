"""Wrong solutions of homework 9. A comment above each says what must be named."""

import gc
import itertools
import sys


def divisors(n, most):
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def layouts(
    shape, gpus, batch, *, tps=(1, 2, 4, 8), chunked=(False, True), zeros=(2,), again=("none",)
):
    for tp in tps:
        for pp in divisors(shape.layers, 16):
            if gpus % (tp * pp):
                continue
            dp = gpus // tp // pp
            for b in (1, 2, 4):
                for most in chunked if pp > 1 else (False,):
                    for zero in zeros:
                        for recompute in again:
                            yield {
                                "dp": dp,
                                "tp": tp,
                                "pp": pp,
                                "microbatch": b,
                                "microbatches": batch // dp // b,
                                "chunks": shape.layers // pp if most else 1,
                                "zero_stage": zero,
                                "recompute": recompute,
                                "sequence_parallel": tp > 1,
                            }


def best(layouts, evaluate, memory=float("inf"), key="seconds"):
    found = []
    for layout in layouts:
        try:
            step = evaluate(**layout)
        except ValueError:
            continue
        if step["bytes"] <= memory:
            found.append((step[key], len(found), layout))
    return min(found)[2]


# named: more than a GPU has
def choose_layout__only_dp(shape, gpus, memory, batch, evaluate):
    """Every GPU has the whole model."""
    dp = max(d for d in divisors(gpus, gpus) if batch % d == 0)
    pp = gpus // dp
    return {"dp": dp, "pp": pp, "microbatches": batch // dp}


# named: more than a GPU has
def choose_layout__fastest_of_all(shape, gpus, memory, batch, evaluate):
    """As if memory had no end."""
    return best(layouts(shape, gpus, batch, zeros=(0,)), evaluate)


# named: - (0 points)
def choose_layout__only_tp(shape, gpus, memory, batch, evaluate):
    return {"tp": gpus, "microbatches": batch}


# named: - (0 points)
def choose_layout__constant(shape, gpus, memory, batch, evaluate):
    return {"dp": 8, "tp": 8, "pp": 8, "microbatches": 32, "chunks": 2, "sequence_parallel": True}


# named: tp beyond the node
def choose_layout__beyond_the_node(shape, gpus, memory, batch, evaluate):
    wide = 16 if shape.heads % 16 == 0 else 8
    return best(layouts(shape, gpus, batch, tps=(wide,)), evaluate, memory)


# named: recomputation without need
def choose_layout__always_recomputes(shape, gpus, memory, batch, evaluate):
    return best(layouts(shape, gpus, batch, again=("full",)), evaluate, memory)


# named: one layout for all
def choose_layout__one_mesh(shape, gpus, memory, batch, evaluate):
    """tp fills a node, and two stages."""
    all_of_them = layouts(shape, gpus, batch, tps=(8,), zeros=(2, 3), again=("none", "full"))
    return best((one for one in all_of_them if one["pp"] == 2), evaluate, memory)


# named: more tp than needed
def choose_layout__always_eight(shape, gpus, memory, batch, evaluate):
    """tp fills a node, and the rest is searched."""
    return best(layouts(shape, gpus, batch, tps=(8,)), evaluate, memory)


# named: one chunk on each GPU
def choose_layout__no_chunks(shape, gpus, memory, batch, evaluate):
    """A pipeline of 1F1B."""
    few = layouts(shape, gpus, batch, chunked=(False,), again=("none", "full"))
    return best((one for one in few if one["pp"] > 1), evaluate, memory)


# named: - (0 points)
def choose_layout__asks_the_planner(shape, gpus, memory, batch, evaluate):
    import parallel101

    return vars(parallel101.plan(vars(shape), gpus=gpus).best.layout)


# named: - (0 points)
def choose_layout__asks_through_the_tool(shape, gpus, memory, batch, evaluate):
    """The module of `evaluate` has a function that asks the planner."""
    planned = type(evaluate).__call__.__globals__["planned"]
    planned(evaluate.shape, "H100", gpus, memory, batch)
    return best(layouts(shape, gpus, batch), evaluate, memory)


# named: - (0 points)
def choose_layout__looks_for_the_planner(shape, gpus, memory, batch, evaluate):
    """In the memory of this process."""
    found = [
        thing
        for thing in gc.get_objects()
        if str(getattr(thing, "__module__", "")).startswith("parallel101.laboratory.planner")
    ]
    return found[0](evaluate.shape, gpus=gpus).best.layout


# named: - (0 points)
def choose_layout__tries_everything(shape, gpus, memory, batch, evaluate):
    more = (0, 1, 2, 3)
    return best(
        layouts(shape, gpus, batch, zeros=more, again=("none", "full")), evaluate, memory
    ) and best(layouts(shape, gpus, batch, zeros=more, again=("none", "full")), evaluate, memory)


def nested_loops(order, shape, gpus, memory, batch, evaluate):
    """Nested loops over everything, for as long as evaluate answers."""
    loops = {
        "tp": divisors(gpus, 64), "pp": divisors(gpus, gpus), "microbatch": (1, 2, 4, 8),
        "chunks": (1, 2, 4, 8), "zero_stage": (0, 1, 2, 3), "recompute": ("none", "full"),
        "sequence_parallel": (False, True),
    }  # fmt: skip
    names = [*order, *(name for name in loops if name not in order)]
    found = []
    for values in itertools.product(*(loops[name] for name in names)):
        layout = dict(zip(names, values))
        layout["dp"] = max(1, gpus // (layout["tp"] * layout["pp"]))
        layout["microbatches"] = max(1, batch // (layout["dp"] * layout["microbatch"]))
        try:
            step = evaluate(**layout)
        except ValueError:
            continue
        except RuntimeError:
            break
        if step["bytes"] <= memory:
            found.append((step["mfu"], len(found), layout))
    return max(found)[2]


# named: bubble too long (6.65 points)
def choose_layout__stops_at_the_limit(*given):
    return nested_loops(["tp"], *given)


# named: tp beyond the node (6.65 points)
def choose_layout__stops_at_the_limit_with_pp_outermost(*given):
    return nested_loops(["pp"], *given)


# named: - (0 points)
def choose_layout__says_it_fits(shape, gpus, memory, batch, evaluate):
    """What the ranks say of a layout isn't believed."""
    return {"dp": gpus, "mfu": 0.9, "bytes": 0.0, "fits": True}


# named: - (0 points)
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
