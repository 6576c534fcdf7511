"""The reference is complete: no verb, option, config key or metric without a description."""

import ast
import json
import re
from pathlib import Path

import reference_pages
from peer_pages import dialect_page, dialects, native_names

from ingot.config.base import known_keys
from ingot.config.run import RunConfig
from ingot.report.metric_names import METRICS

ROOT = Path(__file__).parents[2]
PREFIXES = [
    "time", "loss", "metrics", "icl", "l2_norm", "lr", "trainer", "throughput", "memory", "checkpoint", "system"
]  # fmt: skip
WRITERS = (
    "training/*.py",
    "report/system_metrics.py",
    "evaluation/*.py",
    "evaluation/tasks/*.py",
    "parallel/executors/device.py",
)


def test_every_verb_and_option_has_a_description() -> None:
    verbs = dict(reference_pages.commands())
    assert len(verbs) > 25
    assert not [name for name, command in verbs.items() if not (command.help or "").strip()]
    options = [
        f"{name} {parameter.name}"
        for name, command in verbs.items()
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and not (getattr(parameter, "help", "") or "").strip()
    ]
    assert not options


def test_every_config_key_has_a_description() -> None:
    fields = {key: field for key, field, _ in reference_pages.config_fields()}
    assert not [key for key, field in fields.items() if not (field.description or "").strip()]
    page = reference_pages.config_page()
    assert not [key for key in fields if f"| `{key}` |" not in page]
    known = {key for key in known_keys(RunConfig) if not any(k.startswith(f"{key}.") for k in known_keys(RunConfig))}
    assert known <= {re.sub(r"\.NAME\b.*", "", key) for key in fields} | set(fields)


def test_every_native_name_of_a_foreign_key_exists() -> None:
    assert set(native_names()) <= {key for key, _, _ in reference_pages.config_fields()} | set(known_keys(RunConfig))
    assert {dialect.name for dialect in dialects()} == {"foundry", "neox", "megatron"}


def test_the_page_of_a_stack_lists_every_key_with_what_it_becomes() -> None:
    for dialect in dialects():
        page = dialect_page(dialect)
        rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, flags=re.MULTILINE))
        assert rows.keys() == dialect.keys and "computed from this key" not in page


def metric_names_in_code() -> set[str]:
    """String constants that name a metric; the variable part of an f-string is a dot-free word."""
    found = set()
    for pattern in WRITERS:
        for path in (ROOT / "src" / "ingot").glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = node.value
                else:
                    continue
                if re.fullmatch(rf"({'|'.join(PREFIXES)})[-/][\w*/-]*[\w*]", text):
                    found.add(text)
    return found


def documented(pattern: str) -> bool:
    regex = re.compile(pattern.replace("*", r"[\w/]+"))
    return any(regex.fullmatch(name) for name in METRICS)


def test_every_metric_in_the_code_is_documented() -> None:
    names = metric_names_in_code()
    assert len(names) > 25
    assert not [name for name in names if not documented(name)]


def test_every_metric_of_a_recorded_run_is_documented() -> None:
    names = [re.escape(name) for name in METRICS]
    variable = {"NAME": r"[\w-]+", "LABEL": r"\w+", "N": r"\d+"}
    patterns = [re.sub(r"NAME|LABEL|N$", lambda m: variable[m[0]], name) for name in names]
    rows = [json.loads(line) for file in ROOT.glob("tests/v0_1/frozen/**/metrics.jsonl") for line in file.open()]
    seen = {key for row in rows for key in row if "/" in key}
    assert len(seen) > 20
    assert not [key for key in seen if not any(re.fullmatch(pattern, key) for pattern in patterns)]


def test_no_documented_metric_is_gone_from_the_code() -> None:
    patterns = [re.compile(name.replace("*", r"[\w/]+")) for name in metric_names_in_code()]
    derived = {name for name in METRICS if name.endswith(("/min", "/max"))}
    assert not [n for n in METRICS if n not in derived and not any(p.fullmatch(n) for p in patterns)]
