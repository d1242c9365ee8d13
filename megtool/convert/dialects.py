"""Reads stored tensors as canonical ones, and plans stored tensors from canonical ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from megtool.convert.canonical_view import CanonicalView, Padding, TargetView, refuse_own_mtp_ends
from megtool.convert.config.hybrid import (
    GPT,
    HYBRID,
    are_hybrid,
    from_hybrid,
    hybrid_form,
    needs_hybrid,
    to_hybrid,
)
from megtool.convert.families.class_form import ClassForm
from megtool.convert.families.family import Family
from megtool.convert.families.nested import TIED
from megtool.convert.identity import as_they_are, is_optimizer_state, under_same_names
from megtool.convert.language.binding import Binding, missing, summarize
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel, Weight
from megtool.convert.language.mapping import Row, Table, Tower, first_gap, stack_layers
from megtool.convert.megatron import names as megatron_names
from megtool.convert.megatron.sharding import shard
from megtool.convert.whole_towers import check_towers
from megtool.convert.wrapped_names import HEADLESS, are_of_head, without_wrappers
from megtool.dtypes import DType
from megtool.errors import MappingError, UnknownTensorsError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import ATTENTION, MLP
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor

__all__ = [
    "DIALECTS",
    "CanonicalView",
    "DialectNaming",
    "TargetView",
    "detect_dialect",
    "is_optimizer_state",
    "read_side",
    "write_side",
]

DIALECTS = ("hf", "megatron", "gguf", "torchtitan", "identity")
WRITTEN = ("hf", "megatron", "torchtitan")

STATE_FIRST = "optimizer.state.{state}.{name}"
STATE_LAST = "optimizer.state.{name}.{state}"
"""How optimizer state is called: by Megatron, and by torch.distributed.checkpoint."""


def detect_dialect(names: Sequence[str]) -> str:
    """The dialect of stored names: `megatron`, `gguf`, `torchtitan`, or `hf` for anything else."""
    if megatron_names.is_megatron(names):
        return "megatron"
    if any(n.startswith("blk.") or n == "token_embd.weight" for n in names):
        return "gguf"
    if any(_TORCHTITAN.search(n) for n in names):
        return "torchtitan"
    return "hf"


_TORCHTITAN = re.compile(
    r"\blayers\.\d+\.(attention\.(qkv_linear\.|wkv_a\.)|moe\.routed_experts\.inner_experts\.)"
)


def read_side(
    tensors: Sequence[GlobalTensor],
    *,
    dialect: str | None = None,
    family: Family | None = None,
    config: ModelConfig | None = None,
    partial: bool = False,
    blocks: int = 1,
    form: ClassForm | None = None,
) -> CanonicalView:
    """Read stored tensors as canonical ones.

    Without `dialect` it is detected from the names, and is `identity` (every stored tensor is its
    own canonical one) where the family or configuration that it needs is not given. `partial`
    allows canonical tensors to be missing. `blocks` are those of `CanonicalModel`. Megatron's
    tensors are read in `form`, and `config` is that of the form then.

    Raises:
        MappingError: left-over or missing tensors, or shapes that disagree.
    """
    names = [t.name for t in tensors]
    if dialect is None:
        dialect = detect_dialect(names)
        if config is None or (family is None and dialect != "megatron"):
            dialect = "identity"
    if dialect == "identity":
        return as_they_are(tensors, config)
    if config is None:
        raise MappingError(
            f"reading {dialect!r} tensors needs the model's configuration",
            hint="give --like a folder with a config.json, or reshard inside one format",
            error_id="no-model-config",
        )
    by_state, states = _sorted_by_state(tensors, dialect)
    if family is not None and family.counts_mtp:
        numbers = {int(m[1]) for n in by_state.get("", {}) if (m := _MTP_LAYER.search(n))}
        config = config.with_fields(num_mtp_layers=max(numbers, default=-1) + 1)
    config = _tie(config, dialect, by_state.get("", {}), family, partial=partial)
    if dialect == "megatron":
        config = _with_mlp_in_mtp(config, by_state.get("", {}))
    is_hybrid = dialect == "megatron" and are_hybrid(by_state.get("", {}), config)
    if is_hybrid:
        by_state = _numbered_as(config, by_state)
    model = CanonicalModel(config, _vocabulary(family), blocks)
    out = CanonicalView(
        dialect=dialect,
        tensors=tuple(tensors),
        states={s: n for s, n in states.items() if s},
        family=family,
        is_hybrid=is_hybrid,
    )
    unmatched = _read_states(model, by_state, out, form)
    if config.extra and not any(n.startswith("mtp.") for n in out.canonical):
        config = config.with_fields(num_mtp_layers=0)  # config.json counts what transformers lacks
        model = CanonicalModel(config, model.vocabulary, blocks)
    if unmatched:
        raise UnknownTensorsError(
            f"{_count(len(unmatched), 'stored tensor')} not known to "
            f"{family.name if family else dialect!r}: {summarize(unmatched)}",
            tensor=unmatched[0],
            hint=_what_to_do(unmatched, _table(dialect, family, per_layer=True), model),
        )
    absent, flags = missing(out.canonical, model)
    if absent and not partial:
        table = _table(dialect, family, per_layer=megatron_names.is_per_layer(by_state.get("", {})))
        binding = Binding(table, model)
        place = first_gap(binding.rows, model, absent[0], out.canonical)
        raise MappingError(
            f"{_count(len(absent), 'tensor')} missing: {summarize(absent)}"
            + (f"; the first would be in {place[0]!r}" if place else ""),
            tensor=absent[0],
            hint=HEADLESS
            if dialect == "hf" and are_of_head(absent, binding, out.canonical)
            else _say_absent(absent, config),
            error_id="missing-tensors",
        )
    if family is not None and not partial:
        check_towers(family, out.canonical, config.extra)
    return replace(out, config=config.with_fields(**flags))


def _numbered_as(
    config: ModelConfig, by_state: Mapping[str, Mapping[str, GlobalTensor]]
) -> dict[str, dict[str, GlobalTensor]]:
    """HybridModel's tensors by names with the numbers of the configuration's layers."""
    name = from_hybrid(config)
    return {s: {name(key): t for key, t in of_state.items()} for s, of_state in by_state.items()}


def _say_absent(absent: Sequence[str], config: ModelConfig) -> str:
    """A hint about canonical tensors that are missing."""
    if all(name.startswith("mtp.") for name in absent):
        num = "1 layer" if config.mtp.num_mtp_layers == 1 else f"{config.mtp.num_mtp_layers} layers"
        return (
            f"the configuration counts {num} of multi-token prediction: "
            "either it is another number, or the checkpoint is incomplete; --exclude GLOB leaves "
            "such a layer out as a whole"
        )
    return "the checkpoint is incomplete, or its configuration belongs to another model"


_QUANTIZED = (".weight_scale", ".weight_packed", ".qweight", "_blocks", "_scales")


def _count(number: int, noun: str) -> str:
    return f"1 {noun} is" if number == 1 else f"{number} {noun}s are"


def _what_to_do(unknown: Sequence[str], table: Table, model: CanonicalModel) -> str:
    """A hint about stored tensors that no row holds: of this model, or of none of its family."""
    if any(mark in n for n in unknown for mark in _QUANTIZED):
        return (
            "they look like parts of quantized weights, which are read where config.json has the "
            "quantization_config they were saved with"
        )
    if all(map(Binding(table, model).knows, unknown)):
        kinds = (
            "its list of layers is another model's"
            if model.config.layer_kinds
            else ("a setting is another model's")
        )
        return (
            "the family has them, but not in such layers by this configuration: "
            f"{kinds}, or --exclude GLOB leaves them out"
        )
    return "--exclude GLOB leaves them out, or add rows for them to the family's table"


def _sorted_by_state(
    tensors: Sequence[GlobalTensor], dialect: str
) -> tuple[dict[str, dict[str, GlobalTensor]], dict[str, str]]:
    """Stored tensors by optimizer state ("" for weights) and by their names without it, and the
    spelling of each state.
    """
    by_state: dict[str, dict[str, GlobalTensor]] = {}
    states: dict[str, str] = {}
    for tensor in tensors:
        state, spelled, key = _split(dialect, tensor.name)
        of_state = by_state.setdefault(state, {})
        if key in of_state:
            raise MappingError(
                f"{of_state[key].name!r} is stored twice under different wrappers",
                tensor=of_state[key].name,
                hint="exclude one of them",
            )
        of_state[key] = tensor
        states.setdefault(state, spelled)
    return by_state, states


def _read_states(
    model: CanonicalModel,
    by_state: Mapping[str, Mapping[str, GlobalTensor]],
    out: CanonicalView,
    form: ClassForm | None,
) -> list[str]:
    """Add the table's matches to `out`; returns the names of stored tensors that match no row.

    Weights may be stacked over layers and their optimizer state not, or the other way round.
    """
    unmatched: list[str] = []
    bindings: dict[bool, Binding] = {}
    for state, tensors_of_state in by_state.items():
        if state == "step":
            out.dropped.extend(
                (t.name, "a step count, not a tensor") for t in tensors_of_state.values()
            )
            continue
        per_layer = megatron_names.is_per_layer(tensors_of_state)
        if per_layer not in bindings:
            table = _table(out.dialect, out.family, per_layer=per_layer)
            table = form.table(table) if form and out.dialect == "megatron" else table
            bindings[per_layer] = Binding(table, model)
        if out.dialect in _STATE_DICTS:
            tensors_of_state = without_wrappers(tensors_of_state, bindings[per_layer])
        stored = {key: tensor.name for key, tensor in tensors_of_state.items()}
        reading = bindings[per_layer].read(
            [t if t.name == key else replace(t, name=key) for key, t in tensors_of_state.items()]
        )
        lift = f"{state}:" if state else ""
        for name, p in reading.placements.items():
            shift = p.shift if state in _SHIFTED else 0.0
            tensor = reading.canonical[name]
            if lift:
                tensor = replace(tensor, name=lift + name)
            if lift or shift != p.shift or stored[p.stored] != p.stored:
                p = replace(p, canonical=lift + name, stored=stored[p.stored], shift=shift)
            out.placements[p.canonical] = p
            out.canonical[p.canonical] = tensor
        out.dropped.extend((stored[key], reason) for key, reason in reading.dropped)
        if not state:
            out.copies.update({stored[key]: of for key, of in reading.copies.items()})
            out.keeping.update({stored[key]: flag for key, flag in reading.keeping.items()})
        out.padding.update({stored[key]: rows for key, rows in reading.padding.items()})
        unmatched += [stored[key] for key in reading.unmatched]
    return unmatched


_STATE_DICTS = ("hf", "torchtitan")
"""Dialects of state dicts, which may have the parts of an optimizer, and of wrappers."""

_SHIFTED = ("", megatron_names.MAIN)
"""Weights and their master weights are stored shifted (`mapping.Shifted`), moments are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectNaming:
    """What a dialect leaves open when tensors are written.

    In `megatron` the vocabulary is padded to a multiple of `divisible_by * tp`; `main` is the name
    of master weights (`param` or `fp32_param`; by default the source's); `own_layers`: Megatron's
    own layers will load the tensors, not Transformer Engine's, which name the norm before experts
    differently. `model_class` is GPTModel (`gpt`) or HybridModel (`hybrid`), by default the
    source's, or the one that can hold the model. `in_parts`: parts of mixers' projections are
    tensors of their own, as in formats with global shapes; `singletons`: so are single experts, and
    gate and up rows, as where Megatron saves with `singleton_local_shards`.
    `text_prefix` is what Megatron's names of a nested text model begin with; with `tower_names`
    towers have Megatron's names, too, where a table knows them (`Tower.megatron`).
    `state_names` is the pattern of optimizer state's names, with `{state}` and
    `{name}`; without it `hf` cannot hold optimizer state.
    """

    divisible_by: int = 128
    main: str | None = None
    own_layers: bool = False
    model_class: str | None = None
    in_parts: bool = False
    singletons: bool = False
    text_prefix: str = ""
    tower_names: bool = False
    state_names: str | None = None


