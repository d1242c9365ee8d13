"""Layers of unequal sizes (Llama-Nemotron): lists of blocks in config.json and Megatron's args.

A block says of each layer how many query heads share a key, how wide its MLP is, and which of the
two it lacks. Megatron's HeterogeneousTransformerConfig takes the same list, encoded in one arg.
Source: megatron-core 0.16.1, transformer/heterogeneous/heterogeneous_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.convert.config.hybrid import kinds_of
from megtool.convert.config.keys import Setting, num_layers
from megtool.errors import MappingError, listed
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import ATTENTION, MLP
from megtool.spec.model_config import MOST_LAYERS, ModelConfig

BLOCKS, _PATH = "heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path"
_LIST = "block_configs"
_MULTIPLE = 256  # to which the width of an MLP is rounded up


@dataclass(frozen=True, slots=True)
class BlockConfigs(Setting):
    """A list of blocks: the branches of every layer, its key and value heads, its MLP's width.

    It comes after the numbers of layers and heads and the hidden size. The keys are kept verbatim
    in `extra`.
    """

    key: str = _LIST

    def read(self, stored: Mapping[str, Any], into: dict[str, Any]) -> tuple[str, ...]:
        """Kinds and sizes of every layer; no key counts as understood, so that all are kept."""
        into |= _read_blocks(
            stored.get(self.key), num_layers(into), into["num_heads"], into["hidden_size"]
        )
        return ()

    def write(self, config: ModelConfig, into: dict[str, Any]) -> None:
        """The list, unless what was kept says the same."""
        known = config.extra.get(self.key)
        if known is not None and _read_blocks(
            known, config.num_layers, config.attention.num_heads, config.hidden_size
        ) == _said(config):
            return
        into[self.key] = _blocks(config, by_factor=True)


def block_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the args of a model whose layers have unequal sizes.

    Raises:
        MappingError: the list of blocks is malformed, or has a block that no field describes.
    """
    try:
        encoded = json.loads(args[BLOCKS])
    except (TypeError, ValueError, RecursionError) as error:
        raise MappingError(f"{BLOCKS} is no JSON: {error}") from error
    blocks = encoded.get(_LIST) if isinstance(encoded, dict) else None
    hidden, heads = int(args["hidden_size"]), int(args["num_attention_heads"])
    return _read_blocks(blocks, num_layers(args), heads, hidden)


def block_args(config: ModelConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Args from the fields that `block_fields` reads; `known` are those that there already are."""
    out: dict[str, Any] = {"moe_layer_freq": 1}
    is_as_long = known.get("num_layers") == config.num_layers
    if known.get(BLOCKS) and is_as_long and block_fields(known) == _said(config):
        return out
    # Megatron-LM compares these keys of a config.json with its own args.
    encoded = {
        "hidden_act": config.mlp.activation,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.attention.num_heads,
        "tie_word_embeddings": config.embedding.tied_embeddings,
        "rope_theta": config.positions.rope_base,
        "rope_scaling": dict(config.positions.rope_scaling or {}) or None,
        _LIST: _blocks(config, by_factor=False),
    }
    # A path that is not None makes Megatron read the list, which is then in the other arg.
    return out | {BLOCKS: json.dumps(encoded), _PATH: known.get(_PATH) or ""}


def block_limits(config: ModelConfig) -> list[str]:
    """What Megatron-LM's training script refuses of a model of blocks, one sentence each.

    Source: `validate_model_config_args_from_heterogeneous_config` of Megatron-LM's
    megatron/training/arguments.py. Megatron Core itself builds and loads all of them.
    """
    if config.layer_kinds is None or config.layer_sizes is None:
        return []
    out = []
    groups = sorted(
        {config.at_layer(n).attention.num_kv_heads for n in layer_sets.attn_layers(config)}
    )
    if len(groups) > 1:
        out.append(
            f"layers have {listed([str(n) for n in groups])} query groups: Megatron-LM's training "
            "script loads such a heterogeneous model only with as many in every layer"
        )
    if (config.positions.rope_scaling or {}).get("rope_type") != "llama3":
        out.append(
            "Megatron-LM's training script takes heterogeneous models only with Llama 3's rotary "
            "scaling, which this model has not"
        )
    return out


def _said(config: ModelConfig) -> dict[str, Any]:
    """The fields of a configuration that a list of blocks says."""
    return {
        "layer_kinds": config.layer_kinds,
        "layer_sizes": config.layer_sizes,
        "num_kv_heads": config.attention.num_kv_heads,
        "ffn_hidden_size": config.mlp.ffn_hidden_size,
    }


def _read_blocks(blocks: object, layers: int, heads: object, hidden: object) -> dict[str, Any]:
    """The fields of `_said`."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or len(blocks) != layers:
        raise MappingError(f"{_LIST} is {str(blocks)[:80]}", hint=f"{layers} blocks")
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0):
        raise MappingError(f"there are {heads!r} heads, and a hidden size of {hidden!r}")
    kinds, kv_heads, widths = [], [], []
    for layer, block in enumerate(blocks[:MOST_LAYERS]):
        attention, ffn = _halves(block, layer)
        kinds.append((ATTENTION if attention else "") + (MLP if ffn else ""))
        kv_heads.append(_kv_heads(attention, heads, layer) if attention else 0)
        widths.append(_width(ffn, hidden, layer) if ffn else 0)
    most, widest = max(kv_heads) or heads, max(widths) or _MULTIPLE
    return {
        "layer_kinds": tuple(kinds),
        "layer_sizes": {  # a layer without a branch has no size: the largest stands for it
            "num_kv_heads": tuple(n or most for n in kv_heads),
            "ffn_hidden_size": tuple(n or widest for n in widths),
        },
        "num_kv_heads": most,
        "ffn_hidden_size": widest,
    }


