"""The works and futures that isend, irecv and async collectives return on the sim."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from parallel101.laboratory.bench.simulator_speed import round_the_ring
from parallel101.laboratory.sim.network import Network

from .programs import run, trace


@pytest.mark.parametrize("eager", [0, 1 << 20])
@pytest.mark.parametrize("polled", [False, True])
def test_a_finished_message_holds_no_tensor(eager, polled):
    def program(rank):
        sent, received = torch.ones(3), torch.zeros(3)
        works = [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
        held = [weakref.ref(sent), weakref.ref(received)]
        for work in works:
            while polled and not work.is_completed():
                pass
            work.wait()
        assert received.tolist() == [1.0] * 3
        del sent, received
        return [tensor() for tensor in held], [work.result() for work in works]

    assert run(program, 2, Network(eager=eager)).results == [([None, None], [[], []])] * 2


def test_a_tensor_in_flight_is_kept_alive():
    def program(rank):
        if rank == 0:
            works = [dist.isend(torch.full((n,), float(n)), 1) for n in (3, 1 << 19)]
            torch.zeros(3), torch.zeros(1 << 19)  # these would get the same memory
        else:
            works = [dist.irecv(torch.empty(n), 0) for n in (3, 1 << 19)]
        for work in works:
            work.wait()

    run(program, 2)


def test_the_result_of_a_future_is_the_tensor():
    def program(rank):
        x = torch.full((2,), float(rank))
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        return work.get_future().then(lambda future: future.value()[0] + 1).wait().tolist()

    assert run(program, 2).results == [[1.0, 1.0]] * 2


def summed(amount: float) -> torch.futures.Future:
    return dist.all_reduce(torch.full((2,), amount), async_op=True).get_future()


def set_by(future: torch.futures.Future) -> torch.futures.Future:
    """A future of the program's own, set by a callback of `future`."""
    own: torch.futures.Future = torch.futures.Future()
    future.add_done_callback(lambda done: own.set_result(done.value()[0]))
    return own


def polled_until_done(future: torch.futures.Future) -> torch.Tensor:
    while not future.done():
        pass
    return future.value()


FUTURES = {  # each waits for futures in another way, and returns the sum of 1 over two ranks
    "wait_all": lambda: torch.futures.wait_all([summed(2.0), summed(1.0)])[1][0],
    "collect_all": lambda: (
        torch.futures.collect_all([summed(2.0), summed(1.0)]).wait()[1].value()[0]
    ),
    "collect_all, polled": lambda: polled_until_done(
        torch.futures.collect_all([summed(2.0), summed(1.0)])
    )[1].value()[0],
    "own": lambda: set_by(summed(1.0)).wait(),
    "own, polled": lambda: polled_until_done(set_by(summed(1.0))),
    "own, then": lambda: set_by(summed(0.5)).then(lambda done: done.value() * 2).wait(),
    "own among others": lambda: torch.futures.wait_all([summed(2.0), set_by(summed(1.0))])[1],
    "in a callback": lambda: summed(2.0).then(lambda _: set_by(summed(1.0)).wait()).wait(),
    "set before": lambda: (summed(1.0).wait(), set_by(summed(1.0)).wait())[1],
}


@pytest.mark.parametrize("way", FUTURES)
def test_virtual_time_passes_however_a_program_waits_for_futures(way):
    assert (
        run(lambda rank: FUTURES[way]().tolist(), 2, Network(latency=1.0)).results
        == [[2.0, 2.0]] * 2
    )


def test_a_thread_of_the_program_may_set_a_future():
    def program(rank):
        future: torch.futures.Future = torch.futures.Future()
        thread = threading.Thread(target=future.set_result, args=(rank,))
        thread.start()
        return future.wait()

    assert run(program, 2).results == [0, 1]


def test_after_polling_a_send_the_program_may_change_the_tensor():
    def program(rank):
        x = torch.zeros(2)
        if rank == 1:
            return dist.recv(x, 0)
        work = dist.isend(x, 1)
        while not work.is_completed():
            pass
        x.fill_(1.0)
        return work.wait()

    assert run(program, 2).results == [True, 0]


def test_works_are_instances_of_torchs_work():
    def program(rank):
        x = torch.zeros(1)
        works = [dist.isend(x, rank), dist.irecv(torch.zeros(1), rank), dist.barrier(async_op=True)]
        assert all(isinstance(work, dist.Work) and work.wait() for work in works)
        return [(work.is_success(), work.exception()) for work in works]

    assert run(program, 2).results == [[(True, None)] * 3] * 2


def test_the_benchmark_counts_as_the_callers_code():
    events = trace(run(lambda rank: round_the_ring(1), 3)).events
    lines = {(event.kind, event.where) for event in events}
    assert sorted(kind for kind, _ in lines) == ["recv", "send"]
    files = {where.rpartition(":")[0] for _, where in lines}
    assert files == {round_the_ring.__code__.co_filename}


def test_a_trace_has_the_same_events_whenever_it_is_read():
    result = run(lambda rank: round_the_ring(2), 5)
    read, unread = trace(result), trace(result)
    events = read.events
    for other in (pickle.loads(pickle.dumps(unread)), copy.copy(unread), unread, read):
        assert other.events == events
    assert sorted(events, key=lambda e: (e.start, e.rank, e.seq)) == events
    assert len(events) == 2 * sum(unread.messages_sent)
