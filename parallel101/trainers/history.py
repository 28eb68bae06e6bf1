"""The history that `fit` returns: the loss of every step, and how fast the steps were.

history = trainer.fit(batches)
history.losses, history.plot()        the curve continues where `resume` took it up
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from parallel101.extras import needs_extra


class StepResult(NamedTuple):
    """The report of a step that `fit` gives its history and `on_step`: of the whole batch, the
    same on every rank except `seconds`.
    """

    step: int  # its number, from 0
    loss: float  # mean over the whole batch, before the step's update
    seconds: float  # that it took on this rank
    samples: int  # in the whole batch
    # in the whole batch, if its inputs are whole numbers in rows (as a text's are), else 0
    tokens: int


@dataclass
class History:
    """The history of all steps: a list for each field of `StepResult`."""

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
        return (
            f"<History: {len(self)} steps, loss {self.losses[0]:.4g} → {self.losses[-1]:.4g}, "
            f"{self.rate()}>"
        )

    def add(self, step: StepResult) -> None:
        for name, value in zip(vars(self), step):
            getattr(self, name).append(value)

    def rate(self, last: int = 20) -> str:
        """Return the tokens a second over the last steps, in words; samples a second if there are
        no tokens.
        """
        seconds, tokens = sum(self.seconds[-last:]), sum(self.tokens[-last:])
        amount, unit = tokens or sum(self.samples[-last:]), "tokens" if tokens else "samples"
        return f"{amount / seconds:,.0f} {unit}/s" if seconds else f"? {unit}/s"

    def plot(self, ax: Any = None, **line: Any) -> Any:
        """Draw the loss over the steps, on matplotlib axes `ax` or new ones; `line` goes to
        plot(), such as label="2 ranks".
        """
        with needs_extra("history.plot()"):
            import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots(figsize=(6, 3.2), layout="constrained")[1]
        ax.plot(self.steps, self.losses, **line)
        ax.set_xlabel("step")
        ax.set_ylabel("loss of the whole batch")
        return ax

    def as_dict(self) -> dict[str, list]:
        """Return plain lists, for a checkpoint; `History(**…)` makes a history of them again."""
        return asdict(self)
