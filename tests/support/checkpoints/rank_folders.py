"""Megatron's per-rank folders, written by torch.save as Megatron-LM's training loop writes them."""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megtool.dtypes import dtype
from megtool.tensors.catalogue import Catalogue

BF16 = (torch.bfloat16, torch.bfloat16)


def args(**changes: Any) -> argparse.Namespace:
    """Megatron's arguments, as far as anything looks at them."""
    known = {
        "num_layers": 2,
        "hidden_size": 8,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "params_dtype": torch.bfloat16,
        "save": Path("/somewhere/save"),
        "use_distributed_optimizer": True,
        "betas": (0.9, 0.95),
    }
    return argparse.Namespace(**{**known, **changes})


def model(seed: int = 0, *, experts: bool = False, first: bool = True) -> OrderedDict[str, Any]:
    """A stage of a model, its weights views of one buffer, as DistributedDataParallel has them."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(400, generator=generator).bfloat16()
    out: OrderedDict[str, Any] = OrderedDict()
    if first:
        out["embedding.word_embeddings.weight"] = buffer[300:380].view(10, 8)
    out["decoder.layers.0.mlp.linear_fc1.weight"] = buffer[64:192].view(16, 8)
    out["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    out["decoder.layers.0.mlp.linear_fc2.weight"] = buffer[192:256].view(8, 8)
    out["decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.arange(5, dtype=torch.uint8)
    if experts:
        out["decoder.layers.0.mlp.experts.linear_fc1.weight0"] = buffer[0:64].view(8, 8)
    out._metadata = OrderedDict({"": {"version": 1}})  # as torch.nn.Module.state_dict does
    return out


def random_state() -> list[dict[str, Any]]:
    """What Megatron keeps of every generator."""
    torch_state = torch.get_rng_state()
    return [
        {
            "random_rng_state": random.Random(1).getstate(),
            "np_rng_state": np.random.RandomState(1).get_state(),
            "torch_rng_state": torch_state,
            "cuda_rng_state": torch_state[:16].clone(),
            "rng_tracker_states": {"model-parallel-rng": torch_state[:16].clone()},
        }
    ]


def rank_state(seed: int = 0, *, iteration: int = 7, **changes: Any) -> dict[str, Any]:
    """`model_optim_rng.pt` of one rank; `args`, `experts` and `first` as above."""
    parts = {k: changes.pop(k) for k in ("experts", "first") if k in changes}
    return {
        "args": args(**changes),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "model": model(seed, **parts),
        "optimizer": {
            "optimizer": {"param_groups": [{"lr": 0.1, "step": 3}]},
            "grad_scaler": {"scale": torch.tensor([4.0])},
        },
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 14},
        "num_floating_point_operations_so_far": 1 << 70,
        "rng_state": random_state(),
    }


def buckets(seed: int = 0) -> dict[Any, Any]:
    """`distrib_optim.pt` of one rank."""
    generator = torch.Generator().manual_seed(seed)
    names = ("param", "exp_avg", "exp_avg_sq")
    inner: dict[str, Any] = {n: torch.randn(400, generator=generator) for n in names}
    return {"buckets_coalesced": True, 0: {BF16: {**inner, "numel_unpadded": 400}}}


def save(folder: Path, **files: Any) -> None:
    """Write the given files of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        torch.save(value, folder / f"{name}.pt")


def save_all(
    root: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, iteration: int = 7, **changes: Any
) -> Path:
    """A save folder with one iteration of a whole layout; the iteration's folder."""
    folder = root / f"iter_{iteration:07d}"
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }
    seed = 0
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                name = f"mp_rank_{t:02d}"
                name += f"_{p:03d}" if pp > 1 else ""
                name += f"_{e:03d}" if ep > 1 else ""
                state = rank_state(
                    seed,
                    iteration=iteration,
                    experts=ep > 1,
                    first=p == 0,
                    **{**sizes, **changes},
                )
                save(folder / name, model_optim_rng=state, distrib_optim=buckets(seed))
                seed += 1
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree by its path."""
    if isinstance(tree, torch.Tensor):
        yield "/".join(path), tree
        return
    if not isinstance(tree, dict | list | tuple):
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = ",".join(map(str, key)) if isinstance(key, tuple) else str(key)
        yield from leaves(value, (*path, name))


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row-major."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def stored(c: Catalogue) -> dict[str, bytes]:
    """The row-major elements of every tensor, from where a catalogue says that they are."""
    out = {}
    located = c.locate(np.arange(len(c.shards)))
    for row, t in enumerate(c.shards.tensor.tolist()):
        tensor = c.tensors[t]
        at, size = int(located.offset[row]), int(c.extents.length[row])
        with c.path(int(c.extents.file[row])).open("rb") as f:
            f.seek(at)
            data = f.read(size)
        if row in located.strides:
            item = tensor.dtype.itemsize
            array = np.frombuffer(data, tensor.dtype.view)
            steps = [item * s for s in located.strides[row]]
            data = np.lib.stride_tricks.as_strided(array, tensor.shape, steps).tobytes()
        assert len(data) == tensor.num_bytes
        out[tensor.name] = data
    return out


def check_against(c: Catalogue, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Compare the tensors of one file with what was saved into it, by their path in the tree."""
    found = stored(c)
    names = {n for n in found if n.startswith(f"{name}/")}
    assert names == {f"{name}/{path}" for path in tensors}
    for path, tensor in tensors.items():
        assert c[f"{name}/{path}"].dtype is dtype(str(tensor.dtype)), path
        assert c[f"{name}/{path}"].shape == tuple(tensor.shape), path
        assert found[f"{name}/{path}"] == raw(tensor), path
