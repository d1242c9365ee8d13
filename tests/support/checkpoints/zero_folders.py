"""DeepSpeed checkpoints in its own layout, cut from a known model and optimizer.

Follows deepspeed/runtime/zero/{stage_1_and_2,stage3}.py: real DeepSpeed is no dependency, and its
own files read the same (tests/peers/test_deepspeed.py, where it is installed).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Weights = dict[str, torch.Tensor]
STATES = ("param", "exp_avg", "exp_avg_sq")


def trained(weights: Weights) -> dict[str, Weights]:
    """Master weights and moments, by state."""
    torch.manual_seed(5)
    out = {"param": {n: w.float() + 1e-4 for n, w in weights.items()}}
    for state in STATES[1:]:
        out[state] = {n: torch.randn(w.shape) for n, w in weights.items()}
    return out


def groups_of(weights: Weights) -> list[list[str]]:
    """Two groups of the optimizer: matrices, and what has no weight decay."""
    return [
        [n for n, w in weights.items() if w.ndim > 1],
        [n for n, w in weights.items() if w.ndim <= 1],
    ]


def save_zero(
    root: Path,
    weights: Weights,
    states: dict[str, Weights],
    *,
    stage: int,
    ranks: int,
    extra: dict[str, Any] | None = None,
    sub_groups: int = 1,
) -> Path:
    """A save folder with one step of it; returns the folder of the step."""
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    groups = groups_of(weights)
    if stage == 3:
        names = [n for group in groups for n in group]
        size = math.ceil(len(names) / sub_groups)
        groups = [names[i : i + size] for i in range(0, len(names), size)]
    shapes = [OrderedDict((n, weights[n].shape) for n in group) for group in groups]
    flat = _by_parameter if stage == 3 else _by_group
    for rank in range(ranks):
        model: dict[str, Any] = {
            "module": OrderedDict(
                (n, torch.empty(0, dtype=w.dtype) if stage == 3 else w) for n, w in weights.items()
            ),
            "buffer_names": [],
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "global_steps": 7,
            "ds_version": "0.19.0",
            **(extra or {}),
        }
        parts = {s: [flat(states[s], group, rank, ranks) for group in groups] for s in STATES}
        moments = {i: {s: parts[s][i] for s in STATES[1:]} for i in range(len(groups))}
        for one in moments.values():
            one["step"] = torch.tensor(2.0)
        base = {"state": moments, "param_groups": [{"lr": 0.01, "params": [0]}]}
        inner: dict[str, Any] = {"zero_stage": stage, "ds_version": "0.19.0"}
        if stage == 3:
            inner |= {"partition_count": ranks, "optimizer_state_dict": base}
            inner["fp32_flat_groups"] = parts["param"]
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            inner |= {"partition_count": [ranks] * len(groups), "base_optimizer_state": base}
            inner["single_partition_of_fp32_groups"] = [
                p[: max(0, _total(weights, g) - rank * len(p))].clone()  # padding is left out
                for p, g in zip(parts["param"], groups, strict=True)
            ]
            if rank == 0:
                torch.save(model, folder / "mp_rank_00_model_states.pt")
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save(
            {"optimizer_state_dict": inner}, folder / (name if stage > 1 else f"bf16_{name}")
        )
    return folder


def save_universal(root: Path, weights: Weights, states: dict[str, Weights]) -> Path:
    """What ds_to_universal makes of it."""
    folder = root / "global_step7_universal"
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            file = folder / "zero" / name / ("fp32.pt" if state == "param" else f"{state}.pt")
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"param": tensor, "cat_dim": 0}, file)
    shapes = [OrderedDict((n, w.shape) for n, w in weights.items())]
    torch.save(
        {"module": weights, "param_shapes": shapes, "global_steps": 7},
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def _total(weights: Weights, names: Sequence[str]) -> int:
    return sum(weights[n].numel() for n in names)


def _by_group(tensors: Weights, names: Sequence[str], rank: int, ranks: int) -> torch.Tensor:
    whole = torch.cat([tensors[n].reshape(-1) for n in names])
    size = 2 * math.ceil(len(whole) / (2 * ranks))
    padded = torch.cat([whole, torch.full((size * ranks - len(whole),), torch.nan)])
    return padded[rank * size : (rank + 1) * size].clone()


def _by_parameter(tensors: Weights, names: Sequence[str], rank: int, ranks: int) -> torch.Tensor:
    parts = []
    for name in names:
        flat = tensors[name].reshape(-1)
        size = math.ceil(len(flat) / ranks)
        padded = torch.cat([flat, torch.full((size * ranks - len(flat),), torch.nan)])
        parts.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(parts)
