"""Real megatron-core computes the logits of a converted mixture of experts, on one CPU.

    python moe_world.py FOLDER TOKENS.npy LOGITS.npy

The model (local layers; latent attention, shared experts and multi-token prediction where the args
have them) is built by the args in the checkpoint alone. Run as a script of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "glu_linear_offset",
    "activation_func_clamp_value",
)
SPARSE = (
    "experimental_attention_variant",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_topk_freq",
    "dsa_indexer_skip_topk_offset",
    "dsa_indexer_rope_interleaved",
    "dsa_indexer_k_norm_epsilon",
)
LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def main() -> None:
    folder, tokens_file, logits_file = (Path(p) for p in sys.argv[1:4])
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group(
        "gloo", init_method=f"file://{tokens_file}.rendezvous", rank=0, world_size=1
    )
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    model = gpt(args).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    has_fused_norms = args.multi_latent_attention and not is_sparse(args)
    wanted = {"model": named_as_te(model.sharded_state_dict(), has_fused_norms)}
    state = dist_checkpointing.load(wanted, str(folder))
    model.load_state_dict(state["model"], strict=True)
    held = model.state_dict().items()
    np.savez(f"{logits_file}.mtp.npz", **{n: p for n, p in held if "mtp." in n and p is not None})
    tokens = torch.from_numpy(np.load(tokens_file))
    where = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    size = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), diagonal=1)
    if args.mtp_num_layers:  # with these layers megatron-core computes a loss alone
        np.savez(f"{logits_file}.loss.npz", **losses(model, tokens, where, mask))
    else:
        with torch.no_grad():
            np.save(logits_file, model(tokens, where, mask).float().numpy())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def losses(model: Any, tokens: Any, where: Any, mask: Any) -> dict[str, Any]:
    """The mean loss of all but every fifth token, those of further layers, and all gradients."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    model.train()
    labels = tokens.roll(-1, 1)
    counted = (torch.arange(tokens.numel()) % 5 != 3).float().view(tokens.shape)
    each = model(tokens, where, mask, labels=labels, loss_mask=counted)
    loss = (each * counted).sum() / counted.sum()
    loss.backward()
    out = {f"grad {n}": p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    further = MTPLossLoggingHelper.tracker["values"].detach().numpy()
    return out | {"loss": loss.detach().numpy(), "further": further}


def is_sparse(args: Any) -> bool:
    """Attention is limited to the tokens that an indexer chooses (of megatron-core 0.19)."""
    return getattr(args, "experimental_attention_variant", None) == "dsa"


def named_as_te(state: dict[str, Any], has_fused_norms: bool) -> dict[str, Any]:
    """Norms by the names of Transformer Engine's layers, which is what checkpoints hold."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    held = [v for v in nested_values(state) if isinstance(v, ShardedBase)]
    router = "mlp.router.weight"
    moe = {v.key.removesuffix(router) for v in held if v.key.endswith(router)}
    inside, outside = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    for v in held:
        for name in ("q", "kv") if has_fused_norms else ():
            v.key = v.key.replace(f".{name}_layernorm.", f".linear_{name}_up_proj.layer_norm_")
        for old, new, is_moe in ((inside, outside, True), (outside, inside, False)):
            at, found, rest = v.key.partition(old)
            if found and (at in moe) == is_moe:
                v.key = at + new + rest
                break
    return state


def patch_attention() -> None:
    """Let local attention have values of another size than queries and keys, as latent ones do."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    def window(sq: int, skv: int, sizes: tuple[int, int]) -> torch.Tensor:
        behind = torch.arange(sq)[:, None] - torch.arange(skv)[None]
        return (behind < -sizes[1]) | (behind > sizes[0])

    fused_softmax.get_sliding_window_causal_mask = window  # theirs wants a GPU
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    plain = DotProductAttention.__init__

    def init(self: Any, *a: Any, k_channels: int = 0, v_channels: int = 0, **k: Any) -> None:
        plain(self, *a, **k)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


def gpt(args: Any) -> Any:
    import torch.nn.functional as F
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    patch_attention()
    names = SAME + (LATENT if args.multi_latent_attention else ())
    names += SPARSE if is_sparse(args) else ()
    said = {n: getattr(args, n) for n in names if getattr(args, n, None) is not None}
    if args.multi_latent_attention:
        said["q_lora_rank"] = args.q_lora_rank
    # The Hadamard rotation of queries and keys, which is a CUDA kernel's, leaves their products.
    more = {"dsa_indexer_rotate_activation": False} if is_sparse(args) else {}
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    config = kind(
        **said,
        **more,
        transformer_impl="local",
        num_moe_experts=args.num_experts,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        activation_func=quick_gelu if args.quick_geglu else F.silu,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )
    for name in (n for n in vars(args) if n.startswith("yarn_")):
        setattr(config, name, getattr(args, name))
    if is_sparse(args):
        spec, mtp = sparse_spec(config), None
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
    )


def sparse_spec(config: Any) -> Any:
    """The release's own layers of sparse attention, of local modules: its spec's function takes a
    backend, and the one around it wants Transformer Engine."""
    from hybrid_layers import Duplicated
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Backend(LocalSpecProvider):
        """Local modules, and the linear layer that every rank has whole."""

        def linear(self) -> Any:
            return Duplicated

    absorbed_mla.TELinear = Duplicated
    backend = Backend()
    layers = specs.get_transformer_layer_with_experimental_attention_variant_spec(config, backend)
    norm = backend.layer_norm(rms_norm=True, for_qk=False)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


if __name__ == "__main__":
    main()
