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
VALUES = re.compile(r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}|sk-[\w-]{20,})")
"""Tokens that are known by their first letters: Hugging Face, GitHub, AWS and others."""
KEYS = re.compile(
    r"(?:^|[_-])(?:api_?key|(?:access|account|secret|private|auth)_?key|secret|passw(?:or)?d|passphrase|credentials?|"
    r"(?:access|api|auth|bearer|hf|hub|sas|session)_token)$|^token$",
    re.IGNORECASE,
)
"""Last parts of config keys whose value is a secret."""
SHORTEST = 6  # characters; a shorter value may be an ordinary word


def redact(text: str, env: Mapping[str, str] = os.environ) -> str:
    """The text with each secret of the environment replaced by its variable's name."""
    for name, value in env.items():
        if len(value) >= SHORTEST and value in text and NAMES.search(name):
            text = text.replace(value, f"<{name}>")
    return text


def why_secret(key: str, value: str) -> str | None:
    """What gives away that a dotted key's value is a secret; None if nothing does."""
    if IN_URL.search(value):
        return "the URL has a password or a signature in it"
    if VALUES.search(value) or (KEYS.search(key.rpartition(".")[2]) and len(value) >= SHORTEST):
        return "it looks like a secret"
    return None


def secret_in(values: Any) -> Iterator[str]:
    """The dotted keys of a config whose value is a URL with a password or a signature in it."""
    return (key for key, value in all_strings(values) if IN_URL.search(value))
