"""What a launch gives back: what each rank returned, and the record of how it went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel101.record.trace import Trace


@dataclass
class Run:
    """A finished run.

    Attributes:
        results: what the function returned, by rank. GPU tensors come back on the CPU.
        trace: the record, where one was asked for (always on sim), else None.
        backend, world_size: as it ran.
    """

    results: list[Any] = field(repr=False)
    trace: Trace | None
    backend: str
    world_size: int

    def animate(self, title: str | None = None):
        """The messages of the run as a picture that plays: in a notebook as it is, elsewhere by `.save("ring.html")`.

        Raises ValueError when nothing was recorded.
        """
        from parallel101.viz.collective import collective_scene

        return collective_scene(self._recorded("animate"), self.results, title=title)

    def timeline(self):
        """Every rank's sends, receives, collectives and spans over time, as a picture. Raises ValueError when nothing was recorded."""
        from parallel101.viz.timeline import timeline_scene

        return timeline_scene(self._recorded("timeline"))

    def _recorded(self, what: str) -> Trace:
        if self.trace is None:
            raise ValueError(
                f"run.{what}() draws what was recorded, and this run was not: launch it with trace=True (or on the sim backend)"
            )
        return self.trace
