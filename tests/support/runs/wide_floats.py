"""Computation in float64 by code that asks for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WideFloats(TorchFunctionMode):
    """Whoever asks torch for float32 gets float64: norms, routers and scans of transformers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {k: _widened(v) for k, v in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
