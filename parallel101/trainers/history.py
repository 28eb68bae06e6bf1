"""What `fit` hands back: the loss of every step, and how fast the steps were.

history = trainer.fit(batches)
history.losses, history.plot()        the curve goes on where `resume` took it up
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Step(NamedTuple):
    """What `fit` tells of a step, to its history and to `on_step`: of the whole batch, the same on every rank but for `seconds`."""

    step: int  #  which it was, from 0
    loss: float  #  mean over the whole batch, before the step's update
    seconds: float  #  that it took on this rank
    samples: int  #  in the whole batch
    tokens: int  #  in it, where its inputs are whole numbers (as a text's are), else 0


@dataclass
class History:
    """All steps, a list for each of what `Step` tells of one."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        if not self.steps:
            return "<History: no steps yet>"
        return f"<History: {len(self)} steps, loss {self.losses[0]:.4g} → {self.losses[-1]:.4g}, {self.rate()}>"

    def add(self, step: Step) -> None:
        self.steps.append(step.step)
        self.losses.append(step.loss)
        self.seconds.append(step.seconds)
        self.samples.append(step.samples)
        self.tokens.append(step.tokens)

    def rate(self, last: int = 20) -> str:
        """Tokens a second over the last steps, in words; samples a second where there are no tokens."""
        seconds = sum(self.seconds[-last:])
        amount, unit = (sum(self.tokens[-last:]), "tokens") if any(self.tokens[-last:]) else (sum(self.samples[-last:]), "samples")
        return f"{amount / seconds:,.0f} {unit}/s" if seconds else f"? {unit}/s"

    def plot(self, ax: Axes | None = None, **line: Any) -> Axes:
        """The loss over the steps, on `ax` or on axes of its own; `line` goes to matplotlib's plot, such as label="2 ranks"."""
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots(figsize=(6, 3.2), layout="constrained")[1]
        ax.plot(self.steps, self.losses, **line)
        ax.set_xlabel("step")
        ax.set_ylabel("loss of the whole batch")
        return ax

    def as_dict(self) -> dict[str, list]:
        """Plain lists, as a checkpoint keeps them; `History(**…)` makes a history of them again."""
        return asdict(self)
