"""The grader's side of a run: the learner's ranks are processes whose messages the simulator sends.

    rank 2's process ──CALL, WAIT──▶ virtual rank 2: send, recv, wait on the virtual clock
                     ◀──the bytes, when the message has arrived

Each virtual rank does what the frames of its process say, and nothing else. So what the simulator
recorded is what was sent; a deadlock is found at once, and the same run gives the same record every
time. This process runs no line of the learner's code, and unpickles nothing that comes from it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.grade import frames, isolation
from parallel101.laboratory.grade.exercise import Case, Exercise, Trial
from parallel101.laboratory.grade.exercise_report import (
    LOADING,
    MOST_PRINTED,
    NOT_LOADED,
    GradedRunFailed,
    ends_all,
)
from parallel101.laboratory.grade.frames import MESSAGES, Frame, operation_of
from parallel101.laboratory.grade.isolation import clean_up, user_of
from parallel101.laboratory.grade.plain_text import plain
from parallel101.laboratory.ranks.processes import RankProcess, kill, preload, start_ranks
from parallel101.laboratory.record import program_lines as lines
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.errors import DeadlockError, MisuseError, one_line
from parallel101.laboratory.record.signatures import COLLECTIVES, flat
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.simulate import simulate
from parallel101.spans import compute, recorder

TO_GIVE_UP, TO_START = 0.2, 60.0  # seconds
KEPT_PRINTED = 20_000  # bytes of it that are kept
# bytes that a rank may send, receive and return in one case: the grader holds them
MOST_MOVED = 1 << 28
# torch imports this at the first backward(gradient) or autograd.grad
AUTOGRAD = "torch.fx.experimental.symbolic_shapes"
COMPILER = ("torch._dynamo",)  # and this for what is named here
NEED_COMPILER = ("_functional_collectives", "torch.distributed.tensor", "utils.checkpoint")
MOST_MESSAGE = 2000  # characters of an error's text
NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
REDUCTIONS = {name.lower(): getattr(dist.ReduceOp, name) for name in NAMES}
PAYLOAD_BYTES = 4096  # messages up to this size are recorded with their values
ENDS = ("result", "failed")  # the frames with which a process ends a case
OWN_ERRORS = (GradedRunFailed, DeadlockError, MisuseError)  # a case may end with one of these
PLACE = re.compile(r"(.+):\d{1,7}")


@dataclass
class Submission:
    """The file that a learner handed in.

    Attributes:
        files: the Python files beside it, which it may import: module -> source.
        module: the name under which it is imported; "": that of the file.
        note: what the learner must know about the choice of the file.
        endless: how loading the file ended, once that has taken too long: it is not tried again.
    """

    path: Path
    source: str
    files: dict[str, str] = field(default_factory=dict)
    module: str = ""
    note: str = ""
    endless: GradedRunFailed | None = None

    @property
    def sources(self) -> dict[str, str]:
        """The texts of its files, by the names that messages call them by."""
        beside = {f"{module}.py": source for module, source in self.files.items()}
        return beside | {str(self.path): self.source}


class RemoteRank:
    """A process that runs the learner's code, as the grader holds it, and its virtual rank.

    What it prints goes into the file `output`, which is emptied before each case.
    """

    def __init__(self, owner: SubmissionRanks, number: int, process: RankProcess, file: Path):
        self.owner, self.number, self.process = owner, number, process
        self.output = io.FileIO(str(file), "w+")
        os.chmod(file, 0o600)
        self.ended = True  # its case: it has returned or failed
        self.place = "?"  # "file:line" of what it does

    # ---- the process ----

    def tell(self, kind: str, **content: Any) -> None:
        """Send a frame. If the rank has died, the next `receive` says so."""
        with contextlib.suppress(OSError):
            frames.send(self.process.control, kind, **content)

    def receive(self) -> Frame:
        """Return the next frame."""
        try:
            return frames.receive(self.process.control, self.until)
        except TimeoutError:
            raise self._time_over() from None
        except (EOFError, OSError, ValueError) as error:
            raise self._failed("died", str(error)) from None

    def _time_over(self) -> GradedRunFailed:
        """Return the error, with the line where the rank is.

        A signal asks the rank, and it answers on its status pipe.
        """
        text, seconds = b"", 1.0
        with contextlib.suppress(OSError, AttributeError):
            os.kill(self.process.pid, signal.SIGUSR1)
            # faulthandler writes its lines in pieces
            while select.select([self.process.status], [], [], seconds)[0]:
                if not (piece := os.read(self.process.status.fileno(), 1 << 16)):
                    break
                text, seconds = text + piece, 0.1
        folder = self.output.name.removesuffix(".txt")
        said = text.decode(errors="replace").replace(f"{folder}/", "")
        calls = re.findall(r'File "([^"]+)", line (\d{1,7}) in (\S+)', said)
        own = [call for call in calls if call[0] in self.owner.files]
        self.place = f"{own[0][0]}:{own[0][1]}" if own else "?"
        return self._failed(
            "time", kind=LOADING if "<module>" in [name for *_, name in own] else ""
        )

    def gives_up(self, until: float) -> bool:
        """Return whether the process ends its case until then, and so can serve another one."""
        with contextlib.suppress(EOFError, OSError, ValueError):
            while not self.ended:
                self.ended = frames.receive(self.process.control, until).kind in ENDS
        return self.ended

    def printed(self) -> str:
        self.output.seek(0)
        return plain(self.output.read(KEPT_PRINTED).decode(errors="replace"), MOST_PRINTED)

    def _failed(self, how: str, message: str = "", **more: Any) -> GradedRunFailed:
        return GradedRunFailed(how, message, self.number, self.place, **more)

    # ---- the virtual rank, in one case ----

    def begin(self, case: Case, until: float) -> None:
        """Forget the case before, and let the process begin this one."""
        self.until = until
        self.moved = 0  # bytes
        # what it has posted and not waited for: the work, and the tensors that it writes
        self.calls: dict[int, tuple[Any, list[torch.Tensor], Call]] = {}
        self.groups: dict[str, Any] = {}
        self.spans: dict[int, Any] = {}
        self.result: Any = None
        self.changed: list[int] = []  # places of arguments, as in a Trial
        self.shared: list[int] = []
        self.returned = self.ended = False  # it has returned; it has returned or failed
        self.output.truncate(0)
        arguments, size = case.arguments[self.number], case.world_size
        self.tell("case", arguments=arguments, world_size=size, seed=case.seed)

    def serve(self) -> None:
        """Do what the process says until it returns. Raises what ended the run early."""
        self.groups = {"0": dist.group.WORLD}
        while not self.ended:
            kind, said, size = self.receive()
            self.ended = kind in ENDS
            self.moved += size
            if self.moved > MOST_MOVED:
                raise self._failed("died", f"moved more than {MOST_MOVED >> 20} MiB")
            # only these files are quoted: a rank could name another one, such as the secret seed
            found = PLACE.fullmatch(str(said.get("where")))
            self.place = found[0] if found and found[1] in self.owner.files else "?"
            try:
                at_place(self.place, partial(self._repeat, kind, said))
            except OWN_ERRORS:
                raise
            except Exception as error:  # whatever a rank sends, the grader goes on
                what = f"sent what the grader can't repeat: {plain(str(error) or repr(error), 300)}"
                raise self._failed("died", what) from error

    def _repeat(self, kind: str, said: dict[str, Any]) -> None:
        """Repeat on the sim what the process has done, and answer where it waits for one."""
        clock = recorder()
        assert clock is not None
        if kind == "begin":
            self.spans[said["span"]] = clock.now()
        elif kind == "end":
            times = self.spans[said["span"]], clock.now()
            labels = said["labels"] if isinstance(said["labels"], dict) else {}
            clock.add_span(plain(str(said["name"]), 200), *times, labels, said["waiting"] is True)
        elif kind == "compute":
            compute(float(said["seconds"]))
        elif kind == "clock":
            self.tell("reply", seconds=clock.now())
        elif kind == "call":
            self._call(said)
        elif kind in ("wait", "test"):
            work, outputs, about = self.calls[said["call"]]
            if kind == "wait":
                work.wait()
            if done := kind == "wait" or work.is_completed():
                del self.calls[said["call"]]
            source = work._source_rank() if done and about.kind == "recv" else None
            self.tell("reply", done=done, source=source, outputs=outputs if done else [])
        elif kind == "new_group":
            group = dist.new_group(said["ranks"])
            if isinstance(group, dist.ProcessGroup):
                self.groups[said["group"]] = group
        elif kind == "failed":
            calls = [plain(str(call), 300).replace("\n", " ") for call in said["calls"][:5]]
            stub = said["not_written"] is True
            raise self._raised(said["message"], said["type"], calls, stub)
        elif kind == "result":
            self.changed = [argument for argument in said["changed"] if type(argument) is int]
            self.shared = [argument for argument in said["shared"] if type(argument) is int]
            self.result, self.returned = said["result"], True
        else:
            raise ValueError(f"a frame of kind {kind!r}")

    def _call(self, said: dict[str, Any]) -> None:
        """Repeat a call of a process group's method: a message, or a collective."""
        method, given, kind = said["method"], said["given"], operation_of(said["method"])
        for name in (kind, said["by"]):  # the rank could name another one
            if name not in self.owner.exercise.allowed:
                raise self._failed("not allowed", plain(str(said["by"]), 100))
        try:
            work = getattr(self.groups[said["group"]], method)(*given, *_options(said))
        except OWN_ERRORS:
            raise
        except Exception as error:  # as if the rank had raised it
            raise self._raised(str(error) or repr(error), type(error).__name__) from error
        outputs = flat(given[:1]) if kind != "send" else []
        call = Call(self.number, kind, (), str(said["group"]), 0, self.place)
        self.calls[said["call"]] = work, outputs, call

    def _raised(
        self, message: Any, kind: Any, calls: Sequence[str] = (), stub: bool = False
    ) -> GradedRunFailed:
        """Return the error for an exception of the learner's code."""
        text, kind = plain(str(message), MOST_MESSAGE), plain(str(kind), MOST_MESSAGE)
        how = "not written" if stub else "not loaded" if kind in NOT_LOADED else "raised"
        return self._failed(how, text, kind=kind, calls=calls)


