"""The words of a comparison with one process: a table, and the error that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
        names: dict[tuple[str, str], dict[int, Row]] = {}
        for row in self.rows:
            names.setdefault((row.what, row.name), {})[row.step] = row
        worst = {key: max(row.ratio for row in of.values()) for key, of in names.items()}
        ranked = sorted(names, key=lambda key: (-worst[key], key))
        for what in KINDS:
            of_kind = [key for key in ranked if key[0] == what]
            for key in [key for key in of_kind if worst[key]][:SHOWN] or of_kind[:1]:
                rows = names[key]
                cells = (f"{rows[i].difference:.1e}" if i in rows else "" for i in steps)
                share = "✗" if worst[key] > 1 else f"{worst[key]:.1%}"
                lines.append((" ".join(key).strip(), *cells, share))
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = [
            "   ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        title = "equal to one process" if self.equal else "not equal to one process"
        notes = [self.note] if self.note else []
        return "\n".join([title, *(line.rstrip() for line in table), *notes])

    __repr__ = __str__


class NotEqualError(ValueError):
    """The error of a layout that computes something else than one process, or can't be compared
    with it. `report` has all comparisons.
    """

    def __init__(self, report: Report):
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        what = ""
        for first in self.report.wrong[:1]:
            name = f" of {first.name!r}" * bool(first.name)
            others = len(self.report.wrong) - 1
            what = (
                f": the {first.what}{name} differs by {first.difference:.2g} in step {first.step}"
                f"{f', and {others} other comparisons fail' * (others > 0)}"
            )
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
