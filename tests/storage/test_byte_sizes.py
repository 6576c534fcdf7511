"""Sizes in bytes: one way to read them, one way to write them."""

import pytest

from ingot.storage.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100GB", 10**11), ("64GiB", 2**36), ("1.5mb", 1_500_000), ("123", 123), ("10 kb", 10_000), ("1GiB", 2**30),
        ("1.5g", 1_500_000_000), (" 2T ", 2 * 10**12), ("3KiB", 3072), ("7b", 7), (".5k", 500), ("1.gb", 10**9),
    ],
)  # fmt: skip
def test_sizes_are_read_in_decimal_and_binary_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "1.2.3gb", "-1GB", "1e9", "GB", "1 2", "5ib", "5i", ".", "1gbb", "١GB"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size such as 1\.5GB or 64GiB"):
        parse_bytes(text)


def test_sizes_are_written_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1_550_000, 2.5e9, 3e12)] == [
        "0 B", "999 B", "1.0 kB", "1.6 MB", "2.5 GB", "3.0 TB",
    ]  # fmt: skip
