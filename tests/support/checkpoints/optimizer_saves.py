"""Optimizer states that Megatron saves in its formats, and edits of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from megtool.options.layout import ParallelConfig
from megtool.reshard import execute, target
from megtool.tensors.registration_order import ORDERS, Order
from tests.support.checkpoints.trained import config, write

EXPERTS = {
    "num_layers": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 8,
    "shared_ffn_hidden_size": 8,
    "moe_layer_freq": (0, 1),
    "qk_norm": True,
}

FORMATS = {"dp_reshardable": "torch_dist", "legacy": "megatron"}

Arrays = dict[str, Any]


def args_of(order: Order) -> dict[str, Any]:
    """Args of a run whose parameters are registered so."""
    return {
        "transformer_impl": "transformer_engine" if order.fused_norms else "local",
        "moe_grouped_gemm": order.grouped_experts,
    }


def save(
    root: Path,
    materialize: Any,
    optimizer: str = "dp_reshardable",
    *,
    change: Callable[[Arrays], None] | None = None,
    model: dict[str, Any] | None = None,
    order: Order = ORDERS[0],
    **layout: Any,
) -> Path:
    """A training state in buckets (`out`), made of one by tensors (`in`); `change` alters its
    arrays."""

    def changed(out: Any, folder: Path, arrays: Arrays) -> None:
        if change is not None:
            change(arrays)
        materialize(out, folder, arrays)

    write(root / "in", config(**(model or {})), ParallelConfig(), changed, args=args_of(order))
    with pytest.MonkeyPatch.context() as patch:
        # megtool would not write what it refuses to read: this is another tool's.
        patch.setattr(target, "check_masters", lambda *_: None)
        patch.setattr(execute, "check_staged", lambda *_: None)
        reshard(
            root / "in",
            root / "out",
            to=FORMATS[optimizer],
            optimizer_format=optimizer,
            fsync=False,
            **layout,
        )
    return root / "out"


def edit(file: Path, change: Callable[[Any], None]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)
