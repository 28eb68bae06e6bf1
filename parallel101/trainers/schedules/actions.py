"""The actions of a pipeline schedule, in torch.distributed.pipelining's text form.

"2F3"                       stage 2, forward, microbatch 3
"2B3", "2I3", "2W3"         its backward; or the two halves: input and weight gradients
"2SEND_F3", "3RECV_F3"      its output, to the next stage
"3SEND_B3", "2RECV_B3"      the gradient of it, back to the stage
"(0F1;7B0)OVERLAP_F_B"      both together
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

COMPUTE = ("F", "B", "I", "W")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OVERLAP = "OVERLAP_F_B"
FSDP = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # in torch's lists only
ACTION = re.compile(rf"(\d+)({'|'.join((*COMMUNICATION, *COMPUTE))})(\d+)")


class ScheduleError(ValueError):
    """A schedule that cannot be run. The message names the action and the rank."""


class Action(NamedTuple):
    """An action of a rank."""

    stage: int  # global: a rank has several if the schedule is interleaved; −1 for an overlap
    kind: str  # one of COMPUTE or COMMUNICATION, or OVERLAP
    microbatch: int
    parts: tuple[Action, ...] = ()  # of an overlap: what is computed together

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read "2F3" as stage 2, forward, microbatch 3; "(0F1;7B0)OVERLAP_F_B" as both together.

        Raises ScheduleError for other texts.
        """
        is_text = isinstance(text, str)
        if is_text and text.startswith("(") and text.endswith(f"){OVERLAP}"):
            parts = tuple(cls.parse(part) for part in text[1 : -len(OVERLAP) - 1].split(";"))
            if message := next((part for part in parts if part.kind in COMMUNICATION), None):
                raise ScheduleError(
                    f"action {text!r}: only forwards and backwards can overlap, and {message} is "
                    "a message. List it by itself"
                )
            return cls(-1, OVERLAP, -1, parts)
        match = ACTION.fullmatch(text) if is_text else None
        if match is None:
            kinds = ", ".join(COMPUTE + COMMUNICATION)
            grammar = f"a stage, one of {kinds}, and a microbatch: '0F3'"
            expected = grammar if is_text else "a text such as '0F3'"
            raise ScheduleError(f"action {text!r}: expected {expected}")
        return cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){OVERLAP}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    def computed(self) -> tuple[Action, ...]:
        """Return what is computed: the action itself, or the parts of an overlap."""
        return self.parts or (self,)


Ranks = Sequence[Sequence[Action]]
Placement = Mapping[int, int]  # global stage → rank


def lists_messages(actions: Iterable[Action]) -> bool:
    """Return whether the lists have sends and receives. Otherwise results arrive by themselves."""
    return any(action.kind in COMMUNICATION for action in actions)


def needs(
    action: Action, placement: Placement, where: Collection[Action], listed: bool
) -> list[Action]:
    """Return the actions that must be done before this one can be.

    Args:
        where: all actions.
        listed: see lists_messages, which looks through all actions once.
    """
    stage, kind, i = action[:3]

    def computes(send: Action) -> Action:
        whole = Action(send.stage, send.kind[-1], i)
        return whole if whole in where else Action(send.stage, "I", i)

    if kind in ("SEND_F", "SEND_B"):
        return [computes(action)]
    if kind == "W":
        return [Action(stage, "I", i)]
    needed = [Action(stage, "F", i)] if kind in ("B", "I") else []
    if send := awaits(action, len(placement)):
        message = listed and placement[send.stage] != placement[stage]
        needed.append(partner(send) if message else computes(send))
    return needed  # nothing for a receive, which can be posted at any time


def awaits(action: Action, stages: int) -> Action | None:
    """Return the send of what this action needs from the stage before or after it, or None."""
    stage, kind, i = action[:3]
    if kind == "F" and stage > 0:
        return Action(stage - 1, "SEND_F", i)
    if kind in ("B", "I") and stage + 1 < stages:
        return Action(stage + 1, "SEND_B", i)
    return None


def partner(action: Action) -> Action:
    """Return the other side of a message."""
    stage, kind, i = action[:3]
    step = 1 if kind in ("SEND_F", "RECV_B") else -1
    return Action(stage + step, {"SEND": "RECV", "RECV": "SEND"}[kind[:4]] + kind[4:], i)


# ── sends and receives for lists that have none, so that messages overlap compute ──
#
#     compute only          2F0              2F1              2B0
#     with messages   RECV_F0  RECV_F1  2F0  SEND_F0  RECV_B0  2F1  …
#
# A result is sent once it is computed. A receive is posted one action ahead: before an action is
# computed, the receive of the next action that needs one is posted. (NCCL has no tags: the executor
# posts a receive behind all that the same rank sends earlier, see `Messages.post`.)


def with_messages(ranks: Ranks, placement: Placement) -> list[list[Action]]:
    """Return the lists with their sends and receives, and with overlaps split up.

    Lists that have sends already keep their order.
    """
    lists = [[part for action in of_rank for part in action.computed()] for of_rank in ranks]
    if any(map(lists_messages, lists)):
        return lists
    return [list(posted_ahead(of_rank, placement)) for of_rank in lists]


def posted_ahead(actions: Sequence[Action], placement: Placement) -> Iterator[Action]:
    """Yield one rank's list."""
    receives = [receive_for(action, placement) for action in actions]
    posted: set[Action] = set()
    for place, action in enumerate(actions):
        following = next(filter(None, receives[place + 1 :]), None)
        for receive in (receives[place], following):
            if receive is not None and receive not in posted:
                posted.add(receive)
                yield receive
        yield action
        if action.kind != "W":  # if another rank needs the result
            send = action._replace(kind="SEND_F" if action.kind == "F" else "SEND_B")
            here = placement[action.stage]
            if placement.get(partner(send).stage, here) != here:
                yield send


def receive_for(action: Action, placement: Placement) -> Action | None:
    """Return the receive of what this action needs from another rank, or None."""
    send = awaits(action, len(placement))
    if send is None or placement[send.stage] == placement[action.stage]:
        return None
    return partner(send)
