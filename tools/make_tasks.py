"""Writes the tasks that ship with ingot: small, ours, the same bytes each time.

They need no knowledge of the world, so that even a model trained for minutes moves away from chance on some of them.

    python tools/make_tasks.py
"""

import json
import random
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "src/ingot/evaluation/tasks/shipped"
WORDS = re.findall(r"\w+", """
iron copper silver gold tin lead zinc steel bronze brass coal fire water smoke sand clay mold bar rod wire
sheet plate ring chain nail hammer tongs anvil forge furnace crucible ladle bellows river valley bridge road
house door window table chair lamp book letter clock garden tree apple bread salt honey horse sheep goat crow
owl fish boat
""")  # fmt: skip
NAMES = re.findall(r"\w+", """
Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula
""")  # fmt: skip
PLACES = re.findall(r"\w+", """
Paris London Berlin Madrid Vienna Lisbon Athens Dublin Warsaw Prague Oslo Rome Cairo Lima Tokyo Delhi
""")  # fmt: skip


def arithmetic(draw: random.Random) -> dict[str, Any]:
    """Add or subtract numbers of one or two digits."""
    a, b = sorted((draw.randint(0, 50), draw.randint(0, 49)), reverse=True)
    sign, result = draw.choice([("+", a + b), ("-", a - b)])
    return {"context": f"{a} {sign} {b} =", "continuation": str(result)}


def copy(draw: random.Random) -> dict[str, Any]:
    """Repeat a list of words."""
    words = draw.sample(WORDS, draw.randint(3, 6))
    shown = draw.randint(1, 2)
    return {"context": f"{' '.join(words)} ; {' '.join(words[:shown])}", "continuation": " ".join(words[shown:])}


def capitalization(draw: random.Random) -> dict[str, Any]:
    """Which spelling of a sentence is right?"""
    name, place, thing = draw.choice(NAMES), draw.choice(PLACES), draw.choice(WORDS)
    end = draw.choice([".", f" with {draw.choice(NAMES)}."])
    right, wrong = place + end, place.lower() + end
    gold = draw.randint(0, 1)
    return {"query": f"{name} sent the {thing} to", "choices": [wrong, right] if gold else [right, wrong], "gold": gold}


def brackets(draw: random.Random) -> dict[str, Any]:
    """Close what is open, as in source code."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    opened = [draw.choice("([{") for _ in range(draw.randint(2, 4))]
    text = "".join(f"{bracket}{draw.choice('abcxyz')}" for bracket in opened)
    right = "".join(pairs[bracket] for bracket in reversed(opened))
    others: set[str] = set()
    while len(others) < 3:
        other = "".join(draw.choice(")]}") for _ in opened)
        if other != right:
            others.add(other)
    choices = sorted(others)
    gold = draw.randint(0, 3)
    choices.insert(gold, right)
    return {"query": text, "choices": choices, "gold": gold}


TASKS = {
    "arithmetic": ("language_modeling", 4, 200, arithmetic),
    "copy": ("language_modeling", 2, 100, copy),
    "capitalization": ("multiple_choice", 0, 100, capitalization),
    "brackets": ("multiple_choice", 3, 100, brackets),
}


def main() -> None:
    lines = ["# The tasks that ship with ingot; written by tools/make_tasks.py.", "icl_tasks:"]
    for name, (kind, shots, count, make) in TASKS.items():
        draw = random.Random(f"ingot {name}")
        records = {json.dumps(make(draw)): None for _ in range(count * 4)}  # different ones, in order
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{record}\n" for record in list(records)[:count]))
        lines += [f"- label: {name}", f"  dataset_uri: {name}.jsonl", f"  icl_task_type: {kind}"]
        lines += [f"  num_fewshot: [{shots}]", f"  description: {make.__doc__}"]
    (FOLDER / "tasks.yaml").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
