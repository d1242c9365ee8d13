"""Comparison of what two checkpoints say about the model: every setting that changes its function.

Both sides are read into the same fields, by their family or from Megatron's args, and compared by
meaning. Settings that no field holds are compared as they are stored, where both sides store them
in the same way. What only tensors or the layout say is left to the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import Difference, PartCheck, SettingPair
from megtool.commands.verification.attached_files import parse_json
from megtool.convert.config.without_effect import REASONS
from megtool.convert.families.family import Family
from megtool.convert.families.nested import TEXT_CONFIG
from megtool.convert.language.canonical import VOCABULARY
from megtool.convert.megatron.arg_table import READ
from megtool.convert.megatron.settings import find_unsupported, plain_args
from megtool.errors import MegtoolError
from megtool.formats.safetensors.quantization_config import QUANT_KEYS, TRANSFORMS_KEY
from megtool.megatron_state.saved_objects import saved_args
from megtool.source.checkpoint import HF_FOLDER, CheckpointSource
from megtool.source.identify import identify_model
from megtool.spec.meaning import compare_functions, function_fields
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig
from megtool.storage.files import read_file

PART: Final = "configuration"

_SEEN_IN_TENSORS = frozenset(
    {
        *(entry.flag for entry in VOCABULARY.values() if entry.flag is not None),
        "tied_embeddings",
        "vocab_size",
    }
)
"""Fields that are compared with the tensors: whether there are optional ones, and their rows."""

_PADDED = frozenset({"padded_vocab_size", "vocab_size", "seq_length", "max_position_embeddings"})
"""Args that depend on the layout, or that tensors show."""

_FROM_FAMILY = frozenset(n for n, facts in CONFIG_FIELDS.items() if facts.from_family)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """Configuration of one checkpoint, and what its reader left out.

    `config` is None if it says nothing that can be read, and `reason` says why. `unsaid` are fields
    that it has no place for. `unread` are stored settings that no field holds, by name; `form`
    says how they are stored. `unsupported` are Megatron's args that change the function and that no
    field holds, of those that are not neutral.
    """

    path: str
    config: ModelConfig | None = None
    reason: str = ""
    family: Family | None = None
    form: str = ""
    unread: Mapping[str, Any] = field(default_factory=dict)
    unsupported: Mapping[str, Any] = field(default_factory=dict)
    unsaid: Collection[str] = ()


def compare_configurations(
    a: CheckpointSource, b: CheckpointSource, options: VerifyOptions
) -> tuple[PartCheck, list[Difference], tuple[SettingPair, ...]]:
    """Compare the settings of two models; also returns both sides of each setting."""
    first, second = _describe(a, options), _describe(b, options)
    x, y = _complete(first, second), _complete(second, first)
    differences: list[Difference] = []
    uncompared: dict[str, str] = {}
    compared: list[str] = []
    pairs: list[SettingPair] = []
    if x.config is None or y.config is None:
        side = x if x.config is None else y
        uncompared[PART] = f"{side.path}: {side.reason}"
        x, y = (replace(s, unread=_stored_settings(o)[1]) for s, o in ((x, a), (y, b)))
    else:
        differing = compare_functions(x.config, y.config)
        fields = [n for n in function_fields(x.config) if n not in _SEEN_IN_TENSORS]
        more = [n for n in function_fields(y.config) if n not in {*fields, *_SEEN_IN_TENSORS}]
        for name in (*fields, *more):
            values = x.config.get(name), y.config.get(name)
            place = next((s for s in (x, y) if name in s.unsaid), None)
            if place is not None and name in differing:
                uncompared[name] = f"the args of {place.path} hold none"
                continue
            compared.append(name)
            pairs.append(
                SettingPair(name=name, a=values[0], b=values[1], differs=name in differing)
            )
            if name in differing:
                text = _both(name, values, x, y)
                differences.append(_difference(name, text + _other_names(name)))
    for name in {**x.unsupported, **y.unsupported}:
        has = [s for s in (x, y) if name in s.unsupported]
        value = has[0].unsupported[name]
        compared.append(name)
        if len(has) == 2 and value == has[1].unsupported[name]:
            continue
        text = f"{name} is {value!r:.100} in {has[0].path}, and without effect in the other"
        if len(has) == 2:
            text = _both(name, (value, has[1].unsupported[name]), x, y)
        differences.append(_difference(name, f"{text}; megtool does not read it"))
    for name, text in _compare_unread(x, y, uncompared, compared):
        differences.append(_difference(name, text))
    return PartCheck.of(PART, compared, uncompared, differences), differences, tuple(pairs)


def _describe(source: CheckpointSource, options: VerifyOptions) -> _Described:
    """Read what a checkpoint itself says, without the folder that `--like` names."""
    args = plain_args(saved_args(source.catalogue))
    unsupported = {s.name: s.value for s in find_unsupported(args)}
    form, _ = _stored_settings(source)
    out = _Described(path=str(source.path), form=form, unsupported=unsupported)
    try:
        own = identify_model(source.catalogue, options.family, None)
    except MegtoolError as e:
        return replace(out, reason=e.message)
    if own is None:
        return replace(out, reason=f"{source.format!r} holds no model configuration here")
    if own.config.bidirectional:  # whose windows reach ahead, which no arg says
        settings = find_unsupported({**args, "bidirectional": True})
        out = replace(out, unsupported={s.name: s.value for s in settings})
    is_read_alone = options.like is not None or source.known_config is None
    config = own.config if is_read_alone else source.known_config
    unread = dict(_flatten(own.config.extra)) if own.hf_config is not None else {}
    return replace(out, config=config, family=own.family, unread=unread)


def _stored_settings(source: CheckpointSource) -> tuple[str, dict[str, Any]]:
    """Return how the settings of a model are stored, and all of them by name."""
    metadata = source.catalogue.metadata
    if (facts := metadata.get("gguf")) is not None:
        arch = str(facts.get("general.architecture"))
        keys = {k: v for k, v in facts.items() if k.startswith(f"{arch}.")}
        return f"GGUF metadata of {arch}", keys
    stored = metadata.get("config")
    path = source.catalogue.auxiliary_files.get(f"{HF_FOLDER}config.json")
    if not isinstance(stored, dict) and path is not None:
        stored = parse_json(read_file(path))
    if isinstance(stored, dict):
        return f"config.json of {stored.get('model_type')}", dict(_flatten(stored))
    args = plain_args(saved_args(source.catalogue))
    of_model = {k: args[k] for k in READ if k in args and k not in _PADDED}
    return ("args", of_model) if args else ("", {})


def _complete(side: _Described, other: _Described) -> _Described:
    """Complete a configuration from args with what the other side's family says of every member."""
    if side.config is None or side.family is not None or other.family is None:
        return side
    unsaid = {n for n in _FROM_FAMILY if side.config.get(n) == CONFIG_FIELDS[n].default}
    try:
        config, _ = other.family.completed(side.config)
    except MegtoolError:
        config = side.config
    return replace(side, config=config, unsaid=unsaid)


