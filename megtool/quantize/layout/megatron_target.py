"""Plan a `torch_dist` checkpoint with fake-quantized weights and ModelOpt's quantizers.

Weights keep their dtype; each quantized module has its amaxes as tensors and the settings of its
quantizers as extra state, as modelopt 0.47 saves them from a Megatron model: one key per layer and
expert, gate and up rows apart. `restore_sharded_modelopt_state` and Megatron's own load restore it
at any layout; amaxes by row of gate and up are in the order of the ranks of `--dst-tp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megtool.convert.dialects import CanonicalView, TargetView
from megtool.dtypes import dtype as named_dtype
from megtool.errors import LayoutError, MappingError
from megtool.options.layout import ParallelConfig
from megtool.options.target import TargetOptions
from megtool.plan.copies import PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.quant.modelopt.grid_weights import GridWeightFeed
from megtool.quant.modelopt.module_amax import AmaxRows, FusedRows, ModuleAmaxFeed
from megtool.quant.modelopt.quantizers import (
    AMAX,
    FIXED,
    INPUT,
    OUTPUT,
    PRE_QUANT_SCALE,
    ROUND_TWICE,
    WEIGHT,
    Quantizer,
    encode_extra_state,
    input_quantizer,
    list_cache_quantizers,
    list_disabled_quantizers,
    list_weight_quantizers,
    make_state_files,
)
from megtool.quant.packed_tensors.pack import compute_dtype
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.recipes.formats import RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quantize.layout.stored_layout import StoredModule, StoredWeight, find_folded_norms
from megtool.quantize.layout.weight_layout import row_layout
from megtool.reshard.execute import placements_read
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import AddedState, Target
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed, round_to_dtype

_GATED = re.compile(r"(.+\.linear_fc1)\.weight_([wv])")
_FLOAT32 = named_dtype("float32")
_OF_ROWS = (f"{WEIGHT}.{AMAX}", f"{WEIGHT}.0.{AMAX}")
"""The buffers that may have an amax for each row or block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A canonical weight of a Megatron module, the tensor that it is stored in, its rows there, and
    its rows among all of the module's in the order of `--dst-tp`."""

    decision: Decision
    tensor: GlobalTensor
    stored_rows: FusedRows
    rows: FusedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModule:
    """A linear module of Megatron's, under its global name, and the weights it is made of."""

    name: str
    parts: tuple[ModulePart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the whole weight, without padding."""
        rows = sum(p.decision.module.shape[0] for p in self.parts)
        return rows, self.parts[0].decision.module.shape[1]

    @property
    def num_rows(self) -> int:
        """The rows of the module's weight, padding included."""
        tensors = {p.tensor.name: p.tensor for p in self.parts}
        return sum(t.shape[-2] for t in tensors.values())


def group_modules(
    decisions: Sequence[Decision], side: TargetView | CanonicalView, parallel: ParallelConfig
) -> list[MegatronModule]:
    """Megatron's linear modules, in the order of their tensors.

    Raises:
        MappingError: the rows of a weight are scattered in its module.
    """
    tensors = {t.name: t for t in side.tensors}
    parts: dict[str, list[ModulePart]] = {}
    for d in decisions:
        to = side.placements.get(f"{d.module.name}.weight")
        is_dense = d.module.kind == "linear" and d.module.roles.isdisjoint({"router", "mtp"})
        if (
            to is None
            or not is_dense
            or not to.stored.endswith((".weight", ".weight_w", ".weight_v"))
        ):
            continue
        tensor = tensors[to.stored]
        layout_of = row_layout(to, tensor)
        if layout_of is None or layout_of.is_transposed or len(tensor.shape) != 2:
            if d.format is not None:
                raise MappingError(
                    f"{d.module.name} has no rows of its own in Megatron's {to.stored}",
                    tensor=to.stored,
                    hint="exclude it with a first rule, or --to hf",
                )
            continue
        stored_rows = FusedRows(first=layout_of.first, run=layout_of.run, period=layout_of.period)
        match = _GATED.fullmatch(to.stored)
        name = match[1] if match else to.stored.removesuffix(".weight")
        part = ModulePart(decision=d, tensor=tensor, stored_rows=stored_rows, rows=stored_rows)
        parts.setdefault(name, []).append(part)
    for name, members in parts.items():
        if name.endswith("linear_fc1") and len(members) == 2:  # gate and up of each rank in turn
            d = members[0].decision
            ranks = parallel.etp if "expert" in d.module.roles else parallel.tp
            run = d.module.shape[0] // ranks
            members.sort(key=lambda p: p.decision.module.name.rpartition(".")[2] == "up")
            parts[name] = [
                replace(p, rows=FusedRows(first=i * run, run=run, period=2 * run))
                for i, p in enumerate(members)
            ]
    order = {t.name: i for i, t in enumerate(side.tensors)}
    modules = [MegatronModule(name=n, parts=tuple(p)) for n, p in parts.items()]
    return sorted(modules, key=lambda m: order[m.parts[0].tensor.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAmaxes:
    """What a module's weight has an amax of: `row_block` x `column_block` elements (0: all).

    `is_static`: NVFP4's, which are of blocks and not dynamic. `by_row`: FP8's, where the weights
    of a module have one each.
    """

    row_block: int = 0
    column_block: int = 0
    is_static: bool = False
    by_row: bool = False

    def shape(self, module: MegatronModule) -> tuple[int, ...]:
        """The shape of the amaxes, `()` for one."""
        if not self.row_block:
            return ()
        return -(-module.num_rows // self.row_block), -(-module.shape[1] // self.column_block)


@dataclass(slots=True, kw_only=True)
class QuantizedMegatron:
    """A planned target and what its feeds need: the quantized modules, the KV caches by the name of
    their attention, and by module the quantizers and what they have amaxes of.

    `is_fixed`: amaxes stay what they are, whatever becomes of the weights.
    """

    modules: list[MegatronModule] = field(default_factory=list)
    is_fixed: bool = False
    quantizers: dict[str, list[Quantizer]] = field(default_factory=dict)
    amaxes: dict[str, ModuleAmaxes] = field(default_factory=dict)
    caches: dict[str, Decision] = field(default_factory=dict)
    planned_target: Target | None = None

    @property
    def target(self) -> Target:
        """The planned target."""
        if self.planned_target is None:
            raise ValueError("the target is not planned yet")
        return self.planned_target

    def buffers_of(self, name: str) -> Iterator[tuple[GlobalTensor, str]]:
        """The tensors of a module's quantizers, and which buffer of which quantizer each is.

        ModelOpt stores single numbers as `[1]`, except those of attention, and blocks of rows and
        columns as a matrix (`_process_quantizer_amax`).
        """
        for q in self.quantizers[name]:
            for buffer, (shape, dtype) in q.buffers.items():
                stored = tuple(n for i, n in enumerate(shape) if len(shape) < 4 or i in (0, 2))
                if math.prod(stored) == 1 and name not in self.caches:
                    stored = (1,)
                role = f"{q.name}.{buffer}"
                kind = named_dtype(str(dtype).removeprefix("torch."))
                yield GlobalTensor(name=f"{name}.{role}", shape=stored, dtype=kind), role


def plan_megatron_target(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    qparams: QParams,
    options: TargetOptions,
) -> QuantizedMegatron:
    """Plan the files of the checkpoint, from headers and the shapes of quantization parameters.

    Raises:
        MappingError, LayoutError: see `add_quantizers`.
    """
    out = QuantizedMegatron()
    add = partial(add_quantizers, out, decisions, qparams)
    out.planned_target = make_target(source, options, add=add)
    return out


def add_quantizers(
    out: QuantizedMegatron,
    decisions: Sequence[Decision],
    qparams: QParams,
    side: TargetView | CanonicalView,
    parallel: ParallelConfig,
) -> AddedState:
    """Plan the quantizers of the modules of `side`, and what a checkpoint stores of them.

    Raises:
        MappingError: ModelOpt has no such quantizers for a module, or a module of Megatron's has
            several formats.
        LayoutError: the layout cuts blocks.
    """
    disabled: list[str] = []
    for module in group_modules(decisions, side, parallel):
        form = _find_format(module)
        if form is None:
            if not module.name.endswith("output_layer"):  # Megatron asserts that it has none
                disabled.append(module.name)
            continue
        out.modules.append(module)
        amaxes = _plan_amaxes(module, form, qparams, parallel)
        out.amaxes[module.name] = amaxes
        out.quantizers[module.name] = _list_quantizers(module, form, qparams, amaxes)
    for d in decisions:
        if d.format is not None and d.format.kv_algo:
            name = find_attention(d, side)
            out.caches[name] = d
            out.quantizers[name] = list_cache_quantizers(d.format)
    return _make_added(out, disabled)


def _find_format(module: MegatronModule) -> RecipeFormat | None:
    """The format of all weights of a module.

    Raises:
        MappingError: they have several.
    """
    forms = dict.fromkeys(
        None if f is None else (f.algo, f.group_size)
        for f in (p.decision.format for p in module.parts)
    )
    if len(forms) > 1:
        names = ", ".join(f"{p.decision.module.name} {p.decision.label}" for p in module.parts)
        raise MappingError(
            f"one module of Megatron's has several formats: {names}",
            tensor=f"{module.name}.weight",
            hint="give all of them the same format, or exclude all of them",
        )
    return module.parts[0].decision.format


def _plan_amaxes(
    module: MegatronModule, form: RecipeFormat, qparams: QParams, parallel: ParallelConfig
) -> ModuleAmaxes:
    """The amaxes that ModelOpt's quantizers of a module's weight have.

    Raises:
        MappingError: they have none such.
        LayoutError: the layout cuts blocks.
    """
    packing = packing_of(form)
    members = [qparams.weights[p.decision.module.name] for p in module.parts]
    is_chosen = any(
        q.amax is not None or q.codes is not None or q.weight_factors is not None for q in members
    )
    name, _, granularity = packing.partition(":")
    if name.startswith("mx"):
        if is_chosen:
            raise MappingError(
                f"ModelOpt's {form.algo} has the scales of the weights alone, and those of "
                f"{members[0].module} are chosen otherwise",
                tensor=f"{module.name}.weight",
                hint="--to hf writes them; a recipe with algorithm none fits",
            )
        return ModuleAmaxes()
    sizes = {v.size for q in members if (v := q.amax) is not None}
    differ = len({float(q.amax.reshape(-1)[0]) for q in members if q.amax is not None}) > 1
    by_row = granularity == "tensor" and sizes == {1} and differ
    if granularity == "tensor" and not by_row:
        return ModuleAmaxes()
    if granularity in ("channel", "tensor"):
        return ModuleAmaxes(row_block=1, column_block=module.shape[1], by_row=by_row)
    blocks = [int(n) for n in granularity.split("x")]
    if name == "nvfp4" and not is_chosen:
        return ModuleAmaxes()
    rows, columns = (blocks[0], blocks[1]) if len(blocks) == 2 else (1, blocks[0])
    _check_blocks(module, form, rows, columns, parallel)
    if rows > 1 and any(q.amax is not None for q in members) and not is_aligned(module, rows):
        raise MappingError(
            f"blocks of {rows} rows lie across {', '.join(q.module for q in members)}, whose "
            "amaxes are chosen for each of them",
            tensor=f"{module.name}.weight",
            hint="--to hf writes them; a recipe with algorithm none fits",
        )
    if name == "nvfp4" and parallel.tp > 1:
        raise LayoutError(
            f"chosen block scales of {form.algo} cannot be cut by --dst-tp {parallel.tp}: ModelOpt "
            "takes them as equal on all ranks",
            tensor=f"{module.name}.weight",
            hint="--dst-tp 1, or a recipe whose scales come from the weights alone",
        )
    return ModuleAmaxes(row_block=rows, column_block=columns, is_static=name == "nvfp4")


def is_aligned(module: MegatronModule, rows: int) -> bool:
    """Whether every block of rows is of one weight."""
    return all(
        p.rows.first % rows == 0 and p.rows.run % rows == 0 and p.rows.period % rows == 0
        for p in module.parts
    )


def _check_blocks(
    module: MegatronModule, form: RecipeFormat, rows: int, columns: int, parallel: ParallelConfig
) -> None:
    """Check that tensor-parallel ranks have whole blocks.

    Raises:
        LayoutError: they have not.
    """
    is_expert = "expert" in module.parts[0].decision.module.roles
    ranks = parallel.etp if is_expert else parallel.tp
    is_row_parallel = module.name.endswith(("linear_proj", "linear_fc2", "out_proj"))
    size, block = (module.shape[1], columns) if is_row_parallel else (module.num_rows, rows)
    if ranks > 1 and size // ranks % block:
        axis = "etp" if is_expert else "tp"
        raise LayoutError(
            f"--dst-{axis} {ranks} cuts blocks of {block}: {module.name} has {size // ranks} "
            f"{'columns' if is_row_parallel else 'rows'} a rank",
            tensor=f"{module.name}.weight",
            hint=f"a smaller --dst-{axis}, or another format",
        )


def _list_quantizers(
    module: MegatronModule, form: RecipeFormat, qparams: QParams, amaxes: ModuleAmaxes
) -> list[Quantizer]:
    """The quantizers of a module's inputs, outputs and weight.

    Raises:
        MappingError: its weights have several smoothing scales.
    """
    first = qparams.weights[module.parts[0].decision.module.name]
    for p in module.parts[1:]:
        other = qparams.weights[p.decision.module.name]
        same = (first.smoothing_scale is None) == (other.smoothing_scale is None)
        if same and first.smoothing_scale is not None and other.smoothing_scale is not None:
            same = np.array_equal(first.smoothing_scale, other.smoothing_scale)
        if not same or first.stores_pre_quant_scale != other.stores_pre_quant_scale:
            raise MappingError(
                f"{first.module} and {other.module} are one module of Megatron's and have several "
                "smoothing scales",
                tensor=f"{module.name}.weight",
                hint="--to hf writes them",
            )
    smoothed = None
    if first.stores_pre_quant_scale:
        dtype = compute_dtype(module.parts[0].tensor.dtype)
        smoothed = module.shape[1], getattr(torch, dtype.name)
    shape = amaxes.shape(module)
    if amaxes.row_block > 1 and shape:  # as ModelOpt's quantizer has it
        shape = (shape[0], 1, shape[1], 1)
    return [
        input_quantizer(form, smoothed),
        Quantizer(name=OUTPUT, enabled=False),
        *list_weight_quantizers(form, shape, is_static=amaxes.is_static, by_row=amaxes.by_row),
    ]


def find_attention(d: Decision, side: TargetView | CanonicalView) -> str:
    """The name of Megatron's attention of a layer."""
    parent = d.module.name.rpartition(".")[0]
    for last in ("k", "kv_up", "q", "kv_down"):
        to = side.placements.get(f"{parent}.{last}.weight")
        if to is not None:
            return to.stored.removesuffix(".weight").rpartition(".")[0] + ".core_attention"
    raise MappingError(
        f"{d.module.name} is {d.label}, and Megatron has no attention for it",
        hint="a recipe without a format of the KV cache, or --to hf",
    )


def _make_added(planned: QuantizedMegatron, disabled: Sequence[str]) -> AddedState:
    """The tensors and objects of quantizers, and ModelOpt's state of the whole model."""
    tensors = [t for name in planned.quantizers for t, _ in planned.buffers_of(name)]
    twice = {m.name for m in planned.modules if (f := m.parts[0].decision.format) and f.round_twice}
    fixed = {FIXED: True} if planned.is_fixed else {}
    objects = {
        f"{name}._extra_state/shard_0_1": encode_extra_state(
            owned, fixed | ({ROUND_TWICE: True} if name in twice else {})
        )
        for name, owned in planned.quantizers.items()
    }
    item = encode_extra_state(list_disabled_quantizers())
    objects |= {f"{name}._extra_state/shard_0_1": item for name in disabled}
    return AddedState(
        tensors=tensors, objects=objects, small_files=make_state_files(planned.quantizers)
    )


def list_megatron_feeds(
    source: CheckpointSource,
    qparams: QParams,
    planned: QuantizedMegatron,
    stored: Sequence[StoredModule],
) -> list[TensorFeed]:
    """The feeds of amaxes, smoothing scales, and weights that are not those of the source.

    `stored` are the modules of a Hugging Face folder, with the amaxes that they share there.
    """
    by_name = {w.decision.module.name: w for s in stored for w in s.weights}
    amaxes = {s: max(w.amax for w in m.weights) for m in stored for s in _names(m)}
    feeds: list[TensorFeed] = []
    values: list[tuple[GlobalTensor, Any]] = []
    for module in planned.modules:
        members = [by_name[p.decision.module.name] for p in module.parts]
        plan = planned.amaxes[module.name]
        top = max(amaxes[w.qparams.module] for w in members)
        for tensor, role in planned.buffers_of(module.name):
            if role in _OF_ROWS and plan.row_block:
                feeds.append(_amax_feed(module, members, plan, tensor))
                continue
            values.append((tensor, _constant(tensor, role, members[0].qparams, top)))
        for part, member in zip(module.parts, members, strict=True):
            if member.qparams.smoothing_scale is not None or member.qparams.codes is not None:
                weight = replace(member.weight, placement=source.placement_of(_weight_name(part)))
                feeds.append(
                    GridWeightFeed(
                        weight=weight,
                        tensor=part.tensor,
                        rows=part.stored_rows,
                        amax=amaxes[member.qparams.module],
                    )
                )
    values += _list_cache_values(qparams, planned)
    if values:
        feeds.append(ConstantFeed(values=tuple(values)))
    return feeds + find_folded_norms(source, qparams, planned.target)


def _constant(tensor: GlobalTensor, role: str, first: WeightQParams, top: float) -> NDArray[Any]:
    """The bits of a buffer that is not of rows or blocks; `top` is the amax of the whole weight."""
    if role == f"{INPUT}.{AMAX}":
        value = np.asarray(first.input_amax, np.float32)
    elif role == f"{INPUT}.{PRE_QUANT_SCALE}":
        if first.smoothing_scale is None:
            raise ValueError(f"{first.module} has no smoothing scale")
        value = np.asarray(np.float32(1) / first.smoothing_scale.astype(np.float32))
    else:
        value = np.asarray(top, np.float32)
    return round_to_dtype(value.reshape(tensor.shape), tensor.dtype)


def _list_cache_values(
    qparams: QParams, planned: QuantizedMegatron
) -> Iterator[tuple[GlobalTensor, NDArray[Any]]]:
    """The amaxes of KV caches."""
    for name, d in planned.caches.items():
        cache = qparams.kv_caches.get(d.module.name)
        for tensor, role in planned.buffers_of(name):
            if cache is not None:
                top = cache.key_amax if role.startswith("k_") else cache.value_amax
                yield tensor, np.asarray(top, np.float32).reshape(tensor.shape)


def list_buffer_values(
    qparams: QParams, planned: QuantizedMegatron
) -> list[tuple[GlobalTensor, NDArray[Any]]]:
    """The bits of all buffers of quantizers whose weights have amaxes of their own.

    Raises:
        MappingError: the amaxes of a weight are not known.
    """
    out: list[tuple[GlobalTensor, NDArray[Any]]] = []
    for module in planned.modules:
        members = [qparams.weights[p.decision.module.name] for p in module.parts]
        plan = planned.amaxes[module.name]
        top = max(
            q.global_amax or (0.0 if q.amax is None else float(q.amax.max())) for q in members
        )
        for tensor, role in planned.buffers_of(module.name):
            if role in _OF_ROWS and plan.row_block:
                bits = _join_amaxes(module, members, plan, tensor)
            else:
                bits = _constant(tensor, role, members[0], top)
            out.append((tensor, bits))
    return out + list(_list_cache_values(qparams, planned))


def _join_amaxes(
    module: MegatronModule,
    members: Sequence[WeightQParams],
    plan: ModuleAmaxes,
    tensor: GlobalTensor,
) -> NDArray[Any]:
    """The amaxes of a module's rows or blocks, from those of its weights."""
    out = np.zeros(plan.shape(module), np.float32)
    for part, q in zip(module.parts, members, strict=True):
        if q.amax is None:
            raise MappingError(
                "its amaxes are those of the weight, and are not stored apart",
                tensor=f"{module.name}.weight",
                hint="a format whose scales are not of blocks of rows",
            )
        rows = part.rows.of(0, part.decision.module.shape[0])[:: plan.row_block]
        amax = q.amax.reshape(-1, 1) if plan.by_row else q.amax.reshape(-1, out.shape[1])
        out[rows // plan.row_block] = amax
    return round_to_dtype(out.reshape(tensor.shape), tensor.dtype)


def _names(stored: StoredModule) -> Iterator[str]:
    return (w.qparams.module for w in stored.weights)


def _weight_name(part: ModulePart) -> str:
    return f"{part.decision.module.name}.weight"


def _amax_feed(
    module: MegatronModule,
    members: Sequence[StoredWeight],
    plan: ModuleAmaxes,
    tensor: GlobalTensor,
) -> ModuleAmaxFeed:
    shape = plan.shape(module)
    parts = []
    for part, member in zip(module.parts, members, strict=True):
        amax = member.qparams.amax
        if amax is not None and plan.by_row:
            amax = np.full(part.decision.module.shape[0], amax.reshape(-1)[0], np.float32)
        elif plan.by_row:
            amax = np.full(part.decision.module.shape[0], member.amax, np.float32)
        parts.append(AmaxRows(weight=member.weight, rows=part.rows, amax=amax))
    return ModuleAmaxFeed(
        tensor=tensor,
        parts=tuple(parts),
        shape=(shape[0], shape[1]),
        row_block=plan.row_block,
        column_block=plan.column_block,
    )


def plan_megatron(
    source: CheckpointSource,
    qparams: QParams,
    planned: QuantizedMegatron,
    stored: Sequence[StoredModule],
    options_key: str,
) -> ReshardPlan:
    """The plan of the whole checkpoint: copies of what stays, and feeds of what is computed."""
    target = planned.target
    feeds = list_megatron_feeds(source, qparams, planned, stored)
    names = {
        _weight_name(p)
        for m in planned.modules
        for p in m.parts
        if (q := qparams.weights[p.decision.module.name]).smoothing_scale is not None
        or q.codes is not None
    }
    norms = {f"{n}.{last}" for n in qparams.norm_scales for last in ("weight", "bias")}
    placements = {
        n: p for n, p in target.side.placements.items() if n not in names and n not in norms
    }
    return build_plan(
        [PlanSource(catalogue=source.catalogue, placements=placements_read(source, target))],
        target.destination,
        placements,
        fills=target.fills,
        dropped=target.dropped,
        copies={n: specs for n, specs in source.repeats.items() if n in placements},
        feeds=feeds,
        options=options_key,
    )
