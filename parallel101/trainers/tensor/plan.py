"""A tensor-parallel plan, resolved: which module has which style, whether that can work, and what
becomes of each parameter.

plan      {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}        written beside the model, which is not rewritten
resolve   names the modules and sizes, and refuses what cannot work        nothing is sent or changed: the same on every rank
apply     puts this rank's layers (layers.py) in the modules' places

Whether a cut output reaches a layer that can take it is checked in flow.py; sequence parallel is in
sequence.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.auto import auto_plan, head_width, whole_number
from parallel101.trainers.tensor.chain import Chain, chain_of
from parallel101.trainers.tensor.explain import explain_shape_errors
from parallel101.trainers.tensor.flow import check_flow
from parallel101.trainers.tensor.group import SequenceGroup, TensorGroup
from parallel101.trainers.tensor.loss import is_vocabulary_loss
from parallel101.trainers.tensor.match import listed, match
from parallel101.trainers.tensor.sequence import Regions, regions_of, without_sequence
from parallel101.trainers.tensor.styles import Style
from parallel101.trainers.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    cut_heads,
)

Plan = str | Mapping[str, str | Style]


@dataclass(frozen=True)
class Resolved:
    """A plan for one model and one number of ranks.

    Attributes: styles: name of a module → its style. placements: name of a parameter → how the
        tensor axis cuts it. Those not named are replicated. partial: names of parameters of which
        each rank's gradient is a part, to be summed over the tensor axis after backward.
        vocabulary: whether the logits stay cut, so that the loss must be called with group=.
        algorithm: of the layers' collectives, by operation; "direct" if not named.
    """

    styles: Mapping[str, Style]
    placements: Mapping[str, Shard]
    partial: Collection[str]
    vocabulary: bool
    regions: Regions
    algorithm: Mapping[str, str]

    def describe(self) -> Iterator[str]:
        """A line for each way in which modules are cut: "blocks.*.mlp.up (4 modules): column"."""
        ways: dict[tuple[str, str], int] = {}
        for name, style in self.styles.items():
            alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            key = name if alike.strip("*.") == "" else alike, str(style)
            ways[key] = ways.get(key, 0) + 1
        for (names, way), count in ways.items():
            yield f"{names}{f' ({count} modules)' if count > 1 else ''}: {way}"

    def apply(
        self, model: nn.Module, group: GroupLike, local: Collection[str] | None = None
    ) -> None:
        """Put this rank's layers in the places of the modules, with this rank's blocks of their
        parameters.

        Args: model: the whole model, as `resolve` saw it. group: the ranks along the tensor axis.
            local: the modules (with all that is below them) that this rank has of a pipeline. None:
            all.
        """
        position = group_of(group).position
        assert position is not None
        here = {
            name
            for name, _ in model.named_modules(remove_duplicate=False)
            if local is None or is_below(name, local)
        }
        uses = uses_of_parameters(model, here)
        first = {id(p): name for name, p in model.named_parameters()}
        blocks: dict[int, nn.Parameter] = {}  # of a parameter: tied ones stay one object

        def block(parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None or first[id(parameter)] not in self.placements:
                return parameter
            if id(parameter) not in blocks:
                mine = (
                    self.placements[first[id(parameter)]]
                    .cut(parameter.detach(), position)
                    .clone(memory_format=torch.contiguous_format)
                )
                blocks[id(parameter)] = nn.Parameter(mine, parameter.requires_grad)
            return blocks[id(parameter)]

        whole, cut_time = TensorGroup(group, self.algorithm), SequenceGroup(group, self.algorithm)
        names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        replaced: dict[int, nn.Module] = {}
        # modules whose own code stands between column and row layers → their names
        around: dict[nn.Module, str] = {}
        counts: set[tuple[nn.Module, str]] = set()  # their attributes that count heads
        for name, old in list(model.named_modules(remove_duplicate=False)):
            style = self.styles.get(names[id(old)])
            if style is None or name not in here:
                continue
            if id(old) not in replaced:
                shard = self.placements[first[id(old.weight)]]
                tp = cut_time if names[id(old)] in self.regions.cut_time else whole
                new = layer(old, style, shard, position, tp, block)
                if isinstance(new, ColumnLinear):
                    new.deferred = uses[id(old.weight)] == 1
                replaced[id(old)] = new.train(old.training)
            parent, _, attribute = name.rpartition(".")
            module = model.get_submodule(parent)
            setattr(module, attribute, replaced[id(old)])
            if style.name in ("column", "row"):
                around[module] = parent
            if isinstance(style.heads, str):
                counts.add((module, style.heads))
        for module, attribute in counts:
            setattr(module, attribute, getattr(module, attribute) // whole.size)
        for module, name in around.items():
            explain_shape_errors(module, name, whole.size, cut_time=bool(self.regions.cut_time))
        self.regions.connect(model, cut_time, here)


def resolve(
    plan: Plan,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    size: int,
    sequence_parallel: bool = False,
    algorithm: Mapping[str, str] | None = None,
) -> Resolved:
    """Which modules of the model are cut over `size` ranks, and how. The model is not changed.

    Args: plan: name of a module → style; `*` stands for one or more parts of a name. "auto": from
        the model's structure. model: the whole model. loss_fn: vocabulary_cross_entropy, or a
        functools.partial of it, if and only if the head is cut. size: of the tensor axis.
        sequence_parallel: cut activations along time wherever they are not cut along features.
        algorithm: "all_reduce", "all_gather" and "reduce_scatter" → the algorithm with which the
        layers do it. Without it, or with "direct", backward computes while its messages are in
        flight.

    Raises ValueError, the same on every rank, with the module's name and the reason, for a plan
    that does not fit.
    """
    chain, cut_head = chain_of(model), is_vocabulary_loss(loss_fn)
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(
                f'plan={plan!r}: expected "auto" or a dict from names of modules to styles'
            )
        styles = auto_plan(model, chain, cut_head)
    else:
        styles = match(plan, model)
    modules = dict(model.named_modules())
    styles = {name: styles[name] for name in modules if name in styles}  # in the model's order
    shards = {
        name: shard_of(name, modules[name], style, size, modules) for name, style in styles.items()
    }
    check_flow(model, chain, styles, shards)
    vocabulary = check_loss(model, chain, styles, cut_head)
    placements = placements_of(model, styles, shards)
    regions = regions_of(model, chain, styles) if sequence_parallel else without_sequence()
    return Resolved(styles, placements, regions.partial, vocabulary, regions, dict(algorithm or {}))


# ── how they are cut ──


def shard_of(
    name: str, module: nn.Module, style: Style, size: int, modules: Mapping[str, nn.Module]
) -> Shard:
    """How the module's weight is cut. Raises ValueError for heads or parts that do not fit."""
    if isinstance(module, nn.Embedding):
        return Shard(0, tuple(split_sizes(module.num_embeddings, size)))
    assert isinstance(module, nn.Linear)
    if style.name == "row":
        return Shard(1, tuple(split_sizes(module.in_features, size)))
    outputs, parts, heads = module.out_features, style.parts, style.heads
    if outputs % parts:
        raise ValueError(
            f"plan: {name!r} has {outputs} outputs, which are no {parts} equal parts "
            f"(parts={parts})"
        )
    segment, around = outputs // parts, modules[name.rpartition(".")[0]]
    if isinstance(heads, str):
        if (count := whole_number(vars(around).get(heads))) is None:
            raise ValueError(
                f"plan: {name!r} has the style {str(style)!r}, but the {type(around).__name__} "
                f"around it has no attribute {heads!r} that "
                "is a whole number: expected the attribute with which its code counts heads, "
                "or how many there are"
            )
        heads = count
    if (
        heads is None
        and style.name == "column"
        and (width := head_width(around))
        and segment % width == 0
    ):
        heads = segment // width
    if heads is not None and segment % heads:
        raise ValueError(
            f"plan: {name!r} has {segment} outputs{' a part' * (parts > 1)}, which are no "
            f"{heads} equal heads (heads={heads})"
        )
    if heads is not None and heads % size:
        raise ValueError(
            f"plan: {name!r} has {heads} heads, which {size} ranks cannot share equally: "
            f"expected a tensor axis that divides {heads}, "
            "or a plan that leaves the layers of this module out"
        )
    return cut_heads(outputs, size, heads, parts)


