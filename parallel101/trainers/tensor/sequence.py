"""Sequence parallel: where activations are not cut along features, they are cut along time.

tokens ─▶ embedding ─▶ cut ─▶ [ norm ─▶ gather, column … row, reduce-scatter ─▶ + ] ─▶ norm ─▶
          whole               cut along time: each module acts on each position alone

gather, head ─▶ logits
                cut along the vocabulary

The bytes are the same as without it, and the activations between are 1/n. The parameters there see
some of the positions: their gradients are partial, to be summed. What is cut where follows from the
whole model's list of modules, so it is the same for any pipeline stage. Source: Korthikanti et al.,
"Reducing Activation Recomputation" (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from parallel101.trainers.tensor.plan import Chain, Style
from parallel101.trainers.tensor.tensor_group import TensorGroup

Connect = Callable[[TensorGroup, Collection[str]], None]


def cut_in_time(
    model: nn.Module, chain: Chain | None, styles: Mapping[str, Style]
) -> tuple[set[str], set[str], Connect]:
    """Follow the activations through the model. They are "whole", "cut" along time, or between
    column and row cut along "features".

    Returns the layers of the plan whose activations outside are cut along time, the parameters that
    see some positions only, and a function that lets the modules of this rank (their names) cut and
    join at their entries and exits. Raises ValueError for a model that cannot be cut so.
    """
    if chain is None:
        raise ValueError(
            f"sequence_parallel: the order of the modules of {type(model).__name__} is unknown. "
            "Expected an nn.Sequential, or a model with .sequence(), the list of modules whose "
            "composition is its forward"
        )
    names_of = {id(p): name for name, p in model.named_parameters()}
    inside = [[n for n in styles if name and f"{n}.".startswith(f"{name}.")] for name, _ in chain]
    tables = {n for n in styles if isinstance(model.get_submodule(n), nn.Embedding)}
    last = max((i for i, names in enumerate(inside) if set(names) - tables), default=-1)
    state, previous = "whole", ""
    cut_time, partial = set[str](), set[str]()
    cut_before, join_after = set[str](), set[str]()  # at whose entry or exit
    # modules around an embedding that is cut by vocabulary: each rank keeps its times at their
    # exit, since the code around the embedding works on all times
    keep_after = set[str]()
    # module that gets cut activations → the module before it, maybe on another pipeline stage
    arrivals: dict[str, str] = {}

    def parameters(module: nn.Module) -> set[str]:
        return {names_of[id(p)] for p in module.parameters()}

    def note_partial(names: list[str], module: nn.Module) -> None:
        """Note the parameters that see some positions only: all in this module but those that the
        plan cuts, and the biases of row layers, which are added after the reduce-scatter.
        """
        cut = [model.get_submodule(n) for n in names]
        whole = [layer.bias for n, layer in zip(names, cut) if styles[n].name == "row"]
        partial.update(parameters(module).difference(*map(parameters, cut)))
        partial.update(names_of[id(bias)] for bias in whole if bias is not None)
        cut_time.update(names)

    for i, ((name, module), names) in enumerate(zip(chain, inside)):
        if name and previous and state == "cut":
            arrivals[name] = previous
        previous = name or previous
        if not names:  # no cut layers inside
            partial |= parameters(module) if state == "cut" else set()
        elif tables & set(names):
            if state != "whole" or not tables.issuperset(names):
                raise ValueError(
                    f"sequence_parallel: {name!r} has a cut embedding and other cut layers: "
                    "expected the embedding in an entry of its own"
                )
            if i < last:
                note_partial(names, module)
                keep_after |= {name} - set(names)
                state = "cut"
        elif names == [name]:  # a linear layer
            style = styles[name].name
            if state == "cut" or (style == "row" and i < last):
                note_partial(names, module)
            if style == "row":
                state = "cut" if i < last else "whole"
            else:
                state = "whole" if style == "column_gather" else "features"
        else:  # column and row layers, and code that only this module knows
            note_partial(names, module)
            cut_before |= {name} if state == "whole" else set()
            join_after |= {name} if i == last else set()
            state = "whole" if i == last else "cut"

    def connect(tp: TensorGroup, here: Collection[str]) -> None:
        modules = {name: module for name, module in model.named_modules() if name in here}
        for name, module in modules.items():
            if name in arrivals and arrivals[name] not in here:
                module.register_forward_pre_hook(lambda _, args: tp.arrive(args[0]))
            if name in cut_before:
                module.register_forward_pre_hook(lambda _, args: (tp.cut(args[0]), *args[1:]))
            if name in keep_after:
                for below in cut_time & modules.keys():
                    if below.startswith(f"{name}."):  # its cut embedding
                        modules[below].register_forward_hook(lambda _, args, y: tp.among_zeros(y))
                module.register_forward_hook(lambda _, args, y: tp.local(y))
            if name in join_after:
                module.register_forward_hook(lambda _, args, y: tp.whole(y))

    return cut_time, partial, connect
