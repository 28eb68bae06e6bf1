"""A checked run names the mistakes that gloo accepts silently: calls that do not match, and
tensors changed too early.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101 import collectives
from parallel101.collectives.asynchronous import (
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from tests.collectives.cases import negative


def message(sent, received):
    """What two ranks do: rank 0 sends, and rank 1 receives."""
    return lambda r: dist.recv(received, 0) if r else dist.send(sent, 1)


MISUSES = {
    "different op": (
        lambda r: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if r else dist.ReduceOp.SUM),
        "different reductions",
    ),
    "different collective": (
        lambda r: dist.all_reduce(torch.ones(2)) if r else dist.broadcast(torch.ones(2), 0),
        "different operations",
    ),
    "different dtype": (
        lambda r: dist.all_reduce(torch.ones(2, dtype=torch.int32 if r else torch.float32)),
        "different dtypes",
    ),
    "different shape": (
        lambda r: dist.all_reduce(torch.ones((2, 3) if r else (3, 2))),
        "different shapes",
    ),
    "different root": (lambda r: dist.broadcast(torch.ones(2), r), "different roots"),
    "short send": (message(torch.ones(2), torch.ones(4)), "shorter than the receive"),
    "long send": (message(torch.ones(4), torch.ones(2)), "longer than the receive"),
    "message dtype": (
        message(torch.ones(2), torch.ones(2, dtype=torch.int32)),
        "different dtypes",
    ),
    "message shape": (message(torch.ones(6), torch.ones(2, 3)), "different shapes"),
    "strided collective": (lambda r: dist.all_reduce(torch.ones(4, 4)[:, r]), "strided"),
    "strided message": (message(torch.ones(4, 4)[:, 0], torch.ones(4)), "strided"),
    "two layouts in one call": (
        lambda r: dist.all_gather([torch.ones(2, 3)] * 2, torch.ones(3, 2).t()),
        "different orders in memory",
    ),
    "two layouts on two ranks": (
        lambda r: dist.all_reduce(torch.ones(2, 3) if r else torch.ones(3, 2).t()),
        r"dim order \(1, 0\) and contiguous",
    ),
    "sparse and dense": (
        lambda r: dist.all_reduce(torch.eye(2).to_sparse() if r else torch.eye(2)),
        "contiguous and sparse",
    ),
    "sparse, not a sum": (
        lambda r: dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX),
        "passes a sparse tensor",
    ),
    "sparse message": (
        lambda r: dist.isend(torch.eye(2).to_sparse(), 1 - r),
        "passes a sparse tensor",
    ),
    "negated collective": (
        lambda r: dist.all_reduce(negative(torch.ones(2)) if r else torch.ones(2)),
        "lazily conjugated or negated",
    ),
    "negated message": (
        message(negative(torch.ones(2)), torch.ones(2)),
        "lazily conjugated or negated",
    ),
}


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("name", list(MISUSES))
def test_a_checked_run_names_misuse(name, backend):
    call, message = MISUSES[name]
    program = lambda: call(dist.get_rank())  # noqa: E731
    with pytest.raises(p101.MisuseError, match=message) as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True)
    assert __file__ in str(raised.value)
    assert raised.value.rank in (0, 1)


UNEVEN = {  # on three ranks, of which rank 1 and rank 2 disagree
    "equal shares": lambda r: (torch.ones(6 if r == 2 else 3), torch.ones(3)),
    "splits": lambda r: (
        *[torch.ones(3)] * 2,
        *([1, 1, 1], [1, 0, 2] if r == 1 else [1, 1, 1]),
    ),
    "rows": lambda r: (
        *[torch.ones(6, 2)] * 2,
        *([2, 2, 2], [2, 1, 3] if r == 1 else [2, 2, 2]),
    ),
}


@pytest.mark.parametrize("case", list(UNEVEN))
def test_an_all_to_all_in_which_two_disagree(case):
    differs = r"rank \d gives rank \d \d+ bytes, and rank \d expects \d+\n"
    program = lambda: dist.all_to_all_single(*UNEVEN[case](dist.get_rank()))  # noqa: E731
    with pytest.raises(p101.MisuseError, match=differs) as raised:
        p101.launch(program, world_size=3, trace=True)
    assert raised.value.rank in (1, 2)
    assert __file__ in str(raised.value)


def permuted(call):
    """`call(x, like)` with tensors that lie in memory channels first and channels last: the
    same values, as nested lists.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.arange(24.0).reshape(2, 3, 2, 2).add(100 * rank).to(memory_format=layout)
        outputs = call(x, [torch.empty_like(x) for _ in range(n)])
        found.append([t.tolist() for t in outputs])
    return found


