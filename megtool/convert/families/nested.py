"""Text models inside larger models: where their settings and tensors lie, and the other parts.

A model of several modalities keeps its text model's settings in `text_config`, and its tensors
under a prefix. A family says so with `Nested`; the rows and settings are those of the text model's
own family, and everything else of the model (`Tower`) is carried as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.convert.config.keys import Setting
from megtool.convert.language.mapping import Dropped, Row, Table, Tower
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

TEXT_CONFIG = "text_config"
TIED = "tie_word_embeddings"
MEGATRON_PREFIX = "language_model."
"""What Megatron-Bridge's names of a nested text model begin with."""

TOWERS = (
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "mm_projector",
    "visual",
    "audio_tower",
    "embed_vision",
    "vision_embedder",
    "vision_encoder",
    "vision_language_adapter",
    "patch_merger",
    "embed_audio",
)
"""The modules that families call their other parts than the text model."""

_IN_TOWER = re.compile(rf"((?:model\.)?(?:{'|'.join(TOWERS)}))\..+")


def tower_of(name: str) -> str | None:
    """The module of another part than text that a tensor of a Hugging Face folder belongs to."""
    match = _IN_TOWER.fullmatch(name)
    return match[1] if match else None


def tied_head(names: Iterable[str]) -> str:
    """The module that engines have for a head that is tied, by the names of stored tensors."""
    is_inside = any(name.startswith("language_model.model.") for name in names)
    return "language_model.lm_head" if is_inside else "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Where a larger model has its text model, and which other parts it has.

    Args:
        texts: The family of the text model by the `model_type` in its settings; the first where
            they have none.
        names: How names of the text family begin, each with what is written instead; behind it
            what is also read, since releases of transformers disagree.
        towers: The other parts, carried as they are.
        is_flat: Older files have the text model's settings beside the others, not in
            `text_config`.
        defaults: Settings that published files leave out, with transformers' defaults.
        first_rows: Rows of the text model that the larger one stores otherwise than its family,
            under the names of the family.
        verbatim: Keys of the text model's settings that are kept as they are: the field is read
            from them, and they say more.
        ignored: Keys of the text model's settings that the larger class takes no notice of; it
            computes what `defaults` say.
    """

    texts: Mapping[str, str]
    names: tuple[tuple[str, tuple[str, ...]], ...]
    towers: tuple[Tower, ...]
    is_flat: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    verbatim: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    first_rows: Table = ()

    def text_family(self, metadata: Mapping[str, Any]) -> str:
        """The name of the text model's family, by the keys of a config.json.

        Raises:
            MappingError: the text model is of a type that the family does not know.
        """
        text = metadata.get(TEXT_CONFIG)
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        if kind is None:
            return next(iter(self.texts.values()))
        if kind not in self.texts:
            raise MappingError(
                f"the text model is of type {kind!r}, but the family knows "
                f"{', '.join(map(repr, self.texts))}",
                hint="`texts` in the family's file in converters/ lists those that are known",
                error_id="unsupported-model",
            )
        return self.texts[kind]

    def rows(self, table: Table) -> tuple[Row | Dropped | Tower, ...]:
        """The text family's rows under the larger model's names, and the towers."""
        rows = (*self.first_rows, *table)
        return (*(r for row in rows for r in self._renamed(row)), *self.towers)

    def _renamed(self, row: Row | Dropped | Tower) -> Iterable[Row | Dropped | Tower]:
        if isinstance(row, Row):
            first, *others = (n for old in (row.stored, *row.also) for n in self._names(old))
            return (replace(row, stored=first, also=tuple(others)),)
        if isinstance(row, Dropped):
            return (replace(row, pattern=n) for n in self._names(row.pattern))
        return (row,)

    def _names(self, name: str) -> tuple[str, ...]:
        for begin, stored in self.names:
            if name.startswith(begin):
                return tuple(s + name.removeprefix(begin) for s in stored)
        return (name,)


@dataclass(frozen=True, slots=True)
class TextConfig(Setting):
    """The settings of a nested text model: those of its own family, under `text_config`.

    Whether embeddings are tied, the outer settings say where they have the key, as transformers 5
    reads it; it stays in `extra`.
    """

    nested: Nested
    settings: Sequence[Setting]

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """Those of the text model, which is nested."""
        return tuple(k for setting in self.settings for k in setting.stored_keys)

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """The text family's fields; keys that it does not understand stay nested in `extra`."""
        inner = stored.get(TEXT_CONFIG)
        is_flat = inner is None and self.nested.is_flat
        if is_flat:
            inner = stored
        if not isinstance(inner, Mapping):
            raise MappingError(
                f"the configuration has no {TEXT_CONFIG!r} with the settings of the text model",
                hint="a model of this class nests them; that of a text model alone names a class "
                "of its own in `architectures`",
                error_id="unsupported-model",
            )
        tied = {TIED: bool(stored[TIED])} if TIED in stored else {}
        heeded = {k: v for k, v in inner.items() if k not in self.nested.ignored}
        values = {**self.nested.defaults, **heeded, **tied}
        understood: set[str] = set()
        for setting in self.settings:
            understood.update(setting.read(values, into))
        understood -= {*self.nested.verbatim, *self.nested.ignored}
        if is_flat:
            return tuple(understood - {TIED})
        into["extra"] = {TEXT_CONFIG: {k: v for k, v in inner.items() if k not in understood}}
        return (TEXT_CONFIG,)

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The text family's keys, under `text_config` unless they were read without it."""
        is_flat = TEXT_CONFIG not in config.extra and bool(config.extra)
        inner: Mapping[str, Any] = config.extra if is_flat else config.extra.get(TEXT_CONFIG, {})
        kinds = {} if is_flat else {"model_type": next(iter(self.nested.texts))}
        keys: dict[str, Any] = {}
        for setting in self.settings:
            setting.write(config.with_fields(extra={**kinds, **inner}), keys)
        if not inner.keys().isdisjoint(self.nested.verbatim):
            keys = {k: v for k, v in keys.items() if k not in self.nested.verbatim}
        if is_flat:
            into.update(keys)
            return
        into[TEXT_CONFIG] = {**kinds, **inner, **keys}
        into[TIED] = config.embedding.tied_embeddings


LLAVA_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model.", ("language_model.model.", "model.language_model.")),
    ("lm_head.", ("language_model.lm_head.", "lm_head.")),
)
"""Names of a text model in models that are laid out like LLaVA: published files, and transformers
4.52 and later in memory (which some of its releases also save)."""


def llava_towers(
    ends: tuple[str, ...], projector: tuple[str, ...], name: str = "vision_tower."
) -> tuple[Tower, Tower]:
    """The towers of those models, with the tensors outside of layers of either."""
    both = ((name, ends), ("multi_modal_projector.", projector))
    first, second = (Tower(n, also=(f"model.{n}",), ends=e) for n, e in both)
    return first, second


def tower_modules(*names: str) -> tuple[str, ...]:
    """Modules with a weight and a bias, as their tensors."""
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))
