"""Real megatron-core's T5 with weights that megtool converted, against transformers' logits.

python t5_logits.py SOURCE INPUTS [TP]: prints the largest difference, and names that either side
lacks. SOURCE is a rank file, or the folder of an iteration that megatron-core's dist_checkpointing
loads on TP tensor ranks. INPUTS is what `torch.save` wrote of the texts, sizes and transformers'
logits.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks


def attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    attention_bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attention with a bias, which only Transformer Engine's has."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    scores = q @ k.transpose(-1, -2) * self.softmax_scale
    scores = scores if attention_bias is None else scores + attention_bias
    weights = scores.masked_fill(attention_mask, -1e9).softmax(-1)
    return (weights @ v).permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def build(sizes: dict[str, int], tp: int) -> Any:
    """A T5 of local layers, with the norms after the last ones that Transformer Engine's has."""
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(7)
    DotProductAttention.forward = attend
    layers = sizes["decoder"], sizes["encoder"]
    decoder, encoder = (
        TransformerConfig(
            num_layers=n,
            tensor_model_parallel_size=tp,
            hidden_size=sizes["hidden"],
            num_attention_heads=sizes["heads"],
            kv_channels=sizes["head"],
            ffn_hidden_size=sizes["ffn"],
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            add_bias_linear=False,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            gated_linear_unit=True,
            activation_func=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            softmax_scale=1.0,
        )
        for n in layers
    )
    model = T5Model(
        decoder,
        encoder,
        get_t5_encoder_with_local_block_spec(sizes["encoder"]),
        get_t5_decoder_with_local_block_spec(sizes["decoder"]),
        vocab_size=128,
        max_sequence_length=16,
        share_embeddings_and_output_weights=True,
        position_embedding_type="relative",
        relative_attention_num_buckets=sizes["buckets"],
        relative_attention_max_distance=sizes["distance"],
    )
    for block in (model.encoder, model.decoder):
        block.final_layernorm = torch.nn.RMSNorm(sizes["hidden"], eps=1e-6)
    return model.eval()


def local_name(name: str) -> str:
    """The name of a parameter in local layers."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def load_shards(model: Any, folder: str) -> tuple[list[str], list[str]]:
    """Load a folder by dist_checkpointing, and return names that either side lacks: no bias of the
    output layer is in the folder, so that training has to load it with `log_all`."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from megatron.core.dist_checkpointing.validation import StrictHandling

    state = {"model": model.sharded_state_dict()}
    for value in nested_values(state):
        if isinstance(value, ShardedBase):
            value.key = fused_name(value.key)
    # It calls unexpected what the folder lacks, and missing what the model does.
    held, unexpected, missing = dist_checkpointing.load(
        state, folder, strict=StrictHandling.RETURN_ALL
    )
    found = model.load_state_dict(held["model"], strict=False)
    pairs = (missing, found.missing_keys), (unexpected, found.unexpected_keys)
    # Transformer Engine's modules and the local ones have extra states of different modules.
    lacking, surplus = (sorted(n for n in {*a, *b} if "_extra_state" not in n) for a, b in pairs)
    return lacking, surplus


def fused_name(name: str) -> str:
    """The name of a local layer's norm in Transformer Engine's, which checkpoints have."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def main() -> None:
    source, inputs, *more = sys.argv[1:]
    tp = int(more[0]) if more else 1
    run_ranks(work, tp, source, inputs, tp)


def work(rank: int, source: str, inputs: str, tp: int) -> None:
    """One tensor rank; the first prints."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    parallel_state.initialize_model_parallel(tp, 1)
    said = torch.load(inputs, weights_only=False)
    model = build(said["sizes"], tp)
    if Path(source).is_dir():
        missing, unexpected = load_shards(model, source)
    else:
        held = torch.load(source, weights_only=False)["model"]
        weights = {local_name(n): t for n, t in held.items() if isinstance(t, torch.Tensor)}
        found = model.load_state_dict(weights, strict=False)
        missing, unexpected = found.missing_keys, found.unexpected_keys
    encoder, decoder = said["encoder"], said["decoder"]
    rows, s, t = len(encoder), encoder.shape[1], decoder.shape[1]
    causal = torch.ones(t, t).triu(1).bool().expand(rows, 1, t, t)
    with torch.no_grad():
        logits = model(
            encoder,
            decoder,
            torch.zeros(rows, 1, s, s, dtype=torch.bool),
            causal,
            torch.zeros(rows, 1, t, s, dtype=torch.bool),
        )
        logits = gather_from_tensor_model_parallel_region(logits)
    want = said["logits"]
    answer = {
        "apart": float((logits[..., : want.shape[-1]] - want).abs().max()),
        "missing": missing,
        "unexpected": unexpected,
    }
    if rank == 0:
        print(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