DEFAULT_OPTIONS = DialectNaming()


def write_side(
    source: CanonicalView,
    *,
    dialect: str,
    family: Family | None = None,
    config: ModelConfig | None = None,
    dtype: DType | None = None,
    parallel: ParallelConfig | None = None,
    per_layer: bool | None = None,
    options: DialectNaming = DEFAULT_OPTIONS,
) -> TargetView:
    """Plan the tensors of another dialect (or layout) from a source's canonical tensors.

    `config` and `family` default to the source's. `dtype` casts floating model weights, never
    optimizer state. For `megatron`, `per_layer` chooses one key per layer (the default if layers
    differ).
    An `identity` source can only be written as `identity`.

    Raises:
        MappingError: a tensor has no place in the target.
        LayoutError: `parallel` does not divide the model.
    """
    config, family = config or source.config, family or source.family
    if dialect == "identity" or source.dialect == "identity":
        if dialect != source.dialect:
            raise MappingError(
                f"tensors read as {source.dialect!r} cannot be written as {dialect!r}",
                hint="name the family (--family) and give its configuration (--like)",
            )
        return under_same_names(
            source, config, dtype, parallel, options.divisible_by, per_layer=bool(per_layer)
        )
    if dialect not in WRITTEN:
        raise MappingError(
            f"dialect {dialect!r} cannot be written", hint=f"known: {', '.join(WRITTEN)}"
        )
    if config is None:
        raise MappingError(
            f"writing {dialect!r} tensors needs the model's configuration",
            error_id="no-model-config",
        )
    is_hybrid = dialect == "megatron" and _writes_hybrid(source, config, options.model_class)
    if per_layer is None or is_hybrid:
        per_layer = is_hybrid or not layer_sets.is_homogeneous(config)
    if dialect == "megatron" and not per_layer and not layer_sets.is_homogeneous(config):
        raise MappingError(
            "layers differ and cannot be stacked", hint="write one key per layer instead"
        )
    table = _table(dialect, family, per_layer=per_layer, in_parts=options.in_parts)
    if dialect == "megatron" and options.singletons:
        table = (*(family.megatron if family else ()), *megatron_names.SINGLETONS)
    if dialect == "megatron" and options.tower_names:
        table = tuple(
            replace(r, writes_megatron=True) if isinstance(r, Tower) else r for r in table
        )
    if dialect == "megatron" and options.text_prefix:
        table = tuple(
            replace(r, stored=options.text_prefix + r.stored) if isinstance(r, Row) else r
            for r in table
        )
    binding = Binding(table, CanonicalModel(config, _vocabulary(family)))
    sizes = parallel or ParallelConfig()
    pad_to = (
        megatron_names.padded_multiple(sizes.tp, options.divisible_by)
        if dialect == "megatron"
        else 1
    )
    out = TargetView(tensors=[], placements={}, shards=None, fills=[], dropped=[])
    for state, canonical in _by_state(source.canonical).items():
        if state and dialect != "megatron" and options.state_names is None:
            reason = f"optimizer state has no place in {dialect!r}"
            out.dropped.extend((f"{state}:{n}", reason) for n in canonical)
            continue
        writing = binding.write(canonical, pad_to=pad_to, cast=None if state else dtype)
        if writing.unplaced:
            refuse_own_mtp_ends(writing.unplaced, source, dialect)
            raise _homeless(
                writing.unplaced, canonical, dialect, binding.rows, binding.model, state
            )
        lift = f"{state}:" if state else ""
        spell = _speller(state, source, options)
        out.tensors.extend(replace(t, name=spell(t.name)) for t in writing.tensors)
        for n, p in writing.placements.items():
            shift = p.shift if state in _SHIFTED else 0.0
            out.placements[lift + n] = replace(
                p, canonical=lift + n, stored=spell(p.stored), shift=shift
            )
        for p in writing.padding:
            name = spell(p.stored)
            out.fills.append(
                Padding(placement=replace(p, canonical=f"padding of {name}", stored=name))
            )
    if dialect == "megatron" and options.own_layers and not is_hybrid:
        out = _for_own_layers(out)
    if is_hybrid:
        out, config = _renamed(out, to_hybrid(config)), hybrid_form(config)
    out = replace(out, config=config)
    if dialect == "megatron" and parallel is not None:
        return replace(out, shards=shard(out.tensors, parallel, config=config))
    return out


