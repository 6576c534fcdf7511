import tracemalloc

import numpy as np
import pytest

from ingot.data.loading.order import Order

SIZES = [1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 101, 997, 4095, 4096, 4097, 12_289, 20_000]


@pytest.mark.parametrize(("block", "window_blocks"), [(1, 1), (1, 7), (4, 2), (16, 3), (100, None), (4096, 2)])
def test_every_epoch_is_a_permutation(block: int, window_blocks: int | None) -> None:
    for n in SIZES:
        order = Order(n, 5, True, block, window_blocks)
        epochs = order.take(np.arange(3 * n)).reshape(3, n)
        assert (np.sort(epochs, axis=1) == np.arange(n)).all(), (n, block, window_blocks)


def test_the_id_at_a_position_does_not_depend_on_how_it_is_asked_for() -> None:
    order = Order(1000, 3, True, 64, 3)
    whole = order.take(np.arange(2500))
    assert [int(Order(1000, 3, True, 64, 3).take(np.array(p))) for p in range(900, 1100)] == whole[900:1100].tolist()
    scattered = np.random.default_rng(0).integers(0, 2500, (7, 30))
    assert (order.take(scattered) == whole[scattered]).all()


def test_each_epoch_and_seed_has_its_own_order() -> None:
    n = 5000
    first, second = Order(n, 1).take(np.arange(2 * n)).reshape(2, n)
    other = Order(n, 2).take(np.arange(n))
    for a, b in ((first, second), (first, other), (first, np.arange(n))):
        assert (a == b).mean() < 0.01


@pytest.mark.parametrize("n", [5, 64, 1000])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    seeds, positions = 4000, np.arange(min(n, 16))
    ids = np.stack([Order(n, seed).take(positions) for seed in range(seeds)])
    for p in positions.tolist():
        bins = min(n, 20)
        counts = np.bincount(ids[:, p] * bins // n, minlength=bins)
        sizes = np.bincount(np.arange(n) * bins // n, minlength=bins)
        expected = seeds * sizes / n
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < (bins - 1) + 6 * np.sqrt(2 * (bins - 1)), (p, chi_square)


def test_neighbors_in_the_order_are_not_neighbors_in_the_data() -> None:
    ids = Order(100_000, 9, True, 1000, 10).take(np.arange(100_000))
    within = ids[:10_000]  # one window of ten blocks
    assert len(np.unique(within // 1000)) == 10
    assert abs(np.corrcoef(within[:-1], within[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(within)) == 1).mean() < 0.002


def test_a_window_reads_only_its_own_blocks_and_says_which() -> None:
    for n, block, window_blocks in [(1000, 16, 5), (1003, 16, 5), (50, 64, 2), (128, 16, 100), (7, 1, 2)]:
        for shuffle in (True, False):
            order = Order(n, 4, shuffle, block, window_blocks)
            position = 0
            while position < 2 * n:
                spans, end = order.window_at(position)
                ids = np.concatenate([np.arange(a, b) for a, b in spans])
                assert sorted(ids) == sorted(order.take(np.arange(position, end)))
                assert order.window_at((position + end) // 2) == (spans, end)
                position = end
            assert position == 2 * n


def test_without_shuffling_samples_keep_their_stored_order() -> None:
    assert Order(10, 1, shuffle=False).take(np.arange(25)).tolist() == [*range(10), *range(10), *range(5)]


def test_the_middle_of_half_a_billion_samples_needs_no_index() -> None:
    tracemalloc.start()
    order = Order(500_000_000, 17, True, 16_384)
    ids = order.take(np.arange(250_000_000, 250_004_096))
    spans, _ = order.window_at(250_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids)) == 4096 and ids.max() < 500_000_000
    assert {i // 16_384 for i in ids.tolist()} <= {a // 16_384 for a, _ in spans}
    assert peak < 4 << 20


def test_the_order_is_the_same_in_every_version() -> None:
    """A change here would give every resumed run another order: it needs a new version of the loader's state."""
    assert Order(1000, 17, True, 64, 3).take(np.arange(8)).tolist() == GOLDEN
    assert Order(10**9, 17, True, 16_384).take(np.arange(3) + 5 * 10**8).tolist() == GOLDEN_LARGE


GOLDEN = [722, 753, 563, 562, 576, 590, 632, 631]
GOLDEN_LARGE = [480235761, 19467306, 19464370]
