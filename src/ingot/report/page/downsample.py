"""Fewer points of a curve that look the same: of each stretch the lowest and the highest value are kept."""

from collections.abc import Sequence

MOST_POINTS = 1600


def downsample(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points, first and last among them. A spike of one step stays visible."""
    if len(values) <= most:
        return list(steps), list(values)
    kept = {0, len(values) - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        begin, end = number * len(values) // stretches, (number + 1) * len(values) // stretches
        part = values[begin:end]
        kept.add(begin + part.index(min(part)))
        kept.add(begin + part.index(max(part)))
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]