def placements_of(
    model: nn.Module, styles: Mapping[str, Style], shards: Mapping[str, Shard]
) -> dict[str, Shard]:
    """How each parameter is cut. Raises ValueError if a tied one would be cut in two ways."""
    first = {id(p): name for name, p in model.named_parameters()}
    module_names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    uses: dict[int, list[tuple[str, Shard | None]]] = {}
    for name, module in model.named_modules():
        style = styles.get(module_names[id(module)])
        for kind, p in module.named_parameters(recurse=False):
            cut_here = style is not None and (kind == "weight" or style.name != "row")
            uses.setdefault(id(p), []).append(
                (f"{name}.{kind}".strip("."), shards[name] if cut_here else None)
            )
    placements = {}
    for identity, ((name, shard), *others) in uses.items():
        for other, other_shard in others:
            if other_shard != shard:
                raise ValueError(
                    f"plan: {name!r} and {other!r} are tied (one parameter), but the plan cuts "
                    f"{describe_shard(name, shard)} and "
                    f"{describe_shard(other, other_shard)}: expected both alike, "
                    "such as an embedding and a head that are both 'vocabulary'"
                )
        if shard is not None:
            placements[first[identity]] = shard
    return placements


def describe_shard(name: str, shard: Shard | None) -> str:
    return f"{name!r} not at all" if shard is None else f"{name!r} along dim {shard.dim}"


