"""Real megatron-core computes the logits of a converted model, on one CPU.

    python family_world.py FOLDER TOKENS.npy LOGITS.npy

The model is built by the args in the checkpoint alone, as `--use-checkpoint-args` would, so that
args, names, shapes and the order of rows are all put to the test. Run as a script of its own.
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


def main() -> None:
    folder, tokens_file, logits_file = (Path(p) for p in sys.argv[1:4])
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    meeting = f"file://{tokens_file}.rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    parallel_state.initialize_model_parallel()
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
    is_bert = args.num_tokentypes > 0
    model = (bert if is_bert else gpt)(args, transformer_config(args)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"], strict=True)
    tokens = torch.from_numpy(np.load(tokens_file))
    where = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    with torch.no_grad():
        if is_bert:
            logits, *_ = model(tokens, torch.ones_like(tokens), torch.zeros_like(tokens))
        else:
            size = tokens.shape[1]
            mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), diagonal=1)
            logits = model(tokens, where, mask)
    np.save(logits_file, logits.float().numpy())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def transformer_config(args: Any) -> Any:
    """What megatron's training loop makes of its args."""
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.transformer_config import TransformerConfig

    def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    activation = tanh_gelu if args.openai_gelu else F.gelu
    if args.squared_relu:
        activation = squared_relu
    kind, blocks = TransformerConfig, {}
    if getattr(args, "heterogeneous_layers_config_path", None) is not None:
        from megatron.core.transformer.heterogeneous.heterogeneous_config import (
            HeterogeneousTransformerConfig,
        )

        kind, name = HeterogeneousTransformerConfig, "heterogeneous_layers_config_encoded_json"
        blocks = {name: getattr(args, name)}
    return kind(
        **blocks,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        layernorm_epsilon=args.norm_epsilon,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else activation,
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


def gpt(args: Any, config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )

    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    if getattr(args, "heterogeneous_layers_config_path", None) is not None:
        spec = get_gpt_heterogeneous_layer_spec(config, use_te=False)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def bert(args: Any, config: Any) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config,
        args.num_tokentypes,
        bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        add_binary_head=args.bert_binary_head,
    )


if __name__ == "__main__":
    main()
