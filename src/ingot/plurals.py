"""Numbers with their nouns."""


def count_of(number: int, noun: str, ending: str = "s") -> str:
    """`1 shard`, `1,200 shards`, `0 processes` (with the ending "es")."""
    return f"{number:,} {noun}{ending * (number != 1)}"
