"""Reads foreign `.pt` files in a separate process.

A `.pt` file is a pickle, and a pickle is a program. Here it meets only torch's weights-only unpickler, which runs none
of it, in a child with a bound on its memory; the parent sees what the child writes: safetensors and JSON. Classes of
the stacks whose files we read (an enum of Megatron in its args) are replaced by empty stand-ins, never imported, and so
is the `getattr` by which Python 3.11.2 looks up such an enum; a name from anywhere else is refused.
"""

import argparse
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.checkpoint.hf.folder import weight_files, write_shards
from ingot.checkpoint.safetensors_file import open_safetensors
from ingot.errors import CheckpointError, IngotError, disk_error

STACKS = (
    "megatron deepspeed apex transformer_engine composer llmfoundry examples streaming torchmetrics transformers "
    "omegaconf torch numpy argparse collections datetime enum pathlib types"
)
ENUM_MEMBER = "builtins.getattr"
SHARD_BYTES = 10**9
SPARE_BYTES = 4 * 2**30  # what a child may use in addition to the file that it reads
REFUSED = 3  # exit code of a child whose last line says why


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file that the child wrote; read when asked for."""

    name: str
    origin: Path  # the `.pt` file that it came from
    file: Any

    @property
    def shape(self) -> list[int]:
        return list(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def get(self) -> Tensor:
        return self.file.get_tensor(self.name)


@dataclass(frozen=True)
class Unpacked:
    """What one `.pt` file held: tensors by their dotted path, and everything else as JSON."""

    path: Path
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]


def unpack(files: list[Path], keep: list[str], folder: Path) -> list[Unpacked]:
    """Read `.pt` files in a child, one after another, into `folder`; only what is below the paths in `keep`."""
    job = {"files": [str(file) for file in files], "keep": keep, "folder": str(folder)}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", __name__]  # -P: nothing is imported from the working directory
    child = subprocess.run(command, input=json.dumps(job), env=env, capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip().splitlines()
        if child.returncode == REFUSED and said:
            raise CheckpointError(said[-1])
        how = f"signal {-child.returncode}" if child.returncode < 0 else (said or ["no reason given"])[-1]
        raise CheckpointError(f"{files[0].parent}: the process that reads its files was stopped ({how})")
    found = []
    for k, path in enumerate(files):
        tensors: dict[str, StoredTensor] = {}
        for shard in weight_files(folder / str(k)):
            file = open_safetensors(shard)
            tensors |= {name: StoredTensor(name, path, file) for name in file.keys()}  # noqa: SIM118 - not a mapping
        values = json.loads((folder / str(k) / "values.json").read_text("utf-8"))
        found.append(Unpacked(path, tensors, values if isinstance(values, dict) else {}))
    return found


class StandIn:
    """Replaces an object of a class that is neither installed nor needed."""

    def __init__(self, *args: object, **named: object):
        self.args = args

    def __setstate__(self, state: object) -> None:
        pass

    def __str__(self) -> str:
        return f"{type(self).__name__}{getattr(self, 'args', ())}"


def main() -> None:
    """The child: a job on standard input, folders 0, 1, ... as its answer."""
    job = json.load(sys.stdin)
    _bound_memory(max(Path(file).stat().st_size for file in job["files"]))
    try:
        for k, file in enumerate(job["files"]):
            _convert(Path(file), job["keep"], Path(job["folder"]) / str(k))
    except IngotError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(REFUSED)


def _bound_memory(file_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + 4 * file_bytes + SPARE_BYTES  # the file, a shard, and the copies that writing it makes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _convert(path: Path, keep: list[str], folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    try:
        values = json.dumps(_plain(_load(path), "", keep, tensors))
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise CheckpointError(f"{path}: {name} is not a plain tensor ({tensor.layout} on {tensor.device})")
        if sum(tensor.nbytes for tensor in tensors.values()) > 4 * path.stat().st_size:
            raise CheckpointError(f"{path} claims tensors far larger than itself; it is damaged or hostile")
        write_shards(iter(tensors.items()), folder, SHARD_BYTES)
        (folder / "values.json").write_text(values, encoding="utf-8")
    except OSError as error:
        raise disk_error("write", folder, error) from None
    except (MemoryError, RecursionError):
        raise CheckpointError(f"{path} needs more memory to read than a checkpoint of its size should") from None


def _load(path: Path) -> Any:
    """The content of a `.pt` file, with stand-ins for the objects in it."""
    again = "it is damaged or cut short: copy it again"
    mapped = zipfile.is_zipfile(path)  # since torch 1.6; older files are read whole
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if mapped else []
        foreign = sorted(name for name in names if name.split(".")[0] not in STACKS.split() and name != ENUM_MEMBER)
        if foreign:
            raise CheckpointError(f"{path} asks for {foreign[0]} when opened, as a pickle that runs code does; refused")
        allowed: list[Any] = [argparse.Namespace]
        for name in set(names) - {"argparse.Namespace"}:
            allowed.append((type(name.rpartition(".")[2], (StandIn,), {}), name))
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {named[1]}" if named else _first_line(error)
        raise CheckpointError(f"{path} is not a checkpoint of plain tensors and values ({reason}); refused") from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({_first_line(error)}); {again}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _plain(value: Any, name: str, keep: list[str], tensors: dict[str, Tensor]) -> Any:
    """A value as JSON can express it; tensors go to `tensors` under their dotted path."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return None
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            path = f"{name}.{key}" if name else str(key)
            if any(path.startswith(k) or k.startswith(f"{path}.") for k in keep):
                plain[str(key)] = _plain(item, path, keep, tensors)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{k}", keep, tensors) for k, item in enumerate(value)]
    return value if isinstance(value, str | int | float | None) else str(value)


if __name__ == "__main__":
    main()
