"""Sequence parallel: where activations are not cut along features, they are cut along time.

tokens ─▶ embedding ─▶ cut ─▶ [ norm ─▶ gather, column … row, reduce-scatter ─▶ + ] ─▶ norm ─▶ gather, head ─▶ logits
          whole               cut along time: each module acts on each position alone                   cut along the vocabulary

An all-reduce is a reduce-scatter and an all-gather, so the bytes are the same, and the activations
between are 1/n. The parameters there see some of the positions: their gradients are parts, to be
summed. What is cut where follows from the whole model's list of modules, so it is the same for any
pipeline stage. Source: Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198),
section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from parallel101.trainers.tensor.chain import Chain, acts_on_each_position
from parallel101.trainers.tensor.group import SequenceGroup
from parallel101.trainers.tensor.styles import Style
from parallel101.trainers.tensor_parallel import VocabularyEmbedding


class Regions(NamedTuple):
    """Where time is cut, by names of modules.

    Attributes: cut_time: layers of the plan whose activations outside are cut along time. partial:
        parameters that see some positions only. cut_before, join_after: modules at whose entry time
        is cut, or at whose exit it is put together. keep_after: modules with an embedding cut by
        vocabulary, at whose exit each rank keeps its times. The sum over ranks was scattered
            inside, but the code around the embedding works on all times.
        arrivals: module that gets cut activations → the module before it, maybe on another pipeline
            stage.
    """

    cut_time: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    cut_before: frozenset[str] = frozenset()
    join_after: frozenset[str] = frozenset()
    keep_after: frozenset[str] = frozenset()
    arrivals: Mapping[str, str] = {}

    def connect(self, model: nn.Module, tp: SequenceGroup, here: Collection[str]) -> None:
        """Let the modules of this rank cut and join at their entries and exits."""

        def arrive(_: nn.Module, args: tuple[Any, ...]) -> None:
            tp.arrive(args[0])

        def cut_entry(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (tp.cut(args[0]), *args[1:])

        modules = {name: module for name, module in model.named_modules() if name in here}
        for name, module in modules.items():
            if name in self.arrivals and self.arrivals[name] not in here:
                module.register_forward_pre_hook(arrive)
            if name in self.cut_before:
                module.register_forward_pre_hook(cut_entry)
            if name in self.keep_after:
                # the code around the table may add something to all times, such as positions
                for below in module.modules():
                    if isinstance(below, VocabularyEmbedding):
                        below.register_forward_hook(lambda _, args, y: tp.among_zeros(y))
                module.register_forward_hook(lambda _, args, y: tp.mine(y))
            if name in self.join_after:
                module.register_forward_hook(lambda _, args, y: tp.whole(y))


def without_sequence() -> Regions:
    """Every activation is whole, or cut along features."""
    return Regions()


def regions_of(model: nn.Module, chain: Chain | None, styles: Mapping[str, Style]) -> Regions:
    """Follow the activations through the model.

    Raises ValueError for a model that cannot be cut so.
    """
    if chain is None:
        raise ValueError(
            f"sequence_parallel: the order of the modules of {type(model).__name__} is "
            "unknown. Expected an nn.Sequential, or a model with "
            ".sequence(), the list of modules whose composition is its forward"
        )
    walk = Walk(model, styles)
    inside = [
        [n for n in styles if name and (n == name or n.startswith(name + "."))] for name, _ in chain
    ]
    last = max(
        (i for i, names in enumerate(inside) if any(not walk.is_embedding(n) for n in names)),
        default=-1,
    )
    for i, ((name, module), names) in enumerate(zip(chain, inside)):
        walk.enter(name)
        if not names:
            walk.without_style(name, module)
        elif any(walk.is_embedding(n) for n in names):
            walk.embedding(name, module, names, cut_after=i < last)
        elif names == [name]:
            walk.linear(name, styles[name].name, cut_after=i < last)
        else:
            walk.block(name, module, names, join_after=i == last)
    return walk.regions()


class Walk:
    """The activations on their way through the modules: "whole", "cut" along time, or between
    column and row cut along "features".
    """

    def __init__(self, model: nn.Module, styles: Mapping[str, Style]):
        self.model, self.styles, self.state, self.previous = model, styles, "whole", ""
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.found: dict[str, set[str]] = {
            field: set() for field in Regions._fields if field != "arrivals"
        }
        self.arrivals: dict[str, str] = {}
        self.sees_all: set[str] = set()  # parameters of modules that see every position

    def is_embedding(self, name: str) -> bool:
        return isinstance(self.model.get_submodule(name), nn.Embedding)

    def enter(self, name: str) -> None:
        if name and self.previous and self.state == "cut":
            self.arrivals[name] = self.previous
        self.previous = name or self.previous

    def without_style(self, name: str, module: nn.Module) -> None:
        if self.state != "cut":
            self.sees_all |= self.parameters(module)
        elif acts_on_each_position(module):
            self.found["partial"] |= self.parameters(module)
        else:
            raise ValueError(
                f"sequence_parallel: {name or type(module).__name__!r} "
                f"({type(module).__name__}) gets activations cut along time, and "
                "is not known to act on each position alone, as a LayerNorm does. Cut its "
                "layers too, or leave sequence_parallel out"
            )

    def embedding(self, name: str, module: nn.Module, names: list[str], cut_after: bool) -> None:
        if self.state != "whole" or not all(map(self.is_embedding, names)):
            raise ValueError(
                f"sequence_parallel: {name!r} has a cut embedding and other cut layers: "
                "expected the embedding in an entry of its own"
            )
        if not cut_after:
            self.sees_all |= self.parameters(module)
            return
        self.check_inside(name, module, names)
        self.found["cut_time"].update(names)
        if names != [name]:
            self.found["keep_after"].add(name)
        self.state = "cut"

    def linear(self, name: str, style: str, cut_after: bool) -> None:
        if style == "row":
            if cut_after:
                self.found["cut_time"].add(name)
                self.found["partial"] |= self.row_biases([name])
            self.state = "cut" if cut_after else "whole"
        else:
            if self.state == "cut":
                self.found["cut_time"].add(name)
            self.state = "whole" if style == "column_gather" else "features"

    def block(self, name: str, module: nn.Module, names: list[str], join_after: bool) -> None:
        """A module with column and row layers inside, and code that only it knows."""
        self.check_inside(name, module, names)
        self.found["partial"] |= self.row_biases(names)
        self.found["cut_time"].update(names)
        if self.state == "whole":
            self.found["cut_before"].add(name)
        if join_after:
            self.found["join_after"].add(name)
        self.state = "whole" if join_after else "cut"

    def check_inside(self, name: str, module: nn.Module, names: list[str]) -> None:
        """The other modules inside of this one see some positions: note their parameters, and
        refuse what may need all.
        """
        for below, leaf in module.named_modules():
            full = f"{name}.{below}" if below else name
            if full in names:
                if self.styles[full].name == "column_gather":
                    raise ValueError(
                        f'sequence_parallel: {full!r} has the style "column_gather" inside of '
                        f"{name!r}: expected column and row there"
                    )
            elif leaf._parameters and (
                isinstance(leaf, nn.Linear) or not acts_on_each_position(leaf)
            ):
                raise ValueError(
                    f"sequence_parallel: {full!r} ({type(leaf).__name__}) has no style, and "
                    f"{name!r} gets activations that are cut along "
                    "time: expected every layer in it to be cut, or to act on each position "
                    "alone, as a LayerNorm does"
                )
        styled = {
            self.names[id(p)] for n in names for p in self.model.get_submodule(n).parameters()
        }
        self.found["partial"] |= self.parameters(module) - styled

    def parameters(self, module: nn.Module) -> set[str]:
        return {self.names[id(p)] for p in module.parameters()}

    def row_biases(self, names: list[str]) -> set[str]:
        """They are added after the reduce-scatter."""
        biases = [
            getattr(self.model.get_submodule(name), "bias", None)
            for name in names
            if self.styles[name].name == "row"
        ]
        return {self.names[id(bias)] for bias in biases if bias is not None}

    def regions(self) -> Regions:
        for name in sorted(self.sees_all & self.found["partial"]):
            raise ValueError(
                f"sequence_parallel: {name!r} is used where time is cut and where it is not: "
                "expected two parameters"
            )
        return Regions(
            **{field: frozenset(found) for field, found in self.found.items()},
            arrivals=self.arrivals,
        )