def check_loss(
    model: nn.Module, chain: Chain | None, styles: Mapping[str, Style], cut_head: bool
) -> bool:
    """Whether the logits stay cut. Raises ValueError if the loss does not fit that."""
    heads = [
        name
        for name, style in styles.items()
        if style.name == "vocabulary" and isinstance(model.get_submodule(name), nn.Linear)
    ]
    if len(heads) > 1:
        raise ValueError(
            f'plan: {listed(heads)} are linear layers with the style "vocabulary": expected '
            "one, the head"
        )
    if heads and chain is not None and chain[-1][0] != heads[0]:
        raise ValueError(
            f'plan: {heads[0]!r} has the style "vocabulary", but is not the last module: '
            "expected the head, or an nn.Embedding"
        )
    if heads and not cut_head:
        raise ValueError(
            f'plan: the logits of {heads[0]!r} stay cut (style "vocabulary"), so loss_fn must '
            "be p101.vocabulary_cross_entropy; "
            'or leave this layer out of the plan, or give it the style "column_gather"'
        )
    if cut_head and not heads:
        raise ValueError(
            "loss_fn is vocabulary_cross_entropy, which takes logits that are cut, but the "
            "plan cuts no head: "
            'give the last linear layer the style "vocabulary", or use another loss'
        )
    return bool(heads)


# ── this rank's ──


def layer(
    old: nn.Module,
    style: Style,
    shard: Shard,
    position: int,
    tp: TensorGroup,
    block: Callable[[nn.Parameter | None], nn.Parameter | None],
) -> nn.Module:
    """The layer that takes a module's place."""
    weight: Any = block(old.weight)  # type: ignore[arg-type]
    if isinstance(old, nn.Embedding):
        start, padding = sum(shard.sizes[:position]), old.padding_idx
        if padding is not None:
            padding = padding - start if 0 <= padding - start < len(weight) else None
        table = VocabularyEmbedding(weight, start, padding, tp)
        table.register_forward_pre_hook(partial(check_tokens, old.num_embeddings))
        return table
    assert isinstance(old, nn.Linear)
    if style.name == "row":
        return RowLinear(weight, old.bias, tp)
    column = ColumnLinear(weight, block(old.bias), tp)
    if style.name == "column_gather":
        column.register_forward_hook(lambda _, args, y: tp.join(y, shard.sizes))
    return column


def check_tokens(rows: int, _: nn.Module, args: tuple[Tensor]) -> None:
    (tokens,) = args
    if tokens.numel() and not (tokens.min() >= 0 and tokens.max() < rows):
        raise IndexError(
            f"tokens range from {tokens.min()} to {tokens.max()}, but the embedding has {rows} rows"
        )


def uses_of_parameters(model: nn.Module, here: Collection[str]) -> dict[int, int]:
    """In how many places of this rank's part each parameter stands."""
    uses: dict[int, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for _, p in module.named_parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + (name in here)
    return uses


def is_below(name: str, modules: Collection[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)
