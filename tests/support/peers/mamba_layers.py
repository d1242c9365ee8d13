"""megatron-core 0.16's MambaModel on a CPU, of local layers, with the kernels' arithmetic in torch.

The shipped stack names modules of Transformer Engine, in which norms are part of the linear layer
after them; here they are modules of their own, with the same epsilon. The kernels of mamba_ssm,
which want a GPU, are the recurrence that they compute: `h = exp(dt A) h + dt B x`, `y = C h + D x`
(Dao and Gu 2024, "Transformers are SSMs", section 2; mamba_ssm, `ssd_combined.py`).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedNorm(nn.Module):
    """What mamba_ssm calls RMSNorm: one of each group of channels."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: Any, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


class LayerNorm:
    """Megatron's norm without Transformer Engine, with the configuration's epsilon everywhere."""

    def __new__(cls, config: Any, hidden_size: int, **_: Any) -> Any:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return WrappedTorchNorm(config, hidden_size, config.layernorm_epsilon)


def scan(
    zxBCdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, **by: Any
) -> Any:
    """`mamba_split_conv1d_scan_combined`: convolution, recurrence and gate, [rows, length, ...]."""
    heads, size, groups = len(A), by["headdim"], by["ngroups"]
    state = (len(weight) - heads * size) // (2 * groups)
    z, channels, dt = zxBCdt.split([heads * size, len(weight), heads], -1)
    length = channels.shape[1]
    channels = F.conv1d(
        channels.transpose(1, 2),
        weight[:, None],
        bias,
        padding=weight.shape[1] - 1,
        groups=len(weight),
    )
    channels = F.silu(channels[..., :length]).transpose(1, 2)
    x, B, C = channels.split([heads * size, groups * state, groups * state], -1)
    x = x.unflatten(-1, (heads, size))
    B, C = (t.unflatten(-1, (groups, state)).repeat_interleave(heads // groups, 2) for t in (B, C))
    dt = F.softplus(dt + dt_bias)
    held, out = x.new_zeros(len(x), heads, size, state), []
    for n in range(length):
        step = dt[:, n, :, None, None]
        held = torch.exp(step * A[:, None, None]) * held
        held = held + step * x[:, n, :, :, None] * B[:, n, :, None]
        out.append((held * C[:, n, :, None]).sum(-1) + by["D"][:, None] * x[:, n])
    return torch.stack(out, 1).flatten(2) * F.silu(z)


def rearrange(x: Tensor, pattern: str, **_: int) -> Tensor:
    """The patterns of einops that training takes: one of size 1 goes, or dimensions change."""
    before, after = (side.split() for side in pattern.split("->"))
    if "1" in before:
        return x.squeeze(before.index("1"))
    return x.permute([before.index(name) for name in after])


def stub_kernels() -> None:
    """Give megatron-core what it imports of mamba_ssm and einops; before it is imported."""
    names: dict[str, dict[str, Any]] = {
        "einops": {"rearrange": rearrange, "repeat": rearrange},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": scan,
            "mamba_split_conv1d_scan_combined": scan,
        },
    }
    for name, members in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            module = sys.modules.setdefault(whole, types.ModuleType(whole))
            module.__path__ = []  # type: ignore[attr-defined]
        for key, value in members.items():
            setattr(module, key, value)


def build_mamba(config: Any, args: dict[str, Any]) -> Any:
    """A MambaModel, as Megatron-LM's `mamba_builder` makes it of args."""
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block

    mamba_block.TENorm = LayerNorm
    return MambaModel(
        config,
        _stack(),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        hybrid_attention_ratio=args["hybrid_attention_ratio"],
        hybrid_mlp_ratio=args["hybrid_mlp_ratio"],
        hybrid_override_pattern=args["hybrid_override_pattern"],
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
    )


def _stack() -> Any:
    """`mamba_stack_spec` of megatron-core, of local layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def layer(kind: Any, **parts: Any) -> Any:
        return ModuleSpec(module=kind, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=LayerNorm,
                    mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=LayerNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params=causal, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
            mlp_layer=layer(
                MLPLayer,
                pre_mlp_layernorm=LayerNorm,
                mlp=ModuleSpec(module=MLP, submodules=mlp),
                mlp_bda=get_bias_dropout_add,
            ),
            moe_layer=layer(
                MoETransformerLayer,
                pre_mlp_layernorm=LayerNorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=8),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
