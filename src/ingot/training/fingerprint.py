"""Short hashes of what all processes of a run must have in common."""

import hashlib
from pathlib import Path

from ingot.config.run import RunConfig


def config_hash(config: RunConfig) -> str:
    return hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest()


def code_hash() -> str:
    """A hash of this package's own source."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
