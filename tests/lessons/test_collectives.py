"""Lesson 01: each operation is predicted, watched, written by hand and counted, in this order.

The code written by hand is right on any number of ranks, and so are the answers to the exercises.
"""

from __future__ import annotations

import ast
import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.lessons.lesson import INSTALL, definitions, read

LESSON = definitions("01_collectives", "STEPS", "BYTES")
RANKS = [1, 2, 5, 8]
SAME = "the same messages as the package's"

# By function of the lesson: the package's operation and algorithm, and the cells that predict,
# show, write and count it. An all-gather is shown before it is predicted for more ranks.
CELLS = {
    "flat_broadcast": (
        "broadcast",
        "flat",
        ["flat-predict", "flat-broadcast-watch", "flat-broadcast", "flat-count"],
    ),
    "tree_broadcast": (
        "broadcast",
        "binomial",
        ["tree", "tree-watch", "tree-broadcast", "tree-count"],
    ),
    "scatter": (
        "scatter",
        "flat",
        ["scatter-predict", "scatter-run", "scatter-code", "scatter-count"],
    ),
    "gather": ("gather", "flat", ["gather", "gather-run", "gather-code", "gather-count"]),
    "tree_reduce": ("reduce", "binomial", ["reduce", "reduce-watch", "reduce-run", "reduce-count"]),
    "ring_all_gather": (
        "all_gather",
        "ring",
        ["all-gather-predict", "all-gather-watch", "all-gather-code", "all-gather-count"],
    ),
    "ring_reduce_scatter": (
        "reduce_scatter",
        "ring",
        ["reduce-scatter", "reduce-scatter-run", "reduce-scatter-code", "reduce-scatter-count"],
    ),
    "reduce_broadcast": (
        "all_reduce",
        "reduce_broadcast",
        ["all-reduce-naive", "hot-root", "naive-code", "naive-count"],
    ),
    "ring_all_reduce": (
        "all_reduce",
        "ring",
        ["ring-all-reduce-predict", "ring-all-reduce-run", "ring-all-reduce-code", "ring-count"],
    ),
    "all_to_all": (
        "all_to_all",
        "pairwise",
        ["all-to-all-predict", "all-to-all-run", "all-to-all-code", "all-to-all-count"],
    ),
    "barrier": ("barrier", "", ["barrier", "barrier-watch", "barrier-run", "barrier-count"]),
}


@pytest.mark.parametrize("name", CELLS)
def test_each_operation_is_predicted_watched_and_written_before_it_is_counted(name):
    operation, algorithm, ids = CELLS[name]
    cells = read("01_collectives").cells
    order = [cell.id for cell in cells]
    predict, watch, code, counted = (order.index(i) for i in ids)
    assert watch < code < counted and predict < code
    assert (predict < watch) == (name != "ring_all_gather")
    assert "> **Predict.**" in cells[predict].source
    call = f'p101.{operation}(x, algorithm="{algorithm}")' if algorithm else f"p101.{operation}()"
    shown = cells[watch].source
    assert call in shown and shown.endswith("seen.animate()")
    assert f"def {name}(" in cells[code].source
    last = cells[counted].source
    packaged = call.removeprefix("p101.").replace("(x, ", ", ").removesuffix("()")
    assert re.search(rf"count\([^)]*\b{name}\b", last)
    assert re.search(rf"same_messages\([^)]*\b{name}\b.*p101.{re.escape(packaged)}", last)
    assert "beside(" in last
    for cell in cells[: min(predict, watch)]:  # nothing of it is run, drawn or written before
        assert cell.cell_type == "markdown" or not (
            call in cell.source or re.search(rf"(?<!\.)\b{name}\b", cell.source)
        ), cell.id


def test_every_prediction_that_is_written_down_is_answered_before_the_next_one():
    sources = [cell.source for cell in read("01_collectives").cells if cell.cell_type == "code"]
    turns = [turn for s in sources for turn in re.findall(r"\w+_guess = {|you=\w+_guess", s)]
    names = ["flat_guess", "all_gather_guess", "ring_guess"]
    assert turns == [turn for name in names for turn in (f"{name} = {{", f"you={name}")]
    for guess in (s for s in sources if re.match(r"\w+_guess = ", s)):
        assert set(ast.literal_eval(guess.partition(" = ")[2]).values()) == {"?"}


@pytest.mark.parametrize("counted", [ids[-1] for _, _, ids in CELLS.values()])
def test_a_check_says_the_same_after_later_cells_have_run(counted):
    """It reads no name that several cells assign, such as that of the last run watched."""
    cells = [
        cell
        for cell in read("01_collectives").cells
        if cell.cell_type == "code" and cell.id != INSTALL
    ]
    assigned = [
        {target.id for target in ast.walk(ast.parse(cell.source)) if is_stored(target)}
        for cell in cells
    ]
    (check,) = (cell for cell in cells if cell.id == counted)
    read_here = {node.id for node in ast.walk(ast.parse(check.source)) if is_loaded(node)}
    assert [name for name in read_here if sum(name in names for names in assigned) > 1] == []


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_loaded(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def test_numbers_are_shown_beside_each_other(capsys):
    LESSON["beside"](you={"steps": "?", "bytes": 7168}, run={"steps": 14, "bytes": 7168})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["you", "run"],
        ["steps", "?", "14"],
        ["bytes", "7,168", "7,168"],
    ]