def _compare_unread(
    a: _Described, b: _Described, uncompared: dict[str, str], compared: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield settings that no field holds and that differ as they are stored."""
    if a.form != b.form:
        return
    # One that the family reads is a field on both sides, where its absence is the class's default.
    read = {k for s in (a, b) if s.family for k in s.family.stored_keys}
    ignored = {*_WITHOUT_EFFECT, *(k for s in (a, b) if s.family for k in s.family.ignores)}
    for name in (*a.unread, *(n for n in b.unread if n not in a.unread)):
        if not ignored.isdisjoint(name.split(".")):
            continue
        x, y = a.unread.get(name), b.unread.get(name)
        if x == y:
            compared.append(name)
        elif name in a.unread and name in b.unread:
            compared.append(name)
            yield name, f"{_both(name, (x, y), a, b)}; megtool does not read it"
        elif name in read:
            compared.append(name)
        elif x or y:
            has = a.path if name in a.unread else b.path
            if any(name in s.reason for s in (a, b)):  # the reason why one side is refused
                compared.append(name)
                yield name, f"{_both(name, (x, y), a, b)}; megtool does not read it"
                continue
            uncompared[name] = f"{has} alone states it, and megtool does not read it"


def _flatten(stored: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested settings; those of a text model have the names of a flat one."""
    for key, value in stored.items():
        if isinstance(value, Mapping) and key == TEXT_CONFIG:
            yield from _flatten(value, prefix)
        elif isinstance(value, Mapping) and key.endswith("_config"):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_WITHOUT_EFFECT = frozenset(
    {*QUANT_KEYS, TRANSFORMS_KEY, *REASONS, "vocab_size", "max_position_embeddings"}
)
"""Keys of a config.json that say nothing about the function, or that tensors show."""


def _both(name: str, values: tuple[Any, Any], a: _Described, b: _Described) -> str:
    return f"{name} is {values[0]!r:.100} in {a.path}, and {values[1]!r:.100} in {b.path}"


def _other_names(name: str) -> str:
    facts = CONFIG_FIELDS[name]
    known = {"Hugging Face": facts.hf, "Megatron": facts.megatron}
    names = [f"{word} in {who}" for who, word in known.items() if word and word != name]
    return f" ({', '.join(names)})" if names else ""


def _difference(name: str, text: str) -> Difference:
    return Difference(tensor=name, stored=name, kind="metadata", text=text, part=PART)
