"""The page on which the reader builds a pipeline schedule by hand.

    schedule_rules.js    what is possible, and how long it takes: the rules of Schedule.check
    schedule_builder.js  the schedule as it grows: placing, moving, removing, the address
    schedule_board.js    how it is drawn, the score and the code to copy; mouse, touch and keys

The published schedules that it compares with come from `schedule(…)`. What can be read without
a script, with the score of three ranks and six microbatches, is written here.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from parallel101.trainers.schedules.actions import ScheduleError
from parallel101.trainers.schedules.schedule import Schedule, schedule

ADDRESS, TITLE = "build_a_schedule.html", "Build a schedule"
RANKS, MICROBATCHES = range(2, 5), range(1, 9)
START = 3, 6  # ranks and microbatches when the page opens
CHUNKS = {"interleaved": 2}  # stages on a rank; the others have one
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved, 2 stages a rank",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
}


def _file(name: str) -> str:
    return files("parallel101.laboratory.publish.tools").joinpath(name).read_text(encoding="utf-8")


RULES = _file("schedule_rules.js")


class ScheduleScore(NamedTuple):
    """What the page compares. A rank's share of a microbatch takes 1 for each of F, I and W."""

    step: float  # from the first start to the last end
    idle: float  # of a rank, on average
    bubble_rate: float
    held: float  # microbatches whose activations the fullest rank holds


def published(ranks: int, microbatches: int) -> dict[str, Schedule]:
    """The published schedules that exist for these numbers, by name."""
    found = {}
    for name in NAMES:
        try:
            found[name] = schedule(
                name, stages=ranks, microbatches=microbatches, chunks=CHUNKS.get(name, 1)
            )
            found[name].check("nccl")
        except ScheduleError:  # interleaved needs a multiple of the ranks
            found.pop(name, None)
    return found


def score(made: Schedule, chunks: int) -> ScheduleScore:
    """Return the score of a schedule whose ranks have so many stages each."""
    times = made.time(1 / chunks, 1 / chunks, 1 / chunks)
    work = sum(slot.end - slot.start for slot in times.slots) / len(made.ranks)
    rate = times.bubble_rate
    held = max(times.peak_activations) / chunks
    return ScheduleScore(times.makespan, work * rate / (1 - rate), rate, held)


