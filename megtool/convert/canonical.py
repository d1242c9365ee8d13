"""The canonical tensors: one name each, unfused, unstacked, unpadded, and how large they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megtool.config import ModelConfig
from megtool.convert.expression import Expression, evaluate, names_in
from megtool.errors import MappingError


@dataclass(frozen=True, slots=True)
class Entry:
    """A canonical tensor: its symbolic shape, and the layers that have one.

    `flag` names the ModelConfig field that says whether this optional tensor exists; without one
    the tensor has to be there wherever `when` holds.
    """

    shape: tuple[Expression, ...]
    when: Expression = True
    flag: str | None = None


_HIDDEN = ("hidden_size",)
_Q, _KV, _D = "num_heads * head_dim", "num_kv_heads * head_dim", "head_dim"
_DENSE, _MOE = "l not in moe_layers", "l in moe_layers"
_LAYERNORM = "norm == 'layernorm'"
_SHARED = "shared_ffn_hidden_size and l in moe_layers"

VOCABULARY: Mapping[str, Entry] = MappingProxyType(
    {
        "embed.weight": Entry(("vocab_size", "hidden_size")),
        "layers.{l}.attn_norm.weight": Entry(_HIDDEN),
        "layers.{l}.attn_norm.bias": Entry(_HIDDEN, _LAYERNORM),
        "layers.{l}.attn.q.weight": Entry((_Q, "hidden_size")),
        "layers.{l}.attn.k.weight": Entry((_KV, "hidden_size")),
        "layers.{l}.attn.v.weight": Entry((_KV, "hidden_size")),
        "layers.{l}.attn.q.bias": Entry((_Q,), flag="qkv_bias"),
        "layers.{l}.attn.k.bias": Entry((_KV,), flag="qkv_bias"),
        "layers.{l}.attn.v.bias": Entry((_KV,), flag="qkv_bias"),
        "layers.{l}.attn.gate.weight": Entry((_Q, "hidden_size"), "attn_output_gate"),
        "layers.{l}.attn.q_norm.weight": Entry((_D,), flag="qk_norm"),
        "layers.{l}.attn.k_norm.weight": Entry((_D,), flag="qk_norm"),
        "layers.{l}.attn.o.weight": Entry(("hidden_size", _Q)),
        "layers.{l}.attn.o.bias": Entry(_HIDDEN, flag="attn_out_bias"),
        "layers.{l}.mlp_norm.weight": Entry(_HIDDEN),
        "layers.{l}.mlp_norm.bias": Entry(_HIDDEN, _LAYERNORM),
        "layers.{l}.mlp.gate.weight": Entry(
            ("ffn_hidden_size", "hidden_size"), f"gated and {_DENSE}"
        ),
        "layers.{l}.mlp.gate.bias": Entry(
            ("ffn_hidden_size",), f"gated and {_DENSE}", flag="mlp_bias"
        ),
        "layers.{l}.mlp.up.weight": Entry(("ffn_hidden_size", "hidden_size"), _DENSE),
        "layers.{l}.mlp.up.bias": Entry(("ffn_hidden_size",), _DENSE, flag="mlp_bias"),
        "layers.{l}.mlp.down.weight": Entry(("hidden_size", "ffn_hidden_size"), _DENSE),
        "layers.{l}.mlp.down.bias": Entry(_HIDDEN, _DENSE, flag="mlp_bias"),
        "layers.{l}.mlp.router.weight": Entry(("num_experts", "hidden_size"), _MOE),
        "layers.{l}.mlp.experts.{e}.gate.weight": Entry(
            ("moe_ffn_hidden_size", "hidden_size"), f"gated and {_MOE}"
        ),
        "layers.{l}.mlp.experts.{e}.up.weight": Entry(("moe_ffn_hidden_size", "hidden_size"), _MOE),
        "layers.{l}.mlp.experts.{e}.down.weight": Entry(
            ("hidden_size", "moe_ffn_hidden_size"), _MOE
        ),
        "layers.{l}.mlp.shared.gate.weight": Entry(
            ("shared_ffn_hidden_size", "hidden_size"), f"gated and {_SHARED}"
        ),
        "layers.{l}.mlp.shared.up.weight": Entry(
            ("shared_ffn_hidden_size", "hidden_size"), _SHARED
        ),
        "layers.{l}.mlp.shared.down.weight": Entry(
            ("hidden_size", "shared_ffn_hidden_size"), _SHARED
        ),
        "norm.weight": Entry(_HIDDEN),
        "norm.bias": Entry(_HIDDEN, _LAYERNORM),
        "head.weight": Entry(("vocab_size", "hidden_size"), "not tied_embeddings"),
    }
)

DOMAINS = MappingProxyType({"l": "num_layers", "e": "num_experts"})
_INDEX = re.compile(r"\{(\w+)\}")


def indices_in(pattern: str) -> tuple[str, ...]:
    """The index names of a pattern, in order: `layers.{l}.experts.{e}` gives `('l', 'e')`."""
    return tuple(_INDEX.findall(pattern))


def fill_in(pattern: str, index: Mapping[str, int]) -> str:
    """The pattern with the indices that `index` knows put in."""
    for name, value in index.items():
        pattern = pattern.replace(f"{{{name}}}", str(value))
    return pattern


@dataclass(frozen=True, slots=True)
class Model:
    """The vocabulary at one configuration: which tensors there are, and their shapes."""

    config: ModelConfig
    vocabulary: Mapping[str, Entry] = field(default_factory=lambda: VOCABULARY)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def shape(self, pattern: str) -> tuple[int, ...]:
        """Shape of the canonical tensors that follow `pattern`.

        Raises:
            MappingError: the vocabulary has no such pattern.
        """
        if pattern not in self._shapes:
            if pattern not in self.vocabulary:
                raise MappingError(
                    f"{pattern!r} is no canonical tensor",
                    hint="name one of megtool.convert.canonical, or add it to the family's own",
                )
            entry = self.vocabulary[pattern]
            self._shapes[pattern] = tuple(int(self.value(n)) for n in entry.shape)
        return self._shapes[pattern]

    def value(self, text: Expression, index: Mapping[str, int] | None = None) -> int:
        """An expression's value at this configuration."""
        value: int = evaluate(text, self.config, index)
        return value

    def size(self, index: str) -> int:
        """How many values the index `l` or `e` takes."""
        if index not in DOMAINS:
            raise MappingError(f"unknown index {index!r}", hint=f"known: {', '.join(DOMAINS)}")
        return self.value(DOMAINS[index])

    def each(self, names: tuple[str, ...], when: Expression = True) -> Iterator[dict[str, int]]:
        """Every combination of the named indices for which `when` holds."""
        needed = tuple(n for n in names if n in names_in(when))
        rest = tuple(n for n in names if n not in needed)
        for some in self._combinations(needed):
            if self.value(when, some):
                for more in self._combinations(rest):
                    yield {n: {**some, **more}[n] for n in names}

    def _combinations(self, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if not names:
            yield {}
            return
        for i in range(self.size(names[0])):
            for rest in self._combinations(names[1:]):
                yield {names[0]: i, **rest}

    def names(self, pattern: str) -> list[str]:
        """All canonical tensors of a pattern that this model has, in order."""
        entry = self.vocabulary[pattern]
        return [fill_in(pattern, i) for i in self.each(indices_in(pattern), entry.when)]
