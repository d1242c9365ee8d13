"""A world of gloo processes in which megatron-core 0.19 saves and loads a HybridModel on a CPU.

    python hybrid_world.py ACTION FOLDER [options as JSON]

Like megatron_world.py, with another release of megatron-core on PYTHONPATH. The kernels of Mamba-2
and of gated delta nets are stubs: parameters and sharded state dicts need none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

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


def main() -> None:
    action, folder = sys.argv[1:3]
    options = json.loads(sys.argv[3])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = options["tp"] * options["pp"]
    mp.spawn(work, (action, folder, port, world, options), nprocs=world, join=True)


def work(
    rank: int, action: str, folder: str, port: int, world: int, options: dict[str, Any]
) -> None:
    """One process: stub kernels and devices, then act."""
    warnings.filterwarnings("ignore")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
    }
    stub_kernels()
    cpu = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: cpu
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(options["tp"], options["pp"])
    model = build(options)
    (save if action == "save" else load)(rank, folder, model, options)
    dist.barrier()
    dist.destroy_process_group()


def stub_kernels() -> None:
    """Modules that megatron-core wants to import, whose functions only a forward pass calls."""

    class RMSNorm(nn.Module):
        def __init__(
            self,
            size: int,
            eps: float = 1e-5,
            group_size: int = 0,
            norm_before_gate: bool = False,
            device: Any = None,
            dtype: Any = None,
        ) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def unused(*args: Any, **keywords: Any) -> None:
        raise NotImplementedError

    names: dict[str, dict[str, Any]] = {
        "einops": {"rearrange": unused, "repeat": unused},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": unused,
            "mamba_split_conv1d_scan_combined": unused,
        },
        "fla.modules.l2norm": {"l2norm": unused},
        "fla.modules.convolution": {"causal_conv1d": unused},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": unused},
    }
    for name, members in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(
                ".".join(parts[:end]), types.ModuleType(".".join(parts[:end]))
            )
            module.__path__ = []  # type: ignore[attr-defined]
        for key, value in members.items():
            setattr(module, key, value)


def build(options: dict[str, Any]) -> Any:
    """A small HybridModel of Megatron's own layers."""
    from functools import partial

    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    class Norm(nn.Module):
        """A norm's weight; torch's own norms are not centred around zero."""

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    hybrid_block.TENorm = Norm
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    bda = get_bias_dropout_add
    spec = ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=Norm,
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        submodules=MambaMixerSubmodules(
                            in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                        ),
                    ),
                    mamba_bda=bda,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            gdn_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm,
                    self_attention=ModuleSpec(
                        module=GatedDeltaNet,
                        submodules=GatedDeltaNetSubmodules(
                            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
                        ),
                    ),
                    self_attn_bda=bda,
                    sharded_state_dict_keys_map={
                        "input_layernorm.": "self_attention.in_proj.layer_norm_"
                    },
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm,
                    self_attention=ModuleSpec(
                        module=SelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=SelfAttentionSubmodules(
                            linear_qkv=ColumnParallelLinear,
                            core_attention=DotProductAttention,
                            linear_proj=RowParallelLinear,
                        ),
                    ),
                    self_attn_bda=bda,
                    sharded_state_dict_keys_map={
                        "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
                    },
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=partial(
                        MLP.as_mlp_submodule,
                        submodules=MLPSubmodules(
                            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                        ),
                    ),
                    mlp_bda=bda,
                    sharded_state_dict_keys_map={
                        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
                    },
                ),
            ),
        ),
    )
    pattern = options["pattern"]
    config = TransformerConfig(
        num_layers=len(pattern.replace("|", "")),
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        experimental_attention_variant="gated_delta_net" if "G" in pattern else None,
        linear_attention_freq=[1] * len(pattern.replace("|", "")) if "G" in pattern else None,
        **SIZES,
    )
    return HybridModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=16,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
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
    args = argparse.Namespace(
        **SIZES,
        num_layers=len(options["pattern"].replace("|", "")),
        hybrid_layer_pattern=options["pattern"],
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        group_query_attention=True,
        add_bias_linear=False,
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCAB,
        make_vocab_size_divisible_by=8,
        position_embedding_type="none",
        max_position_embeddings=16,
        transformer_impl="local",
        params_dtype=torch.float32,
    )
    common = {"iteration": ITERATION, "args": args, "checkpoint_version": 3.0}
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
