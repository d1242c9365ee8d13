"""A model of some of its channels, neurons, heads and experts: its configuration and tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.convert.families.family import Family
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel, Weight
from megtool.convert.language.expression import Expression, names_in
from megtool.convert.layer_subset import edited_config
from megtool.convert.pruning_scores import BY_LAYER, KeptParts
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts\.)(\d+)(\..+)")
_AXIS_OF = {
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_heads": "heads",
    "num_kv_heads": "groups",
    "num_experts": "experts",
}
"""The part that each size of a model counts."""

_UNCUT = "the model has parts that are not cut: "
_HINT = "reshard the model with the sizes it has"

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthCut:
    """What stays of a canonical tensor: by dimension, indices of runs of `block` elements.

    `name` is the tensor's new name. `indices` has None for a dimension that stays whole.
    """

    name: str
    indices: tuple[Indices | None, ...]
    blocks: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the tensor stays as it is."""
        return all(indices is None for indices in self.indices)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the tensor then has."""
        return tuple(
            n if indices is None else len(indices) * block
            for n, indices, block in zip(shape, self.indices, self.blocks, strict=True)
        )


def pruned_config(config: ModelConfig, parts: KeptParts) -> ModelConfig:
    """The configuration of the model of these parts, with all its layers.

    Raises:
        MappingError: what the model does with such a part does not allow to leave some out.
    """
    _check_model(config, parts)
    sizes: dict[str, int] = {}
    if parts.hidden is not None:
        sizes["hidden_size"] = len(parts.hidden)
    for name, axis in (("ffn_hidden_size", "ffn"), ("num_heads", "heads")):
        if (by_layer := getattr(parts, axis)) is not None:
            sizes[name] = _one_length(by_layer, axis)
    if parts.groups is not None:
        sizes["num_kv_heads"] = _one_length(parts.groups, "groups")
    if parts.experts is not None:
        sizes["num_experts"] = _one_length(parts.experts, "experts")
    changed: dict[str, Any] = sizes
    return config.with_fields(**changed)


def pruned_hf_config(
    stored: Mapping[str, Any], family: Family, old: ModelConfig, new: ModelConfig
) -> dict[str, Any]:
    """The keys of a config.json for the model of some parts.

    Raises:
        MappingError: a family whose config.json cannot say the new model.
    """
    out = edited_config(stored, family, old, new)
    config, before = family.read_config(out), family.read_config(stored)
    for name, value in new.to_fields().items():
        if name == "extra":
            continue
        stated = config.get(name)
        # What tensors alone say (biases) may differ from what the keys do, as it did before.
        is_as_before = value == old.get(name) and stated == before.get(name)
        if stated != value and not is_as_before:
            raise MappingError(
                f"a config.json of {family.name!r} with these sizes says {name} {stated!r}, and "
                f"it is {value!r}",
                hint="choose sizes that it can describe",
                error_id="unsupported-model",
            )
    return out


class WidthCuts:
    """What stays of each canonical tensor of a model when some parts are left out."""

    def __init__(
        self, config: ModelConfig, parts: KeptParts, vocabulary: Mapping[str, Weight]
    ) -> None:
        self._parts = parts
        vocabulary = {**VOCABULARY, **vocabulary}
        self._old = CanonicalModel(config, vocabulary)
        self._new = CanonicalModel(pruned_config(config, parts), vocabulary)
        self._experts = {
            layer: {old: new for new, old in enumerate(numbers)}
            for layer, numbers in (parts.experts or {}).items()
        }
        self._known = {
            name: (pattern, index.get("l"))
            for pattern in vocabulary
            for name, index in self._old.indexed_names(pattern)
        }

    def of(self, name: str, shape: Sequence[int]) -> WidthCut | None:
        """What stays of the canonical tensor `name` (or its state); None if nothing does.

        Raises:
            MappingError: it is not known what the tensor holds of a part.
        """
        state, colon, weight = name.rpartition(":")
        new_name = weight
        if (match := _EXPERT.fullmatch(weight)) and int(match[2]) in self._experts:
            number = self._experts[int(match[2])].get(int(match[3]))
            if number is None:
                return None
            new_name = f"{match[1]}{number}{match[4]}"
        whole = (None,) * len(shape)
        if weight not in self._known:
            if self._parts.hidden is not None:
                raise MappingError(
                    f"{weight!r} is no tensor of the text model, and may have its hidden size",
                    tensor=weight,
                    hint="--hidden-size is for models of text alone",
                    error_id="unsupported-model",
                )
            return WidthCut(name=state + colon + new_name, indices=whole, blocks=(1,) * len(shape))
        pattern, layer = self._known[weight]
        symbols = self._old.vocabulary[pattern].shape
        parts = [self._cut(weight, symbol, layer) for symbol in symbols]
        if len(symbols) != len(shape):
            raise MappingError(
                f"{name!r} has shape {list(shape)}, and not {len(symbols)} dimensions",
                tensor=name,
                hint=_HINT,
            )
        return WidthCut(
            name=state + colon + new_name,
            indices=tuple(indices for indices, _ in parts),
            blocks=tuple(block for _, block in parts),
        )

    def _cut(self, name: str, size: Expression, layer: int | None) -> tuple[Indices | None, int]:
        """What stays of one dimension: indices, and the elements of each."""
        before, after = self._old.value(size), self._new.value(size)
        if before == after:
            return None, 1
        sized = [n for n in _AXIS_OF if n in names_in(size) and self._differs(n)]
        if len(sized) != 1 or re.search(rf"\* {sized[0]}\b", str(size)):
            raise MappingError(
                f"the size {size!r} of {name!r} cannot be cut",
                tensor=name,
                hint=_HINT + "; --exclude leaves out layers of multi-token prediction",
                error_id="unsupported-model",
            )
        axis, whole = _AXIS_OF[sized[0]], self._old.config.get(sized[0])
        indices = getattr(self._parts, axis)
        if axis in BY_LAYER:
            if layer is None:
                raise MappingError(
                    f"{name!r} is of a layer of multi-token prediction, which has no scores",
                    tensor=name,
                    hint="--exclude leaves such layers out",
                    error_id="unsupported-model",
                )
            if layer not in indices:
                raise MappingError(
                    f"nothing says which {axis} of layer {layer} stay", tensor=name, hint=_HINT
                )
            indices = indices[layer]
        return indices, before // whole

    def _differs(self, size: str) -> bool:
        return getattr(self._parts, _AXIS_OF[size]) is not None


def _one_length(by_layer: Mapping[int, Indices], axis: str) -> int:
    lengths = {len(indices) for indices in by_layer.values()}
    if len(lengths) != 1:
        raise MappingError(
            f"layers have {sorted(lengths)} {axis}",
            hint="a pruned model has as many in every layer",
        )
    return lengths.pop()


def _check_model(config: ModelConfig, parts: KeptParts) -> None:
    """Refuse models whose parts depend on each other in ways that cutting does not follow.

    Raises:
        MappingError: it says what the model has.
    """
    heads = parts.heads is not None
    by_layer = any(getattr(parts, axis) is not None for axis in BY_LAYER)
    reasons = (
        (config.num_decoder_layers, "an encoder and a decoder"),
        (config.compression.is_compressed, "compressed keys"),
        (config.residual.hyper_streams, "several residuals side by side"),
        (config.residual.layer_input_size, "an embedding for every layer"),
        (config.layer_sizes and by_layer, "layers of different sizes"),
        (heads and config.latent.kv_lora_rank, "latent attention"),
        (
            heads and config.norms.qk_norm and config.norms.qk_norm_of == "each",
            "a norm for each head",
        ),
        (heads and config.positions.position_embedding == "alibi", "slopes by number of head"),
        (heads and config.positions.position_embedding == "relative", "biases by number of head"),
        (heads and layer_sets.shared_kv_layers(config), "layers that attend to keys of others"),
        (parts.experts is not None and config.router.router_num_groups > 1, "experts in groups"),
        (
            parts.experts is not None and config.router.num_hash_layers,
            "experts that a table chooses",
        ),
    )
    for is_so, what in reasons:
        if is_so:
            raise MappingError(_UNCUT + what, hint=_HINT, error_id="unsupported-model")
