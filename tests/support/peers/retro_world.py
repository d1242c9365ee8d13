"""A world in which real megatron-core saves and loads a Retro model; see megatron_world.py.

python retro_world.py ACTION FOLDER [options as JSON]

Releases since 0.16 have no Retro: the one to use is on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_world as world
import torch

LAYERS, ENCODER_LAYERS = 9, 2  # layers 6 and 9 attend to neighbours; layer 6 has the encoder
ARGS = {
    "num_layers": LAYERS,
    "num_attention_heads": world.HEADS,
    "vocab_size": world.VOCAB,
    "retro_add_retriever": True,
    "retro_encoder_layers": ENCODER_LAYERS,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
}


def work(rank: int, *rest: Any) -> None:
    """One process of megatron_world, with a Retro model for its model."""
    world.build, world.LAYERS = build, LAYERS
    world.ACTIONS["save_ranks"] = save_ranks
    world.argparse = SimpleNamespace(Namespace=partial(argparse.Namespace, **ARGS))
    world.work(rank, *rest)


def build(layout: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """A small Retro model of local layers, as `get_retro_decoder_block_spec` lays it out."""
    from megatron.core.models.retro import (
        RetroConfig,
        RetroModel,
        get_retro_decoder_block_spec,
    )
    from megatron.core.models.retro import config as retro_config
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(7)
    retro_config.is_te_min_version = lambda version: False  # it asks, and there is none here
    config = RetroConfig(
        num_layers=LAYERS,
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
        retro_chunk_length=4,
        retro_encoder_num_layers=ENCODER_LAYERS,
        retro_split_preprocessing="98,2,0",
    )
    model = RetroModel(
        config,
        get_retro_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=world.VOCAB,
        max_sequence_length=16,
        share_embeddings_and_output_weights=True,
    )
    return [model.to(getattr(torch, options.get("dtype", "float32")))]


def save_ranks(rank: int, folder: str, chunks: list[Any], options: dict[str, Any]) -> None:
    """Save as Megatron-LM's `torch` format does: one file for each tensor-parallel rank."""
    world.fill(world.sharded(chunks))
    name = f"iter_{world.ITERATION:07d}/mp_rank_{rank:02d}"
    (Path(folder) / name).mkdir(parents=True, exist_ok=True)
    args = argparse.Namespace(**ARGS, hidden_size=world.HIDDEN, params_dtype=torch.float32)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = options["world"], 1
    state = {"model": chunks[0].state_dict_for_save_checkpoint(), "args": args}
    state |= {"iteration": world.ITERATION, "checkpoint_version": 3.0}
    torch.save(state, Path(folder) / name / "model_optim_rng.pt")
    if rank == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(world.ITERATION))


def main() -> None:
    world.start(work)


if __name__ == "__main__":
    main()
