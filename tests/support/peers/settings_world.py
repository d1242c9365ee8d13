"""Real megatron-core models on a CPU, perturbed by one setting each: their logits and checkpoints.

    python settings_world.py FOLDER CASES

CASES is a JSON file with a list of `{"name", "base", "args"}`. Each model is built from args by the
rules of Megatron-LM 0.16.1 (`core_transformer_config_from_args` and its builders), of local layers,
as a GPTModel or, where args have a layer pattern, a MambaModel,
and all have the same weights where names and shapes agree. FOLDER gets a save folder of rank files
for each case, and `logits.pt`: logits by name, or the text of the error that building it raised.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))

from mamba_layers import build_mamba, stub_kernels

VOCAB, LENGTH, ROWS = 64, 48, 2
PARSER: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "padded_vocab_size": VOCAB,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "position_embedding_type": "rope",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "no_rope_freq": None,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "apply_residual_connection_post_layernorm": False,
    "use_legacy_models": False,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_force_load_balancing": False,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs",
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "mtp_num_layers": None,
    "spec": None,
    "yaml_cfg": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "experimental_attention_variant": None,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "hybrid_override_pattern": None,
    "is_hybrid_model": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
}
"""Megatron-LM's defaults for what shapes a model, but for sizes, as its parser stores them."""

BASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "biased": {
        "swiglu": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
    },
    "moe": {"num_experts": 4, "moe_ffn_hidden_size": 24},
    "mla": {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "group_query_attention": False,
        "rope_type": "rope",
    },
    "mla_yarn": {
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "group_query_attention": False,
        "rotary_scaling_factor": 4.0,
    },
    "hybrid": {
        "num_layers": 7,
        "hybrid_override_pattern": "M*-ME*-",
        "is_hybrid_model": True,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        "position_embedding_type": "none",
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_state_dim": 16,
        "mamba_num_groups": 2,
    },
}


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    _pretend()
    logits: dict[str, Any] = {}
    for case in cases:
        args = PARSER | BASES[case["base"]] | case["args"]
        args = {k: tuple(v) if k == "window_size" and v else v for k, v in args.items()}
        try:
            model = build(args)
        except (AssertionError, ValueError, RuntimeError, TypeError) as e:
            logits[case["name"]] = f"{type(e).__name__}: {e}"
            continue
        fill(model)  # norms with a weight of 1 + w, which torch has not, are plain ones with 1 + w
        with torch.no_grad():
            logits[case["name"]] = run(model)
        save(folder / case["name"], model, args)
    torch.save(logits, folder / "logits.pt")


def tokens() -> torch.Tensor:
    """The tokens that logits are of."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def build(args: dict[str, Any]) -> Any:
    """A GPTModel or a MambaModel of local layers."""
    if args["is_hybrid_model"]:
        return build_mamba(make_config(args), args).eval()
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = make_config(args)
    is_latent = args["multi_latent_attention"]
    kwargs = {"qk_l2_norm": True} if args["qk_l2_norm"] else {}
    if args["num_experts"]:
        spec = specs.get_gpt_decoder_block_spec(
            config, False, normalization=args["normalization"], **kwargs
        )
    else:
        spec = specs.get_gpt_layer_local_spec(
            None,
            False,
            args["qk_layernorm"],
            is_latent,
            normalization=args["normalization"],
            **kwargs,
        )
    return GPTModel(
        config,
        spec,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        rope_scaling_factor=args["rope_scaling_factor"],
        seq_len_interpolation_factor=args["rotary_seq_len_interpolation_factor"],
    ).eval()


def make_config(args: dict[str, Any]) -> Any:
    """megatron-core's configuration, as Megatron-LM makes it of args."""
    from megatron.core import activations
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    names = {f.name for f in dataclasses.fields(kind)}
    known = {k: v for k, v in args.items() if k in names and (k != "rope_type" or v is not None)}
    if "activation_func" in known:
        name = known["activation_func"]
        known["activation_func"] = getattr(F, name, None) or getattr(activations, name)
    known |= {
        "num_moe_experts": args["num_experts"],
        "num_query_groups": args["num_query_groups"] if args["group_query_attention"] else None,
        "bias_activation_fusion": args["bias_gelu_fusion"],
        "layernorm_zero_centered_gamma": False,
    }
    if args["swiglu"]:
        known |= {
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args["bias_swiglu_fusion"],
        }
    elif args["squared_relu"]:
        known["activation_func"] = activations.squared_relu
    elif args["quick_geglu"]:
        known |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    config = kind(
        **known,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        attention_softmax_in_fp32=True,
    )
    for name, value in args.items():
        if name.startswith("yarn_"):
            setattr(config, name, value)
    return config


def fill(model: Any) -> None:
    """Give every parameter values that its name and shape alone decide."""
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if not p.dtype.is_floating_point or "inv_freq" in name or "cached" in name:
                continue
            seed = int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:12], 16)
            x = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            if "norm" in name and name.endswith("weight"):
                p.copy_(1 + 0.2 * x)
            elif "embedding" in name:
                p.copy_(x)
            else:
                p.copy_(x * (0.2 if p.dim() < 2 else 1.2 / p.shape[-1] ** 0.5))


def run(model: Any) -> torch.Tensor:
    """The logits of the tokens, [rows, length, words]."""
    ids = tokens()
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    out: torch.Tensor = model(ids, positions, mask)
    return out.float()


def save(folder: Path, model: Any, args: dict[str, Any]) -> None:
    """Save rank files."""
    into = folder / "iter_0000001" / "mp_rank_00"
    into.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    state = {k: v for k, v in model.state_dict().items() if torch.is_tensor(v)}
    if args["layernorm_zero_centered_gamma"]:
        centred = {
            k for k in state if k.endswith("norm.weight") and not k.endswith("mixer.norm.weight")
        }
        state = {k: v - 1 if k in centred else v for k, v in state.items()}
    top = {"model": state, "args": argparse.Namespace(**args), "iteration": 1}
    torch.save(top | {"checkpoint_version": 3.0}, into / "model_optim_rng.pt")


def _pretend() -> None:
    """Be the only rank of a world, on a CPU in the place of a GPU."""
    stub_kernels()
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel()
    with contextlib.suppress(Exception):
        random.model_parallel_cuda_manual_seed(7)
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    _CudaToCpu().__enter__()
    _do_without_transformer_engine()


def _do_without_transformer_engine() -> None:
    """Name what megatron-core leaves undefined where TransformerEngine is not installed."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        setattr(multi_latent_attention, name, type(name, (), {}))
    make = DotProductAttention.__init__

    def take_channels(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{k: v for k, v in kwargs.items() if k[1:] != "_channels"})

    DotProductAttention.__init__ = take_channels


if __name__ == "__main__":
    main()
