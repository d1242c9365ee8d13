"""Tensors under their own names: how a checkpoint of an unknown model is read and written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megtool.convert.canonical_view import CanonicalView, Padding, TargetView
from megtool.convert.megatron import names as megatron_names
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import DType
from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


def as_they_are(tensors: Sequence[GlobalTensor], config: ModelConfig | None) -> CanonicalView:
    """Every stored tensor is its own canonical one, less the padding of a known vocabulary.

    An encoder-decoder's are told apart layer by layer, so that they can be stacked or not, and
    Retro's, whose norms have other names in files of ranks.
    """
    placements: dict[str, Placement] = {}
    canonical: dict[str, GlobalTensor] = {}
    padding: dict[str, int] = {}
    by_layer = _is_by_layer([t.name for t in tensors])
    for t in tensors:
        shape = t.shape
        if config is not None and shape and megatron_names.is_vocabulary(t.name):
            rows = min(shape[0], config.embedding.vocab_size)
            if rows < shape[0]:
                padding[t.name] = shape[0] - rows
            shape = (rows, *shape[1:])
        placement = Placement.identity(t.name, shape)
        for p in _layers(placement) if by_layer else (placement,):
            placements[p.canonical] = p
            canonical[p.canonical] = GlobalTensor(name=p.canonical, shape=p.shape, dtype=t.dtype)
    return CanonicalView(
        dialect="identity",
        tensors=tuple(tensors),
        placements=placements,
        canonical=canonical,
        padding=padding,
        config=config,
    )


def _is_by_layer(names: Collection[str]) -> bool:
    """Canonical names are those of layers, which are no decoder's of one stack."""
    return megatron_names.is_encoder_decoder(names) or megatron_names.is_retro(names)


_STACK = re.compile(r"(.*(?:encoder|decoder)\.layers\.)(?!\d)(.+)")
_LAYER = re.compile(r"(.*(?:encoder|decoder)\.layers\.)(\d+)\.(.+)")
_OWN_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


def _layers(p: Placement) -> Iterator[Placement]:
    """A stacked tensor's layers, each under its own name; other tensors unchanged.

    Norms of megatron-core's own layers get the names they have in `torch_dist`. The first layer of
    Retro's encoder has a norm inside a module of its own, with one name everywhere.
    """
    match = _STACK.fullmatch(p.stored)
    if match is None:
        name = p.canonical
        for separate, fused in _OWN_NORMS:
            if not name.endswith((f"{separate}norm.weight", f"{separate}norm.bias")):
                name = name.replace(separate, fused)
        yield replace(p, canonical=name)
        return
    for layer in range(p.shape[0]):
        yield Placement(
            canonical=f"{match[1]}{layer}.{match[2]}",
            stored=p.stored,
            shape=p.shape[1:],
            dims=p.dims[1:],
            mults=p.mults[1:],
            base=(layer, *p.base[1:]),
        )


def _called(p: Placement, name: str) -> Placement:
    return p if p.stored == name else replace(p, stored=name)


def _stacked(side: TargetView) -> TargetView:
    """The same tensors with all layers of a kind on a leading axis."""
    counts = Counter(f"{m[1]}{m[3]}" for t in side.tensors if (m := _LAYER.fullmatch(t.name)))
    tensors: dict[str, GlobalTensor] = {}
    members: dict[str, tuple[str, int]] = {}
    for t in side.tensors:
        match = _LAYER.fullmatch(t.name)
        name = f"{match[1]}{match[3]}" if match else t.name
        shape = (counts[name], *t.shape) if match else t.shape
        tensors.setdefault(name, replace(t, name=name, shape=shape))
        if match:
            members[t.name] = name, int(match[2])
    placements = {}
    for canonical, p in side.placements.items():
        if p.stored in members:
            name, layer = members[p.stored]
            dims = tuple(d + 1 for d in p.dims)
            p = replace(p, stored=name, dims=dims, base=(layer, *p.base))
        placements[canonical] = p
    return replace(side, tensors=list(tensors.values()), placements=placements)


_OPTIMIZERS = frozenset({"optim", "optims", "optimizer", "optimizers", "optimizer_state"})
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step"})


def is_optimizer_state(name: str) -> bool:
    """Whether the stored name is one of optimizer state: Megatron's spelling, or a part of its
    path.
    """
    parts = name.split(".")
    return (
        megatron_names.split_state(name)[0] != ""
        or parts[-1] in _STATES
        or not _OPTIMIZERS.isdisjoint(parts)
    )


def under_same_names(
    source: CanonicalView,
    config: ModelConfig | None,
    dtype: DType | None,
    parallel: ParallelConfig | None,
    divisible_by: int,
    per_layer: bool = False,
) -> TargetView:
    """The source's own names, with the vocabulary padded for another layout.

    An encoder-decoder's layers are stacked, unless `per_layer`; Retro's never are, and all its
    layers are in one stage. With a configuration the padding is
    Megatron's for the new TP; without one the stored rows count as real, and rows are added only if
    TP does not divide them.

    Raises:
        LayoutError: Retro is to be cut into stages, which megatron-core cannot do.
    """
    is_retro = megatron_names.is_retro(source.canonical)
    if is_retro and parallel is not None and parallel.pp > 1:
        raise LayoutError(
            f"pp={parallel.pp}, and Retro has no pipeline: layers behind the one with the encoder "
            "read what it makes of neighbours",
            hint="omit --pp",
        )
    tensors: list[GlobalTensor] = []
    fills: list[Padding] = []
    pad_to = megatron_names.padded_multiple(parallel.tp if parallel else 1, divisible_by)
    cut = parallel is not None and megatron_names.is_megatron(source.canonical)
    for name, t in source.canonical.items():
        shape = t.shape
        if parallel is not None and cut and shape and megatron_names.is_vocabulary(name):
            rows = shape[0]
            if config is not None or rows % parallel.tp:
                rows = -(-rows // pad_to) * pad_to
            shape = (rows, *shape[1:])
        if shape != t.shape:
            placement = Placement.identity(f"padding of {name}", shape, stored=name)
            padding_shape = (shape[0] - t.shape[0], *shape[1:])
            base = (t.shape[0], *(0 for _ in shape[1:]))
            fills.append(Padding(placement=replace(placement, shape=padding_shape, base=base)))
        is_weight = not is_optimizer_state(name) and not name.endswith(".router.expert_bias")
        kind = dtype if dtype is not None and t.dtype.is_float and is_weight else t.dtype
        tensors.append(GlobalTensor(name=name, shape=shape, dtype=kind))
    by_layer = _is_by_layer(source.canonical)
    placements = {
        n: Placement.identity(n, p.shape)
        if by_layer
        else p
        if p.stored == n
        else replace(p, stored=n)
        for n, p in source.placements.items()
    }
    out = TargetView(tensors=tensors, placements=placements, shards=None, fills=fills, dropped=[])
    if by_layer and not per_layer and not is_retro:
        out = _stacked(out)
    if parallel is None:
        return out
    return replace(out, shards=shard(out.tensors, parallel, config=config))
