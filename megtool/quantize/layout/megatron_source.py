"""Read a Megatron checkpoint with ModelOpt's quantizers: the format and parameters of each module.

Settings come from the extra states of modules, amaxes and smoothing scales from the tensors of
their quantizers (see `megatron_target`, and `modelopt_state.quantizers` for the sources).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megtool.console import Progress, silent
from megtool.convert.megatron.names import split_state
from megtool.convert.megatron.parallel_args import parallel_from_args
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError
from megtool.megatron_state.extra_states.names import SUFFIX, is_quantizer_buffer
from megtool.megatron_state.saved_objects import read_object, saved_args
from megtool.options.groups import SourceOptions
from megtool.options.layout import ParallelConfig
from megtool.quant.calibration.solve_qparams import KV_AMAX_OF_UNIT_SCALE
from megtool.quant.modelopt.module_amax import AmaxRows, ModuleAmaxFeed
from megtool.quant.modelopt.quantizers import (
    AMAX,
    FACTS,
    FIXED,
    GLOBAL_AMAX,
    INPUT,
    PRE_QUANT_SCALE,
    ROUND_TWICE,
    STATES,
    WEIGHT,
    decode_extra_state,
    find_cache_format,
    find_format,
)
from megtool.quant.packed_tensors.pack import WeightToPack, compute_dtype, find_amaxes
from megtool.quant.qparams import Floats, KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import ModuleInfo, find_fused_name, list_modules
from megtool.quantize.layout.megatron_target import (
    MegatronModule,
    find_attention,
    group_modules,
    is_aligned,
)
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import WITHOUT_QUANTIZERS, Headers, open_source
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import numeric_values
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.encoded_chunks import SourceFiles
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import Buffers
from megtool.transport.tile import COMPUTED_BYTES

_STATE = f"{SUFFIX}/shard_"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMegatronSource:
    """An opened checkpoint without its quantizers, the format of every module, and the
    quantization parameters that the quantizers say."""

    source: CheckpointSource
    decisions: tuple[Decision, ...]
    qparams: QParams

    @property
    def smoothed(self) -> list[str]:
        """The modules whose weights are multiplied by scales that inputs are to be divided by."""
        return [n for n, q in self.qparams.weights.items() if q.is_smoothed]


def read_quantized_megatron(
    path: Path,
    options: SourceOptions = SourceOptions(),  # noqa: B008
    *,
    threads: int = 1,
    fixed: bool = False,
    progress: Progress = silent,
) -> QuantizedMegatronSource:
    """Open a quantized Megatron checkpoint, and read the parameters of all quantizers.

    Weights are read only where one number stands for those of several: it is the largest of theirs,
    or was chosen for all. With `fixed` none is: that number is the amax of each, as ModelOpt has
    it, whatever the weights are.

    Raises:
        FormatError: a quantizer is damaged, of a module that is not known, or of a format that no
            engine has; or the checkpoint has none. Or amaxes to be `fixed` are not of one weight.
        MappingError: the model is not known.
    """
    headers = Headers.read(path, options)
    catalogue = headers.catalogue
    states = _read_states(catalogue)
    if not states:
        raise FormatError(
            "it has no state of ModelOpt's quantizers",
            file=catalogue.root,
            hint="`megtool quantize --to torch_dist` writes it, and ModelOpt's quantize.py",
        )
    source = open_source(headers, options, optimizer=False, tensors=WITHOUT_QUANTIZERS)
    parallel = (
        parallel_from_args(saved_args(catalogue)) if saved_args(catalogue) else ParallelConfig()
    )
    reader = _Reader(catalogue, source, states, parallel, threads, fixed)
    return reader.read()


def check_readable_again(
    tree: Path, decisions: Sequence[Decision], qparams: QParams, source: CheckpointSource
) -> None:
    """Read a staged checkpoint, and compare formats and scales of inputs and caches with those that
    it was written with.

    Raises:
        FormatError: they differ.
    """
    model = source.model
    family = model.family.name if model is not None and model.family is not None else None
    again = read_quantized_megatron(tree, SourceOptions(family=family, like=source.like))
    formats = {d.module.name: d.format for d in again.decisions}
    for d in decisions:
        stored, name = formats.get(d.module.name), d.module.name
        same = _label(stored) == _label(d.format)
        if same and name in qparams.weights and d.format is not None and d.format.number.calibrates:
            amax = np.float32(qparams.weights[name].input_amax)
            same = again.qparams.weights[name].input_amax == float(amax)
        if not same:
            raise FormatError(
                f"{name} is {d.label}, and what was written says {_label(stored) or 'unquantized'}",
                file=tree,
                hint="this is a bug: report it with the command",
            )


def _label(form: RecipeFormat | None) -> str:
    return "" if form is None else f"{form.algo}{form.kv_algo} {form.group_size or ''}".rstrip()


def _read_states(catalogue: Catalogue) -> dict[str, dict[str, Any]]:
    """ModelOpt's dict of every module that has one, by the module's name."""
    out: dict[str, dict[str, Any]] = {}
    for name, stored in catalogue.objects.items():
        module, suffix, _ = name.partition(_STATE)
        if not suffix:
            continue
        state = decode_extra_state(read_object(catalogue, stored), file=catalogue.root, name=name)
        if state is not None:
            out[split_state(module)[2]] = state
    return out


def _has_quantizer(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of a module's quantizers rounds."""
    return any("_num_bits" in state and not state.get("_disabled") for state in states)


