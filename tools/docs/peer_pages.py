"""The key-by-key tables of LLM Foundry, Megatron-LM and GPT-NeoX, from the translation tables."""

import re
from collections import defaultdict
from typing import Any

from ingot.migrate.detect import DIALECTS
from ingot.migrate.translation import Dialect, show


def dialects() -> list[Dialect]:
    return list(DIALECTS.values()) if isinstance(DIALECTS, dict) else list(DIALECTS)


def native_names() -> dict[str, dict[str, list[str]]]:
    """For each native key, by stack: the keys there whose value is taken as it is, or by name."""
    names: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for dialect in dialects():
        pairs = list(dialect.table["renamed"].items())
        pairs += [(key, entry["native"]) for key, entry in dialect.table["choices"].items() if "native" in entry]
        for key, native in pairs:
            names[native].setdefault(dialect.title, []).append(key)
    return names


def pages() -> dict[str, str]:
    made = {f"docs/reference/peers/{dialect.name}.md": dialect_page(dialect) for dialect in dialects()}
    links = "\n".join(f"- [{dialect.title}]({dialect.name}.md)" for dialect in dialects())
    menu = "\n".join(dialect.name for dialect in dialects())
    made["docs/reference/peers/index.md"] = (
        "# Keys of other stacks\n\nWhat each key of LLM Foundry, Megatron-LM and GPT-NeoX becomes, from the translation "
        f"tables that `ingot config convert` uses.\n\n{links}\n\n```{{toctree}}\n:hidden:\n\n{menu}\n```\n"
    )
    return made


def dialect_page(dialect: Dialect) -> str:
    rows: dict[str, str] = {key: f"`{native}`" for key, native in dialect.table["renamed"].items()}
    for key, entry in dialect.table["choices"].items():
        names = ", ".join(f"`{name}`" for name in entry["names"])
        rows[key] = (f"`{entry['native']}`: " if "native" in entry else "") + f"one of {names}; others are refused"
    rows |= {key: _native(text) for part in ("computed", "trackers") for key, text in dialect.table[part].items()}
    for key in rows:
        rows[key] += _default(dialect, key)
    rows |= {key: f"not needed: {why}" for key, why in dialect.reasons.items()}
    for key, (accepted, why) in dialect.refusals.items():
        rows[key] = f"refused{_unless(accepted)}: {why}"
    lines = [f"# Keys of {dialect.title}", "", "A key stands for the keys below it too. A key that is not listed here is "
             "an error. `ingot config convert FILE` shows what the keys of your file become; where releases differ, "
             "`--peer-version` says whose defaults to fill in.", "", "| key | here |",
             "|---|---|"]  # fmt: skip
    lines += [
        f"| `{key}` | {' '.join(str(what).split()).replace('|', chr(92) + '|')} |" for key, what in sorted(rows.items())
    ]
    return "\n".join(lines) + "\n"


def _native(text: str) -> str:
    """Native keys as code; other text as it is."""
    return ", ".join(f"`{part}`" for part in text.split(", ")) if re.fullmatch(r"[\w.]+(, [\w.]+)*", text) else text


def _default(dialect: Dialect, key: str) -> str:
    changed = dialect.table["releases"]["changed"].get(key, {})
    default = dialect.table["defaults"].get(key)
    if changed:
        return "; default: " + ", ".join(f"{show(value)} from {since} on" for since, value in changed.items())
    return f"; default: {show(default)}" if default is not None else ""


def _unless(accepted: list[Any]) -> str:
    return f" unless it is {' or '.join(f'`{value}`' for value in accepted)}" if accepted else ""
