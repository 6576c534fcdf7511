"""What the supervisor can read of a rank that no longer answers."""

import torch
import torch.distributed as dist

from ingot.training.runtime.heartbeat import FORMAT, collectives_joined, parse_beat


def test_a_beat_is_read_once_it_is_whole() -> None:
    whole = FORMAT.pack(1.0, 2.0, 0.5, 7, 0, 0.25, 3, 4)
    beat = parse_beat(whole)
    assert beat is not None and (beat.batch, beat.own_seconds, beat.collectives) == (7, 0.25, 4)
    assert parse_beat(whole[:-1]) is None and parse_beat(bytes(FORMAT.size)) is None


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