def test_same_messages_says_if_receivers_or_numbers_differ():
    flat = partial(p101.broadcast, algorithm="flat")
    assert LESSON["same_messages"](LESSON["flat_broadcast"], flat) == SAME
    assert LESSON["same_messages"](LESSON["tree_broadcast"], flat) != SAME  # other receivers
    # other numbers
    assert LESSON["same_messages"](lambda x: LESSON["flat_broadcast"](x + 1), flat) != SAME


def results(fn, p, numbers):
    """What fn returns on each rank, where rank r's array is 100r, 100r + 1, …"""

    def program():
        return fn(torch.arange(float(numbers)) + 100 * dist.get_rank())

    return p101.launch(program, world_size=p, backend="sim").results


def arrays(p, numbers):
    return [torch.arange(float(numbers)) + 100 * r for r in range(p)]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), (found, expected)


@pytest.mark.parametrize("p", RANKS)
def test_the_code_by_hand_is_right(p):
    n = 2 * p
    x = arrays(p, n)
    total = sum(x)
    expected = {
        "flat_broadcast": [x[0]] * p,
        "tree_broadcast": [x[0]] * p,
        "scatter": x[0].chunk(p),
        "gather": [torch.cat(x)] + [None] * (p - 1),
        "tree_reduce": [total] + [None] * (p - 1),
        "ring_all_gather": [torch.cat(x)] * p,
        "ring_reduce_scatter": total.chunk(p),
        "reduce_broadcast": [total] * p,
        "ring_all_reduce": [total] * p,
        "all_to_all": [torch.cat([a.chunk(p)[r] for a in x]) for r in range(p)],
    }
    found = results(lambda x: [LESSON[name](x.clone()) for name in expected], p, n)
    for number, name in enumerate(expected):
        same([of_rank[number] for of_rank in found], expected[name])


ADDS_OR_GATHERS = [
    "tree_reduce",
    "ring_all_gather",
    "ring_reduce_scatter",
    "ring_all_reduce",
    "all_to_all",
]


def test_functions_that_add_or_gather_do_not_change_their_input():
    def program(x):
        before = x.clone()
        return [name for name in ADDS_OR_GATHERS if LESSON[name](x) is x or not x.equal(before)]

    assert results(program, 4, 8) == [[]] * 4


@pytest.mark.parametrize("p", RANKS)
def test_the_barrier_takes_log2_p_steps(p):
    assert LESSON["count"](lambda x: LESSON["barrier"](), p)["steps"] == math.ceil(math.log2(p))


def test_the_ring_with_the_bug_is_wrong_on_every_rank():
    assert all(not torch.equal(a, sum(arrays(4, 8))) for a in results(LESSON["my_ring"], 4, 8))


def test_the_check_of_the_mended_ring_knows_it_from_the_broken_one(capsys):
    cells = {cell.id: cell.source for cell in read("01_collectives").cells}
    before, last_add, after = cells["bug-code"].rpartition("add_")
    assert last_add
    for code, says in ((cells["bug-code"], "not right yet:"), (before + "copy_" + after, "right:")):
        names = dict(LESSON)
        exec(code, names)
        exec(cells["bug-numbers"], names)
        assert capsys.readouterr().out.startswith(says)


def tree_from(x, root):
    rank, p = (dist.get_rank() - root) % dist.get_world_size(), dist.get_world_size()
    distance = 2 ** (p - 1).bit_length() // 2
    while distance > 0:
        if rank % (2 * distance) == 0 and rank + distance < p:
            dist.send(x, dst=(rank + distance + root) % p)
        elif rank % (2 * distance) == distance:
            dist.recv(x, src=(rank - distance + root) % p)
        distance //= 2
    return x


def test_a_tree_from_any_root():
    for root in (0, 2, 4):
        same(results(partial(tree_from, root=root), 5, 3), [arrays(5, 3)[root]] * 5)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (tree_from, "right:"),
        (lambda x, root: LESSON["tree_broadcast"](x), "not right yet:"),
        (lambda x, root: x, "not right yet:"),
    ],
    ids=["right", "from rank 0", "nothing sent"],
)
def test_the_check_of_a_broadcast_from_any_root_knows_the_answer(answer, says, capsys):
    (check,) = (cell.source for cell in read("01_collectives").cells if cell.id == "root-check")
    exec(check, LESSON | {"broadcast_from": answer})
    assert capsys.readouterr().out.startswith(says)


def test_exercise_1_ten_numbers_on_four_ranks():
    with pytest.raises(p101.MisuseError, match="shorter than the receive"):
        p101.watch(LESSON["ring_all_reduce"], world_size=4, numel=10)
    assert [len(c) for c in torch.ones(10).chunk(4)] == [3, 3, 3, 1]
    assert list(p101.split_sizes(10, 4)) == [3, 3, 2, 2]


def test_exercise_2_the_mean_is_divided_between_the_halves():
    def mean(x):
        return LESSON["ring_all_gather"](LESSON["ring_reduce_scatter"](x) / dist.get_world_size())

    same(results(mean, 4, 8), [sum(arrays(4, 8)) / 4] * 4)
