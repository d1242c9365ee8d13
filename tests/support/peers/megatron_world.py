"""A world of gloo processes in which real megatron-core saves and loads checkpoints on a CPU.

    python megatron_world.py ACTION FOLDER [options as JSON]

Run as a script of its own, or by `run_forked`: megatron-core spawns further processes. Every
shard is filled from a global tensor seeded by its key, so any layout has a known content, and
`expected` computes it without megatron-core.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, ITERATION = 4, 32, 4, 2, 48, 64, 7


def expected(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The global tensor stored under a key."""
    seed = int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()[:12], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def main() -> None:
    start(work)


def start(work: Callable[..., None]) -> None:
    """Run `work` as all ranks, by the action, the folder and the options of the command line."""
    action, folder = sys.argv[1:3]
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    from gloo_ranks import run_ranks  # beside this script

    run_ranks(work, options.get("world", 2), action, folder, options)


def work(rank: int, action: str, folder: str, options: dict[str, Any]) -> None:
    """One process: set up what megatron-core expects of a GPU, then act under each layout."""
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    from megatron.core import parallel_state

    for layout in options["layouts"]:
        parallel_state.initialize_model_parallel(
            layout.get("tp", 1),
            layout.get("pp", 1),
            layout.get("vpp"),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp"),
        )
        chunks = build(layout, options)
        ACTIONS[action](rank, folder, chunks, options)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(layout: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """The model chunks of this rank: a small GPT of local layers."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(7)
    vpp, experts = layout.get("vpp"), options.get("experts")
    kind = getattr(torch, options.get("dtype", "float32"))
    moe = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": 24,
            "expert_model_parallel_size": layout.get("ep", 1),
            "expert_tensor_parallel_size": layout.get("etp"),
            "moe_router_topk": 2,
        }
    config = TransformerConfig(
        num_layers=options.get("layers", LAYERS),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=layout.get("tp", 1),
        pipeline_model_parallel_size=layout.get("pp", 1),
        virtual_pipeline_model_parallel_size=vpp,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=kind,
        pipeline_dtype=kind,
        bf16=kind is torch.bfloat16,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        hidden_dropout=options.get("dropout", 0.1),
        attention_dropout=options.get("dropout", 0.1),
        **moe,
    )
    chunks = []
    for number in range(vpp or 1):
        stage = {"ignore_virtual": False, "vp_stage": number} if vpp else {}
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=16,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=options.get("tied", False),
            position_embedding_type="rope",
            **({"vp_stage": number} if vpp else {}),
        )
        chunks.append(chunk.to(kind))
    return chunks


def sharded(chunks: list[Any]) -> dict[str, Any]:
    """The sharded state dict of all chunks, as Megatron's training loop names them."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {n: c.sharded_state_dict() for n, c in zip(names, chunks, strict=True)}


def fill(state: dict[str, Any]) -> None:
    """Every local shard gets its part of the global tensor under its key."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def one(t: Any) -> None:
        own = zip(t.global_offset[t.prepend_axis_num :], t.local_shape, strict=True)
        box = [slice(o, o + 1) for o in t.global_offset[: t.prepend_axis_num]]
        box += [slice(o, o + n) for o, n in own]
        whole = expected(t.key, t.global_shape, t.dtype)
        with torch.no_grad():
            t.data.copy_(whole[tuple(box)].reshape(t.local_shape))

    for value in list(nested_values(state)):
        if isinstance(value, ShardedTensorFactory):
            for part in nested_values(value.build()):
                one(part)
        elif isinstance(value, ShardedTensor):
            one(value)


def save(rank: int, folder: str, chunks: list[Any], options: dict[str, Any]) -> None:
    """Save as an iteration of a save folder."""
    from megatron.core import dist_checkpointing

    into = Path(folder) / f"iter_{ITERATION:07d}"
    if rank == 0:
        into.mkdir(parents=True)
        (into.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    state = sharded(chunks)
    fill(state)
    args = argparse.Namespace(num_layers=LAYERS, hidden_size=HIDDEN, params_dtype=torch.float32)
    common = {"iteration": ITERATION, "args": args, "checkpoint_version": 3.0}
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    dist_checkpointing.save({**state, **common}, str(into), content_metadata=metadata)


def load(rank: int, folder: str, chunks: list[Any], options: dict[str, Any]) -> None:
    """Load with the default strictness, or one that is asked for, and compare every parameter."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    fill(sharded(chunks))
    want = [{n: p.detach().clone() for n, p in c.named_parameters()} for c in chunks]
    with torch.no_grad():
        for c in chunks:
            for p in c.parameters():
                p.zero_()
    strict = StrictHandling(options.get("strict", "assume_ok_unexpected"))
    from_folder = str(Path(folder) / f"iter_{ITERATION:07d}")
    out = dist_checkpointing.load(sharded(chunks), from_folder, strict=strict)
    if out["iteration"] != ITERATION or out["args"].num_layers != LAYERS:
        raise AssertionError(out["iteration"])
    for i, c in enumerate(chunks):
        c.load_state_dict(out["model" if len(chunks) == 1 else f"model{i}"])
        for name, p in c.named_parameters():
            if not torch.equal(p, want[i][name]):
                raise AssertionError(f"{name} differs on rank {rank}")
    if rank == 0:
        print(f"loaded {sum(map(len, want))} parameters")


ACTIONS = {"save": save, "load": load}


if __name__ == "__main__":
    main()
