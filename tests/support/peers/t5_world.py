"""A world in which real megatron-core saves and loads a T5; see megatron_world.py.

python t5_world.py ACTION FOLDER [options as JSON]
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron_world as world
import torch

ARGS = {
    "num_attention_heads": world.HEADS,
    "vocab_size": 128,
    "encoder_num_layers": 2,
    "decoder_num_layers": world.LAYERS,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
}


def work(rank: int, *rest: Any) -> None:
    """One process of megatron_world, with a T5 for its model."""
    world.build = build
    world.argparse = SimpleNamespace(Namespace=partial(argparse.Namespace, **ARGS))
    world.work(rank, *rest)


def build(layout: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """A small T5 of local layers, with fewer layers in its encoder."""
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(7)
    decoder, encoder = (
        TransformerConfig(
            num_layers=layers,
            hidden_size=world.HIDDEN,
            num_attention_heads=world.HEADS,
            ffn_hidden_size=world.FFN,
            tensor_model_parallel_size=layout.get("tp", 1),
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
            params_dtype=getattr(torch, options.get("dtype", "float32")),
            bf16=options.get("dtype") == "bfloat16",
        )
        for layers in (world.LAYERS, 2)
    )
    model = T5Model(
        decoder,
        encoder,
        get_t5_encoder_with_local_block_spec(2),
        get_t5_decoder_with_local_block_spec(world.LAYERS),
        vocab_size=128,
        max_sequence_length=16,
        share_embeddings_and_output_weights=True,
    )
    return [model.to(getattr(torch, options.get("dtype", "float32")))]


def main() -> None:
    world.start(work)


if __name__ == "__main__":
    main()
