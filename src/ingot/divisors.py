"""The divisors of a number."""

import math


def divisors(number: int) -> list[int]:
    """All divisors, ascending. Each one up to the square root comes with one above it."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
