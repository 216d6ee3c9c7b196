"""Where a non-finite number came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Watch:
    """Notes the first module whose output is not finite, while it is entered."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.first: str | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if self.first is None and isinstance(first, Tensor) and not _finite(first):
                self.first = name or type(module).__name__

        return look


def diagnose(
    model: nn.Module, forward_first: str | None, union: Callable[[list[str]], list[str]]
) -> str:
    """One sentence: which weights, outputs or gradients are not finite.

    `union` joins the names of all processes, each of which may hold a part of the weights.
    """
    weights = union([name for name, p in model.named_parameters() if not _finite(p.detach())])
    firsts = union([forward_first] if forward_first is not None else [])
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    grads = union([name for name, grad in named if not _finite(grad)])
    if weights:
        return f"weights that are not finite: {_some(weights)}"
    if firsts:
        return f"the first output that is not finite is that of {firsts[0]}"
    if grads:
        # The backward runs from the last layer to the first: the last named is where it began.
        return f"gradients that are not finite: {_some(grads)}; the last of them is {grads[-1]}"
    return "all weights, outputs and gradients are finite one by one, but not their sum"


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all()) if local.is_floating_point() else True


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
