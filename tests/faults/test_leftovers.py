"""What a run leaves behind, and what it must not (F22, F26, F38)."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from runs import Run, assert_as_if_nothing_happened, ranks, whole

from ingot.config.load import refuse_secret
from ingot.config.secrets import redact
from ingot.errors import ConfigError
from ingot.launch.agent.rank_group import TEMPORARY
from ingot.migrate.detect import load_run_config

__all__ = ["ranks", "whole"]


@pytest.mark.slow
def test_a_run_stopped_on_three_processes_continues_with_two_and_ends_with_one(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    run = Run(data, tmp_path / "run", kind="slow", rank=0, batch=1).start()
    run.wait_for_batch(6)
    run.process.send_signal(signal.SIGTERM)
    run.end(code=75)
    two = Run(data, run.folder, nproc=2, kind="slow", rank=0, batch=1).start()
    two.wait_for_batch(15)
    two.process.send_signal(signal.SIGTERM)
    two.end(code=75)
    Run(data, run.folder, nproc=1).run()
    assert_as_if_nothing_happened(run.folder, whole, close=1e-4)


def test_a_secret_of_the_environment_appears_in_no_file_and_no_argument(data: Path, tmp_path: Path) -> None:
    """Not even when an error message has it."""
    secret = "zq-Zq81mVt0-very-secret"
    run = Run(data, tmp_path / "run", f"data.train.path={tmp_path / secret}", nproc=1)
    run.env |= {"WANDB_API_KEY": secret}
    said = run.run(code=2)
    assert secret not in said and "<WANDB_API_KEY>" in said
    good = Run(data, tmp_path / "good", nproc=1, kind="slow", rank=0, batch=1)
    good.env |= {"WANDB_API_KEY": secret}
    good.start().wait_for_batch(3)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (good.process.pid, *good.ranks().values())]
    good.end()
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 10 and not any(secret.encode() in text for text in [*texts, *commands])


def test_a_secret_is_redacted_from_six_characters_on() -> None:
    """A shorter value is a word that texts contain by chance."""
    assert redact("a xxxxxx b", {"HF_TOKEN": "x" * 6}) == "a <HF_TOKEN> b"
    assert redact("a xxxxx b", {"HF_TOKEN": "x" * 5}) == "a xxxxx b"


@pytest.mark.parametrize(
    ("override", "is_secret"),
    [("loggers.wandb.api_key=abcdef0123", True), ("wandb_api_key=abcdef0123", True), ("a.password=hunter22", True),
     ("a.hf_token=abcdef", True), ("token=abcdef", True), (f"a.b=hf_{'x' * 20}", True), (f"a.b=AKIA{'X' * 16}", True),
     ("a.api_key=null", False), ("model.eos_token=<|endoftext|>", False), ("tokenizer=abcdef", False),
     ("eval.context_key=context", False), ("data.train.token_encoding_type=uint16", False)],
)  # fmt: skip
def test_a_secret_in_an_override_is_refused_without_repeating_it(override: str, is_secret: bool) -> None:
    key, _, value = override.partition("=")
    if not is_secret:
        return refuse_secret(override)
    with pytest.raises(ConfigError, match="it looks like a secret") as error:
        load_run_config(["mpt-125m", override])
    assert key in str(error.value) and value not in str(error.value)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/data", "https://host/data?sig=abcdef"])
def test_a_secret_in_a_url_of_the_config_is_refused(data: Path, tmp_path: Path, url: str) -> None:
    said = Run(data, tmp_path / "run", f"data.train.remote={url}", nproc=1).run(code=2)
    assert "has a password or a signature in it" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_killed_launcher_leaves_in_the_temporary_folder_is_cleared_by_the_next(
    data: Path, tmp_path: Path
) -> None:
    def left() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"))

    before = left()
    run = Run(data, tmp_path / "run", nproc=1, kind="slow", rank=0, batch=1).start()
    run.wait_for_batch(2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    assert len(left()) > len(before)
    Run(data, tmp_path / "run", nproc=1).run()
    assert not set(left()) - set(before)
