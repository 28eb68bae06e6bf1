"""The right half where nothing is known of the contents: source × destination, and the bytes that have moved so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from parallel101.analysis.replay import History
from parallel101.record.units import human_bytes
from parallel101.viz.matrix import HEIGHT, LEFT, MIDDLE, NARROW, WIDTH
from parallel101.viz.scene import Scene, box
from parallel101.viz.tempo import Tempo

STYLE = ".sent{fill:var(--accent)}"


def draw_traffic(scene: Scene, history: History, tempo: Tempo, note: Iterable[str]) -> None:
    """Add the matrix of bytes, a row for each sender, and under it the note that says why no more is shown."""
    scene.style += STYLE
    panel = scene.panel(narrow=NARROW)
    n = len(history.ranks)
    width, height = min(103.0, WIDTH / n), min(56.0, HEIGHT / n)
    left, top = LEFT + (WIDTH - width * n) / 2, MIDDLE - height * n / 2
    place = {rank: i for i, rank in enumerate(history.ranks)}
    gap = 2.0 if n <= 16 else 0.5
    every = 1 if n <= 16 else 8  # label every eighth row and column of a large one
    panel.add("text", "from \\ to", x=left - 12, y=top - 9, font_size=12, class_="m e")
    for rank in history.ranks[::every]:
        panel.add("text", rank, x=left + (place[rank] + 0.5) * width, y=top - 9, font_size=12, class_="m c")
        panel.add("text", f"rank {rank}", x=left - 12, y=top + (place[rank] + 0.5) * height + 4, font_size=12, class_="m e")
    for src in history.ranks:
        y = top + place[src] * height + gap
        row = "".join(box(left + c * width + gap, y, width - 2 * gap, height - 2 * gap) for c in range(n))
        panel.add("path", d=row, class_="faint")
    totals: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (src, dst): after which step how many bytes
    for step in range(history.steps):
        for i in history.in_step(step):
            m = history.messages[i]
            so_far = totals[m.src, m.dst][-1][1] if totals[m.src, m.dst] else 0
            totals[m.src, m.dst].append((step, so_far + m.nbytes))
    most = max((states[-1][1] for states in totals.values()), default=1) or 1
    for (src, dst), states in sorted(totals.items()):
        x, y = left + place[dst] * width, top + place[src] * height
        for (step, nbytes), (until, _) in zip(states, [*states[1:], (history.steps, 0)], strict=True):
            share = nbytes / most
            if step == until:
                continue
            group = panel.add("g").show((tempo.land(step), tempo.land(until) if until < history.steps else tempo.duration + 1))
            group.add(
                "rect",
                x=x + gap,
                y=y + gap,
                width=width - 2 * gap,
                height=height - 2 * gap,
                rx=2,
                class_="sent",
                fill_opacity=0.15 + 0.75 * share,
            )
            if width > 36:
                text = human_bytes(nbytes)
                size = min(12.0, (width - 6) / (0.58 * len(text)))
                group.add("text", text, x=x + width / 2, y=y + height / 2 + 4, font_size=size, class_="c on" if share > 0.5 else "c")
    if history.messages:
        for k, line in enumerate(note):
            panel.add("text", line, x=LEFT + WIDTH / 2, y=MIDDLE + height * n / 2 + 20 + 16 * k, font_size=12, class_="m c")
