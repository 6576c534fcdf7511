import pytest

from ingot.config.durations import BatchClock, Duration


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [("4800ba", 4800, "ba"), ("2.5Btok", 2.5e9, "tok"), ("1ep", 1, "ep"), ("30min", 30, "min"), ("0.1dur", 0.1, "dur"),
     ("1e9tok", 1e9, "tok"), ("10_000sp", 10000, "sp"), ("375Mtok", 375e6, "tok"), (" 5 ba ", 5, "ba")],
)  # fmt: skip
def test_durations_are_a_number_a_multiplier_and_a_unit(text: str, value: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize("text", ["4800ba", "2500000000tok", "1ep", "30min", "0.1dur", "374999999tok"])
def test_a_duration_survives_being_written_and_read(text: str) -> None:
    assert Duration.parse(str(Duration.parse(text))) == Duration.parse(text)


@pytest.mark.parametrize("text", [12, "12", 1.5])
def test_a_number_without_unit_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match=f"{text}'? has no unit; write for example {text}ba"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["", "ba", "12 batches", "-3ba", "12baba", "1.2.3ba", "nanba"])
def test_nonsense_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(text)


def test_every_unit_of_progress_is_a_number_of_batches() -> None:
    clock = BatchClock(batch_samples=8, sample_tokens=32, epoch_samples=100, max_duration=Duration(50, "ba"))
    assert clock.batches(Duration(7, "ba")) == 7
    assert clock.batches(Duration(16, "sp")) == 2
    assert clock.batches(Duration(512, "tok")) == 2
    assert clock.batches(Duration(2, "ep")) == 25
    assert clock.batches(Duration(0.5, "dur")) == 25
    with pytest.raises(ValueError, match="wall-clock"):
        clock.batches(Duration(3, "min"))


def test_a_run_ends_with_the_batch_that_reaches_its_duration() -> None:
    assert BatchClock(8, 32, 100, Duration(1, "ep")).total_batches == 13  # 12.5 batches
    assert BatchClock(8, 32, 96, Duration(1, "ep")).total_batches == 12
    assert BatchClock(8, 32, 100, Duration(512, "tok")).total_batches == 2
