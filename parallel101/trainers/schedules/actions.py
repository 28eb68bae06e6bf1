"""The actions of a pipeline schedule, in torch.distributed.pipelining's text form.

"2F3"                       stage 2, forward, microbatch 3
"2B3", "2I3", "2W3"         its backward; or the two halves: input and weight gradients
"2SEND_F3", "3RECV_F3"      its output, to the next stage
"3SEND_B3", "2RECV_B3"      the gradient of it, back to the stage
"(0F1;7B0)OVERLAP_F_B"      both together
"""

from __future__ import annotations

import re
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
        if not isinstance(text, str):
            raise ScheduleError(
                f"action {text!r} ({type(text).__name__}): expected a text such as '0F3'"
            )
        if text.startswith("(") and text.endswith(f"){OVERLAP}"):
            parts = tuple(cls.parse(part) for part in text[1 : -len(OVERLAP) - 1].split(";"))
            if message := next((part for part in parts if part.kind in COMMUNICATION), None):
                raise ScheduleError(
                    f"action {text!r}: only forwards and backwards can overlap, and {message} is "
                    "a message. List it by itself"
                )
            return cls(-1, OVERLAP, -1, parts)
        found = ACTION.fullmatch(text)
        if found is None:
            raise ScheduleError(
                f"action {text!r}: expected a stage, one of "
                f"{', '.join(COMPUTE + COMMUNICATION)}, and a microbatch: '0F3'"
            )
        return cls(int(found[1]), found[2], int(found[3]))

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){OVERLAP}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    def computed(self) -> tuple[Action, ...]:
        """Return what is computed: the action itself, or the parts of an overlap."""
        return self.parts or (self,)
