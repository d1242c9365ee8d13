"""A tiny Llama as FP8 training leaves it: Megatron's checkpoints with delayed scaling state."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megtool import reshard
from megtool.megatron_state.extra_states.names import Site
from tests.support.checkpoints.extra_states import Edit, pack_state
from tests.support.models import tiny_llama

STEPS = 8
LINEAR = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
PARTS = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}  # fmt: skip


def sites(layers: int = 4) -> list[Site]:
    """The modules that have a state."""
    return [Site(f"decoder.layers.{n}.{name}") for n in range(layers) for name in LINEAR]


def input_of(layer: int, name: str) -> np.float32:
    """The largest input that a module has seen."""
    return np.float32(0.7 + 0.31 * layer + 0.11 * LINEAR.index(name))


def state(
    top_input: float,
    top_weight: float,
    *,
    steps: int = STEPS,
    gemms: int = 1,
    columns: str = "blocked",
) -> dict[str, Any]:
    """A state as training leaves it: no step under way, scales of the maxima, no output used.

    Transformer Engine lays several products out in `columns` that are blocked up to release 2.2,
    and interleaved since.
    """
    out: dict[str, Any] = {}
    made = torch.Generator().manual_seed(int(top_input * 1000))
    for d, tops, largest in (
        ("fwd", (top_input, top_weight, 0.0), 448.0),
        ("bwd", (2.0**-12, 0.0), 57344.0),
    ):
        every = [t for t in tops for _ in range(gemms)]
        ones = torch.tensor(list(tops) * gemms if columns == "interleaved" else every)
        history = ones * (torch.rand(steps, len(ones), generator=made) / 2 + 0.25)
        history[0] = 0
        history[steps // 2] = ones
        out[f"scale_{d}"] = torch.where(ones > 0, torch.tensor(largest) / ones, torch.ones(1))
        out[f"amax_history_{d}"] = history
    return out | {"extra_fp8_variables": {"num_gemms": gemms, "fp8_max_fwd": 448.0}}


def amax_of(model: dict[str, Any], key: str) -> float:
    """The largest magnitude of a weight in a rank's file."""
    return float(model[f"{key}.weight"].abs().max())


def edit_ranks(folder: Path, edit: Edit) -> None:
    """Change the model of every rank file: `edit(model, folder of the rank)`."""
    for file in sorted(folder.glob("*/mp_rank_*/model_optim_rng.pt")):
        tree = torch.load(file, weights_only=False)
        edit(tree["model"], file.parent.name)
        torch.save(tree, file)


def with_buffers(folder: Path, destination: Path, buffers: dict[str, torch.Tensor]) -> Path:
    """A `torch_dist` checkpoint with more tensors, written by torch itself; objects are left."""
    from torch.distributed import checkpoint as dcp

    known = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    held = {n: torch.empty(m.size, dtype=m.properties.dtype)
            for n, m in known.items() if hasattr(m, "size")}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(held, storage_reader=dcp.FileSystemReader(str(folder)), no_dist=True)
        writer = dcp.FileSystemWriter(str(destination))
        dcp.save(held | buffers, storage_writer=writer, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(folder / name, destination)
    shutil.copytree(folder / "hf", destination / "hf")
    return destination


def rank_files(folder: Path, *, release: int = 2, like: str = "hf") -> Path:
    """Rank files at TP1 PP1 of a Hugging Face folder beside it, with a state per linear layer."""
    tiny_llama.save(folder / like)
    reshard(folder / like, folder / "ranks", to="megatron", tp=1, pp=1, fsync=False)

    def put(model: dict[str, Any], _: str) -> None:
        for site in sites():
            layer, name = site.layer or 0, site.module.split(".", 3)[3]
            held = state(float(input_of(layer, name)), amax_of(model, site.module))
            model[f"{site.module}._extra_state"] = pack_state(held, release)

    edit_ranks(folder / "ranks", put)
    return folder / "ranks"
