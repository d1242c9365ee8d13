"""One transformer layer: attention and MLP around the residual, in sequence or in parallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megtool.config import ModelConfig
from megtool.model.attention import Attention
from megtool.model.batch import Frame
from megtool.model.latent_attention import LatentAttention
from megtool.model.mlp import Mlp
from megtool.model.moe import MoeMlp
from megtool.model.norm import Norm, NormLayer
from megtool.parallel.groups import Groups


class Layer(nn.Module):
    """A layer, under its number in the whole model.

    The norms before attention and MLP are part of their first projections (`layer_norm_weight`),
    except before latent attention (`input_layernorm`) and experts (`pre_mlp_layernorm`). Norms
    after them, where a model has those, are `post_layernorm` of their last projections.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: Groups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        norm, hidden = Norm.of(config), config.hidden_size

        def norm_layer() -> NormLayer:
            return NormLayer(norm, hidden, partial=sequence_parallel, dtype=dtype, device=device)

        def build(kind: type[nn.Module]) -> nn.Module:
            return kind(
                config,
                layer,
                groups,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )

        self.input_layernorm = norm_layer() if config.kv_lora_rank else None
        if config.kv_lora_rank:
            self.self_attention = build(LatentAttention)
        else:
            self.self_attention = build(Attention)
        is_moe = layer in config.moe_layers
        self.pre_mlp_layernorm = norm_layer() if is_moe else None
        if is_moe:
            self.mlp = build(MoeMlp)
        else:
            self.mlp = build(Mlp)
        self._post_norms: tuple[NormLayer, NormLayer] | None = None
        if config.post_norms:
            self._post_norms = after_attention, after_mlp = norm_layer(), norm_layer()
            last = self.self_attention.get_submodule("linear_proj")
            last.add_module("post_layernorm", after_attention)
            self.mlp.get_submodule("linear_fc2").add_module("post_layernorm", after_mlp)

    def forward(self, x_TH: Tensor, frame: Frame) -> Tensor:
        """The residual behind the layer."""
        attended = self.attend(x_TH, frame)
        if self.config.parallel_residual:
            return self._add(self._add(x_TH, attended), self.feed(x_TH))
        x_TH = self._add(x_TH, attended)
        return self._add(x_TH, self.feed(x_TH))

    def attend(self, x_TH: Tensor, frame: Frame) -> Tensor:
        """What attention adds to the residual."""
        if self.input_layernorm is not None:
            x_TH = self.input_layernorm(x_TH)
        y_TH: Tensor = self.self_attention(x_TH, frame)
        return y_TH if self._post_norms is None else self._post_norms[0](y_TH)

    def feed(self, x_TH: Tensor) -> Tensor:
        """What the MLP, or the experts, add to the residual."""
        if self.pre_mlp_layernorm is not None:
            x_TH = self.pre_mlp_layernorm(x_TH)
        y_TH: Tensor = self.mlp(x_TH)
        return y_TH if self._post_norms is None else self._post_norms[1](y_TH)

    def _add(self, residual_TH: Tensor, branch_TH: Tensor) -> Tensor:
        return torch.add(residual_TH, branch_TH, alpha=self.config.residual_scale)
