"""What the supervisor can read of a rank that no longer answers."""

import torch
import torch.distributed as dist

from ingot.training.runtime.heartbeat import collectives_joined


def test_collectives_are_counted_for_all_ranks_and_over_all_groups() -> None:
    assert collectives_joined() == (0, 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        half = dist.new_group([0])
        before = collectives_joined()
        for group, count in ((None, 3), (half, 2)):
            for _ in range(count):
                dist.all_reduce(torch.zeros(1), group=group)
        after = collectives_joined()
        assert (after[0] - before[0], after[1] - before[1]) == (3, 5)
    finally:
        dist.destroy_process_group()
    assert collectives_joined() == (0, 0)
