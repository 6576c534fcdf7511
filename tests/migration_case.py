"""A config or a script of another stack, and what it becomes here or why it is refused."""

from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.migrate import load_run_config, translate


def check_case(case: dict[str, Any], arguments: list[str]) -> None:
    """A case has `becomes` (dotted keys and their values) or `refused` (parts of the message), and perhaps `warns`."""
    if "refused" in case:
        with pytest.raises(ConfigError) as caught:
            load_run_config(arguments)
        assert all(words in str(caught.value) for words in case["refused"]), str(caught.value)
        return
    config = load_run_config(arguments).model_dump(mode="json")
    for key, value in case["becomes"].items():
        found: Any = config
        for part in key.split("."):
            found = found[part]
        assert found == value or str(found) == str(value), key
    if "warns" in case:
        warnings = "\n".join(translate(arguments).warnings)
        assert all(words in warnings for words in case["warns"]), warnings
        assert case["warns"] or not warnings
