"""Which tensors the pipeline stages of a real T5 hold, in releases of megatron-core that had them.

    python t5_stages.py FOLDER '{"encoder": [2, 2], "decoder": [3, 1], "tied": true, ...}'

Each stack is given by its number of layers and of stages. Every rank is built in turn in a world
whose communication is fake, and saved as a rank file. Prints a JSON list: the names and shapes of
each stage's tensors.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    folder, model = Path(sys.argv[1]), json.loads(sys.argv[2])
    num_stages, stages = model["encoder"][1] + model["decoder"][1], []
    for stage in range(num_stages):
        with contextlib.redirect_stdout(sys.stderr):
            built = build(stage, **model)
        fill(built, stage, **model)
        rank = folder / "iter_0000001" / f"mp_rank_00_{stage:03d}"
        rank.mkdir(parents=True)
        common = {"args": Namespace(**args_of(**model)), "checkpoint_version": 3.0, "iteration": 1}
        torch.save(common | {"model": built.state_dict()}, rank / "model_optim_rng.pt")
        named = built.named_parameters(remove_duplicate=False)
        stages.append({name: list(p.shape) for name, p in named})
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    print(json.dumps(stages))


def args_of(
    *, encoder: list[int], decoder: list[int], tied: bool, sizes: dict[str, int]
) -> dict[str, Any]:
    """The args that the release's training script has."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": decoder[1],
        "encoder_pipeline_model_parallel_size": encoder[1],
        "num_layers": encoder[0],
        "encoder_num_layers": encoder[0],
        "decoder_num_layers": decoder[0],
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "kv_channels": sizes["head"],
        "ffn_hidden_size": sizes["ffn"],
        "max_position_embeddings": 512,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": sizes["buckets"],
        "relative_attention_max_distance": 20,
        "padded_vocab_size": sizes["vocab"],
        "vocab_size": sizes["vocab"],
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": not tied,
    }


@torch.no_grad()
def fill(
    model: Any,
    stage: int,
    *,
    encoder: list[int],
    decoder: list[int],
    tied: bool,
    sizes: dict[str, int],
) -> None:
    """Values that follow from names in the whole model, as stages that trained together have."""
    is_second = stage >= encoder[1]
    each = (decoder if is_second else encoder)[0] // (decoder if is_second else encoder)[1]
    first = each * (stage - encoder[1] * is_second)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stack, layers, rest = name.partition(".layers.")
        if layers:
            number, _, tail = rest.partition(".")
            name = f"{stack}.layers.{first + int(number)}.{tail}"
        if "output_layer.weight" in name:
            name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
            name = name if is_second else "not used"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def build(
    stage: int, *, encoder: list[int], decoder: list[int], tied: bool, sizes: dict[str, int]
) -> Any:
    """One stage, made as Megatron-LM's `training.py` and `pretrain_t5.py` do."""
    from megatron.core import parallel_state
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    t5_spec.TENorm = WrappedTorchNorm  # which its local layers want as well
    second, last = encoder[1], encoder[1] + decoder[1] - 1
    dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=last + 1)
    parallel_state.initialize_model_parallel(
        1,
        decoder[1],
        encoder_pipeline_model_parallel_size=encoder[1],
        encoder_tensor_model_parallel_size=1,
        get_embedding_ranks=lambda ranks: sorted({ranks[0], ranks[second], ranks[-1]}),
        get_position_embedding_ranks=lambda ranks: [ranks[0], ranks[second]],
        create_gloo_process_groups=False,
    )
    with contextlib.suppress(Exception):
        model_parallel_cuda_manual_seed(7)
    own, other = (
        TransformerConfig(
            num_layers=layers,
            hidden_size=sizes["hidden"],
            num_attention_heads=sizes["heads"],
            kv_channels=sizes["head"],
            ffn_hidden_size=sizes["ffn"],
            add_bias_linear=False,
            normalization="RMSNorm",
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=stages,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_dropout_fusion=False,
        )
        for layers, stages in (decoder, encoder)
    )
    model = T5Model(
        own,
        other,
        get_t5_encoder_with_local_block_spec(encoder[0] // encoder[1]),
        get_t5_decoder_with_local_block_spec(decoder[0] // decoder[1]),
        vocab_size=sizes["vocab"],
        max_sequence_length=16,
        pre_process=stage in (0, second),
        post_process=stage in (second - 1, last),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="relative",
        relative_attention_num_buckets=sizes["buckets"],
        relative_attention_max_distance=20,
        add_encoder=stage < second,
        add_decoder=stage >= second,
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
