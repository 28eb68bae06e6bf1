"""Barrier: nobody goes on before all have arrived. Dissemination: hear from ranks that have heard from others.

step 1   hear from the rank 1 to my left      I know of 2 ranks
step 2   hear from the rank 2 to my left      I know of 4
step 3   hear from the rank 4 to my left      I know of 8: ⌈lg p⌉ steps, for any p
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel101.collectives.auto import check_algorithm, choose
from parallel101.collectives.comm import Comm, backends_in, comm_of, wait_all
from parallel101.mesh import Group, GroupLike, group_of


def dissemination(comm: Comm) -> None:
    """At distances 1, 2, 4, … one byte to the right, one from the left."""
    token, inbox = torch.zeros(2, dtype=torch.uint8, device=comm.device).split(1)
    distance = 1
    while distance < comm.size:
        received = comm.irecv(inbox, source=(comm.rank - distance) % comm.size)
        sent = comm.isend(token, to=(comm.rank + distance) % comm.size)
        wait_all([received, sent])
        distance *= 2
    inbox.item()  # on a GPU a wait holds the stream only; reading the byte holds this rank


ALGORITHMS = {"dissemination": dissemination}


def barrier(*, group: GroupLike = None, algorithm: str = "auto") -> None:
    """Wait until every rank of the group is here. An idle rank goes on at once.

    Args:
        group: see `group_of`.
        algorithm: "auto" or "dissemination".

    Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization" (1988).
    """
    check_algorithm("barrier", algorithm, ALGORITHMS)
    members = group_of(group)
    if members.position is None:
        return
    comm = comm_of(members, _device(members), "barrier")
    choose("barrier", algorithm, ALGORITHMS, 0, comm.size)(comm)


def _device(members: Group) -> torch.device:
    """Where the group's backend can send from."""
    on_cpu = members.size == 1 or "cpu" in backends_in(dist.get_backend_config(members.process_group))
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
