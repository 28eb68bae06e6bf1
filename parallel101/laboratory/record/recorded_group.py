"""Records one real rank (gloo, NCCL).

A process group around torch's own sees what the rank posts and waits for.

    program ──▶ RecordedGroup ──▶ ProcessGroupGloo
                     │ always: counts of what was posted, and the call in which the program waits
                     └ in a recorded run: an event for each call, and its arguments for the checks

RecordedGroup is registered as a c10d backend (see process_groups.py), so it sees every message and
collective of the program, also those of DistributedDataParallel and of sub-groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call, operation_on_ranks, rank_at
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.record.events import EventGroup, event_group
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.record.recorder import RankRecorder, WatchedWork
from parallel101.laboratory.record.signatures import (
    COLLECTIVES,
    own_limit,
    size,
    unfit,
    values,
    with_collectives,
)
from parallel101.spans import Collective, current_collective


@with_collectives
class RecordedGroup(torch_private.PythonGroup):
    """A process group that passes every call on to torch's own backend, and tells the recorder.

    Args:
        inner: torch's backend.
        whole: a process group of torch's own around `inner`, for calls that the backend does not
            offer to Python.
        label: the group's name in the record.
        ranks: of the world, in order.
        backend: "gloo" or "nccl".
    """

    def __init__(
        self,
        inner: Any,
        whole: Any,
        label: str,
        ranks: Sequence[int],
        recorder: RankRecorder,
        backend: str,
    ):
        # torch's stub lacks this form, which is made for Python
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.whole = whole
        self.name_in_record = label
        self.ranks = list(ranks)
        self.others = tuple(r for r in ranks if r != recorder.rank)
        self.recorder = recorder
        self.backend = backend
        self.device_type = "cuda" if backend == "nccl" else "cpu"
        self.torch_name = label
        self.limit: float | None = None  # the program's own time limit for this group, in seconds

    @property
    def label(self) -> str:
        """Return the group's name in the record.

        In unrecorded() it has another name, under which its calls are numbered.
        """
        return self.name_in_record + self.recorder.unrecorded_label

    def getBackendName(self) -> str:
        # C++ code asks for it, and would look inside a group called "gloo"
        return f"parallel101_{self.backend}"

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        torch_private.set_timeout(self.inner, timeout)
        self.limit = own_limit(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.inner._get_sequence_number_for_group()

    # ---- messages ----

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return self._message("send", dst, tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self._message("recv", src, tensors, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        # of two ranks, any rank is the other
        position = self.ranks.index(self.others[0]) if len(self.others) == 1 else None
        return self._message("recv_anysource", position, tensors, tag)

    def _message(
        self, method: str, position: int | None, tensors: list[torch.Tensor], *args: int
    ) -> dist.Work:
        """Post a message by this method of the backend. Its tag is the last of `args`."""
        recorder, tensor, kind, tag = self.recorder, tensors[0], method[:4], args[-1]
        peer = None if position is None else rank_at(recorder.rank, kind, position, self.ranks)
        where, nbytes = caller(), size(tensor)
        seq = recorder.next_seq((kind, peer, tag, self.label), where, nbytes)
        peers = self.others if peer is None else (peer,)
        call = Call(recorder.rank, kind, peers, self.label, seq, where, tag, nbytes)
        work, began = WatchedWork(self, call, self.limit), None
        if recorder.recording:
            collective = current_collective()
            work.call = call = call._replace(
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                within=operation_on_ranks(collective),
            )
            # the text of the call takes longer than the rest, and is rarely needed
            self._check(call, unfit(tensor, kind) and unfit(tensor, call.brief))
            small, sent = tensor.nbytes <= recorder.payload_bytes, [tensor] * (kind == "send")
            work.received = tensor if small and not sent else None
            payload = values(sent) if small and sent else None
            began = work.record(self._event_group(collective), sent, payload)
        return work.started(getattr(self.inner, method)(tensors, *args), began)

    def batch(self, messages: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Start messages as one batch, whose work becomes theirs.

        NCCL requires this of messages between two ranks.
        """
        posted = []
        self.inner._start_coalescing()
        try:
            for one in messages:
                posted.append(one.op(one.tensor, one.peer, one.group, one.tag))
        finally:
            whole = self.inner._end_coalescing()
            works = [work for work in posted if work is not None]
            for work in works:
                work.inner, work.batch = whole, works
        return works

    # ---- collectives: the same for all, after the table in signatures.py ----

    def _collective(self, method: str, args: tuple, **kwargs: Any) -> WatchedWork:
        spec = COLLECTIVES[method]
        run = next(
            (getattr(self.inner, name) for name in spec.names if hasattr(self.inner, name)), None
        ) or getattr(self.whole, method)
        recorder = self.recorder
        seq = recorder.count_collective(self.label, spec.operation(args))
        options = args[-1] if args else None
        limit = own_limit(
            options if isinstance(options, timedelta) else getattr(options, "timeout", None)
        )
        call = Call(recorder.rank, spec.kind, self.others, self.label, seq, "?")
        work, began = WatchedWork(self, call, limit or self.limit, limit is not None), None
        if recorder.recording:
            call = spec.with_arguments(call._replace(where=caller()), args, self.ranks)
            work.call = call
            self._check(call, spec.unfit(args, spec.kind) and spec.unfit(args, call.brief))
            small = call.nbytes <= recorder.payload_bytes and call.layout != "sparse"
            began = work.record(
                self._event_group(None),
                spec.unwritten_inputs(args, recorder.rank == call.root),
                values(spec.own_tensors(args)) if small else None,
            )
        # some of them block here already, and this one until it is over
        with recorder.blocked_in(work, recorded=method == "monitored_barrier"):
            inner = run(*args, **kwargs)
        return work.started(inner, began)

    def _event_group(self, collective: Collective | None) -> EventGroup:
        return event_group(self.label, self.ranks, torch_private.mesh_axis(self), collective)

    def _check(self, call: Call, problem: str | None) -> None:
        """Check a call, and raise MisuseError if its tensors must not be passed.

        `problem`: why they must not be passed, or None.
        """
        if self.recorder.on_call is not None:
            self.recorder.on_call(call)
        if problem is not None:
            raise MisuseError(f"rank {call.rank} passes {problem}.", call.rank)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        # it has no work of torch's own: when it returns, it is over
        self._collective("monitored_barrier", (timeout,), wait_all_ranks=wait_all_ranks).ended()
