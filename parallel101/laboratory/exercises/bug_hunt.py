"""Programs that hang, are slow or are wrong, for the bug hunt: a seed decides where.

    hunt("hang", "Ada") ──▶ Hunt: the program's text · its plan, with one fault · rank, line, cause
    .trace, .error      ──▶ what happened on the virtual clock, and the deadlock if it hangs
    .records()          ──▶ the same as plain dicts, by rank: what the learner's function gets

The text and its line numbers differ from seed to seed, and so do the ranks, the faulty one and the
step. The fault itself is in the plan, a table of what each rank does, so it can't be read in the
text. Answers come from a secret seed, so this file tells nobody what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel101.laboratory.grade.exercise import Draw, module_of
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network

FILE = "train.py"
# by kind and cause, the tables of the plan in which the fault may be: the table, the mark of the
# line, and what the culprit's entry becomes, given a number that the seed draws
FAULTS: dict[str, dict[str, list[tuple[str, str, Callable[[Any, int], Any]]]]] = {
    "hang": {
        "missing call": [
            ("sends", "send", lambda sends, k: False),
            ("reports", "loss", lambda reports, k: False),
        ],
        "different order": [("buckets", "bucket", lambda buckets, k: buckets[::-1])],
        "wrong peer": [("distance", "send", lambda distance, k: k)],
    },
    "slow": {
        "slow compute": [
            (part, part, lambda seconds, k: 2.5 * seconds) for part in ("load", "forward")
        ],
        "large message": [("rows", "send", lambda rows, k: 4 * rows)],
        "late send": [("receives first", "send", lambda first, k: True)],
    },
    "wrong": {
        "not summed": [("uses", "gradient", lambda uses, k: "own")],
        "divided twice": [("uses", "gradient", lambda uses, k: "mean again")],
        "stale gradient": [("uses", "gradient", lambda uses, k: "before")],
        "skipped update": [("updates", "weights", lambda updates, k: False)],
    },
}
CAUSES = {kind: tuple(faults) for kind, faults in FAULTS.items()}
HEAD = """import inspect

import torch
import torch.distributed as dist

from parallel101 import compute, span
"""
FORWARD = '''
def forward(plan, step):
    """Compute, which takes time."""
    rank = dist.get_rank()
    with span("load"):  #load
        compute(plan["load"][step][rank])
    with span("forward"):  #forward
        compute(plan["forward"][step][rank])
'''
EXCHANGE = '''
def exchange(plan, step):
    """Send to the next rank, and receive from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows, to = plan["rows"][step], (rank + plan["distance"][step][rank]) % n
    before = (rank - 1) % n
    got, works = torch.empty(rows[before]), []
    if plan["receives first"][step][rank]:
        dist.recv(got, before)  #first_recv
    if plan["sends"][step][rank]:
        works.append(dist.isend(torch.ones(rows[rank]), to))  #send
    if not plan["receives first"][step][rank]:
        works.append(dist.irecv(got, before))  #recv
    for work in works:
        work.wait()
'''
REDUCE = '''
def reduce_gradients(plan, step, groups):
    """Each bucket has a group of its own, so that both can be on their way at once."""
    for bucket in plan["buckets"][step][dist.get_rank()]:
        dist.all_reduce(torch.ones(4), group=groups[bucket])  #bucket
'''
REPORT = '''
def report_loss(plan, step):
    """The mean loss of all ranks."""
    if plan["reports"][step][dist.get_rank()]:
        dist.all_reduce(torch.ones(1))  #loss
'''
MAIN = """
def main(plan):
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    for step in range(plan["steps"]):
        forward(plan, step)
"""
CALLS = (
    "        exchange(plan, step)\n",
    "        reduce_gradients(plan, step, groups)\n",
    "        report_loss(plan, step)\n",
)
WATCH = '''
def watch(log, name, x):
    """Write down a value, and the line that asks for it."""
    line = inspect.currentframe().f_back.f_lineno
    log.append({"line": line, "name": name, "value": x.tolist()})
'''
AVERAGE = '''
def average(gradient, plan, step, before):
    """The mean of all ranks' gradients."""
    total = gradient.clone()
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    use = plan["uses"][step][dist.get_rank()]
    return {
        "mean": mean,
        "own": gradient,
        "mean again": mean / dist.get_world_size(),
        "before": before,
    }[use]
'''
UPDATE = '''
def update(weights, gradient, plan, step):
    """One step of gradient descent."""
    return weights - 0.1 * gradient if plan["updates"][step][dist.get_rank()] else weights
