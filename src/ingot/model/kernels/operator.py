"""Makes an operator of a Python function, which the compiler calls without looking inside.

`torch.library.custom_op` does too, at 14 us a call on the host: it looks for gradients, aliases and versions each time.
These operators run where none of that matters, inside of a function with a gradient of its own, and take 3 us. A block
calls about 25 of them for each microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library
from torch._ops import OpOverload


def operator(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], OpOverload]:
    """Make `ingot::name`, for all devices, without a gradient."""

    def register(function: Callable[..., Any]) -> OpOverload:
        schema = library.infer_schema(function, mutates_args=mutates_args)
        library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, "default", function)
        namespace, _, short = name.partition("::")
        overload = getattr(getattr(torch.ops, namespace), short).default
        assert isinstance(overload, OpOverload)
        return overload

    return register