class _Reader:
    """Reads the quantizers of one checkpoint."""

    def __init__(
        self,
        catalogue: Catalogue,
        source: CheckpointSource,
        states: Mapping[str, dict[str, Any]],
        parallel: ParallelConfig,
        threads: int,
        fixed: bool,
    ) -> None:
        self._catalogue, self._source, self._states = catalogue, source, states
        self._parallel, self._threads, self._fixed = parallel, threads, fixed
        self._tensors = {
            split_state(t.name)[2]: t.name for t in catalogue.tensors if is_quantizer_buffer(t.name)
        }
        self._qparams = QParams()

    def read(self) -> QuantizedMegatronSource:
        """Read all of them."""
        modules = list_modules(self._source.view).modules
        plain = {m.name: _decide(m, None) for m in modules}
        unused = set(self._states)
        for module in group_modules([*plain.values()], self._source.view, self._parallel):
            state = self._states.get(module.name)
            unused.discard(module.name)
            form = find_format(state[STATES], module.name) if state is not None else None
            if state is None or form is None:
                continue
            facts = state.get(FACTS)
            facts = facts if isinstance(facts, dict) else {}
            twice, fixed = bool(facts.get(ROUND_TWICE)), self._fixed or bool(facts.get(FIXED))
            form = replace(form, round_twice=twice and form.algo == "FP8")
            for name, q in self._read_module(module, form, state[STATES], fixed).items():
                self._qparams.weights[name] = q
                plain[name] = _decide(plain[name].module, form)
        for m in modules:
            if m.kind == "kv_cache":
                unused -= self._read_cache(m, plain)
        unused = {n for n in unused if _has_quantizer(self._states[n][STATES].values())}
        if unused:
            raise FormatError(
                f"quantizers of {min(unused)}, which is no linear module of the model that is "
                f"known ({len(unused)} such)",
                file=self._catalogue.root,
                hint="ModelOpt names layers and experts one by one (torch_dist); --like HF_FOLDER "
                "says which model it is",
                error_id="unsupported-quantization",
            )
        return QuantizedMegatronSource(
            source=self._source, decisions=tuple(plain.values()), qparams=self._qparams
        )

    def _read_cache(self, m: ModuleInfo, decisions: dict[str, Decision]) -> set[str]:
        name = find_attention(decisions[m.name], self._source.view)
        state = self._states.get(name)
        form = find_cache_format(state[STATES], name) if state is not None else None
        if form is None:
            return {name}
        amax = KV_AMAX_OF_UNIT_SCALE[form.kv_algo]
        key, value = (
            amax if form.constant else float(self._buffer(f"{name}.{x}_bmm_quantizer.{AMAX}").max())
            for x in "kv"
        )
        self._qparams.kv_caches[m.name] = KVCacheQParams(
            module=m.name, format=form, key_amax=key, value_amax=value
        )
        decisions[m.name] = _decide(m, form)
        return {name}

    def _read_module(
        self,
        module: MegatronModule,
        form: RecipeFormat,
        states: Mapping[str, Mapping[str, Any]],
        fixed: bool,
    ) -> dict[str, WeightQParams]:
        """The parameters of every weight of a module."""
        plain = {
            p.decision.module.name: WeightQParams(module=p.decision.module.name, format=form)
            for p in module.parts
        }
        packing, name = packing_of(form), module.name
        kind, _, granularity = packing.partition(":")
        first = f"{WEIGHT}.0" if f"{WEIGHT}.0" in states else WEIGHT
        is_static = self._has(f"{name}.{first}.{GLOBAL_AMAX}")
        amaxes: dict[str, Floats | None] = dict.fromkeys(plain)
        global_amax = 0.0
        if kind.startswith("mx"):
            pass
        elif kind == "nvfp4" and not is_static:
            global_amax = float(self._buffer(f"{name}.{first}.{AMAX}").max())
        else:
            stored = self._buffer(f"{name}.{first}.{AMAX}")
            if granularity == "tensor" and stored.size == 1:
                amax = float(stored.reshape(-1)[0])
                amaxes |= self._of_whole_weights(module, plain, amax, fixed)
            else:
                amaxes |= self._of_blocks(module, plain, granularity, stored, fixed)
        if is_static:
            global_amax = float(self._buffer(f"{name}.{first}.{GLOBAL_AMAX}").max())
        elif first != WEIGHT:
            global_amax = float(self._buffer(f"{name}.{WEIGHT}.1.{AMAX}").max())
        input_amax = 0.0
        if form.number.calibrates:
            input_amax = float(self._buffer(f"{name}.{INPUT}.{AMAX}").max())
        columns = None
        if self._has(f"{name}.{INPUT}.{PRE_QUANT_SCALE}"):
            factors = self._buffer(f"{name}.{INPUT}.{PRE_QUANT_SCALE}").reshape(-1)
            if not (np.isfinite(factors) & (factors > 0)).all() or len(factors) != module.shape[1]:
                raise self._damaged(f"{name}.{INPUT}.{PRE_QUANT_SCALE}")
            columns = np.float32(1) / factors
        return {
            n: replace(
                q,
                amax=amaxes[n],
                global_amax=global_amax,
                input_amax=input_amax,
                smoothing_scale=columns,
                stores_pre_quant_scale=columns is not None,
                is_smoothed=columns is not None,
            )
            for n, q in plain.items()
        }

    def _of_whole_weights(
        self, module: MegatronModule, plain: Mapping[str, WeightQParams], amax: float, fixed: bool
    ) -> dict[str, Floats | None]:
        """One amax for a module: of each weight, or of those that run as one layer, if it is the
        largest of theirs."""
        names = [*plain]
        values = [amax] * len(names)
        layers = [find_fused_name(part.decision.module) for part in module.parts]
        if len(set(layers)) > 1 and not fixed:
            own = find_amaxes(
                self._source.catalogue,
                self._weights(module, plain),
                Files(),
                threads=self._threads,
            )
            largest: dict[str, float] = defaultdict(float)
            for layer, value in zip(layers, own, strict=True):
                largest[layer] = max(largest[layer], value)
            values = [largest[n] for n in layers] if max(own) == amax else values
        return {n: np.asarray(v, np.float32) for n, v in zip(names, values, strict=True)}

    def _of_blocks(
        self,
        module: MegatronModule,
        plain: Mapping[str, WeightQParams],
        granularity: str,
        stored: Floats,
        fixed: bool,
    ) -> dict[str, Floats | None]:
        """The amaxes of each weight's rows, groups or blocks.

        Raises:
            FormatError: blocks lie across weights, and are not those of the weights.
        """
        width = module.shape[1]
        blocks = [int(n) for n in granularity.split("x")] if granularity[0].isdigit() else [width]
        rows, columns = (blocks[0], blocks[1]) if len(blocks) == 2 else (1, blocks[0])
        shape = -(-module.num_rows // rows), -(-width // columns)
        if stored.size != math.prod(shape):
            raise self._damaged(f"{module.name}.{WEIGHT}.{AMAX}")
        table = stored.reshape(shape)
        if rows > 1 and not is_aligned(module, rows):
            if fixed:
                raise FormatError(
                    f"blocks of {rows} rows lie across several weights, which cannot keep their "
                    "amaxes while they are trained",
                    file=self._catalogue.root,
                    tensor=f"{module.name}.weight",
                    hint="quantize it by rows or by groups of columns, or train with --qat RECIPE",
                    error_id="unsupported-quantization",
                )
            self._check_own(module, plain, (rows, columns), table)
            return dict.fromkeys(plain)
        out: dict[str, Floats | None] = {}
        for part, (name, q) in zip(module.parts, plain.items(), strict=True):
            count = part.decision.module.shape[0]
            found_rows = part.rows.of(0, count)[::rows] // rows
            amax = np.ascontiguousarray(table[found_rows])
            if q.format.algo == "FP8":
                if float(amax.min()) != float(amax.max()):
                    raise self._damaged(f"{module.name}.{WEIGHT}.{AMAX}")
                amax = amax[:1, 0].reshape(())
            out[name] = amax.reshape(-1) if columns == width and rows == 1 else amax
        return out

    def _check_own(
        self,
        module: MegatronModule,
        plain: Mapping[str, WeightQParams],
        blocks: tuple[int, int],
        table: Floats,
    ) -> None:
        """Check that amaxes of blocks that lie across several weights are those of the weights.

        Raises:
            FormatError: they are not, so that no weight has amaxes of its own.
        """
        parts = zip(module.parts, self._weights(module, plain), strict=True)
        tensor = GlobalTensor(name="", shape=table.shape, dtype=named_dtype("float32"))
        feed = ModuleAmaxFeed(
            tensor=tensor,
            parts=tuple(AmaxRows(weight=w, rows=p.rows) for p, w in parts),
            shape=(table.shape[0], table.shape[1]),
            row_block=blocks[0],
            column_block=blocks[1],
        )
        catalogue, files = self._source.catalogue, Files()
        with SourceFiles(files, [catalogue]) as opened:
            reader = RegionReader(
                ShardLocator(catalogue), files, opened, Buffers(), tile_bytes=COMPUTED_BYTES
            )
            (_, _, bits) = next(iter(feed.generate(reader)))
        if not np.array_equal(bits.view(np.float32), table):
            raise FormatError(
                f"blocks of {blocks[0]} rows lie across several weights, and their amaxes are not "
                "those of the weights",
                file=self._catalogue.root,
                tensor=f"{module.name}.weight",
                hint="quantize it again, by rows or by groups of columns",
                error_id="unsupported-quantization",
            )

    def _weights(
        self, module: MegatronModule, plain: Mapping[str, WeightQParams]
    ) -> list[WeightToPack]:
        return [
            WeightToPack(
                placement=self._source.placement_of(f"{n}.weight"),
                shape=(part.decision.module.shape[0], part.decision.module.shape[1]),
                dtype=compute_dtype(part.tensor.dtype),
                qparams=q,
            )
            for part, (n, q) in zip(module.parts, plain.items(), strict=True)
        ]

    def _has(self, name: str) -> bool:
        return name in self._tensors

    def _buffer(self, name: str) -> Floats:
        """A buffer of a quantizer, as float32.

        Raises:
            FormatError: it is missing, or no magnitude.
        """
        if name not in self._tensors:
            raise FormatError(
                f"the quantizer has no {name.rpartition('.')[2]}: it is not calibrated",
                file=self._catalogue.root,
                tensor=name,
                hint="calibrate it (mtq.calibrate), or quantize it again",
            )
        with CheckpointReader(self._catalogue, Files()) as reader:
            view = reader.open_stored(self._tensors[name])
            values = numeric_values(view.read(), view.dtype).astype(np.float32)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise self._damaged(name)
        return np.asarray(values)

    def _damaged(self, name: str) -> FormatError:
        return FormatError(
            "its values or their number do not fit the quantizer",
            file=self._catalogue.root,
            tensor=name,
            hint="`megtool amax inspect SRC` shows them; quantize it again",
        )


def _decide(module: ModuleInfo, form: RecipeFormat | None) -> Decision:
    num_bytes = module.num_bytes
    if form is not None and form.algo:
        num_bytes = form.number.num_bytes(module.shape, form.group_size)
    return Decision(
        module=module,
        format=form,
        rules=(),
        reason="by ModelOpt's quantizers",
        num_bytes=num_bytes,
    )
