"""Which layers Transformer Engine's modules compute (`--kernels te`), and why not the others.

The choice is made once, when a model is built, and needs no weights, so that `--dry-run` shows it
too. What a module cannot do exactly as our layer does is left to our own kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import float32, nn

from megtool.kernels.attention import transformer_engine as te_attention
from megtool.kernels.elementwise.activation import formula
from megtool.kernels.experts.transformer_engine import TeGroupedLinear
from megtool.kernels.transformer_engine import library as transformer_engine
from megtool.kernels.transformer_engine.linear import TeLinear, TeModule
from megtool.kernels.transformer_engine.norm_linear import TeNorm, TeNormLinear, TeNormMlp
from megtool.model.attention.grouped_query import Attention
from megtool.model.attention.mla import DownLinear, LatentAttention
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.mlp import Mlp
from megtool.model.moe.experts import ExpertLinear, SharedExperts
from megtool.model.recurrent.mamba import MambaMixer
from megtool.model.recurrent.short_conv import GatedShortConv
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.layer import TransformerLayer
from megtool.optim.fp8.config import Fp8Config
from megtool.optim.fp8.transformer_engine import required_multiple
from megtool.spec import layer_sets
from megtool.train.features.module_precision import layer_ranges
from megtool.train.options.config import TrainConfig

TeKind = Literal[
    "Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "DotProductAttention"
]
Precision = Callable[[str], Fp8Config | None]

_PLAIN_CALLERS = (Attention, MambaMixer, GatedShortConv, SharedExperts)
"""Owners that read nothing but the product of a linear layer with a norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeChoice:
    """What computes the layers `names` of a model, which are parts of its layer `owner`: a module
    of Transformer Engine, or our own kernels for a `reason`. Attention itself has no names: its
    kernel is chosen in each pass (`kernels.te_attention`)."""

    names: tuple[str, ...]
    owner: str
    module: TeKind | None = None
    reason: str = ""


def in_bf16(name: str) -> Fp8Config | None:
    """The precision of a model without FP8."""
    return None


def excluded_kinds(settings: TrainConfig) -> dict[TeKind, str]:
    """Modules that options of a run exclude, and why."""
    norms: tuple[TeKind, ...] = ("LayerNormLinear", "LayerNormMLP")
    reasons: list[tuple[bool, tuple[TeKind, ...], str]] = [
        (settings.lora.lora_rank is not None, norms, "LoRA reads what the norm gives"),
        (settings.qat is not None, (*norms, "GroupedLinear"), "--qat rounds what is multiplied"),
        (
            settings.cuda_graph_impl != "none",
            (*norms, "GroupedLinear", "DotProductAttention"),
            "not captured as a CUDA graph",
        ),
        (
            settings.sharding.is_fully_sharded,
            (*norms, "GroupedLinear"),
            "weights are sharded by torch",
        ),
        (
            settings.attention_dropout > 0,
            ("DotProductAttention",),
            "dropout of weights, which a seed decides",
        ),
        (
            settings.recompute_granularity == "selective",
            (*norms, "GroupedLinear"),
            "its products cannot be kept by --recompute-granularity selective",
        ),
    ]
    return {kind: why for applies, kinds, why in reversed(reasons) if applies for kind in kinds}


def choose_te_modules(
    stages: Sequence[Decoder],
    precision: Precision = in_bf16,
    excluded: Mapping[TeKind, str] | None = None,
    *,
    has_fp8: bool = False,
) -> list[TeChoice]:
    """The choice for every linear layer between embedding and output layer of some stages.

    `precision` is that of layers by name. With `has_fp8` some are in FP8, and the others are left
    alone: a module of Transformer Engine would compute them in FP8 as well.
    """
    choices: list[TeChoice] = []
    for stage in stages:
        for n in stage.stage.layers:
            layer = cast(TransformerLayer, stage.decoder.layers[str(n)])
            chooser = _Chooser(layer, stage, precision, excluded or {}, has_fp8)
            choices += chooser.choices()
    return choices


