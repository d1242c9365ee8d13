"""Formats and layouts as options of `megtool.reshard`, by name."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "megatron": {"to": "megatron", "tp": 2, "pp": 2},
    "dcp": {"to": "dcp", "dp": 3},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 3},
    "zarr": {"to": "zarr"},
    "safetensors": {"to": "safetensors"},
}
