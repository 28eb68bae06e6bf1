"""A rank of a graded run: a process that runs the learner's code.

Every call of torch.distributed becomes a frame to the grader.

    dist.isend(x, 1)   ──▶ call: send, x, peer, tag, where in the code
    dist.irecv(y, 3)   ──▶ call: recv   y is written when wait() returns, not before
    work.wait()        ──▶ wait         the grader answers when the message has arrived
                       ◀── reply: the received tensors

The grader's side is remote.py. This process knows the inputs of its own rank, the exercise's
program and the learner's code, and nothing else: it is forked from a process that has only imported
torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import sysconfig
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partialmethod
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from parallel101.laboratory.grade import frames
from parallel101.laboratory.grade.exercise import find, module_of
from parallel101.laboratory.grade.frames import operation_of, tensor_bytes
from parallel101.laboratory.grade.isolation import OWN_FILES, close, isolate
from parallel101.laboratory.ranks.watcher import exit_process
from parallel101.laboratory.ranks.worker import open_streams
from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.program_lines import caller, is_inside
from parallel101.laboratory.record.signatures import flat, op_name, unfit, with_collectives
from parallel101.spans import record_into

# what is ready-made, by the folder of its files: the learner writes it, so it may send nothing
TRAINERS = (
    *("nn.parallel", "distributed._composable", "distributed.fsdp", "distributed.optim"),
    "distributed.pipelining",
)
READY_MADE = {
    os.path.join(OWN_FILES, "laboratory", ""): "",
    os.path.join(OWN_FILES, ""): "parallel101",
    **{os.path.join(*torch.__path__, *name.split("."), ""): f"torch.{name}" for name in TRAINERS},
}
LIBRARY = sysconfig.get_path("stdlib")


def main(*, control: int, status: int = -1) -> NoReturn:
    """Serve one grader: a job, then one case after the other until the connection ends.

    The arguments are those of worker.main.
    """
    sock = socket.socket(fileno=control)
    if status >= 0 and hasattr(faulthandler, "register"):
        faulthandler.enable(status)
        # the grader asks where an endless loop is
        faulthandler.register(signal.SIGUSR1, status, all_threads=False)
    open_streams()
    gc.freeze()
    code = 0
    try:
        job = frames.receive(sock).content
        output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        _serve(sock, job)
    except (EOFError, OSError):
        pass  # the grader is gone, or needs no more
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)


def _serve(sock: socket.socket, job: dict[str, Any]) -> None:
    library = isolate(job)
    connection = Connection(sock, job)
    record_into(connection)  # so that the spans of the exercise's program reach the grader
    declared = module_of(job["exercise_path"], job["exercise_source"], "parallel101_exercises")
    exercise = find(declared.EXERCISES, job["function"])
    close(job, library)
    connection.send("ready")
    submission: types.ModuleType | None = None
    while True:
        kind, case, _ = frames.receive(sock)
        if kind == "abort":  # of a case that this rank has ended
            continue
        if kind == "job":  # another submission
            job, submission, connection.path = case, None, case["path"]
            continue
        try:
            # it may have asked for the world size at import
            if submission is None or connection.world_size != case["world_size"]:
                connection.world_size = case["world_size"]
                join(connection)
                submission = module_of(job["path"], job["source"], job["module"], register=True)
            function = getattr(submission, job["function"], None)
            if not callable(function):
                name = os.path.basename(job["path"])
                raise NameError(f"{name} has no function {job['function']}")
            arguments = case["arguments"]
            tensors = {i: x for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
            before = {i: tensor_bytes(tensor) for i, tensor in tensors.items()}
            connection.under_way = []
            random.seed(case["seed"])
            # torch.manual_seed also formats a stack for each kind of GPU
            torch.default_generator.manual_seed(case["seed"])
            if "numpy.random" in sys.modules:  # forked ranks would all have the same numbers
                sys.modules["numpy.random"].seed(case["seed"])
            result = exercise.program(function, *arguments)
            changed = [i for i, tensor in tensors.items() if tensor_bytes(tensor) != before[i]]
            memory = {storage(tensor) for tensor in flat(result)}
            shared = [i for i, x in tensors.items() if x.numel() and storage(x) in memory]
            connection.send("result", result=result, changed=changed, shared=shared)
        except BaseException as error:
            connection.fail(error)


@cache
def origin(file: str) -> str | None:
    """Return the ready-made package that a file belongs to; None for a program's own file."""
    if not is_inside(file) and not file.startswith(LIBRARY):
        return None
    return next((name for folder, name in READY_MADE.items() if file.startswith(folder)), "")


def storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; views of it have the same one."""
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


# ---- torch.distributed, as frames ----


class Connection:
    """This rank's connection to the grader. It is also the rank's recorder: see spans.py."""

    def __init__(self, sock: socket.socket, job: dict[str, Any]):
        self.sock, self.rank = sock, job["rank"]
        self.world_size = 0  # of the present case
        self.path = job["path"]  # the learner's file
        self.folder = os.path.join(job["scratch"], "")  # with the files that it may import
        self.program = job["exercise_path"]  # the file with the exercise's program
        self.calls = self.spans = 0  # so many so far
        self.under_way: list[RelayWork] = []  # of the present case

    def send(self, kind: str, **content: Any) -> None:
        """Tell the grader of something, and where the learner's code does it."""
        where = caller().removeprefix(self.folder)
        frames.send(self.sock, kind, **{"where": where, **content})

    def post(self, method: str, group: str, given: Sequence[Any], **options: Any) -> int:
        """Tell the grader of a call of a process group's method. Returns the call's number.

        The grader ends the run if the exercise doesn't allow the operation.
        """
        self.calls += 1
        about = {"method": method, "group": group, "by": self.ready_made() or operation_of(method)}
        self.send("call", call=self.calls, given=given, options=options, **about)
        return self.calls

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Ask for something that only the grader knows, and wait for the answer."""
        self.send(kind, **content)
        answer = frames.receive(self.sock)
        if answer.kind == "abort":
            raise SystemExit  # the run has failed on another rank: what it waits for won't come
        return answer.content

    def ready_made(self) -> str:
        """Return the package through which the learner's code makes this call; "" if none.

        It is this package, or one of torch's with trainers.
        """
        through = ""
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            file = frame.f_code.co_filename
            if (package := origin(file)) is None and through:
                return "" if file == self.program else through  # the exercise's own may call it
            through = through or package or ""
        return ""

    def fail(self, error: BaseException) -> None:
        """Tell the grader of an exception that the learner's code raised."""
        calls = traceback.extract_tb(error.__traceback__)
        own = [c for c in calls if c.filename == self.path or c.filename.startswith(self.folder)]
        places = [f"{c.filename.removeprefix(self.folder)}:{c.lineno}" for c in own]
        if isinstance(error, SyntaxError) and error.filename:
            places.append(f"{error.filename.removeprefix(self.folder)}:{error.lineno}")
        # torch raises it too, for an operation that a dtype or a device does not have
        by_learner = bool(calls) and calls[-1].filename == self.path
        self.send(
            "failed",
            type=type(error).__name__,
            message=str(error)[:2000],
            where=places[-1] if places else "?",
            # the message names the last one
            calls=[f"{p} in {c.name}: {c.line}" for p, c in zip(places, own[:-1])][-5:],
            not_written=isinstance(error, NotImplementedError) and by_learner,
        )

    # ---- the recorder's part ----

    def now(self) -> int:
        """Begin a span.

        The grader's clock is the one that counts, so this is only the span's number.
        """
        self.spans += 1
        self.send("begin", span=self.spans)
        return self.spans

    def seconds(self) -> float:
        """Return the time on this rank's virtual clock, which only the grader knows."""
        return float(self.ask("clock")["seconds"])

    def add_span(
        self, name: str, start: int, end: int, args: dict[str, Any], waiting: bool = False
    ) -> None:
        self.send("end", span=start, name=name, labels=args, waiting=waiting)

    def compute(self, seconds: float) -> None:
        self.send("compute", seconds=float(seconds))

    def unrecorded(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the grader records every call."""
        return contextlib.nullcontext()

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Any) -> int:
        return 0


class ChangedWhileSent(RuntimeError):
    """A tensor was changed between isend and the send's wait().

    The receiver may get old values or new ones.
    """


def _state(tensor: torch.Tensor) -> tuple[bytes, int]:
    """Return a state of a tensor that changes when somebody writes into it: its bytes.

    NaN divided by 2 is NaN. For a tensor of only NaN, with memory of its own, the state therefore
    includes how often it was written to.
    """
    alone = tensor.nbytes == tensor.untyped_storage().nbytes() and not tensor.is_inference()
    only_nan = tensor.numel() > 0 and tensor.is_floating_point() and bool(tensor.isnan().all())
    return tensor_bytes(tensor), tensor._version if alone and only_nan else 0


@dataclass(eq=False, repr=False)
class RelayWork(dist.Work):
    """The result of isend, irecv and the collectives.

    What a call writes is written in wait(), not before.

    Attributes:
        name: of the call, for the learner.
        uses: tensors that must not change before wait().
        source: of a receive from any rank: the rank that sent, in the group.
    """

    connection: Connection
    call: int
    outputs: list[torch.Tensor]
    name: str
    uses: Sequence[torch.Tensor]
    done: bool = False
    source: int | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.kept = [(tensor, _state(tensor)) for tensor in self.uses]  # as they were when posted
        self.connection.under_way.append(self)

    def _source_rank(self) -> int:
        return self.source  # type: ignore[return-value]  # known when it was waited for

    def wait(self, timeout: object = None) -> bool:
        """Wait until the call is done, and write its outputs.

        Raises ChangedWhileSent if the program has written into a tensor of it since.
        """
        kept, self.kept = self.kept, []
        if any(_state(tensor) != was for tensor, was in kept):
            raise ChangedWhileSent(
                f"a tensor was changed between {self.name} and its wait(): it may still have been "
                "read, or be written later"
            )
        return self._ask("wait")

    def is_completed(self) -> bool:
        return self._ask("test")

    def _ask(self, kind: str) -> bool:
        if not self.done:
            reply = self.connection.ask(kind, call=self.call)
            self.done, self.source = reply["done"], reply["source"]
            if self.done:
                for output, came in zip(self.outputs, reply["outputs"], strict=True):
                    with torch.no_grad():
                        output.copy_(came.reshape(output.shape))
                self._written()
        return self.done

    def _written(self) -> None:
        """Update what other collectives in progress remember of the tensors that this one wrote.

        Two collectives may use one tensor at the same time. Then the program didn't write to it. A
        receive, however, must not write into a tensor that another call still uses.
        """
        self.kept, connection = [], self.connection
        connection.under_way = [work for work in connection.under_way if work is not self]
        memory = {storage(output) for output in self.outputs}
        for work in connection.under_way:
            if not {work.name, self.name} & {"isend", "irecv"}:
                work.kept = [(t, _state(t) if storage(t) in memory else s) for t, s in work.kept]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the outputs. C++ can't wait, so the work is waited for at once."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.outputs)
        return future


@with_collectives
class RelayGroup(torch_private.PythonGroup):
    """A process group whose messages pass through the grader."""

    def __init__(self, connection: Connection, name: str, ranks: Sequence[int]):
        super().__init__(list(ranks).index(connection.rank), len(ranks))  # type: ignore[call-arg]
        self.connection, self.torch_name, self.ranks = connection, name, list(ranks)

    def getBackendName(self) -> str:
        return "relay"

    def new_group(
        self, ranks: Sequence[int], *_: Any, group_name: str, **__: Any
    ) -> RelayGroup | None:
        """Return a group of some of the ranks; dist.new_group calls this.

        A rank that is not in it gets None.
        """
        self.connection.send("new_group", ranks=list(ranks), group=group_name)
        within = self.connection.rank in ranks
        return RelayGroup(self.connection, group_name, ranks) if within else None

    def _message(self, method: str, tensors: list[torch.Tensor], *peer_and_tag: int) -> RelayWork:
        (tensor,), sends = tensors, method == "send"
        if problem := unfit(tensor, operation_of(method)):
            raise RuntimeError(f"rank {self.connection.rank} passes {problem}")
        # flat: as on gloo, the two sides need not have the same shape
        given = [[tensor.detach().flatten()], *peer_and_tag]
        call = self.connection.post(method, self.torch_name, given)
        outputs, kept, name = ([], [tensor], "isend") if sends else ([tensor], [], "irecv")
        return RelayWork(self.connection, call, outputs, name, kept)

    send = partialmethod(_message, "send")
    recv = partialmethod(_message, "recv")
    recv_anysource = partialmethod(_message, "recv_anysource")

    def _collective(self, method: str, args: tuple[Any, ...]) -> dist.Work:
        *given, options = args
        # what the options hold that decides the result
        chosen = {n: getattr(options, n) for n in ("reduceOp", "rootRank") if hasattr(options, n)}
        if "reduceOp" in chosen:
            chosen["reduceOp"] = op_name(chosen["reduceOp"])
        call = self.connection.post(method, self.torch_name, given, **chosen)
        # the outputs are always the first argument
        outputs = flat(given[:1])
        return RelayWork(self.connection, call, outputs, operation_of(method), flat(given))


def join(connection: Connection) -> None:
    """Make torch.distributed use the grader's messages.

    It is then as if init_process_group had been called for a world of this size.
    """
    torch_private.forget_groups()
    if not hasattr(dist.Backend, "RELAY"):
        dist.Backend.register_backend(
            "relay", lambda *_: dist.group.WORLD, extended_api=True, devices=["cpu"]
        )
    world = torch_private.RankWorld()
    group = RelayGroup(connection, "0", range(connection.world_size))
    torch_private.use_world(world)
    world.add_default(group, "0", "relay", dist.HashStore(), connection.world_size)
    torch_private.name_backend("gloo")  # programs choose their device by it
    rank, size = str(connection.rank), str(connection.world_size)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
