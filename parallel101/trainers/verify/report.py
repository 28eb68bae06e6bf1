"""The words of a comparison with one process: a table, and the error that carries it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.options import Trainer

SHOWN = 5  # names of a kind
KINDS = ("loss", "norm", "gradient", "buffer", "update", "evaluate")


class Row(NamedTuple):
    """One comparison. `ratio`: the difference over the largest that rounding explains; above 1
    it is a difference.
    """

    what: str  # one of KINDS
    name: str  # of the parameter or buffer
    step: int  # 1, 2, …
    difference: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """The result of `verify`. Print it to see a table.

    Attributes:
        rows: all comparisons, the same on every rank.
        reason: why nothing was compared, if nothing was.
        cause: of the first differences, in words, if it can be told.
        note: what was left out, if something was.
    """

    rows: Sequence[Row] = field(default=(), repr=False)
    reason: str = ""
    cause: str = ""
    note: str = ""

    @property
    def worst(self) -> Row | None:
        """The row that comes closest to its bound, or exceeds it most."""
        return max(self.rows, key=lambda row: row.ratio, default=None)

    @property
    def equal(self) -> bool:
        """True if something was compared and no row exceeds its bound."""
        return bool(self.rows) and all(row.ratio <= 1 for row in self.rows)

    @property
    def wrong(self) -> list[Row]:
        """The rows that exceed their bounds, by step, then by kind, then the largest."""
        rows = [row for row in self.rows if row.ratio > 1]
        return sorted(rows, key=lambda row: (row.step, KINDS.index(row.what), -row.ratio))

    def __str__(self) -> str:
        if self.reason:
            return f"not verified: {self.reason}"
        steps = sorted({row.step for row in self.rows})
        lines = [("largest differences", *(f"step {i}" for i in steps), "of the bound")]
        table, shown = defaultdict[Any, dict[int, str]](dict), Counter[str]()
        ranked = sorted(self.rows, key=lambda row: (KINDS.index(row.what), -row.ratio, row.name))
        for row in ranked:
            table[row.what, row.name][row.step] = f"{row.difference:.1e}"
        for row in ranked:
            cells = table.pop((row.what, row.name), None)  # a name's worst row comes first
            if cells and shown[row.what] < (SHOWN if row.ratio else 1):
                shown[row.what] += 1
                share = "✗" if row.ratio > 1 else f"{row.ratio:.1%}"
                name = f"{row.what} {row.name}".strip()
                lines.append((name, *(cells.get(i, "") for i in steps), share))
        (first, *widths) = (max(map(len, column)) for column in zip(*lines))
        words = ["equal to one process" if self.equal else "not equal to one process"]
        for name, *of_name in lines:
            words.append("   ".join([name.ljust(first), *map(str.rjust, of_name, widths)]).rstrip())
        return "\n".join([*words, self.note] if self.note else words)

    __repr__ = __str__


class NotEqualError(ValueError):
    """The error of a layout that computes something else than one process, or can't be compared
    with it. `report` has all comparisons.
    """

    def __init__(self, report: Report):
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        what, wrong = "", self.report.wrong
        if wrong:
            name = f" of {wrong[0].name!r}" * bool(wrong[0].name)
            what = f": the {wrong[0].what}{name} differs by {wrong[0].difference:.2g}"
            what += f" in step {wrong[0].step}"
        if len(wrong) > 1:
            what += f", and {len(wrong) - 1} other comparisons fail"
        return (
            f"this layout does not compute what one process does{what}.\n{self.report.cause}\n"
            "No weight was changed. The error's .report is a table; verify=False trains without "
            "this comparison"
        )


NOT_ELEMENTWISE = (
    "From equal gradients the optimizer makes other weights: it looks at whole matrices or their "
    "norms, of which a rank has pieces, or draws random numbers. Use SGD, Adam, AdamW or another "
    "elementwise one, or DataParallelTrainer, where each rank has whole matrices. Or the model's "
    "forward changes weights, as that of an nn.Embedding with max_norm."
)
OF_KERAS = (
    "a Keras model has weights and layers of its own besides torch's. parallel101.keras compares "
    "what it trains; here, compare the losses of a few steps with those of one rank"
)
HINTS = {
    "cp": (
        "Along cp a rank has some positions of each sequence. Code that looks at other positions "
        "must call torch's scaled_dot_product_attention itself (the calls of "
        "nn.MultiheadAttention aren't seen). What counts positions (an embedding, a router's "
        "balance or capacity) must take `positions`, (batch, time) whole numbers: the model's "
        "forward must take `positions`. A loss must be a mean over all positions, or (sum, weight)."
    ),
    "tp": (
        "Along tp a rank has some features between a column and a row layer: code there must act "
        "on each feature (or head) alone, write -1 where it counts them, or be given "
        'p101.column(heads="num_heads"). With sequence_parallel, every module between the cut '
        "layers must act on each position alone. Else leave them out of the plan, or make them "
        "'column_gather'. What reads a cut weight (loss_fn, a hook, a moving average) sees a part "
        "of it: use trainer.state_dict() between the steps."
    ),
    "pp": (
        "Along pp a rank calls some modules of .sequence(), and not the model's forward: look for "
        "what forward does between them, for hooks on the model, and for weights in loss_fn."
    ),
}
OF_SAMPLES = (
    "A rank, and a microbatch, has some samples. Look for what mixes them: statistics of the "
    "batch (BatchNorm works with sync_batch_norm=True), what one forward leaves to the next, "
    "samples that don't lie along dim 0 (a time-first LSTM, for example), a loss that is no mean "
    "over samples (it may return (sum of losses, their weight)), or a hook that sees gradients "
    "before they are summed."
)


def hint(trainer: Trainer) -> str:
    """Return what is special on the layout's axes."""
    hints = [words for axis, words in HINTS.items() if trainer.axes.sizes.get(axis, 1) > 1]
    samples_are_cut = trainer.axes.size(SAMPLES) * trainer.runner.microbatches > 1
    return "\n".join([*hints, OF_SAMPLES] if samples_are_cut else hints)