@cache
def schedule_builder_page() -> str:
    """Return the body of the page."""
    lists = {
        f"{ranks},{microbatches}": {
            name: [" ".join(of_rank) for of_rank in made.actions]
            for name, made in published(ranks, microbatches).items()
        }
        for ranks in RANKS
        for microbatches in MICROBATCHES
    }
    given = json.dumps({"names": NAMES, "chunks": CHUNKS, "lists": lists}, separators=(",", ":"))
    return f"""<nav><a href="index.html">All lessons</a></nav>
<style>{_file("schedule_builder.css")}</style>
<main class="builder">
<h1>{TITLE}</h1>
<p class="text">A pipeline cuts a model into stages and puts them on different ranks. Every
microbatch passes forward through all stages, and its gradient passes back. Which order should each
rank work in? Published answers trade idle time against memory. Find your own.</p>
<ul class="text kinds">
<li><b class="kind F">F</b> <span>the forward of a microbatch on a stage. Its
activations stay in memory until its backward is complete.</span></li>
<li><b class="kind B">B</b> <span>its backward, which takes I and W together.</span></li>
<li><b class="kind I">I</b> <span>half of it: the gradient of the input, which the stage
before needs.</span></li>
<li><b class="kind W">W</b> <span>the other half: the gradient of the weights. No other
rank waits for it.</span></li>
</ul>
<p class="text"><code>1F2</code> is the forward of microbatch 2 on stage 1. Microbatches and stages
count from 0.</p>
<noscript><p class="needs-kernel">Placing actions needs JavaScript, which is switched off
here.</p></noscript>
<form class="settings" hidden>
<label>Ranks <select id="ranks">{_options(RANKS, START[0])}</select></label>
<label>Microbatches <select id="microbatches">{_options(MICROBATCHES, START[1])}</select></label>
<label>Stages <select id="stages"><option value="one">one a rank</option>
<option value="loop">two a rank, in a loop</option><option value="v">two a rank, in a V</option>
</select></label>
<label>Start from <select id="from"></select></label>
<details><summary>Times</summary><p>What a rank's share of one microbatch takes, and how long a
result travels to another rank. With two stages a rank, each stage takes half.</p>
{_time("F", "F", 1)}{_time("I", "I", 1)}{_time("W", "W", 1)}{_time("communication", "message", 0)}
</details></form>
<section class="work" aria-label="The schedule" hidden>
<ol class="goals" aria-label="Goals"></ol>
<p id="said" role="status"></p>
<div class="scroll"><div class="board"></div></div>
<p class="board-note">Under each rank: the microbatches in flight over time. Dashed: the most that a
rank holds with 1F1B. Hatched: a bubble. Choose it to see what the rank waits for.
<span id="second" hidden>Paler: the second stage of a rank.</span></p>
<div class="next" role="group" aria-label="Place the next action"></div>
<div class="edit" role="group" aria-label="Change the chosen action">
<button id="earlier">◀ Earlier</button><button id="later">Later ▶</button>
<button id="split">Split B into I and W</button><button id="remove">Remove</button>
<span></span><button id="undo">Undo</button><button id="clear">Clear</button></div>
<p class="keys-of-board">Keys, in a rank's row: F, B, I or W places the next one; ← and → choose;
Shift with ← or → moves; S splits a backward; Delete removes; U undoes. With a bubble chosen, the
next action goes there. With the mouse, or a finger on a chosen action, drag it.</p>
</section>
<h2>Score</h2>
<div class="scroll"><table class="score"><thead><tr><th>Schedule</th><th class="number">Step</th>
<th class="number">Idle</th><th class="number">Bubble rate</th><th class="number">In flight</th>
</tr></thead><tbody>{_rows()}</tbody></table></div>
<p class="text score-note"><b>Step</b>: time from the first start to the last end. <b>Idle</b>: the
longest that a rank takes from its own first start to its last end, minus the time for which it
computes. <b>In flight</b>: the most microbatches whose activations one rank holds. A microbatch on
one of a rank's two stages counts half.</p>
<section class="code" aria-label="As Python" hidden><h2>As Python</h2>
<p class="text">The address of this page holds your schedule, so a bookmark keeps it. In Python, a
trainer runs it: <code>PipelineTrainer(…, schedule=schedule)</code>.</p>
<p><button id="copy-python">Copy as Python</button> <button id="copy-address">Copy the
address</button> <span id="copied" role="status"></span></p>
<pre class="python" tabindex="0" aria-label="The schedule as Python"></pre>
<details class="paste"><summary>Check lists with sends and receives</summary>
<p class="text">Paste lists with one line for each rank and commas between actions, as
torch.distributed.pipelining writes them. Under gloo's rules, each message starts by itself. Under
NCCL's, the sends and receives of a rank start one by one. The example runs on gloo and hangs on
NCCL.</p>
<textarea id="lists" rows="4" spellcheck="false" aria-label="Lists, one line for each rank">
{HANGS}</textarea>
<p><button id="check-gloo">Check under gloo's rules</button>
<button id="check-nccl">Check under NCCL's rules</button></p>
<p id="verdict" role="status"></p></details></section>
</main>
<script>{RULES}const GIVEN = {given};
{_file("schedule_builder.js")}{_file("schedule_board.js")}</script>"""


# pytorch issue 172668: stages 0 and 2 on rank 0, 1 and 3 on rank 1
HANGS = (
    "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,"
    "2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,"
    "1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1"
)


def _options(values: range, chosen: int) -> str:
    return "".join(f"<option{' selected' * (v == chosen)}>{v}</option>" for v in values)


def _time(name: str, label: str, value: int) -> str:
    least = 0 if name == "communication" else 0.25
    return (
        f'<label>{label} <input id="time-{name}" type="number" value="{value}" min="{least}" '
        'max="8" step="0.25"></label>'
    )


def _rows() -> str:
    rows = []
    for name, made in published(*START).items():
        of = score(made, CHUNKS.get(name, 1))
        cells = f"{of.step:g}", f"{of.idle:.3g}", f"{100 * of.bubble_rate:.1f} %", f"{of.held:g}"
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{NAMES[name]}</td>{numbers}</tr>")
    return "".join(rows)
