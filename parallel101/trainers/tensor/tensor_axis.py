"""The axis tp: the style of each module, checks that it can work, and the cut of each parameter.

plan      {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}, beside the model
before    modules and sizes are named, and what cannot work is refused; nothing is sent or changed
cut       leaves this rank's blocks of parameters, and replaces the modules' forwards by those of
          ../tensor_parallel.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallel101.mesh import Group, split_sizes
from parallel101.trainers.axis import Axis, OneStage
from parallel101.trainers.expect import expect
from parallel101.trainers.layout import Axes, Shard
from parallel101.trainers.options import Options, is_vocabulary_loss
from parallel101.trainers.tensor.plan import (
    Style,
    auto_plan,
    chain_of,
    first_names,
    head_width,
    match,
    whole_number,
)
from parallel101.trainers.tensor.sequence import Connect, cut_in_time
from parallel101.trainers.tensor.tensor_group import TensorGroup
from parallel101.trainers.tensor_parallel import (
    column_linear,
    cut_heads,
    row_linear,
    vocabulary_embedding,
)


class TensorAxis(Axis):
    """The axis tp: a plan for one model and one number of ranks.

    Args:
        model: the whole model.
        loss_fn: vocabulary_cross_entropy, or a functools.partial of it, if and only if the head is
            cut.
        options: `plan` is a dict from names of modules to styles, where `*` matches one or more
            parts of a name, or "auto": from the model's structure.

    Attributes:
        styles: name of a module → its style.
        in_time: layers whose activations outside sequence parallel cuts along time.
        partial: parameters that see some positions only.

    Raises ValueError, the same on every rank, with the module's name and the reason, for a plan
    that does not fit.
    """

    name = "tp"
    placements: dict[str, Shard]
    connect: Connect

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, axes: Axes, options: Options
    ):
        self.axes, self.options = axes, options
        chain, cut_head, plan = chain_of(model), is_vocabulary_loss(loss_fn), options.tensor_plan
        if isinstance(plan, str):
            expect("plan", plan, plan == "auto", '"auto" or a dict from names of modules to styles')
            styles = auto_plan(model, chain, cut_head)
        else:
            styles = match(plan or {}, model)
        modules = dict(model.named_modules())
        self.styles = {name: styles[name] for name in modules if name in styles}
        size, named = axes.sizes["tp"], self.styles.items()
        self.shards = {name: shard_of(name, modules, style, size) for name, style in named}
        of_vocabulary = [name for name, style in self.styles.items() if style.name == "vocabulary"]
        heads = [name for name in of_vocabulary if isinstance(modules[name], nn.Linear)]
        self.cuts_logits = bool(heads)
        if self.cuts_logits != cut_head:
            raise ValueError(
                f"the plan cuts {f'the head {heads[0]!r}' if heads else 'no head'} by vocabulary, "
                f"but loss_fn must be p101.vocabulary_cross_entropy if and only if it does, since "
                'the logits stay cut: give the last linear layer the style "vocabulary" with that '
                'loss, or "column_gather" with another one'
            )

        # each parameter has one cut, if it is tied, too
        names, first_cuts = first_names(model), dict[int, tuple[str, Shard | None]]()
        for name, module in modules.items():
            style = self.styles.get(names[id(module)])
            for kind, p in module.named_parameters(recurse=False):
                cut = style is not None and (kind == "weight" or style.name != "row")
                this = f"{name}.{kind}".strip("."), self.shards[name] if cut else None
                first = first_cuts.setdefault(id(p), this)
                if first[1] != this[1]:
                    ways = [
                        f"{n!r} {f'along dim {s.dim}' if s else 'not'}" for n, s in (first, this)
                    ]
                    raise ValueError(
                        f"plan: {first[0]!r} and {this[0]!r} are tied (one parameter), but the "
                        f"plan cuts {ways[0]} and {ways[1]}: expected the same for both, such as "
                        'an embedding and a head that are both "vocabulary"'
                    )
        self.placements = {name: cut for name, cut in first_cuts.values() if cut is not None}
        self.in_time, self.partial, self.connect = set[str](), set[str](), lambda tp, here: None
        if options.sequence_parallel:
            self.in_time, self.partial, self.connect = cut_in_time(model, chain, self.styles)

    def describe(self) -> Iterator[str]:
        """Yield a line for each way of cutting modules: "blocks.*.mlp.up (4 modules): column"."""
        ways = Counter[tuple[str, str]]()
        for name, style in self.styles.items():
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            ways[name if alike.strip("*.") == "" else alike, str(style)] += 1
        for (names, way), count in ways.items():
            yield f"{names}{f' ({count} modules)' if count > 1 else ''}: {way}"

    def sums(self, names: Sequence[str]) -> Iterator[tuple[list[str], Group]]:
        """Yield the parameters that see some positions only: each rank's gradient is a part."""
        if partly := [name for name in names if name in self.partial]:
            yield partly, self.axes.along(["tp"])

    def cut(self, model: nn.Module, stages: OneStage) -> None:
        """Leave this rank's blocks of the modules' parameters, and let the modules compute with
        them.
        """
        group, position, local = self.axes.along(["tp"]), self.axes.here["tp"], stages.names(model)
        tp, tp_in_time = (TensorGroup(group, self.options, in_time) for in_time in (False, True))
        named = list(model.named_modules(remove_duplicate=False))
        inside = tuple(f"{entry}." for entry in local)
        here = {n: m for n, m in named if "" in local or f"{n}.".startswith(inside)}
        uses = Counter(id(p) for module in here.values() for p in module._parameters.values())
        names = first_names(model)
        name_of = {id(p): name for name, p in model.named_parameters()}
        blocks: dict[int, nn.Parameter] = {}  # of a parameter: tied ones stay one object

        def block(p: nn.Parameter) -> nn.Parameter:
            shard = self.placements.get(name_of.get(id(p), ""))
            if shard is not None and id(p) not in blocks:
                part = shard.cut(p.detach(), position)
                part = part.clone(memory_format=torch.contiguous_format)
                blocks[id(p)] = nn.Parameter(part, p.requires_grad)
            return blocks.get(id(p), p)

        counts: set[tuple[nn.Module, str]] = set()  # modules and their attributes that count heads
        for name, module in here.items():
            first = names[id(module)]
            if (style := self.styles.get(first)) is None:
                continue
            if isinstance(style.heads, str):
                counts.add((model.get_submodule(name.rpartition(".")[0]), style.heads))
            group_here = tp_in_time if first in self.in_time else tp
            sizes, single = self.shards[first].sizes, uses[id(module.weight)] == 1
            if isinstance(module, nn.Embedding):
                start = sum(sizes[:position])
                forward: Any = partial(vocabulary_embedding, tp=group_here, start=start)
            elif style.name == "row":
                forward = partial(row_linear, tp=group_here)
            else:
                join = sizes if style.name == "column_gather" else None
                forward = partial(column_linear, tp=group_here, deferred=single, join=join)
            for attribute, p in list(module.named_parameters()):
                setattr(module, attribute, block(p))
            module.forward = MethodType(forward, module)
        for module, attribute in counts:
            setattr(module, attribute, getattr(module, attribute) // tp.size)
        self.connect(tp_in_time, here)

        # no column layer outside of a module of the sequence takes what layers inside share
        for module, group_here in product(map(model.get_submodule, local), (tp, tp_in_time)):
            module.register_forward_hook(lambda *_, group=group_here: group.forget())


# ── how they are cut ──


def shard_of(name: str, modules: Mapping[str, nn.Module], style: Style, size: int) -> Shard:
    """Return the cut of a module's weight. Raises ValueError if heads or parts don't fit."""
    module, around = modules[name], modules[name.rpartition(".")[0]]
    if isinstance(module, nn.Embedding):
        return Shard(0, tuple(split_sizes(module.num_embeddings, size)))
    assert isinstance(module, nn.Linear)
    if style.name == "row":
        return Shard(1, tuple(split_sizes(module.in_features, size)))
    parts, heads, width = style.parts, style.heads, head_width(around)
    part = module.out_features // parts
    if isinstance(heads, str):
        heads = whole_number(vars(around).get(heads))
        if heads is None:
            raise ValueError(
                f"plan: {name!r} has the style {str(style)!r}, but the {type(around).__name__} "
                f"around it has no attribute {style.heads!r} that is a whole number: expected the "
                "attribute with which its code counts heads, or how many there are"
            )
    elif heads is None and style.name == "column" and width and part % width == 0:
        heads = part // width
    if module.out_features % (parts * (heads or 1)):
        raise ValueError(
            f"plan: {name!r} has {module.out_features} outputs, which can't be cut into {parts} "
            f"equal parts of {heads or 1} equal heads (parts={parts}, heads={heads})"
        )
    if heads is not None and heads % size:
        raise ValueError(
            f"plan: {name!r} has {heads} heads, which {size} ranks cannot share equally: expected "
            f"a tensor axis that divides {heads}, or a plan without the layers of this module"
        )
    return cut_heads(module.out_features, size, heads, parts)
