"""The verdict on one exercise, and the report of it that a learner reads, as text and as HTML.

A terminal shows the text, and a notebook the HTML. Both have the same blocks. If a run ended early,
because of a deadlock, an exception of the learner's, a time limit or a call that is not allowed,
ENDINGS has the words for the learner and for the table of a class.

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

from parallel101.laboratory.grade.exercise import Exercise, Misconception, Question, Trial
from parallel101.laboratory.grade.exercise_checks import rank_missing
from parallel101.laboratory.grade.homework import set_name
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.program_lines import shown
from parallel101.laboratory.record.units import listed, sentence

WIDTH = 96  # characters of a line in a terminal
MOST_LINES = 12  # that are shown of what one rank printed
CSS = Path(__file__).with_name("report.css")
STYLE = f"<style>{CSS.read_text(encoding='utf-8')}</style>"
MOST_PRINTED = 1 << 20  # bytes that a rank may print
MOST_SAID = 600  # characters of a learner's own error
SYNTAX = dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), "syntax error")
LOADING = "while loading"  # in place of an exception's type, if the time was over before
NOT_LOADED = (*SYNTAX, "ImportError", "ModuleNotFoundError")  # the file itself can't be run
REASONS = SYNTAX | {"SystemExit": "exit"}  # in place of the exception's type


# ---- how a run ended early ----


class Ending(NamedTuple):
    """How a run may end early.

    Attributes:
        reason: a word or two for the table of a class.
        text: for the learner.
        ends_all: each other run would end so too.
    """

    reason: str
    text: str = "{where}: {what}{missing}"
    ends_all: bool = False


ENDINGS = {
    "raised": Ending("{kind}", "rank {rank} raised {kind}, {where}{at}\n  {kind}: {what}"),
    "not loaded": Ending("{kind}", "the file can't be loaded{at}\n  {kind}: {what}", True),
    "not written": Ending("not written", "{function} is not written yet", True),
    "not allowed": Ending(
        "wrong call",
        "rank {rank} called {what}, which is not allowed here{at}. This exercise allows {allowed} "
        "only (and isend, irecv, batch_isend_irecv)",
        True,
    ),
    "time": Ending("time", "rank {rank} was still running after {seconds:g} s, {where}{at}", True),
    "died": Ending(
        "exit",
        "rank {rank} ended without a result, {where}{why}. Did the code call exit, or ask for too "
        "much memory?",
    ),
    "not run": Ending("time"),
    "printed": Ending(
        "printed too much",
        f"rank {{rank}} printed more than {MOST_PRINTED >> 20} MiB, {{where}}. Remove the print, "
        "or print less",
        True,
    ),
    "deadlock": Ending("deadlock"),
    "misuse": Ending("wrong call"),  # or whatever the calls of several ranks together do
}


@dataclass(eq=False)
class GradedRunFailed(Exception):
    """A run of the learner's code ended early.

    Attributes:
        how: a key of ENDINGS.
        rank, where: whose run it was, and the line; None and "?" if that isn't known.
        kind: the type of the learner's exception, or LOADING.
        calls: the calls that led to it, in words.
    """

    how: str
    message: str = ""
    rank: int | None = None
    where: str = "?"
    kind: str = ""
    calls: Sequence[str] = ()

    def __str__(self) -> str:
        return self.message


def how_it_ended(error: BaseException | None) -> str:
    """Return the key in ENDINGS for an error of a trial; "" for None."""
    others = "deadlock" if isinstance(error, DeadlockError) else "misuse"
    return getattr(error, "how", others) if error else ""


def ends_all(error: BaseException | None) -> bool:
    """Return whether more runs would tell nothing new, and only take long."""
    return error is not None and ENDINGS[how_it_ended(error)].ends_all


# ---- the blocks of a report ----


class ReportRow(NamedTuple):
    """A line of a report with the text below it, for a terminal and for a notebook.

    Attributes:
        look: "head", "holds", "fails", "mistake", "fold", or "soft" for what matters less. A fold
            shows its text as it is, and a notebook can fold it.
        title, right: the line, and what stands at its end.
        text: below it.
        mark: what stands before the title, in a column of its own.
    """

    look: str
    title: str = ""
    text: str = ""
    right: str = ""
    mark: str = ""

    def __str__(self) -> str:
        if self.look == "fold":
            return f"  {self.title}:\n{textwrap.indent(self.text, '    ')}"
        left = f"  {self.mark:<10} {self.title}" if self.mark else f"  {self.title}"
        left = self.title if self.look == "head" else left
        lines = [f"{left:<{WIDTH - len(self.right) - 1}} {self.right}".rstrip()] * bool(self.title)
        space = " " * (13 if self.mark else 2)
        wrapper = textwrap.TextWrapper(WIDTH - 12, initial_indent=space, subsequent_indent=space)
        return "\n".join(lines + [w for line in self.text.splitlines() for w in wrapper.wrap(line)])

    @property
    def html(self) -> str:
        mark, title, text, right = map(escape, (self.mark, self.title, self.text, self.right))
        if self.look == "fold":
            return f"<details open><summary>{title}</summary><pre>{text}</pre></details>"
        return (
            f'<div class="p101g-row p101g-{self.look}" aria-label="{self.look}"><b>{mark}</b>'
            f"<div><strong>{title}</strong><div>{text}</div></div><span>{right}</span></div>"
        )


@dataclass
class Card:
    """A box with rows. A notebook shows it as HTML, and `print` as text."""

    label: str
    rows: Sequence[ReportRow]

    def __str__(self) -> str:
        """Return the rows with an empty line between them, but not between two with marks."""
        pairs = zip([ReportRow(""), *self.rows], self.rows)
        lines = ["\n" * (not (before.mark and row.mark)) + str(row) for before, row in pairs]
        return "\n".join(lines).strip("\n")

    __repr__ = __str__  # in a notebook, beside the HTML

    def _repr_html_(self) -> str:
        """Return the box in the colours of its page, whatever they are."""
        body = "".join(row.html for row in self.rows)
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
        error, what = self.error, str(self.error)
        if self.shown is None or error is None:
            return ""
        kind, where = getattr(error, "kind", ""), getattr(error, "where", "?")
        if kind and len(what) > MOST_SAID:
            what = f"{what[:MOST_SAID]} …"
        rest = "\n  every rank must call the same collectives, in the same order"
        return ENDINGS[how_it_ended(error)].text.format(
            rank=getattr(error, "rank", None),
            seconds=self.shown.case.seconds,
            where=f"with {self.shown.case.label}",
            at=f", at {shown(where)}" if where != "?" else "",
            kind=kind,
            what=what,
            why=f": {what}" if what else "",
            missing=rest if rank_missing(error) else "",
            function=self.exercise.function,
            allowed=", ".join(sorted(self.exercise.allowed)),
        )

    @property
    def reason(self) -> str:
        """The reason why points are missing, in a word or two, for a class table; "" if none are.

        If a run ended early, it says how: "not written", "syntax error", "NameError", "time",
        "exit", "deadlock", "wrong call", …. Otherwise it says what fails: "wrong value", or "bytes,
        steps".
        """
        if self.error is not None and not self.passed:
            no_function = f"has no function {self.exercise.function}" in str(self.error)
            kind = getattr(self.error, "kind", "")
            how = "not written" if no_function else how_it_ended(self.error)
            return ENDINGS[how].reason.format(kind=REASONS.get(kind, kind))
        if not self.findings:
            return "not graded"
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
    def _rows(self) -> Iterator[ReportRow]:
        exercise, mistake, runs = self.exercise, self.misconception, len(self.trials)
        title = f"{exercise.number} · {exercise.title}: {exercise.function}"
        yield ReportRow("head", title, right=self._points)
        sizes = sorted({trial.world_size for trial in self.trials})
        ranks = f"{listed(sizes)} rank{'s' * (sizes != [1])}"
        ran = f"{runs} run{'s' * (runs != 1)} on {ranks}, in {self.seconds:.1f} s"
        summary = f"{'Everything holds' if self.passed else 'Not right yet'}: {ran}."
        if self.not_written:
            summary = f"{exercise.function} is not written yet. Write it in {self.file}, then "
            summary += "check it again."
        yield ReportRow("", text=summary)
        for kind, says, passed, points, out_of, message in self.findings:
            if not self.not_written:
                right = f"{number(points)} of {number(out_of)}" if out_of else ""
                look, mark = ("holds", "✓") if passed else ("fails", "✗")
                yield ReportRow(look, says, message, right, f"{mark} {kind}")
        if mistake:
            yield ReportRow("mistake", sentence(mistake.name), mistake.says)
        if self.problem and not self.not_written:
            calls = [f"  {call}" for call in getattr(self.error, "calls", ())]
            text = "\n".join([self.problem, *(["called from:", *calls] if calls else [])])
            yield ReportRow("fold", "What happened", text)
        yield from (prediction_row(exercise, prediction) for prediction in self.predictions)
        if self.printed and self.shown:
            title = f"What the ranks printed, with {self.shown.case.label}"
            yield ReportRow("fold", title, self.printed)
        caption = f"{self.caption}\n{self.saved or ''}" if self.picture else ""
        for said in filter(None, (self.suggestion, self.note, caption)):
            yield ReportRow("soft", text=said)

    @property
    def _points(self) -> str:
        points = f"{number(self.points)} of {number(self.out_of)} points"
        return "optional practice" if self.exercise.practice else points

    @property
    def card(self) -> Card:
        return Card(f"{self.exercise.function}: {self._points}", list(self._rows))

    def __str__(self) -> str:
        return str(self.card)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.card._repr_html_() + (self.picture.html() if self.picture else "")


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

    def with_unit(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "it ended early" if value is None else str(value)
        unit = self.question.unit
        return f"{number(value)} {unit.removesuffix('s') if value == 1 else unit}".rstrip()


def prediction_row(exercise: Exercise, prediction: Prediction) -> ReportRow:
    """Return a question with what the learner said and what the run shows."""
    question, said, measured = prediction
    name = f"{set_name(Path(exercise.path))}.{exercise.function}"
    answer = f"predict first: predict({name}, {question.name}=…)"
    if said is not None:
        mark = "" if measured is None else " ✓" if prediction.agrees else " ≠"
        run = f"{prediction.with_unit(measured)}{mark}"
        answer = f"you said: {prediction.with_unit(said)} · your run: {run}"
    return ReportRow("answer", question.ask, answer)


# ---- pieces ----


def number(value: float) -> str:
    """Return a number as short text: 2.5 → "2.5", 10.0 → "10", 12345 → "12,345"."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"
