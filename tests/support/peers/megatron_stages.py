"""Which pipeline stage and chunk of real GPT models holds which tensor, one process for all ranks.

    python megatron_stages.py '[{"layers": 6, "pp": 3, ...}, ...]'

Every rank is built in turn in a world whose communication is fake. Prints a JSON list: for each
model its tensors' shapes, and a row `[key, stage, chunk, layer]` for everything held, where layer
is that of a stacked key and 0 for others. Copies for which another rank is responsible are left
out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

WITHOUT_FUSIONS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
}
"""Settings of models that are built without a GPU and Transformer Engine."""


def main() -> None:
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    models = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        found = [held(**model) for model in models]
    print(json.dumps(found))


def held(*, layers: int, pp: int, vpp: int = 1, mtp: int = 0, **split: Any) -> dict[str, Any]:
    """Everything the ranks of one model hold."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shapes: dict[str, list[int]] = {}
    rows = []
    for stage in range(pp):
        dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=pp)
        parallel_state.initialize_model_parallel(
            1, pp, vpp if vpp > 1 else None, create_gloo_process_groups=False
        )
        with contextlib.suppress(Exception):
            model_parallel_cuda_manual_seed(7)
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            add_bias_linear=False,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            mtp_num_layers=mtp or None,
            **WITHOUT_FUSIONS,
            **split,
        )
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for chunk in range(vpp):
            model = build(config, chunk if vpp > 1 else None)
            for t in model.sharded_state_dict(metadata=groups).values():
                if isinstance(t, ShardedTensor) and not any(t.replica_id):
                    shapes[t.key] = list(t.global_shape)
                    layer = t.global_offset[0] if t.prepend_axis_num else 0
                    rows.append((t.key, stage, chunk, layer))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return {"shapes": shapes, "rows": rows}


def build(config: Any, chunk: int | None) -> Any:
    """One chunk of a GPT of local layers, its input and output layers where they belong."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    at = {} if chunk is None else {"vp_stage": chunk}
    spec, mtp = get_gpt_layer_local_spec(), None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **at)
    return GPTModel(
        config,
        spec,
        vocab_size=16,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **at),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **at),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        **at,
    )


if __name__ == "__main__":
    main()
