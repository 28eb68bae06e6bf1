"""Explains a deadlock under NCCL's rules by the queues, in sentences.

They say what waits behind what, and what never meets (see queues.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from parallel101.laboratory.record.calls import disagreement
from parallel101.laboratory.record.units import ranks_text
from parallel101.laboratory.sim.message_matching import MessageWork
from parallel101.laboratory.sim.queues import (
    Operation,
    QueuedCollective,
    QueuedState,
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
    for (communicator, _), queue in sorted(queues.items()):
        if not queue:
            continue
        started = queue[0]
        for message in started.to_meet:
            others = list(_other_sides(queues, started.label, message))
            here = [(o, of) for o, of in others if of.communicator == communicator]
            if later := [(o, of) for o, of in here if not of.started]:
                behind.append(_behind(later[0][0], later[0][1].queue[0]))
            elif elsewhere := [o for o, of in others if o in of.to_meet]:
                batched = communicator == started.label
                other_queues.append(_in_another_queue(message, batched, elsewhere[0]))
        for collective in started.collectives:
            for rank in sorted(collective.absent()):
                operations = list(queues.get((communicator, rank), ()))
                waiting = [one for of in operations if not of.started for one in of.collectives]
                if same := [o for o in waiting if o.collective is collective.collective]:
                    behind.append(_behind(same[0], operations[0]))
                elif operations and rank > collective.rank.number and not other_queues:
                    first = operations[0].collectives
                    other_queues += [_different(collective, other) for other in first]
    notes = [*sorted(set(behind))[:MOST_BEHIND], *dict.fromkeys(other_queues[:MOST_OTHER_QUEUES])]
    notes += [(text, "") for text in shared.warnings.texts()]
    return [*notes, (ADVICE, "")] if behind else notes


def _other_sides(
    queues: Mapping[tuple[str, int], Iterable[Operation]], group: str, message: MessageWork
) -> Iterator[tuple[MessageWork, Operation]]:
    """Yield what a message could meet in the queues of its group, and the operation that has it."""
    for (_, rank), queue in queues.items():
        for operation in queue if rank == message.peer else ():
            for other in operation.messages if operation.label == group else ():
                if other.kind != message.kind and other.peer == message.rank.number:
                    yield other, operation


def _text(one: MessageWork | QueuedCollective) -> str:
    call = one.own_call
    to = {"send": "send to", "recv": "receive from"}
    return f"{to[call.kind]} rank {call.peers[0]}" if call.kind in to else call.kind


def _behind(one: MessageWork | QueuedCollective, started: Operation) -> Note:
    batch = ", which is in a batch" if len(started.messages) > 1 else ""
    return (
        f"rank {one.rank.number}'s {_text(one)} waits in the queue behind its "
        f"{_text(started.first)}{batch}",
        one.own_call.where,
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
    return f"{disagreement(collective.own_call, other.own_call)}".replace("\n", "\n  "), ""
