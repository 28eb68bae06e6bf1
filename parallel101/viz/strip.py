"""Below the collective view: every send as recorded, a row for each sender, with a cursor that says where we are."""

from __future__ import annotations

from parallel101.analysis.replay import History
from parallel101.record.units import human_seconds
from parallel101.viz.scene import Scene, box
from parallel101.viz.tempo import Tempo

LEFT, WIDTH, TOP = 28.0, 904.0, 440.0
STYLE = (
    ".sum{fill:var(--mute);opacity:.75}.copy{fill:var(--accent);opacity:.75}"
    ".now{stroke:var(--ink);stroke-width:2;vector-effect:non-scaling-stroke}"
)


def draw_strip(scene: Scene, history: History, tempo: Tempo) -> None:
    """Add the record's own time. Grey was added on arrival, blue was not, as in the ring of steps."""
    if not history.messages:
        return
    scene.style += STYLE
    senders = {rank: i for i, rank in enumerate(sorted({m.src for m in history.messages}))}
    row = min(6.0, 28.0 / len(senders))
    begin = min(m.start for m in history.messages)
    span = max(m.end for m in history.messages) - begin
    bars = scene.panel(narrow="translate(14.9,334) scale(.469,1)")

    def x(t: float) -> float:
        return LEFT + (WIDTH * (t - begin) / span if span else 0.0)

    paths: dict[str, str] = {"sum": "", "copy": ""}
    for i, m in enumerate(history.messages):
        added = history.known and any(landing.added for landing in history.landings[i])
        width = max(0.8, x(m.end) - x(m.start) - 1)
        paths["sum" if added else "copy"] += box(x(m.start) + 0.5, TOP + senders[m.src] * row, width, row * 0.72)
    for name, path in paths.items():
        if path:
            bars.add("path", d=path, class_=name)
    bottom = TOP + row * len(senders)
    cursor = bars.add("path", d=f"M0 {TOP - 5:.1f}V{bottom + 3:.1f}", class_="now")
    cursor.key("translate", *[(0.0, (LEFT, 0.0)), *((t, (x(real), 0.0)) for t, real in tempo.cursor())])
    clock = "every send, " + ("on the virtual clock" if history.trace.backend == "sim" else "as recorded")
    legend = clock + "; grey is added on arrival, blue is not" if all(paths.values()) else clock
    for text, place, anchor, narrow in (
        ("0", LEFT, "", "translate(0,334)"),
        (legend, LEFT + WIDTH / 2, " c", "translate(-240,348)"),  #  on a phone a line further down
        (human_seconds(span), LEFT + WIDTH, " e", "translate(-480,334)"),
    ):
        scene.panel(narrow=narrow).add("text", text, x=place, y=bottom + 15, font_size=11, class_="m" + anchor)