def _writes_hybrid(source: CanonicalView, config: ModelConfig, requested: str | None) -> bool:
    """Whether names are HybridModel's.

    Raises:
        MappingError: GPTModel is requested, and cannot hold the model.
    """
    needed = needs_hybrid(config)
    if requested == GPT and needed:
        raise MappingError(
            "Megatron's GPTModel has attention and an MLP in every layer, and this model has not",
            hint=f"--model-class {HYBRID}",
            error_id="unsupported-model",
        )
    if requested is not None:
        return requested == HYBRID
    return needed or source.is_hybrid


def _homeless(
    names: Sequence[str],
    canonical: Collection[str],
    dialect: str,
    table: Table,
    model: CanonicalModel,
    state: str,
) -> MappingError:
    """The reason why canonical tensors cannot be stored: the others of the same stored tensor
    are missing.
    """
    reason = (
        f"{len(names)} tensors of optimizer state {state!r}" if state else f"{len(names)} tensors"
    )
    text = f"{reason} have no place in {dialect!r}: {summarize(names)}"
    gap = first_gap(table, model, names[0], canonical)
    if gap is None:
        hint = "--exclude GLOB leaves them out, or add rows for them to the family's table"
        return MappingError(text, tensor=names[0], hint=hint)
    stored, lacks = gap
    stacked = dialect == "megatron" and lacks.startswith("layers.")
    stacked = stacked and not megatron_names.is_per_layer([stored])
    detail = "a stacked key, which needs every layer" if stacked else "made of several tensors"
    if state:
        return MappingError(
            f"{text}: {stored!r} is {detail}, and {lacks!r} has no such state",
            tensor=f"{state}:{lacks}",
            hint="the optimizer's state is incomplete: --optimizer-format none leaves it out",
        )
    return MappingError(
        f"{text}: {stored!r} is {detail}, and {lacks!r} is the first missing",
        tensor=names[0],
        hint=f"select every part of it{', in every layer,' if stacked else ''} or none",
    )


