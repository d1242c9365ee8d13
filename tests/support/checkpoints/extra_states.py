"""Training states with FP8 scaling in Transformer Engine's extra states."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megtool import reshard
from megtool.formats import open_checkpoint
from megtool.megatron_state.extra_states.names import Site, parse_site
from megtool.megatron_state.extra_states.te_state import ExtraState, decode
from megtool.megatron_state.saved_objects import read_object
from megtool.number_formats.delayed_scaling import KINDS
from megtool.reshard.report import ReshardReport

ITERATION = "iter_0000007"

FC1 = "decoder.layers.{}.mlp.experts.linear_fc1._extra_state"

MOE = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8}

LENGTH = 4


def scaling(
    seed: int, gemms: int = 1, length: int = LENGTH, columns: str = "blocked"
) -> dict[str, Any]:
    """A state as training leaves it: no step under way, scales of the maxima, no output used."""
    made = torch.Generator().manual_seed(seed)
    out: dict[str, Any] = {}
    for d, largest in (("fwd", 448.0), ("bwd", 57344.0)):
        history = torch.rand(length, KINDS[d], gemms, generator=made) + 0.5
        history[0] = 0
        history[:, -1] = 0
        if columns == "interleaved":
            history = history.transpose(1, 2)
        history = history.reshape(length, -1)
        out[f"scale_{d}"] = scale_of(history, largest)
        out[f"amax_history_{d}"] = history
    return out | {"extra_fp8_variables": {"num_gemms": gemms, "fp8_max_fwd": 448}}


def scale_of(history: Any, largest: float) -> Any:
    """The scales that histories ask for; 1 where nothing was seen."""
    top = history.max(0).values
    return torch.where(top > 0, torch.tensor(largest) / top, torch.ones(1))


def in_columns(array: Any, gemms: int, columns: str) -> Any:
    """Scales or histories as `[..., products, kinds]`."""
    if columns == "interleaved":
        return array.view(*array.shape[:-1], gemms, -1)
    return array.view(*array.shape[:-1], -1, gemms).transpose(-1, -2)


def pack_state(state: dict[str, Any] | None, release: int = 2) -> Any:
    """A state as the release keeps it."""
    if release == 2:
        raw = b"" if state is None else pickle.dumps(state)
        return torch.tensor(list(raw), dtype=torch.uint8)
    if state is not None:
        state = state | {f"scale_inv_{d}": 1 / state[f"scale_{d}"] for d in KINDS}
    out = io.BytesIO()
    torch.save(state, out)
    return out


def unpack_state(value: Any) -> Any:
    """What a release keeps, read by torch and pickle."""
    if isinstance(value, io.BytesIO):
        return torch.load(io.BytesIO(value.getvalue()), weights_only=True)
    return pickle.loads(value.numpy().tobytes()) if value.numel() else None


Edit = Callable[[dict[str, Any], str], None]


def edit_ranks(folder: Path, edit: Edit) -> None:
    """Change the model of every rank file: `edit(model, folder of the rank)`."""
    for file in sorted((folder / ITERATION).glob("mp_rank_*/model_optim_rng.pt")):
        tree = torch.load(file, weights_only=False)
        edit(tree["model"], file.parent.name)
        torch.save(tree, file)


def rank(folder: Path, name: str) -> dict[str, Any]:
    """The model in a rank's file."""
    file = folder / ITERATION / name / "model_optim_rng.pt"
    found: dict[str, Any] = torch.load(file, weights_only=False)["model"]
    return found


def ranks(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / ITERATION).glob("mp_rank_*"))


def reshard_copy(a: Path, b: Path, **more: Any) -> ReshardReport:
    return reshard(a, b, fsync=False, **more)


def largest(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The maximum of states, and the scales of it."""
    out: dict[str, Any] = {}
    for d, top in (("fwd", 448.0), ("bwd", 57344.0)):
        history = torch.stack([s[f"amax_history_{d}"] for s in states]).amax(0)
        out[f"amax_history_{d}"] = history
        out[f"scale_{d}"] = scale_of(history, top)
    return out


def assert_state(found: Any, want: dict[str, Any]) -> None:
    for name, tensor in want.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(torch.as_tensor(found[name]), tensor), name


def states_of(folder: Path) -> dict[Site, ExtraState]:
    """The states of a checkpoint of objects."""
    catalogue = open_checkpoint(folder)
    values = {parse_site(n): read_object(catalogue, o) for n, o in catalogue.objects.items()}
    found = {site: decode(v) for site, v in values.items() if site is not None}
    return {site: state for site, state in found.items() if state is not None}


class Hostile:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return (__import__("os").system, ("touch /tmp/hostile",))
