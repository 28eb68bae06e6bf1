"""Programs that hang, are slow or are wrong, for the bug hunt: a seed decides where.

    hunt("hang", "Ada") ──▶ Hunt: the program's text · its plan, with one fault · rank, line, cause
    .trace, .error      ──▶ what happened on the virtual clock, and the deadlock if it hangs
    .records()          ──▶ the same as plain dicts, by rank: what the learner's function gets

The text and its line numbers differ from seed to seed, and so do the ranks, the faulty one and the
step. The fault itself is in the plan, a table of what each rank does, so it can't be read in the
text. Answers come from a secret seed, so this file tells nobody what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel101.laboratory.grade.exercise import Draw, module_of
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network

# the plan, the faulty line by its mark, and what rules about wrong answers need
Faulty = tuple[dict[str, Any], str, dict[str, Any]]
FILE = "train.py"
CAUSES = {
    "hang": ("missing call", "different order", "wrong peer"),
    "slow": ("slow compute", "large message", "late send"),
    "wrong": ("not summed", "divided twice", "stale gradient", "skipped update"),
}
HEAD = """import inspect

import torch
import torch.distributed as dist

from parallel101 import compute, span
"""
FORWARD = '''
def forward(plan, step):
    """Compute, which takes time."""
    mine = plan["seconds"][dist.get_rank()][step]
    with span("load"):  #load
        compute(mine[0])
    with span("forward"):  #forward
        compute(mine[1])
'''
EXCHANGE = '''
def exchange(plan, step):
    """Send to the next rank, and receive from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows, to = plan["rows"][step], plan["next"][step][rank]
    before = (rank - 1) % n
    got, works = torch.empty(rows[before]), []
    if plan["receives first"][rank]:
        dist.recv(got, before)  #first_recv
    if plan["sends"][step][rank]:
        works.append(dist.isend(torch.ones(rows[rank]), to))  #send
    if not plan["receives first"][rank]:
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
        lines: the lines of the calls, by what they do: "send", "recv", "bucket", …
        facts: what rules about wrong answers need.
        trace: the record of the run; if the run hangs, up to that moment.
        error: the DeadlockError of a run that hangs.
        logs: the values that each rank wrote down.
    """

    kind: str
    source: str
    world_size: int
    plan: dict[str, Any] = field(repr=False)
    answer: tuple[int, int, str] = field(repr=False)
    lines: dict[str, int] = field(repr=False)
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
        for events, ended in ((self.trace.events, True), (self.trace.unfinished, False)):
            for event in events:
                row = {
                    "call": event.name if event.kind == "span" else event.kind,
                    "line": int(event.where.rpartition(":")[2]),
                    "peer": event.peer,
                    "group": event.group.name,
                    "nbytes": event.nbytes,
                    "posted": event.posted,
                    "end": event.end if ended else None,
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
    plan, line, facts = MADE[kind](draw, n, steps, culprit, cause)
    ran = _run(source, plan, n)
    return Hunt(kind, source, n, plan, (culprit, lines[line], cause), lines, facts, *ran)


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
    if kind == "wrong":
        parts, main = [WATCH, AVERAGE, UPDATE], TRAIN
    else:
        # the exchange comes first: a rank that is ahead waits for the one before
        rest = CALLS[1:] if kind == "slow" else _shuffled(draw, CALLS[1:])
        parts, main = [FORWARD, EXCHANGE, REDUCE, REPORT], "".join([MAIN, CALLS[0], *rest])
    text = HEAD
    for part in [*_shuffled(draw, parts), main]:
        comments = _shuffled(draw, COMMENTS)[: draw.integer(0, 3)]
        text += "\n" + "".join(f"\n{comment}" for comment in comments) + part
    rows = [line.partition("  #") for line in text.splitlines()]
    lines = {mark: number for number, (_, _, mark) in enumerate(rows, start=1) if mark}
    return "".join(f"{code}\n" for code, _, _ in rows), lines


def _shuffled(draw: Draw, items: Sequence[str]) -> list[str]:
    rest = list(items)
    return [rest.pop(draw.integer(0, len(rest) - 1)) for _ in items]


def _table(steps: int, n: int, value: Any) -> list[list[Any]]:
    """Return a table [step][rank] in which every entry is `value`."""
    return [[value for _ in range(n)] for _ in range(steps)]


def _plan(draw: Draw, n: int, steps: int) -> dict[str, Any]:
    """Return the plan of a program without a fault: the actions of each rank in each step.

    The seconds of computing differ by a few percent.
    """
    return {
        "steps": steps,
        "seconds": [
            [[draw.integer(95, 105) / 100, draw.integer(190, 210) / 100] for _ in range(steps)]
            for _ in range(n)
        ],
        "rows": _table(steps, n, 1000 * draw.integer(5, 9)),
        "next": [[(rank + 1) % n for rank in range(n)] for _ in range(steps)],
        "sends": _table(steps, n, True),
        "receives first": [False] * n,
        "buckets": _table(steps, n, [0, 1]),
        "reports": _table(steps, n, True),
    }


def _hang(draw: Draw, n: int, steps: int, culprit: int, cause: str) -> Faulty:
    plan, step = _plan(draw, n, steps), draw.integer(1, steps - 1)
    fault: Any = False
    if cause == "missing call":
        table, line = draw.choice((("sends", "send"), ("reports", "loss")))
    elif cause == "different order":
        table, line, fault = "buckets", "bucket", [1, 0]
    else:
        table, line, fault = "next", "send", (culprit + draw.integer(2, n - 1)) % n
    plan[table][step][culprit] = fault
    return plan, line, {}


def _slow(draw: Draw, n: int, steps: int, culprit: int, cause: str) -> Faulty:
    plan, line = _plan(draw, n, steps), "send"
    once = (culprit + draw.integer(1, n - 1)) % n  # another rank, which is slow in one step only
    plan["seconds"][once][draw.integer(0, steps - 1)][draw.integer(0, 1)] *= 2.5
    if cause == "slow compute":
        which = draw.integer(0, 1)
        line = ("load", "forward")[which]
        for seconds in plan["seconds"][culprit]:
            seconds[which] *= 2.5
    elif cause == "large message":
        for rows in plan["rows"]:
            rows[culprit] *= 4
    else:
        plan["receives first"][culprit] = True
    return plan, line, {"once": once}


def _wrong(draw: Draw, n: int, steps: int, culprit: int, cause: str) -> Faulty:
    step, seed = draw.integer(1, steps - 2), draw.integer(0, 10**6)
    uses, updates = _table(steps, n, "mean"), _table(steps, n, True)
    if cause == "skipped update":
        updates[step][culprit] = False
    else:
        uses[step][culprit] = USES[cause]
    line = "weights" if cause == "skipped update" else "gradient"
    return {"steps": steps, "seed": seed, "uses": uses, "updates": updates}, line, {}


USES = {"not summed": "own", "divided twice": "mean again", "stale gradient": "before"}
MADE = {"hang": _hang, "slow": _slow, "wrong": _wrong}