def _for_own_layers(side: TargetView) -> TargetView:
    """The names of GPTModel's local layers, which use one name for every norm before an MLP."""

    def name(text: str) -> str:
        return text.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")

    return _renamed(side, name)


def _renamed(side: TargetView, name: Callable[[str], str]) -> TargetView:
    """The same tensors under other names."""
    return replace(
        side,
        tensors=[replace(t, name=name(t.name)) for t in side.tensors],
        placements={c: replace(p, stored=name(p.stored)) for c, p in side.placements.items()},
        fills=[
            replace(f, placement=replace(f.placement, stored=name(f.placement.stored)))
            for f in side.fills
        ],
    )


def _table(
    dialect: str, family: Family | None, *, per_layer: bool, in_parts: bool = False
) -> Table:
    if dialect == "megatron":
        family_rows = family.megatron if family else ()
        if not per_layer:
            return (*stack_layers(family_rows), *megatron_names.STACKED)
        return (*family_rows, *(megatron_names.IN_PARTS if in_parts else megatron_names.PER_LAYER))
    if family is None:
        raise MappingError(
            f"{dialect!r} names need a family, and the checkpoint names none",
            hint="--family NAME, or --like FOLDER of the model (family=, like= in Python)",
        )
    table = {"hf": family.hf, "gguf": family.gguf, "torchtitan": family.torchtitan}.get(dialect)
    if table is None:
        raise MappingError(
            f"the dialect {dialect!r} is unknown", hint=f"known: {', '.join(DIALECTS)}"
        )
    if not table:
        raise MappingError(f"family {family.name!r} has no table for {dialect!r} names")
    return table


