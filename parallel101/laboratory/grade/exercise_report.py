"""The report that a learner reads: verdict, predictions and hints, as text and as HTML.

A terminal shows the text, and a notebook the HTML.

1 · Ring shift: ring_shift                            5 of 10 points
  ✓ value   every rank returns the right values             5 of 5
  ✗ bytes   every rank sends x once                       0 of 2.5
            4 ranks: rank 0 sent 48 bytes; 24 are enough
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from parallel101.laboratory.grade.endings import LearnerError
from parallel101.laboratory.grade.exercise import Exercise
from parallel101.laboratory.grade.grading import ExerciseVerdict, Finding
from parallel101.laboratory.grade.homework import set_name
from parallel101.laboratory.grade.picture import Picture
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.units import listed

WIDTH = 96  # characters of a line in a terminal
MOST_LINES = 12  # that are shown of what one rank printed


@dataclass
class ExerciseReport:
    """A verdict, with all that is shown beside it.

    A notebook shows it as HTML, and `print` as text.

    Attributes:
        verdict: of grading.grade.
        file: the name of the learner's file.
        note: about this check, such as that the kernel holds an older version of the file.
        predictions: next to what was measured.
        picture: of a run; None if there is nothing to draw.
        saved: the file that the picture was written to.
        suggestion: a hint, after several failures.
    """

    verdict: ExerciseVerdict
    file: str
    note: str = ""
    predictions: Predictions | None = None
    picture: Picture | None = None
    saved: Path | None = None
    suggestion: str = ""

    @property
    def points(self) -> str:
        if self.verdict.exercise.practice:
            return "optional practice"
        return f"{number(self.verdict.points)} of {number(self.verdict.out_of)} points"

    @property
    def summary(self) -> str:
        """The first thing to know about the verdict."""
        verdict = self.verdict
        if verdict.not_written:
            return (
                f"{verdict.exercise.function} is not written yet. Write it in {self.file}, then "
                "check it again."
            )
        sizes = sorted({trial.world_size for trial in verdict.trials})
        runs, ranks = len(verdict.trials), f"{listed(sizes)} rank{'s' * (sizes != [1])}"
        ran = f"{runs} run{'s' * (runs != 1)} on {ranks}, in {verdict.seconds:.1f} s"
        return f"{'Everything holds' if verdict.passed else 'Not right yet'}: {ran}."

    @property
    def problem(self) -> str:
        """The reason why a run ended early, with the calls that led there.

        "" if nothing did, or nothing is written yet.
        """
        verdict = self.verdict
        error = verdict.shown.error if verdict.shown is not None else None
        calls = _own_calls(error.traceback) if isinstance(error, LearnerError) else []
        return (
            ""
            if verdict.not_written
            else "\n".join([verdict.problem, *(["called from:", *calls] if calls else [])])
        )

    @property
    def printed(self) -> str:
        """The output of the ranks in the run on which the verdict rests. Each line has its rank."""
        lines = []
        for rank, text in enumerate(self.verdict.shown.printed if self.verdict.shown else []):
            own = text.rstrip("\n").splitlines()
            lines += [f"[rank {rank}] {line}" for line in own[:MOST_LINES]]
            lines += (
                [f"[rank {rank}] … and {len(own) - MOST_LINES} more lines"]
                if len(own) > MOST_LINES
                else []
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        verdict = self.verdict
        exercise, mistake = verdict.exercise, verdict.misconception
        blocks = [_line(f"{exercise.number} · {exercise.title}: {exercise.function}", self.points)]
        if not verdict.not_written:
            rows = []
            for finding in verdict.findings:
                says = f"  {'✓' if finding.passed else '✗'} {finding.kind:<8} {finding.says}"
                rows += [
                    _line(says, _points(finding)).rstrip(),
                    *_wrapped(finding.message, 13),
                ]
            blocks.append("\n".join(rows))
        blocks.append(f"  {self.summary}")
        if mistake:
            blocks.append("\n".join([f"  {capital(mistake.name)}.", *_wrapped(mistake.says, 2)]))
        if self.problem:
            blocks.append(textwrap.indent(self.problem, "  "))
        if self.predictions:
            blocks.append(textwrap.indent(str(self.predictions), "  "))
        if self.printed and verdict.shown:
            blocks.append(
                f"  Printed with {verdict.shown.case.label}:\n"
                f"{textwrap.indent(self.printed, '    ')}"
            )
        if self.picture and self.saved:
            blocks.append(f"  {self.picture.caption}\n  {self.saved}")
        for said in (self.suggestion, self.note):
            if said:
                blocks.append("\n".join(_wrapped(said, 2)))
        return "\n\n".join(blocks)

    __repr__ = __str__  # in a notebook, beside the HTML

    def _repr_html_(self) -> str:
        verdict = self.verdict
        exercise, mistake = verdict.exercise, verdict.misconception
        title = (
            f'<strong class="p101g-title">{escape(exercise.number)} · '
            f"{escape(exercise.title)}</strong>"
        )
        parts = [
            (
                f'<div class="p101g-head">{title}<span '
                f'class="p101g-points">{self.points}</span></div><p>{escape(self.summary)}</p>'
            )
        ]
        if not verdict.not_written:
            parts.append(_findings(verdict))
        if mistake:
            name = f"<strong>{escape(capital(mistake.name))}.</strong>"
            parts.append(
                f'<div class="p101g-mistake" role="note">{name} {escape(mistake.says)}</div>'
            )
        if self.problem:
            # the picture shows it
            deadlock = self.picture is not None and isinstance(
                self.picture.trial.error, DeadlockError
            )
            parts.append(_fold("What happened", self.problem, opened=not deadlock))
        if self.predictions:
            parts.append(self.predictions.table())
        if self.printed and verdict.shown:
            parts.append(
                _fold(f"What the ranks printed, with {verdict.shown.case.label}", self.printed)
            )
        if self.suggestion:
            parts.append(f"<p>{escape(self.suggestion)}</p>")
        if self.note:
            parts.append(f'<p class="p101g-soft">{escape(self.note)}</p>')
        if self.picture:
            parts.append(f'<p class="p101g-soft">{escape(self.picture.caption)}</p>')
        html = card(f"{exercise.function}: {self.points}", "".join(parts))
        return html + (self.picture.scene.html() if self.picture else "")


def _points(finding: Finding) -> str:
    """Return the points of a finding: "2.5 of 5"; "" in optional practice."""
    return f"{number(finding.points)} of {number(finding.out_of)}" if finding.out_of else ""


def _findings(verdict: ExerciseVerdict) -> str:
    rows = []
    for finding in verdict.findings:
        state, mark = ("holds", "✓") if finding.passed else ("fails", "✗")
        message = (
            f'<div class="p101g-soft">{escape(finding.message)}</div>' if finding.message else ""
        )
        rows.append(
            f'<tr><td class="p101g-{state}"><span '
            f'aria-hidden="true">{mark}</span>{_unseen(state)}</td><td>{finding.kind}</td>'
            f'<td class="p101g-wide">{escape(finding.says)}{message}</td>'
            f'<td class="p101g-number">{_points(finding)}</td></tr>'
        )
    head = "".join(
        f"<th>{_unseen(text)}</th>" for text in ("verdict", "kind", "property", "points")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


# ---- predictions ----


class Prediction(NamedTuple):
    """A question, and the answers to it."""

    name: str
    ask: str
    unit: str
    said: Any  # None: nothing was predicted. Then what was measured is not shown
    measured: Any  # None: the function does not run yet

    @property
    def agrees(self) -> bool:
        """True if the prediction is what was measured."""
        if isinstance(self.said, int | float) and isinstance(self.measured, int | float):
            return abs(self.said - self.measured) <= 1e-9 * abs(self.measured)
        return str(self.said).strip().casefold() == str(self.measured).strip().casefold()

    def answers(self, exercise: Exercise) -> tuple[str, ...]:
        """Return what the learner said and what the run shows; or how to predict it."""
        if self.said is None:
            return (f"predict({set_name(Path(exercise.path))}.{exercise.function}, {self.name}=…)",)
        if self.measured is None:
            return self._with_unit(self.said), "it ended early"
        return self._with_unit(
            self.said
        ), f"{self._with_unit(self.measured)} {'✓' if self.agrees else '≠'}"

    def _with_unit(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        return (
            f"{number(value)} {self.unit.removesuffix('s') if value == 1 else self.unit}".rstrip()
        )


@dataclass
class Predictions:
    """The questions of an exercise, each with what the learner said and what the run shows."""

    exercise: Exercise
    questions: Sequence[Prediction]

    def __str__(self) -> str:
        lines = []
        for question in self.questions:
            said, *run = question.answers(self.exercise)
            lines.append(
                f"{question.ask}\n  "
                + (f"you said: {said} · your run: {run[0]}" if run else f"predict first: {said}")
            )
        return "\n".join(lines) if lines else f"{self.exercise.function} asks for no prediction."

    __repr__ = __str__

    def table(self) -> str:
        """Return the predictions as an HTML table."""
        rows = []
        for question in self.questions:
            said, *run = question.answers(self.exercise)
            cells = (
                f"<td>{escape(said)}</td><td>{escape(run[0])}</td>"
                if run
                else f'<td colspan="2"><code>{escape(said)}</code></td>'
            )
            rows.append(f'<tr><td class="p101g-wide">{escape(question.ask)}</td>{cells}</tr>')
        head = "".join(f"<th>{text}</th>" for text in ("Predicted", "you said", "your run"))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"

    def _repr_html_(self) -> str:
        return card(
            f"{self.exercise.function}: predictions",
            self.table() if self.questions else escape(str(self)),
        )


@dataclass
class Hints:
    """The first `rung` of an exercise's hints."""

    exercise: Exercise
    rung: int

    def __str__(self) -> str:
        total = len(self.exercise.hints)
        lines = [
            f"Hint {i} of {total}: {text}"
            for i, text in enumerate(self.exercise.hints[: self.rung], 1)
        ]
        return "\n".join(lines) if lines else f"{self.exercise.function} has no hints."

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return card(
            f"{self.exercise.function}: hints",
            "".join(f"<p>{escape(line)}</p>" for line in str(self).splitlines()),
        )