class _Chooser:
    """The choices of one layer."""

    def __init__(
        self,
        layer: TransformerLayer,
        stage: Decoder,
        precision: Precision,
        excluded: Mapping[TeKind, str],
        has_fp8: bool,
    ) -> None:
        self.layer, self.prefix = layer, f"decoder.layers.{layer.layer}"
        self.groups, self.dtype, self.precision = stage.groups, stage.dtype, precision
        self.excluded, self.has_fp8 = excluded, has_fp8

    def choices(self) -> Iterator[TeChoice]:
        """All of them."""
        done: set[str] = set()
        for owner_name, owner in self.layer.named_modules():
            full = f"{self.prefix}.{owner_name}" if owner_name else self.prefix
            if isinstance(owner, Mlp):
                names = (f"{full}.linear_fc1", f"{full}.linear_fc2")
                if reason := self._refuse_mlp(owner, names):
                    yield TeChoice(names=names, owner=full, reason=f"no LayerNormMLP: {reason}")
                else:
                    done |= set(names)
                    yield TeChoice(names=names, owner=full, module="LayerNormMLP")
            if isinstance(owner, Attention | LatentAttention):
                reason = self._refuse_attention(owner)
                kind: TeKind | None = None if reason else "DotProductAttention"
                core = f"{full}.core_attention"
                yield TeChoice(names=(), owner=core, module=kind, reason=reason)
            for name, module in owner.named_children():
                child = f"{full}.{name}"
                if child not in done and isinstance(
                    module, ColumnLinear | RowLinear | DownLinear | ExpertLinear
                ):
                    yield self._choose_linear(owner, child, module)

    def _choose_linear(self, owner: nn.Module, name: str, module: nn.Module) -> TeChoice:
        """What computes a linear layer, whose norm is part of it or not."""
        kind: TeKind | None
        if isinstance(module, ExpertLinear):
            reason = self._refuse_experts(module, name)
            kind = None if reason else "GroupedLinear"
            return TeChoice(names=(name,), owner=name, module=kind, reason=reason)
        reason = ""
        if isinstance(module, ColumnLinear) and module.norm is not None:
            reason = self._refuse_norm_linear(owner, name, module)
            if not reason:
                return TeChoice(names=(name,), owner=name, module="LayerNormLinear")
            reason = f"no LayerNormLinear: {reason}"
        kind = None if self.precision(name) is None else "Linear"
        if kind is None:
            reason = reason or "torch multiplies in 16 bits"
        return TeChoice(names=(name,), owner=name, module=kind, reason=reason)

    def _refuse_attention(self, attention: Attention | LatentAttention) -> str:
        config = self.layer.config
        if "DotProductAttention" in self.excluded:
            return self.excluded["DotProductAttention"]
        if self.groups.cp.size > 1:
            return "context parallelism has its own exchange"
        sizes = config.attention.head_dim, config.attention.head_dim
        if isinstance(attention, LatentAttention):
            if config.indexer.index_num_heads:
                return "each token attends to those that an indexer ranks"
            sizes = (
                config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim,
                config.attention.v_head_dim,
            )
        return te_attention.refuse(
            self.dtype,
            sizes,
            has_softcap=bool(config.attention.attn_softcap),
            has_bias=config.positions.position_embedding in ("alibi", "relative"),
            has_window_sinks=(config.attention.attn_sinks or config.attention.attn_zero_sinks)
            and self.layer.layer in layer_sets.sink_layers(config)
            and config.window.has_window(self.layer.layer),
        )

    def _refuse_experts(self, module: ExpertLinear, name: str) -> str:
        fp8 = self.precision(name)
        if why := self._refuse_common("GroupedLinear", [name], [module]):
            return why
        multiple = 1 if fp8 is None else required_multiple(fp8.fp8_recipe)
        if any(side % multiple for side in module.weight.shape[1:]):
            return f"a side is no multiple of {multiple}"
        return ""

    def _refuse_norm_linear(self, owner: nn.Module, name: str, module: ColumnLinear) -> str:
        if why := self._refuse_norm(module):
            return why
        if not isinstance(owner, (*_PLAIN_CALLERS, Mlp)):
            return "what its norm gives is read elsewhere, too"
        return self._refuse_common("LayerNormLinear", [name], [module])

    def _refuse_mlp(self, mlp: Mlp, names: tuple[str, str]) -> str:
        config, fc1, fc2 = mlp.config, mlp.linear_fc1, mlp.linear_fc2
        if why := self._refuse_norm(fc1):
            return why
        if mlp.activation_func is not None or formula(config.mlp.activation) not in (
            transformer_engine.KINDS
        ):
            return f"it has no activation {config.mlp.activation}"
        if config.mlp.activation_limit or config.mlp.glu_offset or config.mlp.mlp_gate_scale != 1:
            return "its gate has a limit, an offset or a scale"
        if self.precision(names[0]) != self.precision(names[1]):
            return "its projections differ in precision"
        return self._refuse_common("LayerNormMLP", names, [fc1, fc2])

    def _refuse_norm(self, module: ColumnLinear) -> str:
        norm = module.norm
        if self.layer.config.norms.shared_norm:
            return "one norm feeds attention and MLP"
        if norm is None or module.layer_norm_weight is None:
            return "there is no norm with a weight before it"
        if norm.kind == "layernorm" and module.layer_norm_bias is None:
            return "its layer norm has no bias"
        if module.group.size > 1:
            return "tensor parallelism"
        return ""

    def _refuse_common(self, kind: TeKind, names: Iterable[str], modules: Sequence[Any]) -> str:
        """What excludes a module for all linear layers that it stands for."""
        if kind in self.excluded:
            return self.excluded[kind]
        if self.has_fp8 and any(self.precision(name) is None for name in names):
            return "in 16 bits, between layers in FP8"
        for module in modules:
            if module.weight.dtype == float32:
                return "it multiplies float32 as TF32"
            if module.product is not None or module.tap is not None:
                return "another feature changes its product"
            if kind != "GroupedLinear" and module.adapter is not None:
                return "LoRA reads what the norm gives"
        return ""


