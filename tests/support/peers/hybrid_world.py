"""A world of gloo processes in which megatron-core 0.19 saves and loads a HybridModel on a CPU.

    python hybrid_world.py ACTION FOLDER [options as JSON]

Like megatron_world.py, with another release of megatron-core on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from gloo_ranks import run_ranks
from hybrid_layers import Norm, stack_spec, stub_kernels
from megatron_world import ITERATION, fill

VOCAB = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layernorm_zero_centered_gamma": True,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
}
BEYOND_GPT = (
    "layernorm_zero_centered_gamma",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
)
LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
INDEXER: dict[str, Any] = {
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 8,
}


def main() -> None:
    action, folder = sys.argv[1:3]
    options = json.loads(sys.argv[3])
    world = options["tp"] * options["pp"]
    run_ranks(work, world, action, folder, options)


def work(rank: int, action: str, folder: str, options: dict[str, Any]) -> None:
    """One process: stub kernels and devices, then act."""
    stub_kernels()
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(options["tp"], options["pp"])
    model = build(options)
    (save if action == "save" else load)(rank, folder, model, options)
    dist.barrier()
    dist.destroy_process_group()


def build(options: dict[str, Any]) -> Any:
    """A small HybridModel of Megatron's own layers."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    hybrid_block.TENorm = Norm
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    pattern = options["pattern"]
    num_layers, num_mtp = lengths(pattern)
    kind = getattr(torch, options.get("dtype", "float32"))
    more = sizes(options)
    if "G" in pattern:
        more |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [1] * num_layers,
        }
    config = (MLATransformerConfig if is_latent(pattern) else TransformerConfig)(
        num_layers=num_layers,
        mtp_num_layers=num_mtp or None,
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=options.get("ep", 1),
        sequence_parallel="D" in pattern and options["tp"] > 1,  # which sparse attention needs
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        params_dtype=kind,
        pipeline_dtype=kind,
        bf16=kind is torch.bfloat16,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        **more,
    )
    model = HybridModel(
        config,
        stack_spec(),
        vocab_size=VOCAB,
        max_sequence_length=16,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=options.get("tied", False),
    )
    return model.to(kind)


def lengths(pattern: str) -> tuple[int, int]:
    """The number of layers of a pattern, and of those of multi-token prediction."""
    main, *further = pattern.split("/")
    return len(main.replace("|", "")), len(further)


def sizes(options: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a model; one that is `plain` has no more than megatron_world.py's GPTModel."""
    pattern = options["pattern"]
    out = dict(SIZES)
    if "E" in pattern:
        out |= EXPERTS
    if is_latent(pattern):
        out |= LATENT | (INDEXER if "D" in pattern else {})
    if options.get("plain"):
        out = {k: v for k, v in out.items() if k not in BEYOND_GPT}
    return out


def is_latent(pattern: str) -> bool:
    """Some layer has latent attention."""
    return not {"D", "+"}.isdisjoint(pattern)


def arguments(options: dict[str, Any]) -> argparse.Namespace:
    """Args as Megatron's training loop saves them."""
    pattern = options["pattern"]
    num_layers, num_mtp = lengths(pattern)
    more = sizes(options)
    kind = getattr(torch, options.get("dtype", "float32"))
    return argparse.Namespace(
        **more,
        num_experts=more.get("num_moe_experts"),
        num_layers=num_layers,
        mtp_num_layers=num_mtp or None,
        hybrid_layer_pattern=pattern,
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=options.get("ep", 1),
        expert_tensor_parallel_size=options["tp"],
        group_query_attention=True,
        multi_latent_attention=is_latent(pattern),
        add_bias_linear=False,
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=not options.get("tied", False),
        padded_vocab_size=VOCAB,
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=8,
        position_embedding_type="none",
        max_position_embeddings=16,
        transformer_impl="local",
        moe_grouped_gemm=False,
        bf16=kind is torch.bfloat16,
        params_dtype=kind,
        data_parallel_size=options.get("dp", 1),
        world_size=options["tp"] * options["pp"] * options.get("dp", 1),
        use_distributed_optimizer=True,
        overlap_grad_reduce=options.get("overlap", False),
        ddp_bucket_size=options.get("bucket_size"),
        accumulate_allreduce_grads_in_fp32=options.get("grads_in_fp32", False),
    )


def save(rank: int, folder: str, model: Any, options: dict[str, Any]) -> None:
    """Save known contents, or (with `loads`) what another folder holds, as an iteration."""
    from megatron.core import dist_checkpointing

    into = Path(folder) / f"iter_{ITERATION:07d}"
    if rank == 0:
        into.mkdir(parents=True)
        (into.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    state = {"model": model.sharded_state_dict()}
    fill(state)
    common = {"iteration": ITERATION, "args": arguments(options), "checkpoint_version": 3.0}
    dist_checkpointing.save({**state, **common}, str(into), content_metadata={})


def load(rank: int, folder: str, model: Any, options: dict[str, Any]) -> None:
    """Load and compare every parameter with its known contents."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    fill({"model": model.sharded_state_dict()})
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    out = dist_checkpointing.load(
        {"model": model.sharded_state_dict()},
        str(Path(folder) / f"iter_{ITERATION:07d}"),
        strict=StrictHandling("assume_ok_unexpected"),
    )
    model.load_state_dict(out["model"])
    for name, p in model.named_parameters():
        if not torch.equal(p, want[name]):
            raise AssertionError(f"{name} differs on rank {rank}")
    if rank == 0:
        print(f"loaded {len(want)} parameters")


if __name__ == "__main__":
    main()
