"""torch's stores on the sim: a rank that waits for a key lets virtual time pass.

    rank 0: store.get("ready")          blocks as a recv does: the other ranks run
    rank 1: store.set("ready", "yes")   rank 0 goes on, at rank 1's time

All ranks are threads of one process, so torch's own stores would block every rank. Here each name
of a store (host and port, or a file) is one set of keys that the ranks share. A key that nobody
sets is a deadlock like any other, and reaching the program's own timeout raises torch's error.
Setting and reading a key takes no virtual time.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist
from torch.distributed import HashStore, rpc

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.record.signatures import own_limit
from parallel101.laboratory.sim.clock import VirtualRank
from parallel101.spans import recorder

TORCHS_DEFAULT = timedelta(seconds=300)  # of a store: no limit of the program's own
ALL_HERE = "parallel101/all workers"  # set when the last rank has joined a TCPStore


class Keys:
    """The keys of a store, and the ranks that wait for some of them."""

    def __init__(self) -> None:
        self.held = HashStore()  # torch's own
        self.waits: set[KeyWait] = set()
        self.joined = 0  # ranks that have made a TCPStore with these keys

    def changed(self) -> None:
        """Let the ranks whose keys are there now go on."""
        for wait in self.waits:
            if not wait.done and self.held.check(wait.keys):
                wait.done, world = True, wait.rank.world
                world.schedule(world.now, partial(world.wake, wait.rank))


class KeyWait:
    """The wait of a rank in a store's `method`, until all of `keys` are set."""

    def __init__(self, rank: VirtualRank, method: str, keys: list[str]):
        self.rank, self.method, self.keys = rank, method, keys
        self.done = False
        self.where = caller()

    def call(self) -> Call:
        others = tuple(r.number for r in self.rank.world.ranks if r.number != self.rank.number)
        return Call(self.rank.number, self.method, others, "store", 0, self.where)

    def missing(self) -> set[int]:
        return set() if self.done else set(self.call().peers)


class SimStore(dist.Store):
    """One rank's view of a store. `keys` are shared with the other ranks."""

    def __init__(self, keys: Keys | None = None, timeout: timedelta = TORCHS_DEFAULT):
        super().__init__()
        self.keys = keys or Keys()
        self.limit = timeout

    # ---- what waits ----

    def get(self, key: str) -> bytes:
        self._until(f"store.get({key!r})", [key], self.limit)
        return self.keys.held.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._until(f"store.multi_get({list(keys)})", keys, self.limit)
        return [self.keys.held.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._until(f"store.wait({list(keys)})", keys, timeout or self.limit)

    def check(self, keys: Sequence[str]) -> bool:
        rank, keys = self._rank("store.check"), list(keys)
        if not self.keys.held.check(keys):  # a loop that asks lets time pass
            rank.world.poll(rank, KeyWait(rank, "store.check", keys))
        return self.keys.held.check(keys)

    # ---- what doesn't ----

    def _change(self, method: str, *args: Any) -> Any:
        self._rank(f"store.{method}")
        result = getattr(self.keys.held, method)(*args)
        self.keys.changed()
        return result

    set = partialmethod(_change, "set")
    multi_set = partialmethod(_change, "multi_set")
    add = partialmethod(_change, "add")
    append = partialmethod(_change, "append")
    delete_key = partialmethod(_change, "delete_key")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        as_text = (v.decode() if isinstance(v, bytes) else v for v in (expected, desired))
        return self._change("compare_set", key, *as_text)

    def num_keys(self) -> int:
        return self.keys.held.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.limit = timeout

    def clone(self) -> SimStore:
        return SimStore(self.keys, self.limit)

    def has_extended_api(self) -> bool:
        return True

    # what a PrefixStore calls, in C++
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys
    multiGet, multiSet, hasExtendedApi = multi_get, multi_set, has_extended_api

    # ---- how ----

    def _rank(self, method: str) -> VirtualRank:
        """Return the rank that calls, once the world's time has reached its own."""
        rank = recorder()
        if not isinstance(rank, VirtualRank):
            raise RuntimeError(
                f"{method} on a thread that a rank started itself. On the sim backend, a rank can "
                "use a store only on its own thread"
            )
        rank.world.enter(rank)
        return rank

    def _until(self, method: str, keys: Sequence[str], timeout: timedelta) -> None:
        """Block the rank until these keys are set."""
        rank = self._rank(method)
        if self.keys.held.check(list(keys)):
            return
        seconds = None if timeout == TORCHS_DEFAULT else own_limit(timeout)
        wait = KeyWait(rank, method, list(keys))
        self.keys.waits.add(wait)
        try:
            rank.world.wait(rank, wait, seconds)
        except RuntimeError as error:
            raise dist.DistStoreError(
                f"wait timeout after {1000 * (seconds or 0):g}ms: {error}"
            ) from None
        finally:
            self.keys.waits.discard(wait)


@contextlib.contextmanager
def sim_stores() -> Iterator[None]:
    """Let the program use the stores of a run, which its ranks find by their names, inside."""
    named: dict[tuple, Keys] = defaultdict(Keys)
    ports = iter(range(1 << 16, 1 << 30))  # for port 0: real ones are smaller

    class SimTCPStore(SimStore):
        """A store in place of torch's TCPStore. A port is only a name here."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = TORCHS_DEFAULT,
            wait_for_workers: bool = True,
            **_: Any,
        ):
            self.host, self.port = host_name, port or next(ports)
            super().__init__(named[self.host, self.port], timeout)
            called = f"TCPStore(world_size={world_size})"
            self._rank(called)
            self.keys.joined += 1
            if self.keys.joined == world_size:
                self.set(ALL_HERE, "")
            if wait_for_workers and world_size:
                self._until(called, [ALL_HERE], timeout)

    class SimFileStore(SimStore):
        """A store in place of torch's FileStore, without the file."""

        def __init__(self, file_name: str, world_size: int = -1):
            self.path = os.path.abspath(file_name)
            super().__init__(named[self.path,])

    # each process has a HashStore for itself
    stores: dict[str, Any] = {
        "TCPStore": SimTCPStore,
        "FileStore": SimFileStore,
        "HashStore": SimStore,
    }
    no_rpc = torch_private.called_instead(rpc.init_rpc, lambda _: _refuse_rpc)
    with mock.patch.multiple(dist, **stores), no_rpc:
        yield


def _refuse_rpc(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "torch.distributed.rpc answers calls on threads of its own, and all ranks of the sim "
        "backend are one process in which one rank runs at a time. Use backend='gloo' "
        "(parallel101 run --backend gloo)"
    )