def build_te_modules(
    stages: Sequence[Decoder], choices: Iterable[TeChoice], num_rows: Callable[[str], int]
) -> dict[str, tuple[TeModule, int]]:
    """Put the chosen modules into their layers; parameters stay those of the layers.

    `num_rows` is what rows of a layer are filled up to. Returns for each linear layer, by its name,
    the module and which of its products it is.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: a weight's shape does not fit.
    """
    by_name = {
        f"decoder.layers.{n}.{name}": module
        for stage in stages
        for n in stage.stage.layers
        for name, module in stage.decoder.layers[str(n)].named_modules()
    }
    out: dict[str, tuple[TeModule, int]] = {}
    for choice in choices:
        if choice.module is None or not choice.names:
            continue
        te_module = _build(by_name[choice.owner], choice.module, num_rows(choice.names[0]))
        out |= {name: (te_module, i) for i, name in enumerate(choice.names)}
    return out


def remove_te_modules(stages: Sequence[Decoder]) -> None:
    """Restore the layers."""
    for stage in stages:
        for module in stage.decoder.layers.modules():
            for attribute in ("norm_product", "product"):
                if isinstance(getattr(module, attribute, None), TeModule):
                    setattr(module, attribute, None)


def _build(module: Any, kind: TeKind, num_rows: int) -> TeModule:
    """The module of Transformer Engine for a layer, and its place in it."""
    te_module: Any
    if kind == "GroupedLinear":
        te_module = module.product = TeGroupedLinear(module.weight, num_rows)
    elif kind == "Linear":
        te_module = module.product = TeLinear(module.weight, num_rows)
    elif kind == "LayerNormLinear":
        te_module = TeNormLinear(_norm_of(module), module.weight, module.bias, num_rows=num_rows)
        module.norm_product = te_module
    else:
        fc1, fc2, config = module.linear_fc1, module.linear_fc2, module.config
        te_module = TeNormMlp(
            _norm_of(fc1),
            (fc1.weight, fc1.bias),
            (fc2.weight, fc2.bias),
            activation=formula(config.mlp.activation),
            is_gated=config.mlp.gated,
            num_rows=num_rows,
        )
        module.norm_product = fc1.norm_product = te_module
    return te_module  # type: ignore[no-any-return]


def _norm_of(linear: ColumnLinear) -> TeNorm:
    if linear.norm is None or linear.layer_norm_weight is None:
        raise ValueError("a layer without a norm")
    return TeNorm(
        weight=linear.layer_norm_weight,
        bias=linear.layer_norm_bias,
        eps=linear.norm.eps,
        zero_centered=linear.norm.zero_centered,
    )


def describe_te_choices(choices: Iterable[TeChoice]) -> dict[str, str]:
    """A line for layers of one kind and choice: where they are, and what computes them."""
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for choice in choices:
        number, _, name = choice.owner.removeprefix("decoder.layers.").partition(".")
        module = choice.module or "own kernels"
        label = f"{module} ({choice.reason})" if choice.reason else module
        layers[name.replace("experts.experts.", "experts."), label].append(int(number))
    return {
        f"layers {layer_ranges(numbers)}: {name}": label
        for (name, label), numbers in layers.items()
    }
