"""The verdict on one exercise, and the report of it that a learner reads, as text and as HTML.

A terminal shows the text, and a notebook the HTML. Both have the same blocks.

1 · Ring shift: ring_shift                            5 of 10 points
  ✓ value   every rank returns the right values             5 of 5
  ✗ bytes   every rank sends x once                       0 of 2.5
            4 ranks: rank 0 sent 48 bytes; 24 are enough
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.grade.endings import explain_error, how_it_ended, reason_of
from parallel101.laboratory.grade.exercise import Exercise, Misconception, Question, Trial
from parallel101.laboratory.grade.homework import set_name
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.units import listed

WIDTH = 96  # characters of a line in a terminal
MOST_LINES = 12  # that are shown of what one rank printed


class ReportBlock(NamedTuple):
    """A part of a report: as a terminal shows it, and as a notebook does."""

    text: str
    html: str


@dataclass
class Card:
    """A box with blocks. A notebook shows it as HTML, and `print` as text."""

    label: str
    blocks: Sequence[ReportBlock]

    def __str__(self) -> str:
        return "\n\n".join(block.text for block in self.blocks if block.text)

    __repr__ = __str__  # in a notebook, beside the HTML

    def _repr_html_(self) -> str:
        """Return the box in the colours of its page, whatever they are."""
        body = "".join(block.html for block in self.blocks)
        return f'{STYLE}<section class="p101g" aria-label="{escape(self.label)}">{body}</section>'


class Finding(NamedTuple):
    """The verdict on one check."""

    kind: str
    says: str
    passed: bool
    points: float
    out_of: float
    message: str  # what is wrong, and in which case; or what is tolerated, and why


@dataclass(repr=False)
class ExerciseVerdict:
    """The verdict on one exercise, with all that is shown beside it.

    Attributes:
        findings: one for each check, "value" first.
        misconception: the mistake that the trials show, if it is a known one.
        trials: every run, in the order of the cases.
        shown: the trial that the picture shows: the first that ended early or failed, or the last
            one.
        seconds: how long the grading took.
        file: the name of the learner's file.
        note: about this check, such as that the kernel holds an older version of the file.
        predictions: next to what was measured.
        picture, caption: of a run: a viz.scene.Scene; None if there is nothing to draw.
        saved: the file that the picture was written to.
        suggestion: a hint, after several failures.
    """

    exercise: Exercise
    findings: list[Finding]
    misconception: Misconception | None = None
    trials: list[Trial] = field(default_factory=list)
    shown: Trial | None = None
    seconds: float = 0.0
    file: str = "the file"
    note: str = ""
    predictions: Sequence[Prediction] = ()
    picture: Any = None
    caption: str = ""
    saved: Path | None = None
    suggestion: str = ""

    @property
    def points(self) -> float:
        return round(sum(finding.points for finding in self.findings), 2)

    @property
    def out_of(self) -> float:
        return self.exercise.points

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def error(self) -> BaseException | None:
        """The error that ended a run early; None if all ran to their ends."""
        return self.shown.error if self.shown is not None else None

    @property
    def not_written(self) -> bool:
        """True if the function is still the stub."""
        return how_it_ended(self.error) == "not written"

    @property
    def problem(self) -> str:
        """The reason why a run ended early, as a text for the learner; "" if none did."""
        return explain_error(self.exercise, self.shown) if self.shown and self.error else ""

    @property
    def reason(self) -> str:
        """The reason why points are missing, in a word or two, for a class table; "" if none are.

        If a run ended early, it says how: "not written", "syntax error", "NameError", "time",
        "exit", "deadlock", "wrong call", …. Otherwise it says what fails: "wrong value", or "bytes,
        steps".
        """
        if self.shown is not None and self.error is not None and not self.passed:
            no_function = f"has no function {self.exercise.function}" in str(self.error)
            return "not written" if no_function else reason_of(self.shown)
        failed = [finding.kind for finding in self.findings if not finding.passed]
        # the others count only with the right value
        return "wrong value" if "value" in failed else ", ".join(dict.fromkeys(failed))

    @property
    def printed(self) -> str:
        """The output of the ranks in the run on which the verdict rests. Each line has its rank."""
        lines = []
        for rank, text in enumerate(self.shown.printed if self.shown else []):
            own = text.rstrip("\n").splitlines()
            if len(own) > MOST_LINES:
                own[MOST_LINES:] = [f"… and {len(own) - MOST_LINES} more lines"]
            lines += [f"[rank {rank}] {line}" for line in own]
        return "\n".join(lines)

    @property
    def _summary(self) -> str:
        """The first thing to know."""
        if self.not_written:
            name = self.exercise.function
            return f"{name} is not written yet. Write it in {self.file}, then check it again."
        sizes = sorted({trial.world_size for trial in self.trials})
        runs, ranks = len(self.trials), f"{listed(sizes)} rank{'s' * (sizes != [1])}"
        ran = f"{runs} run{'s' * (runs != 1)} on {ranks}, in {self.seconds:.1f} s"
        return f"{'Everything holds' if self.passed else 'Not right yet'}: {ran}."

    def _blocks(self, points: str) -> Iterator[ReportBlock]:
        exercise, mistake = self.exercise, self.misconception
        title = f"{exercise.number} · {exercise.title}"
        yield ReportBlock(
            _line(f"{title}: {exercise.function}", points),
            f'<div class="p101g-head"><strong class="p101g-title">{escape(title)}</strong>'
            f'<span class="p101g-points">{points}</span></div>',
        )
        yield paragraph(self._summary, "")
        if not self.not_written:
            yield _findings(self.findings)
        if mistake:
            name = f"{capital(mistake.name)}."
            yield ReportBlock(
                "\n".join([f"  {name}", *_wrapped(mistake.says, 2)]),
                f'<div class="p101g-mistake" role="note"><strong>{escape(name)}</strong> '
                f"{escape(mistake.says)}</div>",
            )
        if self.problem and not self.not_written:
            calls = [f"  {call}" for call in getattr(self.error, "calls", ())]
            text = "\n".join([self.problem, *(["called from:", *calls] if calls else [])])
            drawn = self.picture is not None and isinstance(self.error, DeadlockError)
            yield fold("What happened", text, opened=not drawn)
        if self.predictions:
            yield predictions_table(exercise, self.predictions)
        if self.printed and self.shown:
            yield fold(f"What the ranks printed, with {self.shown.case.label}", self.printed)
        for said in filter(None, (self.suggestion, self.note)):
            yield paragraph(said)
        if self.picture:
            text = f"  {self.caption}\n  {self.saved}" if self.saved else ""
            yield ReportBlock(text, paragraph(self.caption).html)

    @property
    def card(self) -> Card:
        points = f"{number(self.points)} of {number(self.out_of)} points"
        points = "optional practice" if self.exercise.practice else points
        return Card(f"{self.exercise.function}: {points}", list(self._blocks(points)))

    def __str__(self) -> str:
        return str(self.card)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.card._repr_html_() + (self.picture.html() if self.picture else "")


def _findings(findings: Sequence[Finding]) -> ReportBlock:
    lines, rows = [], []
    for finding in findings:
        state, mark = ("holds", "✓") if finding.passed else ("fails", "✗")
        points = f"{number(finding.points)} of {number(finding.out_of)}" if finding.out_of else ""
        lines += [
            _line(f"  {mark} {finding.kind:<8} {finding.says}", points).rstrip(),
            *_wrapped(finding.message, 13),
        ]
        message = f'<div class="p101g-soft">{escape(finding.message)}</div>'
        rows.append(
            f'<td class="p101g-{state}" aria-label="{state}">{mark}</td>'
            f'<td>{finding.kind}</td><td class="p101g-wide">{escape(finding.says)}'
            f'{message * bool(finding.message)}</td><td class="p101g-number">{points}</td>'
        )
    return ReportBlock("\n".join(lines), table(("", "", "", "points"), rows))


# ---- predictions and hints ----


class Prediction(NamedTuple):
    """A question, and the answers to it."""

    question: Question
    said: Any  # None: nothing was predicted. Then what was measured is not shown
    measured: Any  # None: the function does not run yet

    @property
    def agrees(self) -> bool:
        """True if the prediction is what was measured."""
        if isinstance(self.said, int | float) and isinstance(self.measured, int | float):
            return abs(self.said - self.measured) <= 1e-9 * abs(self.measured)
        return str(self.said).strip().casefold() == str(self.measured).strip().casefold()

    @property
    def answers(self) -> tuple[str, str]:
        """What the learner said, and what the run shows."""
        ended = "it ended early"
        mark = "✓" if self.agrees else "≠"
        run = ended if self.measured is None else f"{self._with_unit(self.measured)} {mark}"
        return self._with_unit(self.said), run

    def _with_unit(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        unit = self.question.unit
        return f"{number(value)} {unit.removesuffix('s') if value == 1 else unit}".rstrip()


def predictions_table(exercise: Exercise, predictions: Sequence[Prediction]) -> ReportBlock:
    """Return the questions, each with what the learner said and what the run shows."""
    if not predictions:
        return paragraph(f"{exercise.function} asks for no prediction.")
    lines, rows = [], []
    for prediction in predictions:
        ask = prediction.question.ask
        if prediction.said is None:
            name = f"{set_name(Path(exercise.path))}.{exercise.function}"
            call = f"predict({name}, {prediction.question.name}=…)"
            answer, cells = (
                f"predict first: {call}",
                f'<td colspan="2"><code>{escape(call)}</code></td>',
            )
        else:
            said, run = prediction.answers
            answer = f"you said: {said} · your run: {run}"
            cells = f"<td>{escape(said)}</td><td>{escape(run)}</td>"
        lines.append(f"  {ask}\n    {answer}")
        rows.append(f'<td class="p101g-wide">{escape(ask)}</td>{cells}')
    return ReportBlock("\n".join(lines), table(("Predicted", "you said", "your run"), rows))


def hints_card(exercise: Exercise, rung: int) -> Card:
    """Return the first `rung` of an exercise's hints."""
    total = len(exercise.hints)
    given = enumerate(exercise.hints[:rung], start=1)
    hints = [f"Hint {i} of {total}: {text}" for i, text in given]
    said = [paragraph(line) for line in hints or [f"{exercise.function} has no hints."]]
    return Card(f"{exercise.function}: hints", said)


