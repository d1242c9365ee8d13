"""Indexers of DeepSeek Sparse Attention in config.json and in Megatron's args, both ways.

A layer has an indexer of its own, or attends to the tokens that the last one before it has chosen.
Sources: transformers' `glm_moe_dsa`; megatron-core 0.19.2, transformer/transformer_config.py and
transformer/experimental_attention_variant/dsa.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.keys import Setting, num_layers
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

SPARSE_ATTENTION = "dsa"
"""Megatron's `experimental_attention_variant` of models with an indexer."""

_VARIANT = "experimental_attention_variant"
_SIZES = (
    ("index_num_heads", "dsa_indexer_n_heads"),
    ("index_head_dim", "dsa_indexer_head_dim"),
    ("index_topk", "dsa_indexer_topk"),
)
_FREQ, _OFFSET = "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"
_INTERLEAVED = "dsa_indexer_rope_interleaved"
_NORM_EPS = "dsa_indexer_k_norm_epsilon"
INDEX_NORM_EPS = 1e-6
"""The epsilon of an indexer's norm, which no configuration has."""

_TYPES = ("full", "shared")


@dataclass(frozen=True, slots=True)
class IndexerTypes(Setting):
    """Which layers share the choice of an indexer before them, in all notations of GLM's.

    A list names every layer `full` or `shared`; a pattern has an F or S for each; else every
    `index_topk_freq`-th layer has one, from `index_skip_topk_offset` on (counted from 1). The keys
    are preserved verbatim, and the list overrules the others.
    """

    key: str = "indexer_types"
    pattern_key: str = "index_topk_pattern"
    freq_key: str = "index_topk_freq"
    offset_key: str = "index_skip_topk_offset"

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """A 1 for each layer that shares; None where none does."""
        flags = self._flags(stored, num_layers(into))
        into["shared_index_layers"] = flags if any(flags) else None
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless what was kept says the same."""
        flags = config.indexer.shared_index_layers or (0,) * config.num_layers
        flags = flags[: config.num_layers]
        keys = (self.key, self.pattern_key, self.freq_key, self.offset_key)
        is_kept = any(config.extra.get(k) is not None for k in keys)
        if is_kept and self._flags(config.extra, config.num_layers) == flags:
            return
        if is_kept or any(flags):
            into[self.key] = [_TYPES[f] for f in flags]

    def _flags(self, stored: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        listed, known = stored.get(self.key), _TYPES
        if listed is None and (listed := stored.get(self.pattern_key)) is not None:
            known = ("F", "S") if isinstance(listed, str) else _TYPES
        if listed is None:
            freq, offset = stored.get(self.freq_key), stored.get(self.offset_key)
            freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
            if not all(type(n) is int and n >= 0 for n in (freq, offset)):
                raise MappingError(
                    f"{self.freq_key} is {freq!r:.40}, {self.offset_key} {offset!r:.40}",
                    hint="numbers of layers",
                )
            return _stepped(layers, max(freq, 1), offset)
        is_list = isinstance(listed, str | list | tuple) and len(listed) == layers
        if not is_list or not all(isinstance(x, str) and x in known for x in listed):
            raise MappingError(
                f"{self.key} is {str(listed)[:80]}", hint=f"one of {known} for each layer"
            )
        return tuple(known.index(x) for x in listed)


def _stepped(layers: int, freq: int, offset: int) -> tuple[int, ...]:
    """A 1 for each layer that shares; the first never does."""
    return tuple(int(max(i + 1 - max(offset, 1), 0) % freq != 0) for i in range(layers))


def indexer_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that describe indexers, from args; none for a model without.

    Raises:
        MappingError: sizes are missing.
    """
    if args.get(_VARIANT) != SPARSE_ATTENTION and not args.get(_SIZES[0][1]):
        return {}
    for _, name in _SIZES:
        if not args.get(name):
            raise MappingError(
                f"the args have sparse attention and lack {name!r}",
                hint="--like HF_FOLDER gives the model's configuration",
            )
    layers, freq = num_layers(args), int(args.get(_FREQ) or 1)
    flags = _stepped(layers, max(freq, 1), int(args.get(_OFFSET) or 0))
    return {
        **{field: int(args[name]) for field, name in _SIZES},
        "index_interleaved": bool(args.get(_INTERLEAVED)),
        "shared_index_layers": flags if any(flags) else None,
    }


def indexer_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the fields that `indexer_fields` reads."""
    if not config.indexer.index_num_heads:
        return {}
    freq, offset = _find_steps(config) or (1, 0)
    return {
        _VARIANT: SPARSE_ATTENTION,
        **{name: config.get(field) for field, name in _SIZES},
        _INTERLEAVED: config.indexer.index_interleaved,
        _NORM_EPS: INDEX_NORM_EPS,
        _FREQ: freq,
        _OFFSET: offset,
    }


def has_steps(config: ModelConfig) -> bool:
    """Whether Megatron's args can say which layers share a choice: every n-th has an indexer."""
    return _find_steps(config) is not None


def _find_steps(config: ModelConfig) -> tuple[int, int] | None:
    """Frequency and offset of the layers with an indexer; None where there are none."""
    layers, shared = config.num_layers, config.indexer.shared_index_layers
    if shared is None:
        return 1, 0
    flags = tuple(shared[:layers])
    first = flags.index(1) if any(flags) else layers
    if first == layers:
        return 1, 0
    again = next((i for i in range(first, layers) if not flags[i]), layers)
    freq = again - first + 1
    return (freq, first) if _stepped(layers, freq, first) == flags else None
