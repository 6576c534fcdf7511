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


@dataclass(frozen=True)
class CheckResult:
    """One line of the doctor's table. `state` is ok, warn (works without) or fail (must be mended)."""

    what: str
    state: str
    detail: str
    fix: str = ""


def examine(folder: str = ".") -> list[CheckResult]:
    """Look at everything a run depends on."""
    findings = [_python(), *_torch(), _disk(folder)]
    for extra, requirements in EXTRAS.items():
        modules = [requirement.partition(">")[0] for requirement in requirements]
        if missing := [module for module in modules if find_spec(module) is None]:
            findings.append(
                CheckResult(f"extra {extra}", "warn", f"{' and '.join(missing)} not installed", install(extra))
            )
        else:
            versions = ", ".join(f"{module} {metadata.version(module)}" for module in modules)
            findings.append(CheckResult(f"extra {extra}", "ok", versions))
    return findings


def _python() -> CheckResult:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return CheckResult("python", "ok" if good else "fail", version, "" if good else "use Python 3.11 or 3.12")


def _torch() -> list[CheckResult]:
    try:
        import torch
    except ImportError as error:
        return [CheckResult("torch", "fail", str(error), "pip install 'torch>=2.11,<2.14'")]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    good = TORCH_TESTED[0] <= version <= TORCH_TESTED[1]
    findings = [
        CheckResult(
            "torch", "ok" if good else "warn", torch.__version__, "" if good else "pip install 'torch>=2.11,<2.14'"
        )
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            findings.append(
                CheckResult(f"GPU {index}", "ok", f"{properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
            )
    elif shutil.which("nvidia-smi"):
        findings.append(
            CheckResult("GPU", "fail", "the driver is there, but this torch cannot use it",
                    "pip install --force-reinstall 'torch>=2.11,<2.14'")
        )  # fmt: skip
    else:
        threads = torch.get_num_threads()
        findings.append(
            CheckResult("GPU", "warn", f"none; runs use the CPU with {threads} threads", "use a machine with a GPU")
        )
    findings.append(_attention(torch.cuda.is_available()))
    findings.append(_compiler())
    return findings


def _attention(cuda: bool) -> CheckResult:
    """Run the kernels for real: a build of torch may have them and the machine may not."""
    import torch
    import torch.nn.functional as F

    device = "cuda" if cuda else "cpu"
    try:
        q = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        torch.optim.AdamW([q], fused=True).step()
    except RuntimeError as error:
        return CheckResult(
            "kernels", "fail", f"attention or fused AdamW: {str(error).splitlines()[0]}", "reinstall torch"
        )
    return CheckResult("kernels", "ok", f"attention forward and backward and fused AdamW ran on {device}")


def _compiler() -> CheckResult:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler:
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
            "disk", "fail", f"{path} cannot be written: {error.strerror}", "run from a folder that you own"
        )
    free = shutil.disk_usage(path).free / 1e9
    return CheckResult(
        "disk", "ok" if free > 5 else "warn", f"{free:.0f} GB free here", "" if free > 5 else "free some space"
    )
