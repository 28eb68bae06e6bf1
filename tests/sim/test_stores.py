"""torch's stores on the sim: waiting for a key lets the other ranks run."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .programs import run, trace


def on_sim(program, n=3):
    return run(lambda rank: program(), n).results


def test_a_rank_waits_until_another_has_set_the_key():
    def program():
        store, rank = c10d._get_default_store(), dist.get_rank()
        within = dist.PrefixStore("mine", store)
        if rank == 0:
            return store.get("ready"), within.get("a"), within.multi_get(["a", "b"])
        if rank == 1:
            store.wait(["count"])
            store.set("ready", "yes")
            return within.add("n", 2), within.compare_set("c", "", "x"), within.check(["a", "b"])
        within.multi_set(["a", "b"], ["1", "2"])
        store.add("count", 1)
        return store.delete_key("count"), within.num_keys() > 0

    assert on_sim(program) == [(b"yes", b"1", [b"1", b"2"]), (2, b"x", True), (True, True)]


@pytest.mark.parametrize("store", ["TCPStore", "FileStore"])
def test_ranks_meet_in_a_store_of_their_own(store, tmp_path):
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = (
            dist.TCPStore("localhost", 29400, size, is_master=rank == 0)
            if store == "TCPStore"
            else dist.FileStore(f"{tmp_path}/keys", size)
        )
        mine.set(f"of {rank}", str(rank))
        while not mine.check([f"of {(rank + 1) % size}"]):
            pass  # asking in a loop lets time pass, too
        return mine.get(f"of {(rank + 1) % size}")

    real = dist.TCPStore, dist.FileStore, dist.HashStore
    assert on_sim(program) == [b"1", b"2", b"0"]
    assert (dist.TCPStore, dist.FileStore, dist.HashStore) == real


def test_a_message_and_a_key_wait_at_the_same_virtual_times():
    def program():
        store = c10d._get_default_store()
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), 1)
            store.set("sent", "yes")
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(1000), 0)
            dist.recv(torch.empty(1), 2)
        else:
            store.get("sent")
            dist.send(torch.ones(1), 1)

    messages = trace(run(lambda rank: program(), 3)).messages()
    first, second = sorted(messages, key=lambda message: message.start)
    assert second.start == first.end


def test_a_limit_of_the_programs_own_ends_in_torchs_error():
    def program():
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistStoreError, match="wait timeout after 2000ms"):
                c10d._get_default_store().wait(["never"], timedelta(seconds=2))

    on_sim(program, 2)