PERMUTED = {
    "all_reduce": lambda x, like: dist.all_reduce(x) or [x],
    "broadcast": lambda x, like: dist.broadcast(x, 1) or [x],
    "reduce": lambda x, like: dist.reduce(x, 0) or [x][dist.get_rank() :],
    "all_gather": lambda x, like: dist.all_gather(like, x) or like,
    "gather": lambda x, like: (
        dist.gather(x, None if dist.get_rank() else like) or like[2 * dist.get_rank() :]
    ),
    "scatter": lambda x, like: (
        dist.scatter(like[0], None if dist.get_rank() else [x, x + 1]) or like[:1]
    ),
    "reduce_scatter": lambda x, like: dist.reduce_scatter(like[0], [x, x + 1]) or like[:1],
    "all_to_all": lambda x, like: dist.all_to_all(like, [x, x + 1]) or like,
    "all_to_all_single": lambda x, like: dist.all_to_all_single(like[0], x) or like[:1],
}


def harmless():
    """What has been taken for misuse: dims of size 1, dense tensors with dims in another order
    on all ranks, sums of sparse tensors, an uneven all-to-all.
    """
    rank = dist.get_rank()
    one, total = torch.zeros(1), torch.ones(()) if rank else torch.ones(1)
    dist.recv(one, 0) if rank else dist.send(torch.tensor(3.0), 1)
    dist.all_reduce(total)
    uneven, splits = torch.empty(2 * rank + 1, 2), [rank, rank + 1]
    dist.all_to_all_single(uneven, torch.ones(2 * rank + 1, 2), splits, splits)
    assert uneven.tolist() == [[1.0, 1.0]] * (2 * rank + 1)
    both = {name: permuted(call) for name, call in PERMUTED.items()}
    sparse = torch.sparse_coo_tensor(
        [[0, rank + 1, rank + 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (4, 2)
    )
    work = dist.all_reduce(sparse, async_op=True)
    work.wait()
    rows = sparse._indices().tolist(), sparse._values().tolist()
    differ = [name for name, (first, last) in both.items() if first != last]
    return one.tolist() == [3.0 * rank], total.tolist(), differ, rows


@pytest.mark.parametrize(
    "where", [{}, {"trace": True}, {"backend": "sim"}], ids=["gloo", "recorded gloo", "sim"]
)
def test_what_is_no_misuse(where):
    for received, total, differ, rows in p101.launch(harmless, world_size=2, **where).results:
        assert received and total in (2.0, [2.0]) and differ == []
        assert rows == ([[0, 1, 2]], [[2.0, 4.0], [8.0, 10.0], [8.0, 10.0]])


def test_nccl_has_no_sums_of_sparse_tensors():
    program = lambda: dist.all_reduce(torch.eye(2).to_sparse())  # noqa: E731
    refused = "sparse tensor to all_reduce, and NCCL does not support that"
    with pytest.raises(p101.RankFailed, match=refused):
        p101.launch(program, world_size=2, backend="sim", rules="nccl")


def double(x: torch.Tensor, how: str) -> None:
    if how == "in place":
        x.mul_(2)
    else:  # torch does not count this as a change
        x.numpy()[:] *= 2


@pytest.mark.parametrize("how", ["in place", "by NumPy"])
@pytest.mark.parametrize(("backend", "count"), [("gloo", 4), ("gloo", 1 << 20), ("sim", 4)])
def test_a_tensor_changed_while_it_is_being_sent(backend, count, how):
    def program():
        x = torch.ones(count)
        if dist.get_rank() == 0:
            work = dist.isend(x, 1)
            double(x, how)
            work.wait()
        else:
            dist.recv(x, 0)

    with pytest.raises(p101.MisuseError, match="rank 0 changed a tensor") as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True)
    assert raised.value.rank == 0


def two_like(x):
    return [torch.empty_like(x) for _ in range(2)]


GIVEN = {  # collectives that read x and do not write it
    "all_gather": lambda x: dist.all_gather(two_like(x), x, async_op=True),
    "reduce_scatter": lambda x: dist.reduce_scatter(
        torch.empty_like(x), [x, torch.ones_like(x)], async_op=True
    ),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x, async_op=True),
    "gather": lambda x: dist.gather(x, None if dist.get_rank() else two_like(x), async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 1, async_op=True),
}


