"""Modules whose parameters and buffers have given names, shapes and types."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def modules_named(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A tree of modules with uninitialized tensors; those that are no floats are buffers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        empty = torch.empty_like(tensor)
        if tensor.is_floating_point():
            parent.register_parameter(last, nn.Parameter(empty))
        else:
            parent.register_buffer(last, empty)
    return root