'''
TRAIN = """
def main(plan):
    torch.manual_seed(plan["seed"])
    weights, log = torch.randn(3, dtype=torch.float64), []
    data = torch.randn(dist.get_world_size(), plan["steps"], 3, dtype=torch.float64)
    gradient = torch.zeros_like(weights)
    for step in range(plan["steps"]):
        local = weights - data[dist.get_rank(), step]
        watch(log, "local gradient", local)  #local
        gradient = average(local, plan, step, gradient)
        watch(log, "gradient", gradient)  #gradient
        weights = update(weights, gradient, plan, step)
        watch(log, "weights", weights)  #weights
    return log
"""

COMMENTS = (
    "# TODO: type hints",
    "# Called in every step.",
    "# The cluster's notes have more about this.",
)


@dataclass
class Hunt:
    """One program with one fault.

    Attributes:
        kind: "hang", "slow" or "wrong".
        source: the program's text. It runs as `train.py`.
        world_size: the number of ranks.
        plan: what each rank does in each step, with the fault.
        answer: (rank, line, cause).
        facts: what rules about wrong answers need: the "lines" of the calls, by what they do
            ("send", "recv", "bucket", …), and the rank that is slow "once".
        trace: the record of the run; if the run hangs, up to that moment.
        error: the DeadlockError of a run that hangs.
        logs: the values that each rank wrote down.
    """

    kind: str
    source: str
    world_size: int
    plan: dict[str, Any] = field(repr=False)
    answer: tuple[int, int, str] = field(repr=False)
    facts: dict[str, Any] = field(repr=False)
    trace: Trace = field(repr=False)
    error: DeadlockError | None = field(repr=False)
    logs: list[Any] = field(repr=False)

    @property
    def listing(self) -> str:
        """The program's text, with line numbers."""
        rows = enumerate(self.source.splitlines(), start=1)
        return "\n".join(f"{number:3}  {line}".rstrip() for number, line in rows)

    def records(self) -> list[list[dict[str, Any]]]:
        """Return the calls of each rank, or the values that it wrote down, in program order."""
        if self.kind == "wrong":
            return self.logs
        rows: list[list[dict[str, Any]]] = [[] for _ in range(self.world_size)]
        unfinished = self.trace.unfinished
        for event in (*self.trace.events, *unfinished):
            row = {
                "call": event.name if event.kind == "span" else event.kind,
                "line": int(event.where.rpartition(":")[2]),
                "peer": event.peer,
                "group": event.group.name,
                "nbytes": event.nbytes,
                "posted": event.posted,
                "end": None if event in unfinished else event.end,
            }
            rows[event.rank].append(row)
        return [sorted(own, key=lambda row: (row["posted"], row["line"])) for own in rows]


def hunt(kind: str, seed: str, cause: str | None = None, rank: int | None = None) -> Hunt:
    """Return the program that belongs to a seed.

    Args:
        kind: "hang", "slow" or "wrong".
        seed: any text, for example your name.
        cause: one of CAUSES[kind]; None: the seed decides.
        rank: the rank with the fault; None: the seed decides.
    """
    if kind not in CAUSES:
        raise ValueError(f"kind must be one of {', '.join(CAUSES)}; got {kind!r}")
    draw = Draw(seed, f"hunt {kind}")
    n, steps = draw.integer(4, 6), draw.integer(4, 6)
    cause = draw.choice(CAUSES[kind]) if cause is None else cause
    if cause not in CAUSES[kind]:
        raise ValueError(f"cause must be one of {', '.join(CAUSES[kind])}; got {cause!r}")
    culprit = draw.integer(0, n - 1) if rank is None else rank % n
    source, lines = _text(kind, draw)
    plan, once = _plan(draw, n, steps), (culprit + draw.integer(1, n - 1)) % n
    if kind == "slow":  # another rank, in one step
        plan[draw.choice(("load", "forward"))][draw.integer(0, steps - 1)][once] *= 2.5
    table, mark, change = draw.choice(FAULTS[kind][cause])
    step, k = draw.integer(1, steps - 2), draw.integer(2, n - 1)
    for row in plan[table] if kind == "slow" else plan[table][step : step + 1]:
        row[culprit] = change(row[culprit], k)
    answer, facts = (culprit, lines[mark], cause), {"lines": lines, "once": once}
    return Hunt(kind, source, n, plan, answer, facts, *_run(source, plan, n))


def _run(source: str, plan: dict[str, Any], n: int) -> tuple[Trace, DeadlockError | None, list]:
    from parallel101.laboratory.ranks.launch import launch

    main, network = module_of(FILE, source, "train").main, Network(latency=1e-3, bandwidth=2e4)
    try:
        run = launch(main, plan, world_size=n, backend="sim", trace=True, network=network)
    except DeadlockError as error:
        return error.trace, error, []  # type: ignore[attr-defined]
    assert run.trace is not None
    return run.trace, None, run.results


def _text(kind: str, draw: Draw) -> tuple[str, dict[str, int]]:
    """Return the program, with its functions and comments shuffled, and its marked lines."""
    parts, main = [WATCH, AVERAGE, UPDATE], TRAIN
    if kind != "wrong":  # the exchange comes first: a rank that is ahead waits for the one before
        parts = [FORWARD, EXCHANGE, REDUCE, REPORT]
        main = "".join([MAIN, CALLS[0], *_shuffled(draw, CALLS[1:])])
    text = HEAD
    for part in [*_shuffled(draw, parts), main]:
        comments = _shuffled(draw, COMMENTS)[: draw.integer(0, 3)]
        text += "\n" + "".join(f"\n{comment}" for comment in comments) + part
    rows = [line.partition("  #") for line in text.splitlines()]
    lines = {mark: number for number, (_, _, mark) in enumerate(rows, start=1) if mark}
    return "".join(f"{code}\n" for code, _, _ in rows), lines


def _shuffled(draw: Draw, items: Sequence[str]) -> list[str]:
    return [items[i] for i in torch.randperm(len(items), generator=draw.generator)]


def _plan(draw: Draw, n: int, steps: int) -> dict[str, Any]:
    """Return the plan of a program without a fault: tables [step][rank] of what each rank does.

    The seconds of computing differ by a few percent.
    """

    def table(entry: Callable[[], Any]) -> list[list[Any]]:
        return [[entry() for _ in range(n)] for _ in range(steps)]

    usual = {
        "rows": 1000 * draw.integer(5, 9),
        "distance": 1,
        "sends": True,
        "receives first": False,
        "buckets": [0, 1],
        "reports": True,
        "uses": "mean",
        "updates": True,
    }
    return {
        "steps": steps,
        "seed": draw.integer(0, 10**6),
        "load": table(lambda: draw.integer(95, 105) / 100),
        "forward": table(lambda: draw.integer(190, 210) / 100),
        **{name: [[value] * n for _ in range(steps)] for name, value in usual.items()},
    }
