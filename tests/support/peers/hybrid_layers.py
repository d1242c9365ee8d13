"""Megatron's own layers as megatron-core 0.19's HybridModel and GPTModel are built of them.

Modules of Transformer Engine, which its shipped specs name, are replaced by local ones. Kernels are
stubs: parameters and sharded state dicts need none.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import torch
from torch import nn


class Norm(nn.Module):
    """A norm's parameters, which are zero: torch's own norms are not centred around it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No values: parameters alone are looked at."""
        return x


class GatedNorm(nn.Module):
    """What mamba_ssm calls RMSNorm: its weight."""

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


class Duplicated(nn.Module):
    """A linear layer that every tensor rank has whole, like Transformer Engine's TELinear."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        weight = torch.zeros(outputs, inputs, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias."""
        return nn.functional.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Nothing, under a key of its own."""

    def set_extra_state(self, state: Any) -> None:
        """There is none."""


class Attends(nn.Module):
    """Attention without parameters, of keys and values that may differ in size."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def stub_kernels() -> None:
    """Modules that megatron-core wants to import, whose functions only a forward pass calls."""

    def unused(*args: Any, **keywords: Any) -> None:
        raise NotImplementedError

    names: dict[str, dict[str, Any]] = {
        "einops": {"rearrange": unused, "repeat": unused},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
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


def stack_spec() -> Any:
    """Every kind of layer that a pattern of HybridModel's may name, and multi-token prediction."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    further = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=Norm,
            hnorm=Norm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=Norm,
        ),
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba(),
            gdn_layer=_mixing(_delta_net(), "self_attention.in_proj.layer_norm_"),
            attention_layer=_mixing(_attention(), "self_attention.linear_qkv.layer_norm_"),
            dsa_layer=_mixing(latent(Norm, is_sparse=True, has_norms=False)),
            mla_layer=_mixing(latent(Norm, is_sparse=False, has_norms=False)),
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
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={
                        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
                    },
                ),
            ),
            moe_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=8),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[further]),
            ),
        ),
    )


def _mixing(self_attention: Any, norm: str = "") -> Any:
    """A layer of a mixer alone; `norm` is how the norm before it is called on disk."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": norm} if norm else {},
        ),
    )


def _mamba() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=Norm,
            mixer=ModuleSpec(
                module=MambaMixer,
                submodules=MambaMixerSubmodules(
                    in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                ),
            ),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _delta_net() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        ),
    )


def _attention() -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )


def latent(norm: Any, *, is_sparse: bool, has_norms: bool) -> Any:
    """Latent attention, with an indexer where it is sparse; `has_norms`: of compressed queries,
    keys and values, as in GPTModel (HybridModel's layers have none)."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import (
        MLASelfAttention,
        MLASelfAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    absorbed_mla.TELinear = multi_latent_attention.TELinear = Duplicated
    module, submodules = MLASelfAttention, MLASelfAttentionSubmodules
    attends: Any = Attends
    if is_sparse:
        module = absorbed_mla.AbsorbedMLASelfAttention
        submodules = absorbed_mla.AbsorbedMLASelfAttentionSubmodules
        indexer = ModuleSpec(
            module=dsa.DSAIndexer,
            submodules=dsa.DSAIndexerSubmodules(
                linear_wq_b=Duplicated,
                linear_wk=Duplicated,
                k_norm=norm,
                linear_weights_proj=Duplicated,
            ),
        )
        attends = ModuleSpec(
            module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer)
        )
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=submodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=Duplicated,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=Duplicated,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=attends,
            linear_proj=RowParallelLinear,
            q_layernorm=norm if has_norms else IdentityOp,
            kv_layernorm=norm if has_norms else IdentityOp,
        ),
    )
