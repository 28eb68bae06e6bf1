"""Sends and receives for a schedule whose lists have none: what the executor adds, so that messages
overlap compute.

    compute only          2F0              2F1              2B0
    with messages   RECV_F0  RECV_F1  2F0  SEND_F0  RECV_B0  2F1  …

A result is sent once it is computed. A receive is posted one action ahead: before an action is
computed, the receive of the next action that needs one is posted. Receives from one rank are posted
in the order in which that rank sends, since NCCL has no tags.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel101.trainers.schedules.actions import Action
from parallel101.trainers.schedules.check import Placement, Ranks, awaits, lists_messages, partner


def with_messages(ranks: Ranks, placement: Placement) -> list[list[Action]]:
    """Return the lists with their sends and receives, and with overlaps split up.

    Lists that have sends already keep their order.
    """
    apart = [[part for action in of_rank for part in action.computed()] for of_rank in ranks]
    if any(map(lists_messages, ranks)):
        return apart
    sent = [[list(sends(action, placement)) for action in of_rank] for of_rank in apart]
    # by receiver and sender, in the sender's order
    expected: dict[int, dict[int, list[Action]]] = {rank: {} for rank in range(len(ranks))}
    for source, of_rank in enumerate(sent):
        for send in sum(of_rank, []):
            receive = partner(send)
            expected[placement[receive.stage]].setdefault(source, []).append(receive)
    return [
        list(posted_ahead(apart[rank], sent[rank], expected[rank], placement))
        for rank in range(len(ranks))
    ]


def posted_ahead(
    actions: list[Action],
    sent: list[list[Action]],
    expected: dict[int, list[Action]],
    placement: Placement,
) -> Iterator[Action]:
    """Yield one rank's list. `expected`: each sending rank's receives, in the order it sends."""
    needed = [receive_for(action, placement) for action in actions]
    channel = {receive: source for source, receives in expected.items() for receive in receives}
    waiting = {source: iter(receives) for source, receives in expected.items()}
    posted: set[Action] = set()

    def post(receive: Action) -> Iterator[Action]:
        while receive not in posted:
            posted.add(earlier := next(waiting[channel[receive]]))
            yield earlier

    # of each action: what the first of the actions behind it needs that needs anything
    following: list[Action | None] = [None]
    for receive in reversed(needed[1:]):
        following.append(receive or following[-1])
    following.reverse()
    for place, action in enumerate(actions):
        for receive in (needed[place], following[place]):
            if receive is not None:
                yield from post(receive)
        yield action
        yield from sent[place]


def receive_for(action: Action, placement: Placement) -> Action | None:
    """Return the receive of what this action needs from another rank, or None."""
    send = awaits(action, len(placement))
    if send is None or placement[send.stage] == placement[action.stage]:
        return None
    return partner(send)


def sends(action: Action, placement: Placement) -> Iterator[Action]:
    """Yield the send of what this action computes, if another rank needs it."""
    if action.kind != "W":
        send = action._replace(kind="SEND_F" if action.kind == "F" else "SEND_B")
        if placement.get(partner(send).stage, placement[action.stage]) != placement[action.stage]:
            yield send
