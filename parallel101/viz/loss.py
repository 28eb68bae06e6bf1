"""The loss while it falls: one picture in a notebook that is redrawn in place, fed from the ranks themselves.

with LiveLoss() as live:                                     the notebook: draws, a few times a second
    p101.launch(train, live, world_size=2)
        …  trainer.fit(batches, on_step=live.curve("2 ranks"))  …        a rank: appends a line to a file that both know
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from parallel101.record.units import round_step
from parallel101.viz.palette import PLOTTED
from parallel101.viz.scene import Scene

LEFT, RIGHT, TOP, BOTTOM = 72.0, 770.0, 84.0, 286.0
EVERY = 0.25  #  seconds between two drawings
MOST_POINTS = 400
DASHES = (None, "7 4", "2 4", "10 3 2 3", "1 6")  #  as well as colours: two curves that lie upon each other are both seen
STYLE = "".join(f".l{i}{{stroke:var(--{colour})}}.d{i}{{fill:var(--{colour})}}" for i, colour in enumerate(PLOTTED))

Curve = Sequence[tuple[float, float]]  #  (step, loss)


class Step(Protocol):
    """What a trainer's `fit` tells of a step."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...


class Losses(Protocol):
    """What a trainer's `fit` gives."""

    @property
    def steps(self) -> Sequence[int]: ...
    @property
    def losses(self) -> Sequence[float]: ...


def loss_scene(curves: Losses | Mapping[str, Losses | Curve], *, title: str = "Training loss", until: float | None = None) -> Scene:
    """Draw losses over steps.

    Args:
        curves: a trainer's history, or several of them, or lists of (step, loss), by name.
        until: the last step of the axis, where it is known beforehand.

    Returns: a Scene that stands still; its colours follow the page. Raises ValueError for more than five curves.
    """
    named = curves if isinstance(curves, Mapping) else {"loss": curves}
    lines = {name: points(curve) for name, curve in named.items()}
    if len(lines) > len(PLOTTED):
        raise ValueError(f"{len(lines)} curves ({', '.join(lines)}): expected at most {len(PLOTTED)}")
    scene = Scene(960, 330, title, "; ".join(f"{name}: {line[0][1]:.3g} to {line[-1][1]:.3g}" for name, line in lines.items() if line))
    scene.style += STYLE
    everything = [p for line in lines.values() for p in line] or [(0.0, 0.0)]
    last = until or max(step for step, _ in everything) or 1
    high = max(loss for _, loss in everything) * 1.05 or 1.0
    right = min(RIGHT, 850.0 - 8 * max(map(len, lines), default=0))  #  room for names and values

    def at(step: float, loss: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * step / last, BOTTOM - (BOTTOM - TOP) * loss / high

    scene.add("text", title, x=28, y=40, class_="h")
    tick = round_step(high, 6)
    for k in range(int(high / tick) + 1):
        y = at(0, k * tick)[1]
        scene.add("path", d=f"M{LEFT} {y:.1f}H{right}", class_="link", opacity=0.7 if k else 1)
        scene.add("text", f"{k * tick:.6g}", x=LEFT - 8, y=y + 4, font_size=12, class_="m e")
    scene.add("text", "0", x=LEFT, y=BOTTOM + 22, font_size=12, class_="m")
    scene.add("text", f"step {last:g}", x=right, y=BOTTOM + 22, font_size=12, class_="m e")
    labels = sorted((at(*line[-1])[1], i, name) for i, (name, line) in enumerate(lines.items()) if line)
    for i, line in enumerate(lines.values()):
        if line:
            shown = [*line[:: max(1, len(line) // MOST_POINTS)], line[-1]]
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in shown))
            scene.add("polyline", points=places, fill="none", class_=f"l{i}", stroke_width=2.2, stroke_dasharray=DASHES[i])
    lowest = 0.0
    for y, i, name in labels:
        lowest = max(y, lowest + 18)
        x, end = at(*list(lines.values())[i][-1])
        scene.add("circle", cx=x, cy=end, r=3.5, class_=f"d{i}")
        scene.add("text", name, x=right + 12, y=lowest + 4, font_size=13, class_=f"b d{i}")
        scene.add("text", f"{lines[name][-1][1]:.4f}", x=932, y=lowest + 4, font_size=13, class_="m e")
    return scene


def points(curve: Losses | Curve) -> list[tuple[float, float]]:
    return [
        (float(step), float(loss)) for step, loss in (curve if isinstance(curve, Sequence) else zip(curve.steps, curve.losses, strict=True))
    ]


class LiveLoss:
    """A picture of losses that grows while ranks train. It travels to the ranks as any argument does, and they `add` to it.

    Args:
        title: above the picture. until: the last step of the axis, where it is known.

    In a notebook it is drawn where the `with` stands, again and again in place, and once more, to stay, at its end. Elsewhere, in a script
    or a test, nothing is drawn, and `curves` and `scene()` are there all the same.
    """

    def __init__(self, title: str = "Training loss", until: float | None = None):
        self.title, self.until = title, until
        handle, path = tempfile.mkstemp(prefix="p101-loss-", suffix=".jsonl")
        os.close(handle)
        self.path = Path(path)
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self._read = 0
        self._handle: Any = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A rank gets the place to write to, and nothing else."""
        return {"path": self.path}

    def add(self, name: str, step: float, loss: float) -> None:
        """One more point of a curve; from any rank. A line is written at once and whole, so that ranks do not mix theirs."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, step, loss]) + "\n")

    def curve(self, name: str, rank: int = 0) -> Callable[[Step], None]:
        """What `fit` takes as `on_step`: every step adds its loss to this curve. All ranks may have it, and only `rank` writes."""

        def on_step(step: Step) -> None:
            if not dist.is_initialized() or dist.get_rank() == rank:
                self.add(name, step.step, step.loss)

        return on_step

    def __enter__(self) -> LiveLoss:
        if in_notebook():
            from IPython.display import display

            self._handle = display(self._image(), display_id=True)
            self._thread = threading.Thread(target=self._draw_on, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.update()
        self.path.unlink(missing_ok=True)
        if self._handle is not None:
            self._handle.update(self.scene())  #  with the player's script it follows the page's theme

    def update(self) -> bool:
        """Read what the ranks have written since; True where there was something."""
        with open(self.path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            name, step, loss = json.loads(line)
            self.curves.setdefault(name, []).append((step, loss))
        return bool(whole)

    def scene(self) -> Scene:
        """The picture as it is now."""
        return loss_scene(self.curves, title=self.title, until=self.until)

    def _draw_on(self) -> None:
        while not self._over.wait(EVERY):
            if self.update():
                self._handle.update(self._image())

    def _image(self) -> Any:
        from IPython.display import HTML

        coded = base64.b64encode(self.scene().svg().encode()).decode()
        return HTML(
            f'<img alt="{escape(self.title)}" decoding="sync" style="width:100%;max-width:960px" src="data:image/svg+xml;base64,{coded}">'
        )


def in_notebook() -> bool:
    """Whether there is a page that can show a picture: a kernel's, not a terminal's."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
