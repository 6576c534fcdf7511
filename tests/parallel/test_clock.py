"""The time that a process waits for messages tells a slow process from those that wait for it."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from warm_process import spawn_warm

from ingot.parallel.executors.comm_timer import CommTimer


def _worker(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, clock = torch.ones(300, 300), CommTimer(torch.device("cpu"))
    dist.barrier()
    plain = dist.Work.wait
    clock.start()
    for _ in range(50 if rank == 1 else 1):  # rank 1 has fifty times the work
        x @ x
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))
    waited = clock.seconds
    clock.stop()
    assert dist.Work.wait is plain
    dist.all_reduce(torch.ones(4))
    assert clock.seconds == waited
    clock.start()
    assert clock.seconds == 0.0
    clock.stop()
    both = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(both, torch.tensor([waited]))
    assert both[0] > both[1], both
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads for gloo now and then abort a process that goes the long way


def test_the_process_with_less_work_waits_longer_and_the_clock_leaves_no_trace() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_warm(_worker, args=(store.port,), nprocs=2)
