"""torchtitan's models, parallelized by its own functions on the ranks of a gloo world."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import megtool
from megtool.access.state_dict import TensorRequest
from tests.support.counted_reads import CountedReads
from tests.support.peers.torchtitan_models import CASES

PARALLELIZE = {
    "llama": ("llama3", "parallelize_llama"),
    "qwen3": ("qwen3", "parallelize_qwen3"),
    "qwen3_moe": ("qwen3", "parallelize_qwen3"),
    "deepseek_v3": ("deepseek_v3", "parallelize_deepseekv3"),
}
"""The folder and the function of each family."""

NUM_STEPS = 3


class ParallelModel:
    """An empty model of torchtitan on this rank, and its adapter."""

    def __init__(self, case: str, size: int, degrees: dict[str, int]) -> None:
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.distributed.utils import set_spmd_backend

        parallel_dims.device_type = "cpu"  # "cuda" where there is no device

        # torchtitan's default, `spmd_types`, needs a later FSDP2 than that of torch 2.13.
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
        training = TrainingConfig(
            mixed_precision_param="float32", mixed_precision_reduce="float32", seq_len=24
        )
        set_spmd_backend(parallelism.spmd_backend)
        self.dims = ParallelDims.from_config(parallelism, size)
        self.dims.build_mesh()
        family, _, build = CASES[case]
        folder, function = PARALLELIZE[family]
        config, self.adapter = build()
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        with torch.device("meta"):
            model = config.build()
        parallelize = getattr(import_module(f"torchtitan.models.{folder}.parallelize"), function)
        self.model = parallelize(
            model,
            parallel_dims=self.dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def state(self, names: Any) -> dict[str, Any]:
        """The entries of the model's state dict that the folder has, too."""
        return {n: t for n, t in self.model.state_dict().items() if n in names}

    def train(self, tokens: torch.Tensor) -> list[float]:
        """The loss of each of a few steps on this rank's rows of the tokens."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        count = self.dims.dp_shard
        rank = self.dims.get_mesh("batch").get_local_rank() if count > 1 else 0
        rows = tokens.chunk(count)[rank]
        losses = []
        for _ in range(NUM_STEPS):
            logits = self.model(rows)
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def compare_loads(
    rank: int,
    size: int,
    case: str,
    degrees: dict[str, int],
    folder: Path,
    sources: list[Path],
    tokens: torch.Tensor,
) -> dict[str, Any]:
    """The losses of a model with the tensors of torchtitan's adapter, and of those that we filled.

    For each of ours also what was read over what the rank needs, and the tensors that differ. The
    adapter converts whole tensors: of those that FSDP and tensor parallelism cut (`_StridedShard`)
    torchtitan 0.3.0 has other rows of Llama's keys than on one process.
    """
    dist.init_process_group("gloo")
    parallel = ParallelModel(case, size, degrees)
    expected = parallel.adapter.from_hf(load_file(folder / "model.safetensors"))
    names = set(expected)
    own = parallel.state(names)
    for name, tensor in own.items():
        part = TensorRequest.of(name, tensor)
        box = tuple(slice(a, b) for a, b in zip(part.lo, part.hi, strict=True))
        part.local.copy_(expected[name][box])
    parallel.model.load_state_dict(own, strict=False)
    own = parallel.state(names)
    assert all(whole(own[n]).equal(t) for n, t in expected.items())
    out: dict[str, Any] = {"own": parallel.train(tokens), "ours": [], "shares": [], "other": []}
    for source in sources:
        parallel = ParallelModel(case, size, degrees)
        state = parallel.state(names)
        reader = megtool.dcp.Reader(source)
        assert all(name in reader.read_metadata().state_dict_metadata for name in state)
        with CountedReads() as files:
            dcp.load(state, storage_reader=reader, planner=megtool.dcp.Planner())
        needed = sum(local(t).numel() * local(t).element_size() for t in state.values())
        out["shares"].append(files.num_bytes / needed)
        parallel.model.load_state_dict(state, strict=False)
        now = parallel.state(names)
        out["other"] += [n for n in expected if not whole(now[n]).equal(expected[n])]
        out["ours"].append(parallel.train(tokens))
    out["kinds"] = sorted({str(t.placements) for t in state.values() if isinstance(t, DTensor)})
    return out


def local(tensor: Any) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor."""
    all_of_it: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return all_of_it.detach()
