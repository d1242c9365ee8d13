"""One layer: a mixer of tokens and an MLP around the residual, or one of the two."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megtool.errors import MappingError
from megtool.kernels.elementwise.activation import activate
from megtool.kernels.elementwise.dropout_add import bias_dropout_add, drop
from megtool.model.attention.compressed import CompressedAttention
from megtool.model.attention.grouped_query import Attention
from megtool.model.attention.mla import DownLinear, LatentAttention
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.dropout import DropoutSpec
from megtool.model.layers.linear import ColumnLinear
from megtool.model.layers.mlp import Mlp
from megtool.model.layers.norm import NoNorm, NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.model.moe.experts import MoeMlp
from megtool.model.recurrent.delta_net import GatedDeltaNet
from megtool.model.recurrent.kimi_delta import KimiDeltaAttention
from megtool.model.recurrent.mamba import MambaMixer
from megtool.model.recurrent.short_conv import GatedShortConv
from megtool.model.stacks.hyper_connections import HyperConnection
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


class TransformerLayer(nn.Module):
    """A layer, under its number in the entire model, with the branches that `layer_kinds` names.

    Tokens are mixed by attention, a gated delta net or Kimi delta attention (`self_attention`), a
    Mamba-2 mixer (`mixer`) or a gated short convolution (`short_conv`), or not at all; `mlp` is an
    MLP, experts, or None. Attention may have a Mamba-2 mixer beside it (`mamba_mixer`): both are
    given the output of `norm`, and their sum is added.

    The norms before attention and MLP are part of their first projections (`layer_norm_weight`),
    except before latent or Kimi delta attention (`input_layernorm`) and experts
    (`pre_mlp_layernorm`). That before the MLP is computed together with the addition to the
    residual before it, unless dropout is. Where one norm feeds both branches it is that of
    attention. Norms after attention and MLP,
    where a model has those, are `post_layernorm` of their last projections (after experts
    `post_ffn_layernorm`), and come before dropout; with `norms_after_add` they come after the
    addition to the residual. With `layer_input_size` a layer ends with a gate on what it gets
    beside the residual (`input_gate`, `input_proj`, `input_post_layernorm`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        config = config.at_layer(layer)
        self.config, self.layer = config, layer
        norm, hidden = NormSpec.of(config), config.hidden_size

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

        check_branches(config, layer)
        has_attention = layer in layer_sets.attn_layers(config)
        is_latent = has_attention and bool(config.latent.kv_lora_rank)
        is_compressed = has_attention and config.compression.is_compressed
        has_own_norm = is_latent or is_compressed or layer in layer_sets.kda_layers(config)
        self.input_layernorm = norm_layer() if has_own_norm else None
        self.self_attention: nn.Module | None = None
        if has_attention:
            kind = LatentAttention if is_latent else Attention
            self.self_attention = build(CompressedAttention if is_compressed else kind)
        elif layer in layer_sets.delta_layers(config):
            self.self_attention = build(GatedDeltaNet)
        elif layer in layer_sets.kda_layers(config):
            self.self_attention = build(KimiDeltaAttention)
        self.mixer: nn.Module | None = None
        self.short_conv = build(GatedShortConv) if layer in layer_sets.conv_layers(config) else None
        self.mamba_mixer: nn.Module | None = None
        self.norm: NormLayer | None = None
        if layer in layer_sets.parallel_layers(config):
            self.norm, self.mamba_mixer = norm_layer(), build(MambaMixer)
        elif layer in layer_sets.mamba_layers(config):
            self.mixer = build(MambaMixer)
        self.is_moe = layer in layer_sets.moe_layers(config)
        if self.is_moe and config.norms.shared_norm:
            raise MappingError(
                f"layer {layer} has experts without a norm of their own before them",
                hint="such a model is converted, but not run",
            )
        self.pre_mlp_layernorm: NormLayer | NoNorm | None = None
        if self.is_moe:
            self.pre_mlp_layernorm = norm_layer() if config.norms.pre_norms else NoNorm()
        self.mlp: nn.Module | None = None
        if self.is_moe:
            self.mlp = build(MoeMlp)
        elif layer in layer_sets.dense_layers(config):
            self.mlp = build(Mlp)
        self.self_attention_hyper_connection: HyperConnection | None = None
        if config.residual.hyper_streams:
            self.self_attention_hyper_connection, self.mlp_hyper_connection = (
                HyperConnection(config, partial=sequence_parallel, device=device) for _ in range(2)
            )
        self.layer_scalar: nn.Parameter | None = None
        if config.residual.layer_scalar:
            ones = torch.ones(1, dtype=dtype, device=device)
            self.layer_scalar = mark(nn.Parameter(ones, requires_grad=False))
        self._post_norms: tuple[NormLayer, NormLayer] | None = None
        self.input_gate: DownLinear | None = None
        if size := config.residual.layer_input_size:
            self.input_gate, self.input_proj = (
                DownLinear(
                    *sizes,
                    groups.tp,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                    device=device,
                )
                for sizes in ((hidden, size), (size, hidden))
            )
            self.input_post_layernorm = norm_layer()
        has_post_norms = config.norms.post_norms or config.norms.norms_after_add
        if has_post_norms and self.self_attention is not None and self.mlp is not None:
            self._post_norms = after_attention, after_mlp = norm_layer(), norm_layer()
            last = self.self_attention.get_submodule("linear_proj")
            last.add_module("post_layernorm", after_attention)
            if self.is_moe:
                self.post_ffn_layernorm = after_mlp
            else:
                self.mlp.get_submodule("linear_fc2").add_module("post_layernorm", after_mlp)

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual behind the layer."""
        y_TH = self.sum_branches(x_TH, frame)
        if self.input_gate is not None:
            gate_TI = activate(self.input_gate(y_TH), self.config.mlp.activation)
            read_TH = self.input_proj(gate_TI * frame.layer_inputs[self.layer])
            y_TH = y_TH + self.input_post_layernorm(read_TH)
        return y_TH if self.layer_scalar is None else y_TH * self.layer_scalar.detach()

    def sum_branches(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual with what the branches add to it."""
        if self.self_attention_hyper_connection is not None:
            return self._mix_streams(x_TH, self.self_attention_hyper_connection, frame)
        first, second = (None, None) if frame.draws is None else frame.draws.branches(self.layer)
        if self.config.norms.norms_after_add and self._post_norms is not None:
            x_TH = self._post_norms[0](self._add(x_TH, self.attend(x_TH, frame), first))
            y_TH: Tensor = self._post_norms[1](self._add(x_TH, self.feed(x_TH, frame), second))
            return y_TH
        norm = self.mlp_norm
        has_mixer = self.token_mixer is not None
        if norm is None and not has_mixer:
            return x_TH
        if norm is None:
            return self._add(x_TH, self.attend(x_TH, frame), first)
        if not has_mixer:
            return self._add(x_TH, self.feed(norm.normalize(x_TH), frame, x_TH), second)
        attended = self.attend(x_TH, frame)
        if self.config.residual.parallel_residual:
            normal_TH = norm.normalize(x_TH)
            x_TH = self._add(x_TH, attended, first)
        elif first is not None:
            x_TH = self._add(x_TH, attended, first)
            normal_TH = norm.normalize(x_TH)
        else:
            if self.config.residual.residual_scale != 1:
                attended = attended * self.config.residual.residual_scale
            normal_TH, x_TH = norm.of_sum(attended, x_TH)
        return self._add(x_TH, self.feed(normal_TH, frame, x_TH), second)

    def _mix_streams(self, x_TH: Tensor, hyper: HyperConnection, frame: ForwardContext) -> Tensor:
        """The residuals side by side with what the branches add to them."""
        first, second = (None, None) if frame.draws is None else frame.draws.branches(self.layer)
        read_TH, post_TN, mix_TNM = hyper(x_TH)
        branch_TH = dropped(self.attend(read_TH, frame), first)
        x_TH = hyper.add(x_TH, branch_TH, post_TN, mix_TNM)
        hyper, norm = self.mlp_hyper_connection, self.mlp_norm
        read_TH, post_TN, mix_TNM = hyper(x_TH)
        normal_TH = read_TH if norm is None else norm.normalize(read_TH)
        return hyper.add(x_TH, dropped(self.feed(normal_TH, frame), second), post_TN, mix_TNM)

    @property
    def token_mixer(self) -> nn.Module | None:
        """The module that mixes tokens (attention, where it has another beside it), if any."""
        mixers = (self.self_attention, self.mixer, self.short_conv)
        return next((m for m in mixers if m is not None), None)

    @property
    def mlp_norm(self) -> NormLayer | NoNorm | ColumnLinear | None:
        """The module of the norm before the MLP; None in a layer without one."""
        if self.mlp is None:
            return None
        if self.pre_mlp_layernorm is not None:
            return self.pre_mlp_layernorm
        if self.config.norms.shared_norm and self.self_attention is not None:
            first = self.self_attention.get_submodule("linear_qkv")
        else:
            first = self.mlp.get_submodule("linear_fc1")
        return cast(ColumnLinear, first)

    def reads(self) -> list[nn.Parameter]:
        """Parameters of `mlp_norm`, which this layer reads before it calls their holder."""
        if (norm := self.mlp_norm) is None:
            return []
        norm_parameters = norm.named_parameters(recurse=False)
        return [p for name, p in norm_parameters if self.is_moe or name.startswith("layer_norm_")]

    def attend(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output of attention or mixer, or of both, that is added to the residual."""
        if self.norm is not None:
            return self._attend_and_mix(self.norm(x_TH), frame)
        if self.input_layernorm is not None:
            x_TH = self.input_layernorm(x_TH)
        y_TH: Tensor = cast(nn.Module, self.token_mixer)(x_TH, frame)
        return y_TH if self._branch_norms is None else self._branch_norms[0](y_TH)

    def _attend_and_mix(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The sum of attention and mixer, of rows after the norm of both."""
        config = self.config
        attention, mixer = cast(nn.Module, self.self_attention), cast(nn.Module, self.mamba_mixer)
        mixed_TH: Tensor = mixer(x_TH, frame)
        attended_TH: Tensor = attention(x_TH * config.attention.attn_in_scale, frame)
        return (
            mixed_TH * config.mamba.mamba_out_scale + attended_TH * config.attention.attn_out_scale
        )

    def feed(
        self, x_TH: Tensor, frame: ForwardContext, residual_TH: Tensor | None = None
    ) -> Tensor:
        """The output of the MLP or the experts that is added to the residual, computed after
        `mlp_norm`. Experts may need the residual itself.
        """
        mlp = cast(nn.Module, self.mlp)
        y_TH: Tensor = mlp(x_TH, frame, residual_TH) if self.is_moe else mlp(x_TH)
        return y_TH if self._branch_norms is None else self._branch_norms[1](y_TH)

    @property
    def _branch_norms(self) -> tuple[NormLayer, NormLayer] | None:
        """The norms of what attention and MLP add, where they are not those of the sums."""
        return None if self.config.norms.norms_after_add else self._post_norms

    def _add(self, residual_TH: Tensor, branch_TH: Tensor, chance: DropoutSpec | None) -> Tensor:
        scale = self.config.residual.residual_scale
        if chance is None:
            return torch.add(residual_TH, branch_TH, alpha=scale)
        share, seed = chance.share, chance.seed
        return bias_dropout_add(branch_TH, None, residual_TH, share, seed=seed, scale=scale)


def dropped(branch_TH: Tensor, chance: DropoutSpec | None) -> Tensor:
    """What a branch gives after dropout."""
    return branch_TH if chance is None else drop(branch_TH, chance.share, chance.seed)


def check_branches(config: ModelConfig, layer: int) -> None:
    """Refuse a layer whose branches cannot be run.

    Raises:
        MappingError: several mixers in one layer, which are not attention and Mamba-2.
    """
    if layer not in layer_sets.parallel_layers(config):
        return
    mixers = [
        name
        for name, layers in (
            ("attention", layer_sets.attn_layers(config)),
            ("Mamba-2", layer_sets.mamba_layers(config)),
            ("a gated delta net", layer_sets.delta_layers(config)),
            ("Kimi delta attention", layer_sets.kda_layers(config)),
            ("a gated short convolution", layer_sets.conv_layers(config)),
        )
        if layer in layers
    ]
    odd = (
        config.latent.kv_lora_rank
        or not config.norms.pre_norms
        or config.residual.parallel_residual
    )
    if odd or set(mixers) - {"attention", "Mamba-2"}:
        raise MappingError(
            f"layer {layer} has {' and '.join(mixers)} side by side",
            hint="such a model is converted, but not run",
        )
