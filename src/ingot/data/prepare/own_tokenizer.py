"""`--tokenizer train:SIZE`: a tokenizer trained on the documents that are prepared, before they are.

It is saved in the dataset with a note of what it was trained on, so that the same command after a crash, or another
share of the work, takes it instead of training again.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.data.document_sample import SAMPLE_BYTES, DocumentSample
from ingot.data.prepare.holdout import Holdout
from ingot.data.prepare.options import TRAIN, PrepareOptions
from ingot.data.sources.input_files import SourceFile
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.data.tokenizer_training import check_vocabulary, describe_result, train_tokenizer
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import write_json

_NOTE = "trained.json"


def own_tokenizer(
    options: PrepareOptions,
    files: Sequence[SourceFile],
    folder: Path,
    threshold: Callable[[], int],
    say: Callable[[str], None],
) -> Tokenizer:
    """The tokenizer of these files: the one in the folder if it was trained on them, or a new one. Held-out documents
    are not learned from."""
    size = int((options.tokenizer or "").removeprefix(TRAIN))
    check_vocabulary(size)
    request = {
        "vocab_size": size, "documents": options.documents, "key": options.key, "sample": SAMPLE_BYTES,
        "val": [options.val_fraction, options.val_documents], "files": [[f.path, f.size] for f in files],
    }  # fmt: skip
    signature = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    lock_path = folder.parent / ".tokenizer.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several shares, the first trains
            if _signature(folder) == signature:
                return load_tokenizer(folder)
            _check_free(folder)
            holdout = Holdout(False, threshold()) if options.holds_out else None
            sample = DocumentSample(list(files), SAMPLE_BYTES, options, holdout, "training the tokenizer: reading")
            sample.announce(say)
            tokenizer = train_tokenizer(sample, size)
            say(describe_result(tokenizer, size, sample.documents, sample.bytes, folder))
            (folder / "tokenizer.json").unlink(missing_ok=True)  # so that the note never describes another one
            folder.mkdir(exist_ok=True)
            write_json(folder / _NOTE, {"signature": signature, **request, "files": len(files)})
            tokenizer.save(folder)
            return tokenizer
    except OSError as error:
        raise disk_error("write the tokenizer to", folder, error) from None
    finally:
        with contextlib.suppress(OSError):
            lock_path.unlink()
            folder.parent.rmdir()  # if nothing was written


def discard_tokenizer(folder: Path) -> None:
    """Remove the tokenizer of a preparation that came to nothing."""
    if _signature(folder) is not None and not _users(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _users(folder: Path) -> list[str]:
    """The splits next to a tokenizer."""
    return [path.parent.name for path in sorted(folder.parent.glob("*/*meta.json"))]


def _signature(folder: Path) -> str | None:
    """What the tokenizer there was trained on."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if (folder / "tokenizer.json").is_file():
            return str(json.loads((folder / _NOTE).read_text(encoding="utf-8"))["signature"])
    return None


def _check_free(folder: Path) -> None:
    """Refuse to replace a tokenizer that a dataset there uses, or that was not made here."""
    if not (folder / "tokenizer.json").exists():
        return
    if (used := _users(folder)) or _signature(folder) is None:
        reason = f"the split {used[0]!r} there uses it" if used else "`prepare` did not train it"
        raise DataError(
            f"{folder}: holds a tokenizer of other text or options, and {reason}; pass it as --tokenizer, choose "
            "another output, or remove an earlier result with --reprocess"
        )
