"""Explains a deadlock under NCCL's rules by the queues, in sentences.

They say what waits behind what, and what never meets (see queues.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel101.laboratory.record.calls import disagreement
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.sim.message_matching import MessageWork
from parallel101.laboratory.sim.queues import (
    Operation,
    Queue,
    QueuedCollective,
    QueuedState,
    Queues,
)

Note = tuple[str, str]  # a sentence, and "file:line" or ""

ADVICE = (
    "On NCCL, an operation starts only when everything before it in its queue has ended. Messages "
    "that must be in flight together belong in one batch_isend_irecv"
)
MOST_BEHIND, MOST_OTHER_QUEUES = 5, 2  # notes of each sort: the error shows eight


def queue_notes(shared: QueuedState) -> list[Note]:
    """Return the notes for the error of a run in which no rank can go on."""
    queues = shared.queues
    behind: list[Note] = []
    other_queues: list[Note] = []
    for (communicator, _), queue in sorted(queues.of.items()):
        if not queue.operations:
            continue
        started = queue.operations[0]
        for message in started.to_meet:
            if (behind_it := _other_side_behind(queues, communicator, message)) is not None:
                behind.append(_behind(behind_it[0], behind_it[1].operations[0]))
            elif (
                other := _other_side_elsewhere(queues, communicator, started, message)
            ) is not None:
                other_queues.append(
                    _in_another_queue(message, communicator == started.label, other)
                )
        for collective in started.collectives:
            for rank in sorted(collective.absent()):
                queue_of_rank = queues.of.get((communicator, rank))
                if queue_of_rank is None or not queue_of_rank.operations:
                    continue
                if (same := _same_behind(queue_of_rank, collective)) is not None:
                    behind.append(_behind(same, queue_of_rank.operations[0]))
                elif rank > collective.rank.number and not other_queues:
                    other_queues += [
                        _different(collective, other)
                        for other in queue_of_rank.operations[0].collectives
                    ]
    notes = [*sorted(set(behind))[:MOST_BEHIND], *dict.fromkeys(other_queues[:MOST_OTHER_QUEUES])]
    notes += [(text, "") for text in shared.warnings.texts()]
    return [*notes, (ADVICE, "")] if behind else notes


def _not_started(queue: Queue) -> Iterator[Operation]:
    return (operation for operation in queue.operations if not operation.started)


def _other_side_behind(
    queues: Queues, communicator: str, message: MessageWork
) -> tuple[MessageWork, Queue] | None:
    """Return a message's other side if it is behind another operation of the same communicator."""
    queue = queues.of.get((communicator, message.peer or 0))
    if queue is not None:
        for operation in _not_started(queue):
            for other in operation.messages:
                if other.kind != message.kind and other.peer == message.rank.number:
                    return other, queue
    return None


def _other_side_elsewhere(
    queues: Queues, communicator: str, started: Operation, message: MessageWork
) -> MessageWork | None:
    """Return a message's other side if it is in another communicator of the same group."""
    for (name, rank), queue in queues.of.items():
        if rank == message.peer and name != communicator:
            for operation in queue.operations:
                for other in operation.to_meet if operation.label == started.label else []:
                    if other.kind != message.kind and other.peer == message.rank.number:
                        return other
    return None


def _same_behind(queue: Queue, collective: QueuedCollective) -> QueuedCollective | None:
    others = (other for operation in _not_started(queue) for other in operation.collectives)
    return next((other for other in others if other.collective is collective.collective), None)


def _text(one: MessageWork | QueuedCollective) -> str:
    return (
        {"send": f"send to rank {one.peer}", "recv": f"receive from rank {one.peer}"}[one.kind]
        if isinstance(one, MessageWork)
        else one.kind
    )


def _behind(one: MessageWork | QueuedCollective, started: Operation) -> Note:
    batch = ", which is in a batch" if len(started.messages) > 1 else ""
    return (
        f"rank {one.rank.number}'s {_text(one)} waits in the queue behind its "
        f"{_text(started.first)}{batch}",
        one.where,
    )


def _in_another_queue(message: MessageWork, batched: bool, other: MessageWork) -> Note:
    this, that = ("in a batch", "outside a batch") if batched else ("outside a batch", "in a batch")
    ranks = ranks_text(sorted((message.rank.number, other.rank.number)))
    sentence = (
        f"rank {message.rank.number}'s {_text(message)} is {this}, and rank {other.rank.number}'s "
        f"{_text(other)} is {that}. On NCCL they use different communicators and never meet. Use "
        f"batch_isend_irecv on both of {ranks}, or on neither"
    )
    return sentence, other.where


def _different(collective: QueuedCollective, other: QueuedCollective) -> Note:
    return f"{disagreement(collective.own_call(), other.own_call())}".replace("\n", "\n  "), ""
