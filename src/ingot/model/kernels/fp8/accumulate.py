"""An 8-bit matrix product that is added to an fp32 tensor while it is made, by the library behind torch's `_scaled_mm`.

The gradient of a weight is summed over the microbatches of a step: total += dy^T @ x. `_scaled_mm` cannot add. With it,
the product goes to memory in fp32, and another kernel reads it and the total and writes their sum:

    _scaled_mm and add_           16 bytes of memory traffic per weight, half of them while the tensor cores wait
    cuBLASLt with beta = 1        8 bytes: only the total is read and written, while the tensor cores are busy

So this calls cuBLASLt, which torch has loaded, through ctypes: as TransformerEngine does, but without compiling
anything. Descriptors and the algorithm are found once per shape. A call sets the addresses of the two scales and
launches, which takes the host less time than the two calls above.

cuBLASLt counts by columns: to it, total [n, m] is a matrix [m, n], and the product x^T @ dy.
"""

import ctypes
import threading
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# values of cublasLt.h and library_types.h, which are part of the library's binary interface
FP32, TYPES = 0, {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_FP32, TRANSPOSED, MAX_WORKSPACE_BYTES = 68, 1, 1
TRANSPOSE_A, A_SCALE, B_SCALE, FAST_ACCUMULATION = 3, 17, 18, 25  # attributes of a product
WORKSPACE = 32 << 20  # what NVIDIA recommends for Hopper


class _Heuristic(ctypes.Structure):
    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]  # fmt: skip


@dataclass(frozen=True)
class _Product:
    """What is the same in all products of a shape."""

    description: c_void_p
    a: c_void_p
    b: c_void_p
    total: c_void_p
    heuristic: _Heuristic


_lock = threading.Lock()  # the addresses of the scales are part of the description
_ONE = c_float(1.0)


def add_product(total: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """total [n, m] += a [n, k] times b [m, k] transposed, both in 8 bits. False if the library has no way to do it,
    and nothing was done."""
    n, k = a.shape
    product = _product(total.device, a.dtype, b.dtype, n, b.shape[0], k)
    if product is None:
        return False
    library, stream = _library(), torch.cuda.current_stream(total.device).cuda_stream
    workspace = torch.empty(product.heuristic.workspace, dtype=torch.uint8, device=total.device)
    address = c_void_p(total.data_ptr())
    with _lock:
        _set(product.description, B_SCALE, c_void_p(a_scale.data_ptr()))
        _set(product.description, A_SCALE, c_void_p(b_scale.data_ptr()))
        _check(library.cublasLtMatmul(
            _handle(total.device), product.description, byref(_ONE), c_void_p(b.data_ptr()), product.a,
            c_void_p(a.data_ptr()), product.b, byref(_ONE), address, product.total, address, product.total,
            byref(product.heuristic), c_void_p(workspace.data_ptr()), c_size_t(product.heuristic.workspace),
            c_void_p(stream),
        ))  # fmt: skip
    return True


@cache
def _product(device: torch.device, a_type: torch.dtype, b_type: torch.dtype, n: int, m: int, k: int) -> _Product | None:
    """Describe a product and find the algorithm for it; None if there is none."""
    try:
        library = _library()
    except OSError:  # torch was built with another library
        return None
    description, preference = c_void_p(), c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(description), COMPUTE_FP32, FP32))
    _set(description, TRANSPOSE_A, c_int(TRANSPOSED))
    _set(description, FAST_ACCUMULATION, c_int8(1))
    scale = torch.ones((), device=device)  # the heuristic wants to know that there are scales
    _set(description, A_SCALE, c_void_p(scale.data_ptr()))
    _set(description, B_SCALE, c_void_p(scale.data_ptr()))
    layouts = [_layout(TYPES[b_type], k, m), _layout(TYPES[a_type], k, n), _layout(FP32, m, n)]
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    limit = c_size_t(WORKSPACE)
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE_BYTES, byref(limit), c_size_t(8)))
    heuristic, found = _Heuristic(), c_int()
    a, b, total = layouts
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), description, a, b, total, total, preference, 1, byref(heuristic), byref(found)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if status or found.value < 1 or heuristic.status:
        return None
    return _Product(description, a, b, total, heuristic)


def _layout(kind: int, rows: int, columns: int) -> c_void_p:
    """A matrix whose columns follow each other."""
    layout = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), kind, *sizes))
    return layout


def _set(description: c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _check(_library().cublasLtMatmulDescSetAttribute(description, attribute, byref(value), size))


@cache
def _library() -> ctypes.PyDLL:
    """The library as torch has loaded it. Calls keep Python's lock: they return at once."""
    return ctypes.PyDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt refused an 8-bit product with status {status}; use precision=bf16")
