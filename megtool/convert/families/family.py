"""Model families: the data of a file in converters/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.convert.config.hybrid import hybrid_form
from megtool.convert.config.keys import Setting, read_settings, write_settings
from megtool.convert.config.without_effect import find_unknown_keys
from megtool.convert.families.nested import TEXT_CONFIG, Nested, TextConfig
from megtool.convert.language.canonical import Weight
from megtool.convert.language.expression import Expression
from megtool.convert.language.mapping import Row, Table, Tower
from megtool.spec.model_config import CONFIG_FIELDS, ModelConfig

_META, _OF_META = ".attention.wq.", re.compile(r"\blayers\.\d+\.attention\.w[qk]\.")
_FROM_FAMILY = frozenset(n for n, facts in CONFIG_FIELDS.items() if facts.from_family)
INFERRED = ("qk_l2_norm_unrotated",)
"""Fields without an arg of theirs: what Megatron does whatever the model; a class may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: names, configuration and tensors, as data.

    `architectures` and `model_types` are what a Hugging Face config.json calls it (the first of
    each is written), `gguf_architectures` what a GGUF file does (`llama with experts`: llama.cpp
    has one name for Llama and Mixtral). `traits` are ModelConfig fields true of every member.
    `config` maps config.json to ModelConfig; `hf`, `gguf`, `torchtitan` and `megatron` map stored
    tensors to canonical ones, the last in addition to Megatron's own names; `vocabulary` adds
    canonical tensors that no other family has. `limits` are conditions on the configuration, each
    with what Megatron cannot run, or cannot be told by its args, where it holds. `ignores` are keys
    that the class has and takes no notice of, each with the reason. With `head_unties` a stored
    output layer that differs from the embedding is one of its own, even if config.json says that
    they are tied (transformers 5 always says so of T5, and loads both). With `counts_mtp` tensors
    say how many layers of multi-token prediction there are, and no key.

    `nested` says that the model is a larger one, whose text model is of another family: `config`,
    `hf`, `megatron`, `traits`, `vocabulary` and `limits` are then that family's.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: tuple[Setting, ...] = ()
    hf: Table = ()
    gguf_architectures: tuple[str, ...] = ()
    gguf: Table = ()
    torchtitan: Table = ()
    megatron: Table = ()
    traits: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: Mapping[str, Weight] = field(default_factory=dict)
    limits: tuple[tuple[Expression, str], ...] = ()
    ignores: Mapping[str, str] = field(default_factory=dict)
    head_unties: bool = False
    counts_mtp: bool = False
    nested: Nested | None = None

    @property
    def towers(self) -> tuple[Tower, ...]:
        """The parts of the model that are not text."""
        rows = self.nested.towers if self.nested else self.hf
        return tuple(row for row in rows if isinstance(row, Tower))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of the text model, nested or not."""
        if len(self.config) == 1 and isinstance(self.config[0], TextConfig):
            return tuple(self.config[0].settings)
        return self.config

    @property
    def for_codes(self) -> Family:
        """The family with the names and places that loaders look for quantized weights in."""
        rows = tuple(r for r in self.hf if not (isinstance(r, Row) and r.plain))
        return self if len(rows) == len(self.hf) else replace(self, hf=rows)

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """The keys of a config.json that it reads, once each."""
        return tuple(dict.fromkeys(k for setting in self.config for k in setting.stored_keys))

    def unknown_keys(self, stored: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys that nobody has said to be read, or to be without effect.

        Of a larger model they are those of its text model.
        """
        inner = stored.get(TEXT_CONFIG) if self.nested is not None else stored
        if not isinstance(inner, Mapping):
            return ()
        return find_unknown_keys(inner, (*self.stored_keys, *self.ignores))

    def has_torchtitan_names(self, names: Iterable[str]) -> bool:
        """Whether names are those of torchtitan before 0.3, which are Meta's own, too.

        They are not where the family's Hugging Face folders may have them, as Mistral's do.
        """
        rows = (r for r in self.hf if isinstance(r, Row))
        if not self.torchtitan or any(_META in n for r in rows for n in (r.stored, *r.also)):
            return False
        return any(_OF_META.search(n) for n in names)

    def read_config(self, stored: Mapping[str, Any]) -> ModelConfig:
        """The model's configuration from the keys of its config.json.

        Raises:
            MappingError: a key is missing, or has a value this family does not know.
        """
        return read_settings(self.config, stored, self.traits)

    def completed(self, config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
        """A configuration from Megatron's args, completed with the fields that args do not say.

        Also the keys of a config.json that would have said it; the family's defaults stand for
        them.
        """
        if any(s.numbers_branches() for s in self.settings):
            config = hybrid_form(config)
        values = config.to_fields()
        unsaid = {n for n in _FROM_FAMILY if values[n] == CONFIG_FIELDS[n].default}
        unsaid |= {n for n in INFERRED if n in self.traits}
        values |= {n: v for n, v in self.traits.items() if n in unsaid}
        keys: list[str] = []
        for setting in self.settings:
            keys += setting.complete(values, unsaid)
        return config.with_fields(**{n: values[n] for n in unsaid}), tuple(keys)

    def write_config(self, config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
        """The keys of a config.json; those it was once read from are preserved."""
        constants: dict[str, Any] = {
            "architectures": [self.architectures[0]],
            "model_type": self.model_types[0],
        }
        is_decoder = not (config.bidirectional or config.num_decoder_layers)
        if is_decoder and not config.extra:  # a class's own default may be no word of this model
            constants["pad_token_id"] = None
        out = write_settings(self.config, config, constants)
        if dtype is not None:
            out["dtype" if "dtype" in out else "torch_dtype"] = dtype
        return out