@pytest.mark.parametrize(("backend", "how"), [("gloo", "in place"), ("sim", "by NumPy")])
@pytest.mark.parametrize("name", list(GIVEN))
def test_a_tensor_changed_before_its_collective_has_ended(name, backend, how):
    def program():
        x = torch.ones(4)
        work = GIVEN[name](x)
        if dist.get_rank() == 1:
            double(x, how)
        work.wait()

    with pytest.raises(p101.MisuseError, match="rank 1 changed a tensor") as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True)
    assert raised.value.rank == 1 and name in str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_another_part_of_the_same_memory_may_change(backend):
    def program():
        whole = torch.arange(8.0)
        mine, theirs = whole.chunk(2)
        work = dist.isend(mine, 1 - dist.get_rank())
        inbox = torch.empty(4)
        dist.recv(inbox, 1 - dist.get_rank())
        theirs.add_(inbox)
        work.wait()
        return whole.tolist()

    run = p101.launch(program, world_size=2, backend=backend, trace=True)
    assert run.results == [[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]] * 2


INTS, FLOATS = torch.ones(6, dtype=torch.int32), torch.ones(6)
WIDE, TALL = torch.ones(2, 3), torch.ones(3, 2)
UNALIKE = {  # of parallel101's own collectives: what rank 1 says otherwise, and the word for it
    "op": lambda r: p101.all_reduce(FLOATS, "max" if r == 1 else "sum"),
    "dim": lambda r: p101.all_gather(WIDE, int(r == 1)),
    "src": lambda r: p101.broadcast(FLOATS, int(r == 1)),
    "algorithm": lambda r: p101.all_reduce(FLOATS, algorithm="direct" if r == 1 else "ring"),
    "dtype": lambda r: p101.reduce_scatter(INTS if r == 1 else FLOATS),
    "shape": lambda r: p101.all_reduce(TALL if r == 1 else WIDE),
    "group": lambda r: p101.all_gather(FLOATS, group=[0, 2, 1] if r == 1 else [0, 1, 2]),
    "shape in the other dims": lambda r: p101.all_gather(torch.ones(2, 2 + (r == 1))),
    "sizes": lambda r: p101.all_gather(torch.ones(2 + (r == 1))),
    "collectives: op": lambda r: collectives.all_reduce(FLOATS, "max" if r == 1 else "sum"),
    "collectives: dim": lambda r: collectives.scatter(torch.ones(3, 3), dim=int(r == 1)),
    "async: op": lambda r: all_reduce_async(FLOATS, "max" if r == 1 else "sum").wait(),
    "async: shape": lambda r: reduce_scatter_async(TALL if r == 1 else WIDE).wait(),
    "async: dtype": lambda r: all_gather_async(INTS if r == 1 else FLOATS).wait(),
    "replicated: algorithm": lambda r: p101.copy_to_group(
        FLOATS, algorithm="ring" if r == 1 else "direct"
    ),
}


@pytest.mark.parametrize(
    ("what", "backend"),
    [*((what, "sim") for what in UNALIKE), *((what, "gloo") for what in ("op", "shape", "group"))],
)
def test_arguments_that_differ_between_ranks_are_named(what, backend):
    differs = f"^{what.split(': ')[-1]} is not the same on all ranks: "
    program = lambda: UNALIKE[what](dist.get_rank())  # noqa: E731
    with pytest.raises(p101.MisuseError, match=differs) as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert raised.value.rank == 1 and __file__ in str(raised.value)


