"""Twenty-three programs for two ranks that hang or fail, each as scripts for torchrun do.

    … faulty.py receive_cycle

The line that a report should name ends with `# here`. The script's own time limit is a minute, as
in many scripts.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

LIMIT = timedelta(seconds=60)


def receive_cycle(rank, x):
    dist.recv(x, 1 - rank)  # here
    dist.send(x, 1 - rank)


def send_cycle(rank, x):
    x = torch.ones(1_000_000)
    dist.send(x, 1 - rank)  # here
    dist.recv(x, 1 - rank)


def early_return(rank, x):
    if rank == 1:
        return
    dist.all_reduce(x)  # here


def other_order(rank, x):
    if rank == 1:
        dist.broadcast(x, 0)  # here
    dist.all_reduce(x)  # here
    if rank == 0:
        dist.broadcast(x, 0)


def barrier_on_rank_0_only(rank, x):
    if rank == 0:
        dist.barrier()  # here
    dist.all_reduce(x)  # here


def different_shapes(rank, x):
    dist.all_reduce(torch.ones(2 + rank))  # here


def different_dtypes(rank, x):
    dist.all_reduce(x.double() if rank == 1 else x)  # here


def different_roots(rank, x):
    dist.broadcast(x, src=rank)  # here
    dist.barrier()  # here


def different_tags(rank, x):
    if rank == 0:
        dist.send(x, 1, tag=1)  # here
    else:
        dist.recv(x, 0, tag=2)  # here


def longer_message(rank, x):
    if rank == 0:
        dist.send(torch.ones(8), 1)  # here
    else:
        dist.recv(torch.ones(4), 0)  # here
    dist.barrier()


def group_on_rank_0_only(rank, x):
    if rank == 0:
        dist.new_group([0, 1])  # here
    dist.all_reduce(x)  # here


def one_batch_fewer(rank, x):
    model = DDP(nn.Linear(4, 4))
    for _ in range(3 - rank):
        model(torch.ones(2, 4)).sum().backward()  # here
    dist.barrier()  # here


def unused_parameters(rank, x):
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return layers[1](layers[0](x)) if rank == 0 else layers[0](x)

    model = DDP(Sometimes())
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()  # here
        loss.backward()  # here


def checkpoint_on_rank_0_only(rank, x):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    if rank == 0:
        weight.full_tensor()  # here
    dist.barrier()  # here


def endless_loop(rank, x):
    while rank == 1:
        x += 1  # here
    dist.all_reduce(x)


def lock(rank, x):
    busy = threading.Lock()
    if rank == 1:
        busy.acquire()
        busy.acquire()  # here
    dist.all_reduce(x)


def queue_whose_worker_died(rank, x):
    if rank == 1:
        loaded = multiprocessing.Queue()
        worker = multiprocessing.Process(target=os._exit, args=(1,))
        worker.start()
        loaded.get()  # here
    dist.all_reduce(x)


class DyingLoader(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, k):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does if memory runs out


def data_loader_whose_worker_died(rank, x):
    if rank == 1:
        next(iter(DataLoader(DyingLoader(), num_workers=1)))  # here
    dist.all_reduce(x)


def full_disk(rank, x):
    if rank == 1:
        with open("/dev/full", "wb") as file:
            torch.save(torch.ones(100_000), file)  # here
    dist.all_reduce(x)


def error_on_rank_1(rank, x):
    if rank == 1:
        raise ValueError("a bad sample")  # here
    dist.all_reduce(x)


def killed(rank, x):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)  # here


def stopped(rank, x):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # here
    dist.all_reduce(x)  # here


def key_that_nobody_sets(rank, x):
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["never"], LIMIT)  # here
    dist.all_reduce(x)


# name → the ranks that a report should name. All of them take part in a cycle; otherwise the rank
# that is at fault, or the one that waits for a rank which has left.
FAULTS = {
    receive_cycle: (0, 1),
    send_cycle: (0, 1),
    early_return: (0, 1),
    other_order: (0, 1),
    barrier_on_rank_0_only: (0, 1),
    different_shapes: (0, 1),
    different_dtypes: (0, 1),
    different_roots: (0, 1),
    different_tags: (0, 1),
    longer_message: (0, 1),
    group_on_rank_0_only: (0, 1),
    one_batch_fewer: (0, 1),
    unused_parameters: (1,),
    checkpoint_on_rank_0_only: (0, 1),
    endless_loop: (1,),
    lock: (1,),
    queue_whose_worker_died: (1,),
    data_loader_whose_worker_died: (1,),
    full_disk: (1,),
    error_on_rank_1: (1,),
    killed: (1,),
    stopped: (1,),
    key_that_nobody_sets: (1,),
}


def main(name: str) -> None:
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.barrier()
    print(f"staged {name} at {time.time():.2f}", flush=True)
    {function.__name__: function for function in FAULTS}[name](dist.get_rank(), torch.ones(1))
    print(f"{name} has returned", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
