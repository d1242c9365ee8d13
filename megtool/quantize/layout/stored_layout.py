"""The stored tensors of quantized modules, and the feeds that fill them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megtool.convert.families.nested import tied_head, tower_of
from megtool.errors import CalibrationError, MappingError, UsageError
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.hf_config import QuantizedLayer, quantization
from megtool.quant.packed_tensors.interleaved import interleave
from megtool.quant.packed_tensors.modelopt_tensors import (
    QuantizedTensor,
    compute_input_scale,
    list_kv_scale_specs,
    list_module_specs,
)
from megtool.quant.packed_tensors.mxfp4_expert_blocks import list_block_tensors, make_expert_feeds
from megtool.quant.packed_tensors.pack import (
    TransposedFeed,
    WeightToPack,
    compute_dtype,
    grain_of,
    make_pack_feeds,
)
from megtool.quant.qparams import Floats, LowRankBranch, QParams, WeightQParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import BLOCKS
from megtool.quantize.layout.weight_layout import (
    RowLayout,
    check_blocks,
    describe_misplacement,
    placement_error,
    row_layout,
)
from megtool.reshard.writers.target_spec import Target
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TensorFeed
from megtool.transport.constant_feed import (
    ConstantFeed,
    WholeTensorFeed,
    digest_facts,
    round_to_dtype,
    to_bits,
)
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(slots=True, kw_only=True)
class StoredWeight:
    """A canonical weight in a stored module: its decision, its parameters, and its rows there."""

    decision: Decision
    qparams: WeightQParams
    weight: WeightToPack
    rows: RowLayout
    amax: float = 0.0


@dataclass(slots=True, kw_only=True)
class StoredModule:
    """A stored module to be quantized: several canonical weights if a family fuses them in one
    tensor."""

    name: str
    tensor: GlobalTensor
    weights: list[StoredWeight] = field(default_factory=list)

    @property
    def smoothed(self) -> Floats | None:
        """The per-channel smoothing scales to store."""
        first = self.weights[0].qparams
        return first.smoothing_scale if first.stores_pre_quant_scale else None

    @property
    def branch(self) -> LowRankBranch | None:
        """SVDQuant's matrices to store, with the rows of all weights."""
        first = self.weights[0].qparams.branch
        if first is None:
            return None
        up = np.zeros((self.tensor.shape[0], first.up.shape[1]), np.float32)
        for p in self.weights:
            if p.qparams.branch is not None:
                up[p.rows.indices(len(p.qparams.branch.up))] = p.qparams.branch.up
        return LowRankBranch(up=up, down=first.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm(WholeTensorFeed):
    """A norm's weight (or bias) divided by factors in float32 and rounded once.

    Zero-centered weights w represent 1 + w.
    """

    placement: Placement
    tensor: GlobalTensor
    factors: Floats
    zero_centered: bool

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The norm in the source."""
        return (self.placement,)

    @property
    def identity(self) -> bytes:
        """A digest of the factors."""
        return digest_facts(self.factors, self.zero_centered, self.tensor.dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        # Read in the stored dtype: a source of another dtype gives the same bytes as its cast.
        with reader.open(self.placement, self.tensor.dtype) as run:
            stored = run.read(0, numel(self.placement.shape))
            values = single(stored, self.tensor.dtype.name)
        unit_offset = np.float32(self.zero_centered)
        out = ((values + unit_offset) / self.factors.astype(np.float32) - unit_offset).astype(
            np.float32
        )
        if not np.isfinite(out).all():
            raise CalibrationError(
                "dividing the norm by its smoothing scales gives NaN or Inf",
                tensor=self.tensor.name,
            )
        yield 0, (0,), to_bits(round_to_dtype(out, self.tensor.dtype), self.tensor.dtype)


def collect_weight_qparams(
    decisions: Sequence[Decision], qparams: QParams
) -> dict[str, WeightQParams]:
    """The quantization parameters of every quantized module.

    Raises:
        CalibrationError: a module has none, or those of another format.
    """
    out: dict[str, WeightQParams] = {}
    for d in decisions:
        if d.format is None or not d.format.algo:
            continue
        weight_qparams = qparams.weights.get(d.module.name)
        if weight_qparams is None or weight_qparams.format.algo != d.format.algo:
            has = f"those of {weight_qparams.format.algo}" if weight_qparams else "none"
            raise CalibrationError(
                f"{d.module.name} needs parameters of {d.format.algo}, but the calibration has "
                f"{has}",
                hint="the calibration is of another recipe: calibrate again",
            )
        out[d.module.name] = weight_qparams
    return out


def list_stored_modules(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    weight_qparams: Mapping[str, WeightQParams],
    target: Target,
) -> list[StoredModule]:
    """The stored modules to be quantized, in the order of the files.

    Raises:
        MappingError: see `check_storable`.
    """
    check_blocks(decisions, target)
    tensors = {t.name: t for t in target.side.tensors}
    out: dict[str, StoredModule] = {}
    for d in decisions:
        if d.module.name not in weight_qparams:
            continue
        name = f"{d.module.name}.weight"
        to = target.side.placements[name]
        tensor = tensors[to.stored]
        rows = row_layout(to, tensor)
        reason = describe_misplacement(d, to, tensor)
        if rows is None or reason:
            raise placement_error([(d, tensor, reason)], is_all=False)
        weight = WeightToPack(
            placement=source.placement_of(name),
            shape=(d.module.shape[0], d.module.shape[1]),
            dtype=compute_dtype(tensor.dtype),
            qparams=weight_qparams[d.module.name],
        )
        stored = out.setdefault(
            tensor.name, StoredModule(name=_module_name(tensor.name), tensor=tensor)
        )
        stored.weights.append(
            StoredWeight(
                decision=d, qparams=weight_qparams[d.module.name], weight=weight, rows=rows
            )
        )
    shared: dict[str, list[str]] = defaultdict(list)
    for name, p in target.side.placements.items():
        shared[p.stored].append(name)
    for stored in out.values():
        _check_together(stored, shared[stored.tensor.name])
    return [out[t.name] for t in target.side.tensors if t.name in out]


def _module_name(stored: str) -> str:
    return stored.removesuffix(".weight").removesuffix(BLOCKS)


def _check_together(stored: StoredModule, names: Sequence[str]) -> None:
    """Check that weights in one stored tensor are quantized as one."""
    first = stored.weights[0]
    modules = {p.decision.module.name for p in stored.weights}
    missing = [name for name in names if name.removesuffix(".weight") not in modules]
    differ = [
        p.decision.module.name
        for p in stored.weights
        if (p.qparams.format.algo, p.qparams.format.group_size)
        != (first.qparams.format.algo, first.qparams.format.group_size)
        or p.qparams.stores_pre_quant_scale != first.qparams.stores_pre_quant_scale
        or not np.array_equal(_smoothing_scale(p), _smoothing_scale(first))
        or not _has_same_down(p.qparams.branch, first.qparams.branch)
    ]
    if missing or differ:
        neighbor = (missing or differ)[0].removesuffix(".weight")
        raise MappingError(
            f"{first.decision.module.name} is {first.decision.label}, but {neighbor}, which is "
            "stored in the same tensor, "
            + ("is not quantized" if missing else "has another format or other smoothing scales"),
            tensor=stored.tensor.name,
            hint="give all of them the same format, or exclude all of them",
        )
    for p in stored.weights:
        grain = grain_of(p.weight)
        if p.rows.first % grain or (p.rows.is_interleaved and p.rows.run % grain):
            location = (
                f"{p.rows.run} rows at a time"
                if p.rows.is_interleaved
                else f"at row {p.rows.first}"
            )
            raise MappingError(
                f"{p.decision.module.name} begins {location} in its stored tensor, but "
                f"{p.decision.label} packs {grain} rows together",
                tensor=stored.tensor.name,
                hint="exclude it with a first rule, or choose another format",
            )


def _has_same_down(a: LowRankBranch | None, b: LowRankBranch | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a.down, b.down)


def _smoothing_scale(weight: StoredWeight) -> Floats:
    columns = weight.qparams.smoothing_scale
    return np.ones(weight.weight.shape[1], np.float32) if columns is None else columns


def list_tensor_specs(stored: StoredModule, *, checked: bool = True) -> list[QuantizedTensor]:
    """List the tensors of a module; `checked` requires that calibration has all parameters."""
    first = stored.weights[0]
    if len(stored.tensor.shape) == 3:
        shape = stored.tensor.shape
        return [
            QuantizedTensor(tensor=t)
            for t in list_block_tensors(stored.tensor.name, (shape[0], shape[1], shape[2]))
        ]
    inputs = [
        s for p in stored.weights if checked and (s := compute_input_scale(p.qparams)) is not None
    ]
    rows, width = stored.tensor.shape
    return list_module_specs(
        stored.name,
        (rows, width),
        first.qparams.format,
        first.weight.dtype,
        amax=max(p.amax for p in stored.weights),
        inputs=max(inputs, default=None),
        columns=first.qparams.smoothing_scale if first.qparams.stores_pre_quant_scale else None,
        branch=stored.branch,
    )


def build_module_feeds(stored: StoredModule, specs: Sequence[QuantizedTensor]) -> list[TensorFeed]:
    """The feeds that fill the tensors of one module."""
    amax = max(p.amax for p in stored.weights)
    if len(stored.tensor.shape) == 3:
        codes, scales = (h.tensor for h in specs)
        return [
            feed
            for p, weight in _join_interleaved(stored)
            for feed in make_expert_feeds(
                weight, (codes, scales), expert=p.rows.matrix, first=p.rows.first
            )
        ]
    computed = [(h.part.role, h.tensor) for h in specs if h.part is not None and h.value is None]
    out: list[TensorFeed] = []
    for p, weight in _join_interleaved(stored):
        feeds = make_pack_feeds(weight, computed, row_offset=p.rows.first, amax=amax)
        out += [TransposedFeed(feed=f) for f in feeds] if p.rows.is_transposed else feeds
    values = tuple((h.tensor, h.value) for h in specs if h.value is not None)
    return [*out, ConstantFeed(values=values)] if values else out


def _join_interleaved(stored: StoredModule) -> Iterator[tuple[StoredWeight, WeightToPack]]:
    """Weights with contiguous rows, and interleaved ones joined into one."""
    interleaved: dict[int, list[StoredWeight]] = defaultdict(list)
    for p in stored.weights:
        if p.rows.is_interleaved:
            interleaved[p.rows.matrix].append(p)
        else:
            yield p, _weight_to_pack(p)
    for members in interleaved.values():
        members.sort(key=lambda p: p.rows.first)
        yield (
            members[0],
            interleave([_weight_to_pack(p) for p in members], [p.rows.run for p in members]),
        )


def _weight_to_pack(weight: StoredWeight) -> WeightToPack:
    if weight.qparams.format.algo != "FP8":
        return weight.weight  # FP8 has one scale per stored tensor
    return replace(weight.weight, qparams=replace(weight.qparams, amax=None))


def find_folded_norms(
    source: CheckpointSource, qparams: QParams, target: Target
) -> list[FoldedNorm]:
    """The feeds of the norms into which smoothing scales are folded."""
    tensors = {t.name: t for t in target.side.tensors}
    config = source.view.config
    out: list[FoldedNorm] = []
    for norm, factors in qparams.norm_scales.items():
        for last in ("weight", "bias"):
            name = f"{norm}.{last}"
            to = target.side.placements.get(name)
            if to is None and last == "bias":
                continue
            tensor = None if to is None else tensors[to.stored]
            fits = to is not None and tensor is not None and to.is_identity
            if to is None or tensor is None or not fits or tensor.shape != factors.shape:
                raise MappingError(
                    f"calibration has {len(factors)} smoothing scales for {name}, which does not "
                    "exist or has another shape",
                    tensor=name,
                    hint="use a calibration of this model",
                )
            out.append(
                FoldedNorm(
                    placement=source.placement_of(name),
                    tensor=tensor,
                    factors=factors,
                    zero_centered=bool(
                        last == "weight" and config is not None and config.norms.zero_centered_norm
                    ),
                )
            )
    return out


def list_cache_scales(decisions: Sequence[Decision], qparams: QParams) -> list[QuantizedTensor]:
    """List the scales of those KV caches that the recipe quantizes; qparams of others are
    ignored."""
    out: list[QuantizedTensor] = []
    for d in decisions:
        if d.format is None or not d.format.kv_algo:
            continue
        cache = qparams.kv_caches.get(d.module.name)
        if cache is None:
            if d.format.constant:
                continue  # loaders default to 1
            raise CalibrationError(
                f"{d.module.name} is {d.label}, but the amax of its values is unknown",
                hint="calibrate with data",
            )
        out += list_kv_scale_specs(d.module.names_in("hf")[0], cache)
    return out


def excluded_from_blocks(
    decisions: Sequence[Decision], modules: Sequence[StoredModule], target: Target
) -> list[str] | None:
    """The modules excluded next to experts in MXFP4 blocks; None if there are no such experts.

    Attention is named as one module, as loaders expect.
    """
    if not any(s.tensor.name.endswith(BLOCKS) for s in modules):
        return None
    out = []
    for d in decisions:
        to = target.side.placements.get(f"{d.module.name}.weight")
        if d.format is not None or to is None or d.module.kind not in ("linear", "embedding"):
            continue
        name = _module_name(to.stored)
        out.append(name.rpartition(".")[0] if d.module.roles & {"qkv", "proj"} else name)
    if not any(d.module.name == "head" for d in decisions):
        out.append(tied_head(t.name for t in target.side.tensors))
    towers = dict.fromkeys(t for x in target.side.tensors if (t := tower_of(x.name)))
    return [*out, *towers]


def build_quantization_config(
    decisions: Sequence[Decision], modules: Sequence[StoredModule], target: Target
) -> dict[str, Any]:
    """The quantization config of the folder's config files."""
    caches = {d.format.kv_algo for d in decisions if d.format is not None and d.format.kv_algo}
    if len(caches) > 1:
        raise UsageError(
            f"the KV caches have several formats ({' and '.join(sorted(caches))}), but engines "
            "support one",
            hint="use the same KV cache format in all layers",
        )
    layers = [
        QuantizedLayer(
            name=s.name,
            algo=s.weights[0].qparams.format.algo,
            group_size=s.weights[0].qparams.format.group_size,
            smoothed=s.smoothed is not None,
            rank=0 if (b := s.branch) is None else len(b.down),
        )
        for s in modules
    ]
    quantized = {layer.name for layer in layers}
    unquantized: dict[str, None] = {}
    for d in decisions:
        if d.format is None and d.module.kind == "linear":
            unquantized[_module_name(target.side.placements[f"{d.module.name}.weight"].stored)] = (
                None
            )
    names = [t.name for t in target.side.tensors]
    if not any(d.module.name == "head" for d in decisions):
        unquantized[tied_head(names)] = None  # engines have a module for it
    for t in target.side.tensors:
        if t.name.endswith(".weight") and len(t.shape) == 2 and tower_of(t.name):
            unquantized[_module_name(t.name)] = None
    if not unquantized:  # loaders of NVFP4 refuse an empty list
        embeddings = [d for d in decisions if d.module.kind == "embedding" and d.format is None]
        unquantized.update(dict.fromkeys(n for d in embeddings for n in d.module.names_in("hf")))
    return quantization(
        layers, [k for k in unquantized if k not in quantized], next(iter(caches), None)
    )
