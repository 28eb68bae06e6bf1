"""An explorer of the collectives: choose an operation, an algorithm, ranks, size, root and links, and watch the run.

[all_reduce ▾] [ring ▾]  ranks ──●──  numbers ──●──  [gloo ▾]        each change runs the collective again and draws
┌───────────────────────────────────────────────────────────┐        the record of that run. In an exported page, which
└───────────────────────────────────────────────────────────┘        has no kernel, the last picture still plays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import ipywidgets
import torch

from parallel101 import autograd
from parallel101.analysis.provenance import most_elements
from parallel101.sim.network import Network
from parallel101.viz.watch import watch

OPERATIONS = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier")
ROOT = {"broadcast": "src", "scatter": "src", "gather": "dst", "reduce": "dst"}
MOST_RANKS = {"gloo": 8, "sim": 16}  # gloo: processes on a laptop; sim: stripes that can still be told apart
MOST_NUMBERS = 48

# A message takes one second, whatever its size: the time below the picture counts steps.
LINKS: dict[str, Callable[[], Network]] = {
    "switch": lambda: Network(latency=1.0, bandwidth=math.inf),
    "ring, one way": lambda: Network.ring(bidirectional=False, latency=1.0, bandwidth=math.inf),
    "ring, both ways": lambda: Network.ring(latency=1.0, bandwidth=math.inf),
}


def most_numbers(ranks: int) -> int:
    """The most elements per rank that fit the slider and can carry their origin."""
    return min(MOST_NUMBERS, most_elements(ranks, torch.int64))


class Explorer(ipywidgets.VBox):
    """Controls, with the animation of a run below them. Display it as the last expression of a cell.

    Args:
        operation, algorithm, ranks, numbers, root, backend, links: the first settings. `numbers` is the elements of each rank's tensor.

    Raises:
        ValueError: an unknown operation, algorithm, backend or link, or a number outside its slider's range.
    """

    def __init__(
        self,
        operation: str = "all_reduce",
        algorithm: str = "ring",
        *,
        ranks: int = 4,
        numbers: int = 8,
        root: int = 0,
        backend: str = "gloo",
        links: str = "switch",
    ):
        for name, value, known in (
            ("operation", operation, OPERATIONS),
            ("algorithm", algorithm, autograd.algorithms(operation) if operation in OPERATIONS else ()),
            ("backend", backend, MOST_RANKS),
            ("links", links, LINKS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown: expected one of {', '.join(map(repr, known))}")

        def menu(name: str, options: Iterable[str], value: str) -> Any:
            return ipywidgets.Dropdown(description=name, options=tuple(options), value=value, layout={"width": "260px"})

        def slider(name: str, low: int, high: int, value: int) -> Any:
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: expected a whole number from {low} to {high}")
            layout = {"width": "260px"}
            return ipywidgets.IntSlider(description=name, min=low, max=high, value=value, continuous_update=False, layout=layout)

        self.operation = menu("operation", OPERATIONS, operation)
        self.algorithm = menu("algorithm", autograd.algorithms(operation), algorithm)
        self.backend = menu("world", MOST_RANKS, backend)
        self.ranks = slider("ranks", 1, MOST_RANKS[backend], ranks)
        self.numbers = slider("numbers", 1, most_numbers(ranks), numbers)
        self.root = slider("root", 0, ranks - 1, root)
        self.links = menu("links", LINKS, links)
        self.picture = ipywidgets.Output()
        self.html = ""
        controls = [self.operation, self.algorithm, self.ranks, self.numbers, self.backend, self.root, self.links]
        super().__init__([ipywidgets.HBox(controls, layout={"flex_flow": "row wrap", "max_width": "960px"}), self.picture])
        self._adjusting = False
        for control in controls:
            control.observe(self._changed, "value")
        self._changed({"owner": None})

    def program(self) -> Callable[[torch.Tensor], Any]:
        """The function that every rank calls with its tensor."""
        operation, options = self.operation.value, {"algorithm": self.algorithm.value}
        if operation in ROOT:
            options[ROOT[operation]] = self.root.value
        function = getattr(autograd, operation)
        return lambda x: function(**options) if operation == "barrier" else function(x, **options)

    def _changed(self, change: Any) -> None:
        """Adjust the other controls to the one that changed, then run once."""
        if self._adjusting:
            return
        self._adjusting = True
        try:
            if change["owner"] is self.operation:
                algorithms = tuple(autograd.algorithms(self.operation.value))
                kept = self.algorithm.value if self.algorithm.value in algorithms else algorithms[0]
                self.algorithm.options, self.algorithm.value = algorithms, kept
            self.ranks.max = MOST_RANKS[self.backend.value]
            self.numbers.max = most_numbers(self.ranks.value)
            self.root.max = self.ranks.value - 1
            self.root.disabled = self.operation.value not in ROOT
            self.links.disabled = self.backend.value != "sim"
        finally:
            self._adjusting = False
        self._show()

    def _show(self) -> None:
        n = self.ranks.value
        network = LINKS[self.links.value]() if self.backend.value == "sim" else None
        try:
            run = watch(self.program(), n, numel=self.numbers.value, backend=self.backend.value, network=network)
            self.html, plain = run.animate().html(), repr(run.trace)
        except (RuntimeError, ValueError, TimeoutError) as error:  # shown in place of the picture
            self.html, plain = f"<pre>{escape(str(error))}</pre>", str(error)
        self.picture.outputs = ({"output_type": "display_data", "data": {"text/html": self.html, "text/plain": plain}, "metadata": {}},)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live controls, and the picture as HTML for a page without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/html": self.html}, metadata
