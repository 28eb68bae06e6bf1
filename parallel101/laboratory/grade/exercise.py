"""Declarations of exercises: a function to write, cases to try it on, and checks on each run.

Exercise("ring_shift", cases=…, checks=(value(), bytes_sent(…), steps(…)), misconceptions=(…),
         hints=(…, …, …))

    cases(draw)  ──▶  Case: arguments and expected result by rank
    a run of it  ──▶  Trial: results and record
    each check   ──▶  None, or what is wrong

All of it is data. grading.py runs the cases.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallel101.laboratory.record import signatures
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.sim.network import Network

if TYPE_CHECKING:
    from parallel101.laboratory.record.trace import Trace

# what a learner may call: isend and irecv, in batches too, are meant by these names
P2P = frozenset({"send", "recv"})
COLLECTIVES = frozenset(spec.kind for spec in signatures.COLLECTIVES.values())
# each message takes one second, so a run takes as many seconds as it has steps
STEPS = Network(latency=1.0, bandwidth=math.inf)


ANYTHING: Any = object()  # an expected result that is not looked at
# what checks look at, in the order in which they are shown
KINDS = ("value", "bytes", "peers", "steps", "memory", "overlap", "mfu")


@dataclass(frozen=True)
class Case:
    """One run of the learner's function.

    Attributes:
        arguments: what each rank's function is called with, by rank: tuples of tensors, numbers,
            text, lists, tuples, dicts. A tensor keeps its strides, so a transposed one arrives
            transposed.
        expected: what each rank must return, by rank, or ANYTHING.
        note: what is special about this case, for the report, e.g. "7 elements of int64, root 2".
        facts: what the checks need to know of the case.
        network: the links of the virtual clock. By default each message takes one second.
        seconds: the time limit, in wall time.
        seed: of torch's and Python's random numbers, the same on all ranks.
        computes: the function sends nothing, so the label doesn't say how many ranks there are.
    """

    arguments: Sequence[tuple]
    expected: Sequence[Any]
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    network: Network = STEPS
    seconds: float = 10.0
    seed: int = 0
    computes: bool = False

    @property
    def world_size(self) -> int:
        return len(self.arguments)

    @property
    def label(self) -> str:
        """The case in a few words: "4 ranks, 7 elements of int64"."""
        if self.computes:
            return self.note
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        return f"{ranks}, {self.note}" if self.note else ranks


@dataclass(eq=False)  # so that a rule can remember what it found in a trial
class Trial:
    """The results and the record of one case.

    Attributes:
        results: what each rank returned; None for a rank that did not return.
        trace: the record. On `case.network`, `trace.makespan` is the number of steps, or whatever
            time the network gives.
        error: what ended the run early: a DeadlockError, a MisuseError or a GradedRunFailed. None
            if all ranks returned.
        unwaited: the calls of ranks that returned, which they never waited for.
        changed: by rank, the places of the arguments that its function changed, which must be
            tensors.
        shared: by rank, the places of those whose memory its result shares.
        printed: what each rank printed, by rank.
        world: on which ranks it ran: "relay" (the processes whose messages pass through the
            grader), "gloo", "sim" or "nccl".
    """

    case: Case
    results: list[Any]
    trace: Trace
    error: BaseException | None = None
    unwaited: list[Call] = field(default_factory=list)
    changed: list[list[int]] = field(default_factory=list)
    shared: list[list[int]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    world: str = "relay"

    @property
    def world_size(self) -> int:
        return self.case.world_size


@dataclass(frozen=True)
class Check:
    """One property of a run.

    Attributes:
        kind: one of KINDS. It decides the points, and "value" comes first.
        says: what must be true, as the report shows it, e.g. "every rank sends x once".
        wrong: None for a run that has the property; otherwise a sentence with what was found and
            what was expected.
        allowed: for a run that has it by a tolerance only, a sentence with what was found and why
            that is allowed; None for any other.
        weight: against the other checks of its kind, with which it shares the points.
        part: for trials that lack the property, the part of the points that they earn all the same.
    """

    kind: str
    says: str
    wrong: Callable[[Trial], str | None]
    allowed: Callable[[Trial], str | None] = lambda trial: None
    weight: float = 1.0
    part: Callable[[Sequence[Trial]], float] = lambda trials: 0.0


@dataclass(frozen=True)
class Misconception:
    """A mistake that learners make, and how a run shows it.

    Attributes:
        name: short, the same in all exercises: "mean taken n times".
        says: the sentence for the learner: what the code does, and why that is wrong. Not what to
            write instead.
        seen: whether these trials show it. It looks at values and at the record, never at the
            source.
    """

    name: str
    says: str
    seen: Callable[[Sequence[Trial]], bool]


def mistake(name: str, says: str) -> Callable[[Callable], Misconception]:
    """Return a decorator that makes a misconception of the rule that sees it."""
    return partial(Misconception, name, says)


@dataclass(frozen=True)
class Question:
    """A prediction that the learner makes before the run, to be shown next to what was measured.

    Attributes:
        name: the keyword in `predict(fn, name=…)`. For bytes it is `sent`, those that a rank sends
            (the one that the question names, or the busiest); `received`, those that it receives;
            or `total`, those that all ranks send together.
        ask: the question.
        case: the case to which it applies.
        measured: the answer, from the trial of that case.
        unit: "bytes", "steps", …
    """

    name: str
    ask: str
    case: Callable[[], Case]
    measured: Callable[[Trial], Any]
    unit: str = ""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the learner's function: the usual program of a rank."""
    return function(*arguments)


