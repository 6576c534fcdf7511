"""Makes an operator of a Python function, which the compiler calls without looking inside.

PyTorch's `custom_op` does too, but each call then looks for gradients, aliases and versions in Python, which takes the
host longer than the call itself. These operators run where none of that matters: inside of a function with a gradient
of its own. A block calls about 25 of them for each microbatch.
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
