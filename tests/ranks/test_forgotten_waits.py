"""A checked run reports each receive that nobody waits for, with rank and line, also if no rank
hangs; such a send is a warning.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import line_of

BACKENDS = ["gloo", "sim"]
KEPT: list[object] = []


def pass_right(x, wait_for=("send",)):
    rank, p = dist.get_rank(), dist.get_world_size()
    inbox = torch.zeros_like(x)
    received = dist.irecv(inbox, src=(rank - 1) % p)
    sent = dist.isend(x, dst=(rank + 1) % p)
    if "send" in wait_for:
        sent.wait()
    if "receive" in wait_for:
        received.wait()
    if "keep" in wait_for:
        KEPT.append(received)
    dist.barrier()  # on gloo, a send whose work is dropped may be cancelled before it has arrived
    return inbox


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept until the end"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receive_without_a_wait(backend, kept):
    wait_for = ("send", "keep") if kept else ("send",)
    options = {"world_size": 3, "backend": backend, "trace": True}
    with pytest.raises(p101.MisuseError, match="ranks 0–2 do not wait for receives:") as raised:
        p101.launch(pass_right, torch.ones(4), wait_for, **options)
    here = line_of(pass_right, "dist.irecv")
    for rank in range(3):
        assert f"rank {rank}: recv from rank {(rank - 1) % 3}, at {here}" in str(raised.value)
    assert "isend" not in str(raised.value) and raised.value.trace is not None


def test_on_sim_a_message_that_nobody_waited_for_has_not_arrived():
    def program():
        x = torch.full((2,), 5.0)
        works = [
            dist.isend(x, 1 - dist.get_rank()),
            dist.irecv(inbox := torch.zeros(2), 1 - dist.get_rank()),
        ]
        dist.barrier()
        before = inbox.tolist()
        for work in works:
            work.wait()
        return before, inbox.tolist()

    run = p101.launch(program, world_size=2, backend="sim")
    assert run.results == [([0.0, 0.0], [5.0, 5.0])] * 2


def test_a_receive_that_nobody_answers_is_reported_too():
    def program():
        return dist.get_rank() == 1 and bool(dist.irecv(torch.zeros(1)))

    told = "rank 1 does not wait for a receive:\n  rank 1: recv from any rank, at"
    with pytest.raises(p101.MisuseError, match=told):
        p101.launch(program, world_size=3, backend="sim")


def batch(x, got, peer):
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    )


def test_a_batch_without_a_wait_under_nccls_rules():
    def program():
        batch(torch.ones(2), torch.zeros(2), 1 - dist.get_rank())
        dist.barrier()

    with pytest.raises(p101.MisuseError, match="rank 1: recv from rank 0, at"):
        p101.launch(program, world_size=2, backend="sim", rules="nccl")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_rank_names_what_it_did_not_wait_for(backend):
    def program():
        pass_right(torch.ones(2))
        raise ValueError("wrong numbers")

    wrong = r"rank [01] raised ValueError: wrong numbers"
    with pytest.raises(p101.RankFailed, match=wrong) as raised:
        p101.launch(program, world_size=2, backend=backend, trace=True)
    assert "Before that, it received without a wait()" in str(raised.value)
    assert line_of(pass_right, "dist.irecv") in str(raised.value)


def test_a_send_without_a_wait_is_a_warning():
    with pytest.warns(RuntimeWarning, match="ranks 0–2 do not wait for sends:") as raised:
        run = p101.launch(pass_right, torch.ones(2), ("receive",), world_size=3, backend="sim")
    told = f"rank 1: send to rank 2, at {line_of(pass_right, 'dist.isend')}"
    assert told in str(raised[0].message)
    assert raised[0].filename == __file__ and run.results[0].tolist() == [1.0, 1.0]


class Pending:
    """Works that one object posts and another one waits for."""

    def __init__(self, works):
        self.works = works


def waited_for_in_every_way():
    """All of these count as a wait."""
    rank, got = dist.get_rank(), [torch.zeros(1) for _ in range(5)]
    x, peer = torch.ones(1), 1 - rank
    received, sent = dist.irecv(got[0], peer), dist.isend(x, peer)
    while dist.get_backend() == "sim" and not (received.is_completed() and sent.is_completed()):
        pass
    if dist.get_backend() == "gloo":  # whose messages are complete only in wait()
        received.wait(), sent.wait()
    for work in batch(x, got[1], peer):
        work.wait()
    pending = Pending([dist.irecv(got[2], peer), dist.isend(x, peer)])
    dist.barrier()
    for work in pending.works:
        work.wait()
    if rank:
        dist.send(x, peer), dist.recv(got[3])
    else:
        dist.recv(got[3]), dist.send(x, peer)
    if dist.get_backend() != "gloo":  # whose messages have no futures
        future, sent = dist.irecv(got[4], peer).get_future(), dist.isend(x, peer)
        future.wait(), sent.wait()
    return [int(t) for t in got]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_counts_as_a_wait(backend):
    run = p101.launch(waited_for_in_every_way, world_size=2, backend=backend, trace=True)
    assert run.results == [[1, 1, 1, 1, int(backend == "sim")]] * 2


def test_under_nccls_rules_a_wait_for_one_is_a_wait_for_the_batch():
    def program():
        x, got, peer = torch.ones(1), torch.zeros(1), 1 - dist.get_rank()
        batch(x, got, peer)[0].wait()
        batch(x, got, peer)[0].get_future()
        dist.barrier()
        return got.item()

    assert p101.launch(program, world_size=2, backend="sim", rules="nccl").results == [1.0, 1.0]