@dataclass(frozen=True)
class Exercise:
    """An exercise, as declared in homework/hwN_topic/test_hwN*.py.

    Attributes:
        number: as in the list of all exercises; text, for there is a "15a".
        function: the name of the function that the learner writes.
        title: a few words.
        points: for the whole exercise; 0 for optional practice, which is checked in the same way.
        weights: the part of the points for each kind of check; without them, all kinds have the
            same. What the exercise teaches weighs most. The stub's docstring says it.
        cases: makes the cases from a `Draw`, which gives other numbers for each seed.
        checks: the properties. Those of one kind share its points (see `share` in grading.py).
        least_received: for a case, the bytes by rank that every correct solution receives. A right
            value with fewer earns nothing.
        misconceptions: in the order in which they are tried; the first that is seen is named.
        hints: three rungs. They name functions and ask; the last one stops short of the solution.
        questions: the predictions that the notebook asks for.
        program: what each rank runs: program(function, *arguments). Spans and compute() in it reach
            the record.
        allowed: the operations that the learner may call: P2P, or more.
        watch: a case whose inputs carry their origin (see analysis/provenance.py), for the
            animation; None: the failing case is shown.
        picture: "collective", "lanes" or "pipeline": how a run is drawn.
        path, source: the file that declares it; set when it is loaded.
    """

    number: str
    function: str
    title: str
    points: float
    cases: Callable[[Draw], Sequence[Case]]
    checks: Sequence[Check]
    least_received: Callable[[Case], Sequence[int]]
    misconceptions: Sequence[Misconception] = ()
    hints: tuple[str, ...] = ()
    questions: Sequence[Question] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    program: Callable[..., Any] = call
    allowed: frozenset[str] = P2P
    watch: Callable[[], Case] | None = None
    picture: str = "collective"
    path: str = ""
    source: str = field(default="", repr=False)

    @property
    def practice(self) -> bool:
        """True for optional practice, which is checked like any other exercise, for no points."""
        return self.points == 0


class Draw:
    """Random numbers for the cases, all from one seed.

    A secret seed makes cases that nobody knows beforehand.
    """

    def __init__(self, seed: str, exercise: str = ""):
        digest = hashlib.sha256(f"{seed}:{exercise}".encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def integer(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, options: Sequence[Any]) -> Any:
        """Return one of the options."""
        return options[self.integer(0, len(options) - 1)]

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random values that differ everywhere.

        They are normal numbers, or whole numbers from −1000 to 1000.
        """
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)
        return torch.randint(-1000, 1001, shape, generator=self.generator).to(dtype)

    def tensors(
        self, count: int, *shape: int, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """Return one tensor for each of `count` ranks."""
        return [self.tensor(*shape, dtype=dtype) for _ in range(count)]


def find(exercises: Sequence[Exercise], function: str) -> Exercise:
    """Return the exercise whose function has this name."""
    by_function = {exercise.function: exercise for exercise in exercises}
    if function not in by_function:
        there = ", ".join(by_function)
        raise ValueError(f"no exercise asks for a function {function!r}; there are {there}")
    return by_function[function]


def load_exercises(path: Path) -> list[Exercise]:
    """Return the exercises that a file homework/hwN_topic/test_hwN*.py declares."""
    source = path.read_text(encoding="utf-8")
    module = module_of(str(path), source, "parallel101_exercises")
    return [replace(exercise, path=str(path), source=source) for exercise in module.EXERCISES]


def module_of(path: str, source: str, name: str, register: bool = False) -> types.ModuleType:
    """Return the module that a source text defines.

    Its tracebacks show lines of `path`, which need not be readable here. With `register`, the code
    can find its module in sys.modules while it runs, as dataclasses do.
    """
    module = types.ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    if register:
        sys.modules[name] = module
    exec(compiled(source, path), module.__dict__)
    return module


@lru_cache(maxsize=8)
def compiled(source: str, path: str) -> types.CodeType:
    """Return the code of a source text. A rank runs it again for each number of ranks."""
    return compile(source, path, "exec", dont_inherit=True)
