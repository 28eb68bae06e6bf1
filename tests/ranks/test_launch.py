"""launch runs any function on every rank, and returns its results by rank, on every backend."""

from __future__ import annotations

import os
import sys

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.ranks.processes import Rendezvous, preload


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_runs_the_function_in_one_group(backend, world_size):
    def program(factor, *, offset):
        x = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(x)
        return dist.get_rank() * factor + offset, x.item(), dist.get_backend()

    run = p101.launch(program, 10, offset=7, world_size=world_size, backend=backend)
    total = sum(range(world_size))
    assert run.results == [(10 * rank + 7, total, backend) for rank in range(world_size)]
    assert (run.world_size, run.backend) == (world_size, backend)


def addresses():
    """The ends of this process's connections; on other systems than Linux they aren't asked."""
    connections = psutil.Process().net_connections("inet") if sys.platform == "linux" else []
    return {end.ip for c in connections for end in (c.laddr, c.raddr) if end}


def test_what_a_rank_finds(tmp_path, monkeypatch):
    """For a connection to ::ffff:127.0.0.1, as TCPStore's, torch looks up a name that is in no
    /etc/hosts: the network is asked.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    names, before = ("FROM_THE_CALLER", "RANK", "WORLD_SIZE"), addresses()

    def program():
        dist.barrier()
        drawn = torch.rand(3).tolist()
        return (
            [*map(os.environ.get, names)],
            os.getcwd(),
            torch.get_num_threads(),
            drawn,
            addresses(),
        )

    own, *alike = zip(*p101.launch(program, world_size=2).results)
    assert list(own) == [["yes", str(rank), "2"] for rank in range(2)]
    assert all(first == second for first, second in alike), "torch's default seed is fixed"
    assert [found for found, _ in alike[:2]] == [str(tmp_path), 1]
    assert alike[-1][0] == ({"127.0.0.1"} if sys.platform == "linux" else set())
    assert addresses() <= before | {"127.0.0.1"}


def test_the_rendezvous_works_by_a_file_in_memory_and_by_a_temporary_one(monkeypatch):
    rendezvous = [Rendezvous()]
    monkeypatch.delattr(os, "memfd_create", raising=False)
    rendezvous.append(Rendezvous())
    for one in rendezvous:
        stores = [dist.FileStore(one.path) for _ in range(3)]
        stores[0].set("key", "value")
        assert [store.get("key") for store in stores] == [b"value"] * 3
        del stores
        one.close()
        assert not os.path.exists(one.path)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_functions_imported_from_random_modules_use_each_ranks_own_generators(world):
    preload(["numpy.random"])  # once for all ranks, as with the first optimizer
    from random import Random, random, seed, shuffle

    from torch import default_generator

    rand, own = np.random.rand, Random(3)

    def program():
        shuffle(deck := list(range(30)))
        first, same = (random(), float(rand()), tuple(deck)), []
        of_torch = lambda: torch.rand((), generator=default_generator)  # noqa: E731
        for number in (random, sys.modules["random"].random, of_torch):
            seed(dist.get_rank()), torch.manual_seed(dist.get_rank())
            dist.barrier()  # meanwhile the others seed theirs
            same.append(float(number()))
        return first, own.random(), same[0] == same[1], same[2]

    once, again = (p101.launch(program, world_size=3, backend=world).results for _ in range(2))
    first, copies, python, of_torch = zip(*once, strict=True)
    assert all(len(set(draws)) == 3 for draws in [of_torch, *zip(*first, strict=True)])
    assert copies == (Random(3).random(),) * 3, "a generator of the program's own is copied"
    assert all(python) and (once == again) == (world == "sim")


class Read:
    """Makes a file when a rank unpickles it as an argument of its program, later on the higher
    ranks.
    """

    def __init__(self, folder):
        self.folder = folder

    def __setstate__(self, state):
        self.__dict__.update(state)
        for _ in range(dist.get_rank() * 100):
            torch.rand(100, 100).sum()
        (self.folder / str(dist.get_rank())).touch()


def test_no_rank_begins_before_all_have_unpickled_the_program(tmp_path):
    program = lambda read: sorted(os.listdir(read.folder))  # noqa: E731
    run = p101.launch(program, Read(tmp_path), world_size=4, trace=True)
    assert run.results == [["0", "1", "2", "3"]] * 4
    assert run.trace.events == [], "the barrier before the program is not recorded"


SPELLINGS = """
import functools, torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from torch.distributed import destroy_process_group, init_process_group as init, group, new_group
from torch.distributed import P2POp, batch_isend_irecv, get_rank, get_world_size, irecv, isend

start = functools.partial(init, "gloo")

def program():
    from torch.distributed import init_process_group
    start()
    init_process_group("gloo", None, None, -1, get_rank())
    c10d.init_process_group(backend="gloo", world_size=get_world_size())
    x = torch.ones(1)
    pair = new_group([0, 1])
    dist.all_reduce(x, group=group.WORLD)
    box = torch.zeros(1)
    peer = 1 - get_rank()
    for work in batch_isend_irecv([P2POp(isend, x, peer, pair), P2POp(irecv, box, peer, pair)]):
        work.wait()
    destroy_process_group(pair)
    destroy_process_group()
    refused = []
    wrong = (init, "gloo", None, None, 7), (batch_isend_irecv, [1, 2]), (batch_isend_irecv, None)
    for call, *given in wrong:
        try:
            call(*given)
        except ValueError as error:
            refused.append(str(error))
    return box.item(), refused
"""


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_functions_imported_by_name_are_the_launchs_own(backend, tmp_path, monkeypatch):
    (tmp_path / "spelled_by_name.py").write_text(SPELLINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import spelled_by_name  # before the launch, and on each rank again

    for program in (spelled_by_name.program, lambda: __import__("spelled_by_name").program()):
        for received, refused in p101.launch(program, world_size=2, backend=backend).results:
            assert received == 2.0 and len(refused) == 3
            assert "init_process_group(world_size=7)" in refused[0] and "P2POp" in refused[1]
    del sys.modules["spelled_by_name"]


def test_spawned_ranks_do_the_same(monkeypatch, capsys):
    monkeypatch.setenv("PARALLEL101_START", "spawn")

    def program():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        print(x.item(), flush=True)
        dist.barrier()
        return os._exit(7) if dist.get_rank() == 1 else x

    with pytest.raises(p101.RankFailed) as failure:
        p101.launch(program, world_size=2)
    assert (failure.value.rank, failure.value.exitcode) == (1, 7)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] 3.0", "[rank 1] 3.0"]