OTHERS = {  # what rank 2 calls instead of an all-gather; gloo would match the messages of the two
    "all_to_all": lambda: p101.all_to_all(torch.ones(3), algorithm="direct"),
    "all_gather_async": lambda: all_gather_async(torch.ones(1)).wait(),
    "barrier": lambda: p101.barrier(),
}


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("other", list(OTHERS))
def test_another_collective_is_named(other, backend):
    def program():
        if dist.get_rank() == 2:
            OTHERS[other]()
        else:
            p101.all_gather(torch.ones(1), algorithm="direct")

    differs = rf"^the ranks call different operations: all_gather and {other}\n"
    with pytest.raises(p101.MisuseError, match=differs) as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert raised.value.rank == 2 and __file__ in str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_message_of_one_collective_received_in_another_is_named(backend):
    def program():
        p101.all_reduce(torch.ones(1), group=[0, 2] if dist.get_rank() == 2 else [0, 1, 2])

    mixed = r"^a message of \w+ on ranks \[0.* is received in \w+ on ranks \[0"
    with pytest.raises(p101.MisuseError, match=mixed) as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert __file__ in str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_what_may_differ_between_ranks_is_no_misuse(backend):
    def program():
        rank, sizes = dist.get_rank(), [3, 0, 2]
        shard = torch.full((2, sizes[rank]), float(rank))
        # the same dim, counted from the end
        assert p101.all_gather(shard, -1 if rank == 1 else 1, sizes=sizes).shape == (2, 5)
        assert p101.gather(shard, 2, 1, sizes=sizes).numel() == (10 if rank == 2 else 0)
        whole, splits = shard.expand(2, sizes[rank]), [1, 1, 0]
        got = p101.all_to_all(whole, 0, 1, split_sizes=splits, concat_sizes=sizes)
        assert got.shape[0] == splits[rank]

    p101.launch(program, world_size=3, backend=backend, trace=True)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("odd", [0, 2])
def test_requires_grad_that_differs_is_named(backend, odd):
    """The ranks with requires_grad would wait in backward for ever for those without."""

    def program():
        x = torch.ones(2, requires_grad=dist.get_rank() != odd)
        p101.all_reduce(p101.all_gather(torch.ones(2)))  # the same on all ranks
        y = p101.all_reduce(x)
        if y.requires_grad:
            y.sum().backward()

    with pytest.raises(p101.MisuseError, match="requires_grad is not the same") as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert raised.value.rank == odd
    assert "all_reduce" in str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_result_that_some_ranks_leave_out_of_their_loss_is_named(backend):
    """The backward of one collective would exchange messages with that of another, and both
    gradients would be wrong.
    """

    def program():
        x = torch.ones(2, requires_grad=True)
        results = p101.all_reduce(x), p101.all_reduce(10 * x)
        results[dist.get_rank() == 1].sum().backward()

    differs = "'all_reduce, number 1' and 'all_reduce, number 2'\n"
    with pytest.raises(p101.MisuseError, match=differs) as raised:
        p101.launch(program, world_size=3, backend=backend, trace=True)
    assert raised.value.rank == 1 and str(raised.value).count("backward()") == 2


def test_threads_may_each_have_a_group_of_their_own():
    def program():
        groups, found = [dist.new_group([0, 1]) for _ in range(2)], []

        def reduce_20(group, op, sizes):
            for size in sizes:
                found.append(p101.all_reduce(torch.ones(size), op, group=group).sum().item())

        other = threading.Thread(target=reduce_20, args=(groups[1], "sum", range(1, 21)))
        other.start()
        reduce_20(groups[0], "max", [3] * 20)
        other.join()
        return sum(found)

    assert p101.launch(program, world_size=2, trace=True).results == [480.0, 480.0]


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_backward_that_sends_nothing_may_come_in_any_order(backend):
    def program():
        x = torch.ones(2, requires_grad=True)
        results = [
            p101.reduce_from_group(x),
            p101.gather_from_group(2 * x),
            p101.reduce_from_group(3 * x[:1]),
        ]
        for y in results[:: 1 if dist.get_rank() else -1]:
            y.sum().backward()
        return x.grad.tolist()

    run = p101.launch(program, world_size=2, backend=backend, trace=True)
    assert run.results == [[6.0, 3.0]] * 2


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_receives_from_anyone_and_from_one_may_take_turns(backend, world_size):
    def program():
        rank, go = dist.get_rank(), torch.zeros(1)
        if rank == 0:
            first, second = torch.zeros(8), torch.zeros(2)
            dist.recv(first)  # rank 1's: nobody else sends
            dist.send(go, 1)
            dist.recv(second, 1)
            return first.tolist() + second.tolist()
        if rank == 1:
            dist.send(torch.full((8,), 1.0), 0)
            dist.recv(go, 0)
            dist.send(torch.full((2,), 2.0), 0)

    run = p101.launch(program, world_size=world_size, backend=backend, trace="payload")
    assert run.results[0] == [1.0] * 8 + [2.0] * 2
    for m in run.trace.messages():
        assert m.send.payload == m.recv.payload and m.send.seq == m.recv.seq
