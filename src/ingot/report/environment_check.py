"""What works on this machine, what is missing, and the command that fixes it."""

import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ingot.errors import EXTRAS, install

TORCH_TESTED = ((2, 11), (2, 13))
INSTALL_TORCH = "pip install 'torch>=2.11,<2.14'"
LOW_DISK_BYTES = 5e9


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. `state` is ok, warn (runs work without it) or fail (must be fixed)."""

    what: str
    state: str
    detail: str
    fix: str = ""


def check_environment(folder: str = ".") -> list[CheckResult]:
    """Check everything that a run depends on."""
    return [_python(), *_torch(), _disk(folder), *(_extra(name, packages) for name, packages in EXTRAS.items())]


def _extra(name: str, requirements: tuple[str, ...]) -> CheckResult:
    modules = [requirement.partition(">")[0] for requirement in requirements]
    if missing := [module for module in modules if find_spec(module) is None]:
        return CheckResult(f"extra {name}", "warn", f"{' and '.join(missing)} not installed", install(name))
    return CheckResult(f"extra {name}", "ok", ", ".join(f"{module} {metadata.version(module)}" for module in modules))


def _python() -> CheckResult:
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return CheckResult("python", "ok", platform.python_version())
    return CheckResult("python", "fail", platform.python_version(), "use Python 3.11, 3.12 or 3.13")


def _torch() -> list[CheckResult]:
    try:
        import torch
    except ImportError as error:
        return [CheckResult("torch", "fail", str(error), INSTALL_TORCH)]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tested = TORCH_TESTED[0] <= version <= TORCH_TESTED[1]
    results = [CheckResult("torch", "ok" if tested else "warn", torch.__version__, "" if tested else INSTALL_TORCH)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        detail = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        results.append(CheckResult(f"GPU {index}", "ok", detail))
    if not torch.cuda.is_available():
        results.append(_no_gpu(torch.get_num_threads()))
    return [*results, _attention(torch.cuda.is_available()), _compiler()]


def _no_gpu(threads: int) -> CheckResult:
    if shutil.which("nvidia-smi"):
        detail, fix = "the driver is installed, but this torch cannot use it", "pip install --force-reinstall"
        return CheckResult("GPU", "fail", detail, INSTALL_TORCH.replace("pip install", fix))
    return CheckResult("GPU", "warn", f"none; runs use the CPU with {threads} threads", "use a machine with a GPU")


def _attention(cuda: bool) -> CheckResult:
    """Run the kernels: a build of torch may contain kernels that this machine cannot run."""
    import torch
    import torch.nn.functional as F

    device = "cuda" if cuda else "cpu"
    try:
        q = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        torch.optim.AdamW([q], fused=True).step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return CheckResult("kernels", "fail", f"attention or fused AdamW: {reason}", "reinstall torch")
    return CheckResult("kernels", "ok", f"attention forward and backward and fused AdamW ran on {device}")


def _compiler() -> CheckResult:
    if compiler := shutil.which("g++") or shutil.which("clang++"):
        return CheckResult("torch.compile", "ok", f"C++ compiler {compiler}")
    return CheckResult("torch.compile", "warn", "no C++ compiler; compile=true fails on a CPU", "apt-get install g++")


def _disk(folder: str) -> CheckResult:
    path = Path(folder).resolve()
    try:
        probe = path / ".ingot-doctor"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return CheckResult(
            "disk", "fail", f"cannot write to {path}: {error.strerror}", "run from a folder that you own"
        )
    free = shutil.disk_usage(path).free
    enough = free > LOW_DISK_BYTES
    return CheckResult(
        "disk", "ok" if enough else "warn", f"{free / 1e9:.0f} GB free", "" if enough else "free some space"
    )