def _vocabulary(family: Family | None) -> Mapping[str, Weight]:
    return {**VOCABULARY, **family.vocabulary} if family and family.vocabulary else VOCABULARY


_HEADS = (".output.weight", ".output_layer.weight", ".lm_head.weight")


def _tie(
    config: ModelConfig,
    dialect: str,
    keys: Collection[str],
    family: Family | None,
    *,
    partial: bool,
) -> ModelConfig:
    """The configuration with its embeddings tied if the output matrix is absent.

    GGUF does not say whether they are. Nor do nested configurations without the outer key: what
    its absence means depends on the release that wrote them.
    """
    is_unsaid = family is not None and family.nested is not None and TIED not in config.extra
    if dialect == "gguf" or (is_unsaid and not partial):
        has_head = any(f".{k}".endswith(_HEADS) for k in keys)
        return config.with_fields(tied_embeddings=not has_head)
    return config


_MTP_LAYER = re.compile(r"\bmtp\.layers\.(\d{1,4})\.")
_MTP_MLP = "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"


def _with_mlp_in_mtp(config: ModelConfig, keys: Collection[str]) -> ModelConfig:
    """The configuration with an MLP in layers of multi-token prediction where names say so.

    GPTModel builds them like the last layer, and no args say that a bridge has not (K-EXAONE).
    """
    mtp = config.mtp
    is_like_last = mtp.num_mtp_layers and not mtp.mtp_kind and config.layer_kinds is None
    if is_like_last and config.num_layers - 1 in layer_sets.moe_layers(config) and _MTP_MLP in keys:
        return config.with_fields(mtp_kind=ATTENTION + MLP)
    return config


def _split(dialect: str, name: str) -> tuple[str, str, str]:
    if dialect == "megatron":
        return megatron_names.split_state(name)
    return megatron_names.split_optimizer(name) if dialect in _STATE_DICTS else ("", "", name)


def _by_state(canonical: Mapping[str, GlobalTensor]) -> dict[str, dict[str, GlobalTensor]]:
    out: dict[str, dict[str, GlobalTensor]] = {}
    for name, tensor in canonical.items():
        state, _, key = name.rpartition(":")
        out.setdefault(state, {})[key] = tensor
    return out


def _speller(state: str, source: CanonicalView, options: DialectNaming) -> Callable[[str], str]:
    """How tensors of one state are called, by the names of the weights."""
    if not state:
        return str
    spelled = source.states.get(state, state)
    if state == megatron_names.MAIN:
        spelled = options.main or spelled
    pattern = options.state_names or STATE_FIRST
    return lambda name: pattern.format(state=spelled, name=name)
