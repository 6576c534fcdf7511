import math

import pytest

from ingot.config.durations import BatchClock, Duration
from ingot.config.training import SchedulerConfig
from ingot.training.schedule import lr_multiplier

CLOCK = BatchClock(batch_samples=8, sample_tokens=32, epoch_samples=800, max_duration=Duration(100, "ba"))


def at(batch: int, **values: object) -> float:
    return lr_multiplier(SchedulerConfig.model_validate(values), CLOCK, batch)


@pytest.mark.parametrize(
    "name",
    [
        "constant_with_warmup",
        "linear_decay_with_warmup",
        "cosine_with_warmup",
        "exponential_decay_with_warmup",
        "inv_sqrt_with_warmup",
        "wsd",
    ],
)
@pytest.mark.parametrize("warmup", ["10ba", "80sp", "2560tok", "0.1ep", "0.1dur"])
def test_every_schedule_warms_up_from_zero_in_every_unit(name: str, warmup: str) -> None:
    assert [at(b, name=name, t_warmup=warmup) for b in (0, 1, 5)] == pytest.approx([0.0, 0.1, 0.5])
    assert at(10, name=name, t_warmup=warmup) == pytest.approx(1.0)


def test_cosine_is_composers() -> None:
    for batch in range(10, 101):
        expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (batch - 10) / 90))
        assert at(batch, name="cosine_with_warmup", t_warmup="10ba", alpha_f=0.1) == pytest.approx(expected)


def test_decay_ends_at_alpha_f_and_stays_there() -> None:
    for name in ("linear_decay_with_warmup", "cosine_with_warmup", "wsd"):
        values = {"name": name, "t_max": "60ba", "alpha_f": 0.2}
        assert [at(60, **values), at(99, **values)] == pytest.approx([0.2, 0.2])


def test_linear_is_half_way_in_the_middle() -> None:
    assert at(55, name="linear_decay_with_warmup", t_warmup="10ba", alpha_f=0.0) == pytest.approx(0.5)


def test_inverse_square_root_falls_to_its_root_after_t_scale() -> None:
    values = {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "alpha_f": 0.0}
    assert at(10 + 30, **values, t_scale="10ba") == pytest.approx(0.5)
    assert at(10 + 30, **values) == pytest.approx(0.5)  # t_scale defaults to t_warmup


@pytest.mark.parametrize(
    ("shape", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("exponential", math.sqrt(2) - 1)],
)
def test_wsd_is_stable_until_its_decay(shape: str, middle: float) -> None:
    values = {"name": "wsd", "t_warmup": "5ba", "t_decay": "20ba", "alpha_f": 0.0, "decay_shape": shape}
    assert [at(b, **values) for b in (5, 40, 80)] == [1.0, 1.0, 1.0]
    assert at(90, **values) == pytest.approx(middle)
    assert at(100, **values) == pytest.approx(0.0)


def test_a_decay_without_length_happens_at_its_end_and_not_before() -> None:
    for name in ("linear_decay_with_warmup", "cosine_with_warmup", "exponential_decay_with_warmup"):
        values = {"name": name, "t_warmup": "20ba", "t_max": "20ba", "alpha_f": 0.25}
        assert [at(b, **values) for b in (10, 20, 99)] == pytest.approx([0.5, 0.25, 0.25])
    without_decay = {"name": "wsd", "t_decay": "0ba", "alpha_f": 0.25}
    assert [at(b, **without_decay) for b in (0, 99, 100)] == pytest.approx([1.0, 1.0, 0.25])


def test_a_warmup_may_rise_from_above_zero() -> None:
    assert [at(b, t_warmup="10ba", warmup_start=0.2) for b in (0, 5, 10)] == pytest.approx([0.2, 0.6, 1.0])


def test_exponential_decay_is_a_power_of_alpha_f() -> None:
    values = {"name": "exponential_decay_with_warmup", "t_warmup": "20ba", "t_max": "60ba", "alpha_f": 0.25}
    assert [at(b, **values) for b in (20, 40, 60, 99)] == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_inverse_square_root_may_cool_down_at_the_end() -> None:
    values = {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "t_scale": "10ba", "alpha_f": 0.0}
    values |= {"t_cooldown": "60ba", "alpha_cooldown": 0.1}
    assert [at(b, **values) for b in (39, 40, 70, 100)] == pytest.approx([1 / math.sqrt(3.9), 0.5, 0.3, 0.1])


def test_a_warmup_floor_gives_the_first_step_a_rate() -> None:
    assert [at(b, t_warmup="10ba", warmup_floor=1) for b in (0, 1, 2)] == pytest.approx([0.1, 0.1, 0.2])


def test_the_rate_never_falls_below_its_floor() -> None:
    values = {"name": "linear_decay_with_warmup", "t_warmup": "10ba", "alpha_f": 0.0, "floor": 0.3}
    assert [at(b, **values) for b in (5, 55, 99)] == pytest.approx([0.5, 0.5, 0.3])
