"""What tests share: a small real dataset, made by the project's own code, and ways to run the command."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run in as many processes as there are cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("INGOT_LAUNCH_DEFAULTS", os.path.join(os.path.dirname(__file__), "launch", "defaults.yaml"))

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from object_store import s3  # noqa: F401  an S3 server, for whoever names it
from warm_process import close_server, run_warm

from ingot.data.prepare.prepare import prepare
from ingot.data.tokenizer_training import train_tokenizer

SENTENCES = [
    f"{who} {what} {where}, {why}.\n"
    for who in ("The miller", "A young smith", "Nobody", "The old ferryman", "My aunt")
    for what in ("poured the molten brass", "counted every ingot twice", "kept the ledger", "sang")
    for where in ("by the river", "under the arch", "in the long hall", "before dawn")
    for why in ("because the day was short", "as the law demands", "and said nothing of it")
]
TINY = [
    "model.d_model=32", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=320", "max_seq_len=32",
    "global_train_batch_size=8", "max_duration=12ba", "precision=fp32", "scheduler.t_warmup=2ba", "optimizer.lr=0.01",
]  # fmt: skip


WORKER_GROUPS = {
    "slurm": ["launch/test_array", "launch/test_preflight", "launch/test_queue", "launch/test_slurm", "launch/test_transport"],
    "chaos": ["launch/test_chaos"],
    "object-store": ["data/test_cache", "checkpoint/test_remote"],
    "parity": ["parallel/test_parity"],
    "readme": ["test_readme"],
    "verbs": ["cli/test_verbs"],
    "gpu": ["train/test_gpu"],
}  # fmt: skip
"""Files whose tests share an expensive fixture, and therefore one worker. All other tests run in any worker."""
GROUP_OF = {f"tests/{file}.py": group for group, files in WORKER_GROUPS.items() for file in files}
assert all((Path(__file__).parent.parent / file).is_file() for file in GROUP_OF), "a file of WORKER_GROUPS is gone"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadgroup` by file, since xdist 3.8 loses the group marks with pytest 9.2."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUP_OF.get(nodeid.partition("::")[0], nodeid)

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, so that no worker runs on alone at the end."""
    first = ("test_readme.py", "test_parity.py")
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> Iterator[None]:
    """The server of `warm_process` ends with the tests that it served."""
    yield
    close_server()


Shared = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Fill a folder once for all workers of a test run: `shared(name, fill)` returns it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def get(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
        with (root / f"shared-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def data(shared: Shared) -> Path:
    """A prepared dataset with train and val splits and its tokenizer (320 tokens)."""
    return shared("data", make_data)


def make_data(root: Path) -> None:
    text = root / "text"
    text.mkdir()
    train_tokenizer(SENTENCES, 320, root / "tokenizer")
    for split, part in (("train", SENTENCES[10:]), ("val", SENTENCES[:10])):
        (text / f"{split}.txt").write_text("".join(part))
        prepare(text / f"{split}.txt", root, split=split, tokenizer=root / "tokenizer", concat_tokens=64)


@pytest.fixture
def warm_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads a `.pt` file has torch imported. `monkeypatch.undo()` brings the fresh one back."""
    from ingot.migrate.checkpoints import pt_reader

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return run_warm([word for word in command if word != "-P"], **options)

    monkeypatch.setattr(pt_reader, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def tiny(data: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run that takes a second: a two-layer model on the small dataset."""
    return [*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}"]


Ingot = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ingot_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ingot:
    """Like `ingot`, but in this process: for what a command prints before it starts to work, ten times as fast."""
    from ingot.cli.main import main

    def run(*arguments: str, check: bool = True, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["ingot", *arguments])
        monkeypatch.setattr("faulthandler.enable", lambda *_: None)  # pytest has its own
        capfd.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        out, errors = capfd.readouterr()
        assert not (check and code), (arguments, code, out, errors)
        return subprocess.CompletedProcess(list(arguments), int(str(code or 0)), out, errors)

    return run


@pytest.fixture
def ingot(tmp_path: Path) -> Ingot:
    """Run the `ingot` command as a user would, in an empty folder."""

    def run(*arguments: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ingot.cli.main", *arguments]
        options.setdefault("cwd", tmp_path)
        done = run_warm(command, capture_output=True, text=True, timeout=240, **options)
        if check and done.returncode:
            raise AssertionError(f"ingot {' '.join(arguments)} -> {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run
