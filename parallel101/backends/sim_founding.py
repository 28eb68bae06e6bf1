"""The making of a sub-group on the sim: dist.new_group returns when all members have called it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel101.trace.calls import Call
from parallel101.trace.where import caller

if TYPE_CHECKING:
    from parallel101.backends.sim_group import SimGroup


class Founding:
    """One rank's part in the making of a sub-group. It waits for all members: where one never comes, that is a deadlock, as on gloo."""

    def __init__(self, group: SimGroup):
        self.group = group
        self.where = caller()
        self.done = False
        self.come = group.traffic.founded.setdefault((group.torch_name, tuple(group.ranks)), [])

    def wait(self) -> None:
        world, member = self.group.world, self.group.member
        world.enter(member)
        self.come.append(self)
        if len(self.come) == len(self.group.ranks):
            world.at(world.now, self)
        world.wait(member, self)

    def happen(self) -> None:
        """All have come."""
        for part in self.come:
            part.done = True
            part.group.world.wake(part.group.member)
        self.come.clear()

    def call(self) -> Call:
        me = self.group.member.number
        others = tuple(r for r in self.group.ranks if r != me)
        return Call(me, "new_group", others, 0, "new_group", 0, 0, (), "", None, None, self.where)

    def missing(self) -> set[int]:
        return set(self.group.ranks) - {part.group.member.number for part in self.come}
