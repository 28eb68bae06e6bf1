"""Barrier: no rank leaves it before all ranks have entered.

Dissemination: each message also vouches for the ranks that its sender has heard from.

step 1   a message from the rank 1 to the left      2 ranks are known to have entered
step 2   a message from the rank 2 to the left      4
step 3   a message from the rank 4 to the left      8, and so on: ⌈lg p⌉ steps for any p
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.checks import compare
from parallel101.collectives.comm import Comm, backends_in, comm_of, wait_all
from parallel101.mesh import GroupLike, group_of


def dissemination(comm: Comm) -> None:
    """Exchange bytes with the ranks 1, 2, 4, … to the right and to the left: ⌈lg p⌉ steps."""
    token, inbox = torch.zeros(2, dtype=torch.uint8, device=comm.device).split(1)
    distance = 1
    while distance < comm.size:
        received = comm.irecv(inbox, source=(comm.rank - distance) % comm.size)
        sent = comm.isend(token, to=(comm.rank + distance) % comm.size)
        wait_all([received, sent])
        distance *= 2
    inbox.item()  # on a GPU a wait blocks the stream only; reading the byte blocks this rank


ALGORITHMS = {"dissemination": dissemination}


def barrier(*, group: GroupLike = None, algorithm: str = "auto") -> None:
    """Wait until every rank of the group has called it. An idle rank returns at once.

    Args:
        group: see `group_of`; None is all ranks.
        algorithm: "auto" or "dissemination".

    Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization" (1988).

    Example:
        >>> def program():
        ...     p101.compute(seconds=dist.get_rank())
        ...     with p101.span("waiting"):
        ...         p101.barrier()
        >>> at_once = p101.Network(latency=0.0, bandwidth=float("inf"))
        >>> run = p101.launch(program, world_size=3, backend="sim", network=at_once)
        >>> {e.rank: e.end - e.start for e in run.trace.spans()}
        {0: 2.0, 1: 1.0, 2: 0.0}
    """
    members = group_of(group)
    check_algorithm("barrier", algorithm, members, ALGORITHMS, {})
    if members.position is None:
        return
    # a device from which the group's backend can send
    device = torch.device("cpu")
    if members.size > 1 and "cpu" not in backends_in(
        dist.get_backend_config(members.process_group)
    ):
        device = torch.device("cuda", torch.cuda.current_device())
    comm = comm_of(members, device, "barrier")
    compare("barrier", members, algorithm=algorithm)
    choose("barrier", algorithm, ALGORITHMS, 0, comm.size)(comm)