def preload_for(exercises: Iterable[Exercise], more: Collection[str] = ()) -> None:
    """Let the fork server import what the ranks of these exercises need, before they start."""
    imported = {name for one in exercises for name in imported_modules(one.source)}
    preload({*imported, AUTOGRAD, *more})


@lru_cache
def imported_modules(source: str) -> tuple[str, ...]:
    """Return the modules that a file of exercises imports at its top."""
    nodes = ast.parse(source).body
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return (*plain, *(n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module))


class SubmissionRanks:
    """The processes that run one submission's ranks for one exercise.

    Use it in a `with` block: at its end no process is left.

    They serve one case after the other, of any world size: starting a process takes longer than
    most cases. So ranks that a failed run leaves waiting are told to give up, and stay.
    """

    def __init__(self, exercise: Exercise, submission: Submission):
        self.exercise, self.submission = exercise, submission
        self.ranks: dict[int, RemoteRank] = {}

    def __enter__(self) -> SubmissionRanks:
        # The fork server imports what the ranks need while the grader draws the cases. Importing
        # torch's compiler in each rank would take seconds.
        texts = self.submission.sources.values()
        needed = any(name in text for name in NEED_COMPILER for text in texts)
        preload_for([self.exercise], COMPILER * needed)
        # last: what is told to end before this block begins leaves no folder
        self.scratch = tempfile.TemporaryDirectory(prefix="parallel101_")
        os.chmod(self.scratch.name, 0o711)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop([*self.ranks])
        self.scratch.cleanup()

    def start(self, count: int) -> None:
        """Have at least `count` processes, each ready to call the learner's function.

        None of the learner's code has run yet, so a start that fails is this machine's fault.
        """
        missing = [number for number in range(count) if number not in self.ranks]
        started = start_ranks(len(missing), "parallel101.laboratory.grade.rank")
        for number, process in zip(missing, started, strict=True):
            user, folder = user_of(number), Path(self.scratch.name) / str(number)
            folder.mkdir(exist_ok=True)
            if user is not None:
                os.chown(folder, user, user)
            file = folder.with_suffix(".txt")
            rank = self.ranks[number] = RemoteRank(self, number, process, file)
            own = {"rank": number, "user": user, "scratch": str(folder), "output": str(file)}
            rank.tell("job", **self._job(), **own)
        for number in missing:
            self.ranks[number].until = time.monotonic() + TO_START
            self.ranks[number].receive()

    def take(self, submission: Submission) -> None:
        """Run another submission on the same processes from now on.

        It may find what this one has changed there, so this is not for grades.
        """
        self.submission = submission
        for rank in self.ranks.values():
            rank.tell("job", **self._job())

    @property
    def files(self) -> set[str]:
        """The files whose lines may be named: those of the submission, and the exercise's."""
        return {*self.submission.sources, self.exercise.path}

    def _job(self) -> dict[str, Any]:
        exercise, submission = self.exercise, self.submission
        return {
            "function": exercise.function,
            "exercise_path": exercise.path,
            "exercise_source": exercise.source,
            "path": str(submission.path),
            "source": submission.source,
            "module": submission.module or submission.path.stem,
            "files": submission.files,
            "closed": isolation.protection().files,
        }

    def stop(self, numbers: Iterable[int]) -> None:
        """End the processes of these ranks."""
        ending = [self.ranks.pop(number) for number in numbers]
        for rank in ending:
            kill(rank.process)
        for rank in ending:
            rank.process.close()
            rank.output.close()
        clean_up(rank.number for rank in ending)

    def run(self, case: Case) -> Trial:
        """Run one case. Of a run that failed, ranks that don't give up at once are ended."""
        try:
            self.start(case.world_size)
        except GradedRunFailed as error:
            self.stop([*self.ranks])
            busy = f"rank {error.rank}'s process did not start, on a machine that is too busy. "
            return not_run(case, GradedRunFailed("not run", f"{busy}Run it again"))
        ranks = [self.ranks[number] for number in range(case.world_size)]
        until = time.monotonic() + case.seconds
        # the processes compute at the same time, though the sim repeats one call after the other
        for rank in ranks:
            rank.begin(case, until)
        outcome = simulate(
            lambda number: ranks[number].serve(),
            case.world_size,
            case.network,
            payload_bytes=PAYLOAD_BYTES,
        )
        failure = outcome.error
        # what the calls of several ranks together do: no rank's own fault is known
        if failure is not None and not isinstance(failure, OWN_ERRORS):
            failure = GradedRunFailed("misuse", plain(one_line(failure)))
        for rank in ranks:
            if os.fstat(rank.output.fileno()).st_size > MOST_PRINTED:
                failure = GradedRunFailed("printed", rank=rank.number)
        returned = [rank for rank in ranks if rank.returned]  # others might still have waited
        trial = Trial(
            case=case,
            results=[rank.result for rank in ranks],
            trace=Trace.from_rows(outcome.events, case.world_size, "sim", outcome.unfinished),
            error=failure,
            unwaited=[call for rank in returned for *_, call in rank.calls.values()],
            changed=[rank.changed for rank in ranks],
            shared=[rank.shared for rank in ranks],
            printed=[rank.printed() for rank in ranks],
        )
        if failure is not None:
            until = 0.0 if ends_all(failure) else time.monotonic() + TO_GIVE_UP
            for rank in ranks:
                rank.tell("abort")
            self.stop([rank.number for rank in ranks if not until or not rank.gives_up(until)])
        return trial


def not_run(case: Case, error: GradedRunFailed) -> Trial:
    """Return the trial of a case that was not run."""
    return Trial(case, [None] * case.world_size, Trace((), case.world_size, "sim"), error)


def _options(said: dict[str, Any]) -> list[Any]:
    """Return the last argument of a collective's method; those for messages have none."""
    if said["method"] in MESSAGES:
        return []
    options, chosen = COLLECTIVES[said["method"]].options(), said["options"]
    if "rootRank" in chosen:
        options.rootRank = chosen["rootRank"]
    if "reduceOp" in chosen:
        if (name := chosen["reduceOp"]) not in REDUCTIONS:
            known = ", ".join(NAMES)
            raise ValueError(f"the reduction {name} can't be used; use {known}")
        options.reduceOp = REDUCTIONS[name]
    return [options]


def at_place(place: str, act: Callable[[], None]) -> None:
    """Call `act`. What it posts is recorded as called at `place`, a line of the learner's code."""
    act()


lines.stands_for_a_place(at_place)