# ---- pieces ----


def _own_calls(traceback: str) -> list[str]:
    """Return the lines of a traceback in the learner's own files, except the last one.

    The message names the last one. A long traceback is cut to the last five lines. Learners' files
    have no folder there: see `Submission`.
    """
    calls = re.findall(r'^  File "([^"]+)", line (\d+), in (\w+)\n +(.+)$', traceback, re.M)
    own = [
        f"  {file}:{line} in {function}: {source}"
        for file, line, function, source in calls
        if not os.path.isabs(file) and not file.startswith("<")
    ]
    return own[:-1][-5:]


def number(value: float) -> str:
    """Return a number as short text: 2.5 → "2.5", 10.0 → "10", 12345 → "12,345"."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _line(left: str, right: str) -> str:
    return f"{left:<{WIDTH - len(right) - 1}} {right}"


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return [
        line
        for part in text.splitlines()
        for line in textwrap.wrap(part, WIDTH - 12, initial_indent=space, subsequent_indent=space)
    ]


def _unseen(text: str) -> str:
    return f'<span class="p101g-unseen">{text}</span>'


def _fold(title: str, text: str, opened: bool = True) -> str:
    summary = f"<summary>{escape(title)}</summary>"
    return f"<details{' open' * opened}>{summary}<pre>{escape(text)}</pre></details>"


def card(label: str, body: str) -> str:
    """Return a box in the colours of its page, whatever they are."""
    return f'{STYLE}<section class="p101g" aria-label="{escape(label)}">{body}</section>'


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
.p101g-unseen { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap }
@media print { .p101g pre { white-space: pre-wrap; overflow-wrap: anywhere } }
</style>"""
