"""Megatron's names of towers that Megatron-Bridge builds of Megatron's own layers, both ways.

A tower is otherwise carried as it is, under the names it has in Hugging Face's model. Here its
tensors are those of Megatron's transformer layers: layers are stacked on a leading axis, and the
rows of queries, keys and values go head by head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megtool.errors import MappingError
from megtool.spec.model_config import MOST_LAYERS
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

_NUMBER = re.compile(r"\.(\d+)\.")
_INDEX = "{n}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """The names of a tower's tensors behind `prefix`, and behind the tower's own prefix.

    Args:
        prefix: How Megatron's names begin.
        rows: Megatron's name and Hugging Face's of each tensor; `{n}` is a number, over which
            Megatron stacks the tensors unless its layers differ.
        fused: Hugging Face's names of the tensors whose rows are all queries, all keys, all values;
            Megatron has those of each head together.
        config_key: The settings of the tower in the model's.
        heads_key: How many heads its attention has, in these settings.
    """

    prefix: str
    rows: tuple[tuple[str, str], ...]
    fused: tuple[str, ...] = ()
    config_key: str = "vision_config"
    heads_key: str = "num_heads"

    def read(self, tensor: GlobalTensor, extra: Mapping[str, Any]) -> list[Placement] | None:
        """The placements in a stored tensor of what Hugging Face has, by its names without prefix;
        None if it is no tensor of the tower.

        `extra` are the settings of the model beside its text's.

        Raises:
            MappingError: the settings do not say how many heads there are, or another number than
                the rows are of.
        """
        if not tensor.name.startswith(self.prefix):
            return None
        rest, shape = tensor.name.removeprefix(self.prefix), tensor.shape
        by_name = dict(self.rows)
        if rest in by_name:
            return [self._placement(by_name[rest], tensor.name, shape, extra)]
        numbered = _NUMBER.sub(".{n}.", rest, count=1)
        if numbered in by_name and (match := _NUMBER.search(rest)):
            pattern = by_name[numbered]
            inner = self._placement(pattern, tensor.name, shape, extra)
            return [replace(inner, canonical=pattern.replace("{n}", match[1]))]
        stacked = {m.replace(_INDEX, ""): h for m, h in self.rows if _INDEX in m}
        if rest not in stacked or not shape or shape[0] > MOST_LAYERS:
            return None
        inner = self._placement(stacked[rest], tensor.name, shape[1:], extra)
        return [_layer(inner, stacked[rest], n) for n in range(shape[0])]

    def write(
        self, canonical: Mapping[str, GlobalTensor], extra: Mapping[str, Any]
    ) -> Iterator[tuple[GlobalTensor, list[Placement]]]:
        """Megatron's tensors made of some by Hugging Face's names without prefix, and where these
        lie in each. What no row knows, or has a gap in its numbers, is left out.

        Raises:
            MappingError: see `read`.
        """
        for megatron, pattern in self.rows:
            if _INDEX not in megatron:
                names = [pattern] if pattern in canonical else []
            else:
                names = _numbered(pattern, canonical)
            parts = [canonical[n] for n in names]
            if len({(t.shape, t.dtype) for t in parts}) != 1:
                continue
            stored = self.prefix + megatron.replace(_INDEX, "")
            inner = self._placement(pattern, stored, parts[0].shape, extra)
            if _INDEX not in megatron:
                yield replace(parts[0], name=stored), [inner]
                continue
            shape = (len(parts), *parts[0].shape)
            tensor = GlobalTensor(name=stored, shape=shape, dtype=parts[0].dtype)
            yield tensor, [_layer(inner, pattern, n) for n in range(len(parts))]

    def _placement(
        self, pattern: str, stored: str, shape: Sequence[int], extra: Mapping[str, Any]
    ) -> Placement:
        """Where a tensor lies in a stored one of the same shape."""
        if pattern not in self.fused:
            return Placement.identity(pattern, shape, stored=stored)
        settings = extra.get(self.config_key)
        heads = settings.get(self.heads_key) if isinstance(settings, Mapping) else None
        if not isinstance(heads, int) or heads < 1:
            raise MappingError(
                f"the rows of {stored!r} are of heads, and nothing says of how many",
                tensor=stored,
                hint=f"--like HF_FOLDER, whose config.json has {self.config_key}.{self.heads_key}",
                error_id="no-model-config",
            )
        rows, *others = shape
        if rows % (3 * heads):
            raise MappingError(
                f"{stored!r} has {rows} rows, which are not queries, keys and values of {heads} "
                "heads",
                tensor=stored,
                hint=f"{self.config_key}.{self.heads_key} belongs to another model",
            )
        size = rows // (3 * heads)
        return Placement(
            canonical=pattern,
            stored=stored,
            shape=(3, heads, size, *others),
            dims=(0, 0, 0, *range(1, len(shape))),
            mults=(size, 3 * size, 1, *(1 for _ in others)),
            base=(0,) * len(shape),
        )


def _layer(inner: Placement, pattern: str, number: int) -> Placement:
    """A placement in one layer of a stack."""
    return replace(
        inner,
        canonical=pattern.replace("{n}", str(number)),
        dims=tuple(d + 1 for d in inner.dims),
        base=(number, *inner.base),
    )


def _numbered(pattern: str, canonical: Mapping[str, GlobalTensor]) -> list[str]:
    """The names of a pattern, from 0 on."""
    names: list[str] = []
    while (name := pattern.replace("{n}", str(len(names)))) in canonical:
        names.append(name)
    return names


def _both(megatron: str, stored: str) -> Iterator[tuple[str, str]]:
    """The rows of a module's weight and bias."""
    joint = "_" if megatron.endswith("layer_norm") else "."
    for kind in ("weight", "bias"):
        yield f"{megatron}{joint}{kind}", f"{stored}.{kind}"


