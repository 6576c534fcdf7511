"""A curve in characters: each has two columns and four rows of dots (Unicode's Braille patterns)."""

from collections.abc import Sequence

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then by row from the top
BLANK = 0x2800


def draw_curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Lines of text that show the values from left to right, with the highest and lowest at the left edge."""
    if not values:
        return []
    low, high = min(values), max(values)
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns, rows = 2 * (width - margin), 4 * height
    cells = [[BLANK] * (width - margin) for _ in range(height)]
    for column in range(columns):
        begin = column * len(values) // columns
        part = values[begin : max(begin + 1, (column + 1) * len(values) // columns)]
        tops = [round((high - value) / (high - low or 1.0) * (rows - 1)) for value in (min(part), max(part))]
        for row in range(tops[1], tops[0] + 1):
            cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    return [f"{label:>{margin - 1}} {''.join(map(chr, line))}" for label, line in zip(labels, cells, strict=True)]
