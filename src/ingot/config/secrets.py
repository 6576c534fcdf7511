"""Keeps secrets out of what is written: configs that contain one are refused, and the values of secret environment
variables are removed from texts. Credentials come from the environment (or the cloud's own files) and stay there.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.config.dotted_keys import all_strings

NAMES = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|ACCOUNT_KEY|CREDENTIAL|PRIVATE_KEY|SAS", re.IGNORECASE)
IN_URL = re.compile(
    r"(?P<user>\b[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@)|[?&](?P<key>sig|signature|token|key|secret|x-amz-[a-z-]+)=",
    re.IGNORECASE,
)
SHORTEST = 6  # characters; a shorter value may be an ordinary word


def redact(text: str, env: Mapping[str, str] = os.environ) -> str:
    """The text with each secret of the environment replaced by its variable's name."""
    for name, value in env.items():
        if len(value) >= SHORTEST and value in text and NAMES.search(name):
            text = text.replace(value, f"<{name}>")
    return text


def secret_in(values: Any) -> Iterator[str]:
    """The dotted keys of a config whose value is a URL with a password or a signature in it."""
    return (key for key, value in all_strings(values) if IN_URL.search(value))