def _halves(block: object, layer: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A block's attention and MLP, each empty where the layer has none."""
    table = block if isinstance(block, Mapping) else {}
    halves: list[Mapping[str, Any]] = []
    for half in (table.get("attention"), table.get("ffn") or table.get("mlp")):
        if not isinstance(half, Mapping) or not half:
            raise MappingError(
                f"block {layer} of {_LIST} is {str(block)[:80]}", hint="'attention' and 'ffn', each"
            )
        kinds = [k for k in ("replace_with_linear", "sparsify", "unshifted_sink") if half.get(k)]
        kinds += [k for k in ("moe", "mamba", "llama4") if half.get(k)]
        if half.get("window_length"):
            kinds.append("window_length")
        if kinds:
            raise MappingError(
                f"block {layer} of {_LIST} says {kinds[0]}={half[kinds[0]]!r:.40}",
                hint="known are blocks with attention, an MLP, or without one of them",
                error_id="unsupported-model",
            )
        halves.append({} if half.get("no_op") else half)
    return halves[0], halves[1]


def _kv_heads(attention: Mapping[str, Any], heads: int, layer: int) -> int:
    if (groups := attention.get("num_query_groups")) is None:
        groups = attention.get("num_key_value_heads")
    if groups is None and (share := attention.get("n_heads_in_group")) is not None:
        whole = isinstance(share, int) and not isinstance(share, bool) and share > 0
        groups = heads // share if whole and heads % share == 0 else share
        if not whole or heads % share:
            raise MappingError(
                f"n_heads_in_group of block {layer} is {share!r}, and there are {heads} heads",
                hint="a number that divides them",
            )
    groups = heads if groups is None else groups
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1 or heads % groups:
        raise MappingError(
            f"block {layer} has {groups!r} key and value heads, and there are {heads} heads",
            hint="a number that divides them",
        )
    return groups


def _width(ffn: Mapping[str, Any], hidden: int, layer: int) -> int:
    width = ffn.get("ffn_hidden_size") or ffn.get("intermediate_size")
    factor = ffn.get("ffn_mult")
    if width is None and isinstance(factor, int | float) and 0 < factor < 10**6:
        width = _rounded(factor, hidden)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise MappingError(
            f"the MLP of block {layer} is {str(dict(ffn))[:80]}", hint="a positive 'ffn_mult'"
        )
    return width


def _rounded(factor: float, hidden: int) -> int:
    """The width that a factor stands for, as the family's own code computes it."""
    return -(-int(2 * factor * hidden / 3) // _MULTIPLE) * _MULTIPLE


def _blocks(config: ModelConfig, *, by_factor: bool) -> list[dict[str, Any]]:
    """The list; the family's own code knows an MLP's width as a factor, Megatron as a number."""
    if config.layer_sizes is not None and set(config.layer_sizes) - {
        "num_kv_heads",
        "ffn_hidden_size",
    }:
        raise MappingError(
            f"{', '.join(config.layer_sizes)} vary by layer",
            hint="key and value heads and the width of the MLP can",
            error_id="unsupported-model",
        )
    out = []
    for layer, kind in enumerate(kinds_of(config)):
        of = config.at_layer(layer)
        if set(kind) - {ATTENTION, MLP}:
            raise MappingError(
                f"layer {layer} is of the kind {kind!r}, which no block is",
                error_id="unsupported-model",
            )
        attention: dict[str, Any] = {"no_op": True, "n_heads_in_group": None}
        ffn: dict[str, Any] = {"no_op": True, "ffn_mult": None}
        if ATTENTION in kind:
            attention = {
                "no_op": False,
                "n_heads_in_group": of.attention.num_heads // of.attention.num_kv_heads,
            }
        if MLP in kind:
            width = of.mlp.ffn_hidden_size
            factor = 1.5 * width / of.hidden_size
            if by_factor and _rounded(factor, of.hidden_size) != width:
                raise MappingError(
                    f"the MLP of layer {layer} is {width} wide, which no factor says",
                    hint=f"the family rounds it up to a multiple of {_MULTIPLE}",
                    error_id="unsupported-model",
                )
            ffn = {"no_op": False, "ffn_mult": factor}
            if not by_factor:
                ffn["ffn_hidden_size"] = width
        elif not by_factor:
            ffn["ffn_hidden_size"] = None
        both = {"replace_with_linear": False}
        out.append({"attention": attention | both, "ffn": ffn | both})
    return out