# ---- pieces ----


def number(value: float) -> str:
    """Return a number as short text: 2.5 → "2.5", 10.0 → "10", 12345 → "12,345"."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def paragraph(text: str, look: str = ' class="p101g-soft"') -> ReportBlock:
    return ReportBlock("\n".join(_wrapped(text, 2)), f"<p{look}>{escape(text)}</p>")


def fold(title: str, text: str, opened: bool = True) -> ReportBlock:
    """Return a block of text as it is, which a notebook can fold."""
    summary = f"<summary>{escape(title)}</summary>"
    return ReportBlock(
        f"  {title}:\n{textwrap.indent(text, '    ')}",
        f"<details{' open' * opened}>{summary}<pre>{escape(text)}</pre></details>",
    )


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Return an HTML table. The heads and the rows, which consist of cells, are HTML."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _line(left: str, right: str) -> str:
    return f"{left:<{WIDTH - len(right) - 1}} {right}"


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    wrapper = textwrap.TextWrapper(WIDTH - 12, initial_indent=space, subsequent_indent=space)
    return [line for part in text.splitlines() for line in wrapper.wrap(part)]


# Text and background are the page's own. Selectors with the name twice win over JupyterLab's, which
# aligns the cells of tables to the right. The marks have a contrast of at least 3 against white and
# against black.
STYLE = """<style>
.p101g { box-sizing: border-box; max-width: 960px; margin: 4px 0 12px; padding: 14px 20px;
  border: 1px solid #8899aa66; border-radius: 10px;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums }
.p101g-head { display: flex; justify-content: space-between; align-items: baseline; gap: 16px }
.p101g-title { font-size: 19px; font-weight: 650 }
.p101g-points { font-size: 17px; font-weight: 600; white-space: nowrap }
.p101g p { margin: 4px 0 8px }
section.p101g.p101g table { width: 100%; margin: 8px 0; border: 0; border-collapse: collapse;
  font-size: 14px; table-layout: auto }
section.p101g.p101g tr, section.p101g.p101g tr:hover { background: none !important }
section.p101g.p101g td, section.p101g.p101g th { padding: 5px 14px 5px 0; border: 0;
  text-align: left; vertical-align: top; white-space: normal; max-width: none }
section.p101g.p101g td { border-top: 1px solid #8899aa44 }
section.p101g.p101g th { font-weight: 600; padding: 2px 14px 2px 0; white-space: nowrap }
section.p101g.p101g code { padding: 0; font-size: 12.5px; background: none; color: inherit }
section.p101g.p101g td.p101g-wide { width: 70% }
section.p101g.p101g td.p101g-number { padding-right: 0; text-align: right; white-space: nowrap }
section.p101g.p101g td.p101g-holds, section.p101g.p101g td.p101g-fails { width: 18px;
  font-size: 16px; font-weight: 700 }
section.p101g.p101g td.p101g-holds { color: #2a9150 }
section.p101g.p101g td.p101g-fails { color: #d9570f }
.p101g-soft { opacity: .78 }
.p101g-mistake { margin: 10px 0; padding: 8px 14px; border-left: 4px solid #d9570f;
  background: #d9570f1a; border-radius: 0 6px 6px 0 }
.p101g details { margin: 8px 0 }
.p101g summary { cursor: pointer; font-weight: 600 }
.p101g pre { margin: 6px 0; padding: 8px 12px; overflow-x: auto; white-space: pre;
  background: #8899aa1a; border-radius: 6px; color: inherit;
  font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
@media print { .p101g pre { white-space: pre-wrap; overflow-wrap: anywhere } }
</style>"""
