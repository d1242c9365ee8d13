"""The parameters of every pipeline stage and chunk of real models, one process for all ranks.

    python chunk_world.py '[{"kind": "gpt", "layers": 6, "pp": 3, "tied": true, ...}, ...]'

Every rank is built in turn in a world whose communication is fake. Prints a JSON list: for each
model, rows `[stage, chunk, [[name, is shared, is unused], ...]]` with the parameters in
registration order. A parameter is shared where Megatron marks it `shared_embedding`, and unused
where the module has another weight for the same product.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron_stages import WITHOUT_FUSIONS
from torch import nn

PATTERN_SYMBOLS = "M*-E"


class Layer(nn.Module):
    """A layer of a hybrid stack: where it lies is looked at, not what it consists of."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class Norm(nn.Module):
    """The final norm of a hybrid stack."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def main() -> None:
    warnings.filterwarnings("ignore")
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    models = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        found = [chunks(**model) for model in models]
    print(json.dumps(found))


def chunks(*, kind: str, layers: int, pp: int, vpp: int = 1, mtp: int = 0, **more: Any) -> Any:
    """The rows of one model."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    own = {n: more.pop(n) for n in ("tied", "positions", "pattern") if n in more}
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
            num_attention_heads=2,
            add_bias_linear=False,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            mtp_num_layers=mtp or None,
            normalization="RMSNorm",
            gated_linear_unit=True,
            **WITHOUT_FUSIONS,
            **more,
        )
        for chunk in range(vpp):
            model = {"gpt": gpt, "hybrid": hybrid}[kind](config, chunk if vpp > 1 else None, **own)
            rows.append([stage, chunk, [row(model, n, p) for n, p in model.named_parameters()]])
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return rows


def row(model: Any, name: str, parameter: nn.Parameter) -> list[Any]:
    """Name, is shared, is unused."""
    is_unused = (
        name == "output_layer.weight"
        and model.share_embeddings_and_output_weights
        and model.shared_embedding_or_output_weight() is not parameter
    )
    return [name, bool(getattr(parameter, "shared_embedding", False)), is_unused]


def gpt(config: Any, chunk: int | None, *, tied: bool = False, positions: bool = False) -> Any:
    """One chunk of a GPT of local layers, its input and output layers where they belong."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    at = {} if chunk is None else {"vp_stage": chunk}
    spec, mtp = get_gpt_layer_local_spec(normalization="RMSNorm"), None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **at)
    return GPTModel(
        config,
        spec,
        vocab_size=16,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **at),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **at),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute" if positions else "rope",
        mtp_block_spec=mtp,
        **at,
    )


def hybrid(config: Any, chunk: int | None, *, pattern: str, tied: bool = False) -> Any:
    """One stage of a hybrid model, of layers without contents."""
    from megatron.core import parallel_state
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    mamba_block.TENorm = Norm
    kinds = MambaStackSubmodules(*[ModuleSpec(module=Layer)] * len(PATTERN_SYMBOLS))
    return MambaModel(
        config,
        ModuleSpec(module=MambaStack, submodules=kinds),
        vocab_size=16,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        hybrid_override_pattern=pattern,
    )


if __name__ == "__main__":
    main()
