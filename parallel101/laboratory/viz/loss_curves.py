"""Draws loss curves: of a finished run (`loss_scene`), or live while the ranks train (`LiveLoss`).

with LiveLoss() as live:
    p101.launch(train, live, world_size=2)
        …  trainer.fit(batches, on_step=live.curve("2 ranks"))  …

Each rank appends its losses to a file. The notebook reads the file and redraws the picture.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel101.laboratory.record.ipython import in_notebook
from parallel101.laboratory.record.units import round_step
from parallel101.laboratory.viz.plots import Curve, Scale, draw_plot
from parallel101.laboratory.viz.scene import Scene, data_uri

INTERVAL = 0.25  # seconds between two drawings
MOST_POINTS = 400
# of the curves: dashes show two curves on top of each other
DASHES = (None, "7 4", "2 4", "10 3 2 3", "1 6")

# (step, loss) pairs, or what `fit` returns: an object with `steps` and `losses`
Losses = Any


def loss_scene(
    curves: Losses | Mapping[str, Losses],
    *,
    title: str = "Training loss",
    until: float | None = None,
) -> Scene:
    """Draw losses over steps.

    Args:
        curves: a trainer's history; or several of them, or lists of (step, loss), by name.
        title: above the picture.
        until: the last step of the axis; None: the last step of the curves.

    Returns:
        A still Scene.

    Raises:
        ValueError: more than five curves.
    """
    named = curves if isinstance(curves, Mapping) else {"loss": curves}
    lines = {name: points(curve) for name, curve in named.items()}
    if len(lines) > len(DASHES):
        names = ", ".join(lines)
        raise ValueError(f"got {len(lines)} curves ({names}): expected at most {len(DASHES)}")
    lines = {name: line for name, line in lines.items() if line}
    everything = [p for line in lines.values() for p in line] or [(0.0, 0.0)]
    last = until or max(step for step, _ in everything) or 1.0
    high = max(loss for _, loss in everything) * 1.05 or 1.0
    tick = round_step(high, 6)
    heights = [(k * tick, f"{k * tick:.6g}") for k in range(int(high / tick) + 1)]
    across = Scale(0.0, last, False, [(0.0, "0"), (last, f"step {last:g}")])
    drawn = []
    for dashes, (name, line) in zip(DASHES, lines.items()):
        shown = [*line[:: max(1, len(line) // MOST_POINTS)], line[-1]]
        drawn.append(Curve(name, shown, shown[-1:], dashes=dashes, value=f"{line[-1][1]:.4f}"))
    words = (f"{name}: {line[0][1]:.3g} to {line[-1][1]:.3g}" for name, line in lines.items())
    axes = across, Scale(0.0, high, False, heights)
    return draw_plot(title, "", 330, drawn, axes, description="; ".join(words))


def points(curve: Losses) -> list[tuple[float, float]]:
    pairs = curve if isinstance(curve, Sequence) else zip(curve.steps, curve.losses, strict=True)
    return [(float(step), float(loss)) for step, loss in pairs]


class LiveLoss:
    """A picture of losses that grows while ranks train.

    Pass it to `launch` as an argument; the ranks add points to it.

    Args:
        title: above the picture.
        until: the last step of the axis, if known.

    In a notebook the picture appears at the `with` and is redrawn in place until the block ends.
    Outside a notebook nothing is drawn, but `curves` and `scene()` work all the same.
    """

    def __init__(self, title: str = "Training loss", until: float | None = None):
        self.title, self.until = title, until
        handle, path = tempfile.mkstemp(prefix="p101-loss-", suffix=".jsonl")
        os.close(handle)
        self.path = Path(path)
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self._read = 0
        self._handle: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a rank gets: the path of the file, and nothing else."""
        return {"path": self.path}

    def add(self, name: str, step: float, loss: float) -> None:
        """Add a point to a curve, from any rank.

        The line is one write(), so lines of different ranks do not mix.
        """
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, step, loss]) + "\n")

    def curve(self, name: str, rank: int = 0) -> Callable[[Any], None]:
        """Return an `on_step` for `fit` that adds the loss of every step to this curve.

        All ranks may pass it; only `rank` writes.
        """

        def on_step(step: Any) -> None:
            if not dist.is_initialized() or dist.get_rank() == rank:
                self.add(name, step.step, step.loss)

        return on_step

    def __enter__(self) -> LiveLoss:
        if in_notebook():
            from IPython.display import display

            self._handle = display(self._image(), display_id=True)
            self._thread = threading.Thread(target=self._redraw, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.update()
        self.path.unlink(missing_ok=True)
        if self._handle is not None:
            # unlike the image so far, this follows the page's theme
            self._handle.update(self.scene())

    def update(self) -> bool:
        """Read what the ranks have written since the last call.

        Returns whether there was anything new.
        """
        with open(self.path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # a rank may be in the middle of a line
        self._read += len(whole)
        for line in whole.splitlines():
            name, step, loss = json.loads(line)
            self.curves.setdefault(name, []).append((step, loss))
        return bool(whole)

    def scene(self) -> Scene:
        """Return the picture as it is now."""
        return loss_scene(self.curves, title=self.title, until=self.until)

    def _redraw(self) -> None:
        while not self._stop.wait(INTERVAL):
            if self.update():
                self._handle.update(self._image())

    def _image(self) -> Any:
        from IPython.display import HTML

        source = data_uri(self.scene().svg())
        look = 'decoding="sync" style="width:100%;max-width:960px"'
        return HTML(f'<img alt="{escape(self.title)}" {look} src="{source}">')
