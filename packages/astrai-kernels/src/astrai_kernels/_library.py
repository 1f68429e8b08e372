"""Registration of ops in the ``astrai`` namespace of torch.

``Library.define`` / ``impl`` rather than ``torch.library.custom_op``: a call costs a quarter of it. The one Python
kernel of an op serves every device (CompositeExplicitAutograd), so that a tensor on the wrong one meets the op's own
argument checks. There is no autograd registration; the public functions refuse tensors that need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "astrai"

# Holds the registrations; they end with this object.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an op, register its kernel and its fake (shape-only) kernel.

    Parameters
    ----------
    schema : str
        Name and signature in torch's schema language, without the namespace.
    kernel : callable
        Checks its arguments and launches on the current stream of their device.
    fake : callable
        The same checks and outputs of the right shape, without reading an address.

    Returns
    -------
    torch._ops.OpOverload
        The op's default overload, ready to be called.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def refuse_grad(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise if autograd would record this call: the result would silently lose its gradient (row K11).

    Raises
    ------
    RuntimeError
        Naming the first tensor that requires a gradient while gradients are enabled.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"astrai_kernels.{op}: {name} requires a gradient, and this kernel has no backward: call it under "
                f"torch.no_grad(), or use astrai_kernels.reference.{op.rstrip('_')} for training"
            )
