"""Sizes in bytes as people write them: 1.5GB is 1,500,000,000 bytes, 64MiB is 67,108,864."""

import re

UNITS = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """The number of bytes in 100GB, 64 MiB, 1.5g or 4096; units in either case, with or without their B."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmgt]?i?b?)", text.strip().lower())
    factors = {unit.lower(): factor for unit, factor in UNITS.items()}
    unit = f"{match[2].removesuffix('b')}b" if match else ""
    if match is None or unit not in factors:
        raise ValueError(f"{text[:60]!r} is not a size such as 1.5GB or 64GiB")
    return int(float(match[1]) * factors[unit])


def format_bytes(count: float) -> str:
    """A number of bytes to one decimal place, in the largest decimal unit that fits."""
    unit = next((u for u in ("TB", "GB", "MB", "kB") if abs(count) >= UNITS[u]), "B")
    return f"{count / UNITS[unit]:,.{0 if unit == 'B' else 1}f} {unit}"