_LAYERS, _BLOCKS = "decoder.layers.{n}.", "blocks.{n}."
_MERGERS = "deepstack_merger_list.{n}."

QWEN_VISION = TowerNames(
    prefix="vision_model.",
    rows=(
        *_both("patch_embed.proj", "patch_embed.proj"),
        ("pos_embed.weight", "pos_embed.weight"),
        *_both(_LAYERS + "self_attention.linear_proj", _BLOCKS + "attn.proj"),
        *_both(_LAYERS + "self_attention.linear_qkv", _BLOCKS + "attn.qkv"),
        *_both(_LAYERS + "self_attention.linear_qkv.layer_norm", _BLOCKS + "norm1"),
        *_both(_LAYERS + "mlp.linear_fc1", _BLOCKS + "mlp.linear_fc1"),
        *_both(_LAYERS + "mlp.linear_fc1.layer_norm", _BLOCKS + "norm2"),
        *_both(_LAYERS + "mlp.linear_fc2", _BLOCKS + "mlp.linear_fc2"),
        *_both("decoder." + _MERGERS + "patch_norm", _MERGERS + "norm"),
        *_both("decoder." + _MERGERS + "linear_fc1", _MERGERS + "linear_fc1"),
        *_both("decoder." + _MERGERS + "linear_fc2", _MERGERS + "linear_fc2"),
        *_both("merger.patch_norm", "merger.norm"),
        *_both("merger.linear_fc1", "merger.linear_fc1"),
        *_both("merger.linear_fc2", "merger.linear_fc2"),
    ),
    fused=(_BLOCKS + "attn.qkv.weight", _BLOCKS + "attn.qkv.bias"),
)
"""The tower of Qwen3-VL and Qwen3.5. Source: Megatron-Bridge, models/qwen_vl/qwen3_vl_bridge.py and
modelling_qwen3_vl/transformer_block.py (August 2026)."""

_BESIDE_BLOCKS = (
    "patch_embed.proj",
    *("merger.norm", "merger.linear_fc1", "merger.linear_fc2"),
    *(_MERGERS + "norm", _MERGERS + "linear_fc1", _MERGERS + "linear_fc2"),
)
QWEN_VISION_ENDS = (
    *(f"{module}.{kind}" for module in _BESIDE_BLOCKS for kind in ("weight", "bias")),
    "pos_embed.weight",
)
"""The tensors of this tower outside of its layers, for each of `deepstack_visual_indexes` too."""
