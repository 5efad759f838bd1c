"""Run compiled models uncompiled: code compiled by torch.compile has no second derivative."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["eager"]


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Inside, neither use compiled code nor compile.

    First derivatives need this too: a batch of another size would make torch.compile build other kernels, which the
    training would then use.

    Example:
        >>> with eager(torch.compile(nn.Linear(1, 1))) as nothing:
        ...     "compiled code is not entered here"
        'compiled code is not entered here'
    """
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    # Before torch 2.6 the whole module or its call is compiled, and both can be replaced for a while.
    compiled = [module for module in model.modules() if _compiled(module)]
    before = [dict(vars(module)) for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
        original = module._modules.get("_orig_mod")
        if original is not None:
            module.forward = original.__call__
    try:
        yield
    finally:
        for module, attributes in zip(compiled, before):
            for name in ("_compiled_call_impl", "forward"):
                vars(module).pop(name, None)
                vars(module).update({name: attributes[name]} if name in attributes else {})


def _compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
