"""One model as Megatron's GPTModel or HybridModel: layers of several branches, or of one each.

A layer of a GPT model is attention (or another mixer) and an MLP (or experts) under one number. A
HybridModel numbers each branch as a layer of its own, in the same order. `hybrid_form` and
`gpt_form` turn one configuration into the other, and names follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megtool.convert.config.windows import skip_flags
from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    KIMI_DELTA,
    MAMBA,
    MLP,
    SHORT_CONV,
)
from megtool.spec.model_config import ModelConfig

GPT, HYBRID = "gpt", "hybrid"

_MIXERS, _FEEDS = (ATTENTION, MAMBA, DELTA_NET, KIMI_DELTA, SHORT_CONV), (MLP, EXPERTS)
_LAYER = re.compile(r"((?:.*\.)?decoder\.layers\.)(\d+)\.(.+)")
_MTP = re.compile(
    r"((?:.*\.)?mtp\.layers\.\d+\.)(?:transformer_layer|mtp_model_layer)\.(?:layers\.(\d+)\.)?(.+)"
)
_OF_FEED = re.compile(r"(?:mlp|pre_mlp_layernorm)(?:\.|$)")
_FINAL = "decoder.final_layernorm.", "decoder.final_norm."


def kinds_of(config: ModelConfig) -> tuple[str, ...]:
    """The branches of every layer."""
    if config.layer_kinds is not None:
        return config.layer_kinds
    moe = layer_sets.moe_layers(config)
    return tuple(ATTENTION + (EXPERTS if i in moe else MLP) for i in range(config.num_layers))


def paired(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The branches of layers of two, from those of layers of one.

    Raises:
        MappingError: they are not a mixer and an MLP or experts by turns.
    """
    pairs = list(zip(kinds[::2], kinds[1::2], strict=False))
    if len(kinds) % 2 or any(a not in _MIXERS or b not in _FEEDS for a, b in pairs):
        raise MappingError(
            f"the layers {''.join(kinds)[:60]!r} are not a mixer and an MLP by turns",
            hint="in this family every layer has both",
            error_id="unsupported-model",
        )
    return tuple(a + b for a, b in pairs)


def needs_hybrid(config: ModelConfig) -> bool:
    """Whether GPTModel has no such layers, and HybridModel may have them."""
    if layer_sets.parallel_layers(config) or config.layer_sizes is not None:
        return False
    return bool(config.mtp.num_mtp_inner) or any(
        MAMBA in kind or len(kind) != 2 or kind[0] not in _MIXERS or kind[1] not in _FEEDS
        for kind in kinds_of(config)
    )


def hybrid_form(config: ModelConfig) -> ModelConfig:
    """The configuration with one branch in every layer.

    Raises:
        MappingError: layers are of a kind that HybridModel does not have, or branches of one run
            side by side.
    """
    kinds = kinds_of(config)
    if config.layer_sizes is not None:
        raise MappingError(
            "sizes vary by layer, and in Megatron's HybridModel all layers of a kind are alike",
            hint="leave --model-class out",
            error_id="unsupported-model",
        )
    if config.residual.parallel_residual or layer_sets.parallel_layers(config):
        raise MappingError(
            "branches of a layer run side by side, and in Megatron's HybridModel one after another",
            hint="leave --model-class out",
            error_id="unsupported-model",
        )
    if layer_sets.conv_layers(config):
        raise MappingError(
            "layers have gated short convolutions, and Megatron's HybridModel has none",
            hint="leave --model-class out",
            error_id="unsupported-model",
        )
    if config.compression.is_compressed or config.residual.hyper_streams:
        raise MappingError(
            "layers have compressed keys, or residuals side by side, and Megatron's HybridModel "
            "has neither",
            hint="leave --model-class out",
            error_id="unsupported-model",
        )
    if config.layer_kinds is not None and all(len(kind) == 1 for kind in kinds):
        return config
    of_branch = [i for i, kind in enumerate(kinds) for _ in kind]
    config = config.with_fields(
        mtp_kind=layer_sets.mtp_branches(config) if config.mtp.num_mtp_layers else ""
    )
    return _with_layers(config, tuple("".join(kinds)), of_branch)


def gpt_form(config: ModelConfig) -> ModelConfig:
    """The configuration with a mixer and an MLP in every layer, itself where GPTModel has none."""
    kinds = config.layer_kinds
    if config.layer_sizes is not None or config.mtp.num_mtp_inner:
        return config
    if kinds is None or any(len(kind) != 1 for kind in kinds) or len(kinds) % 2:
        return config
    pairs = list(zip(kinds[::2], kinds[1::2], strict=True))
    if any(a not in (ATTENTION, DELTA_NET, KIMI_DELTA) or b not in _FEEDS for a, b in pairs):
        return config
    if config.mtp.mtp_kind == "".join(pairs[-1]):
        config = config.with_fields(mtp_kind="")
    grouped = _with_layers(config, tuple(a + b for a, b in pairs), range(0, len(kinds), 2))
    if any(a != ATTENTION for a, _ in pairs):
        return grouped
    flags = tuple(int(b == EXPERTS) for _, b in pairs)
    return grouped.with_fields(
        layer_kinds=None,
        moe_layer_freq=flags if any(flags) and not all(flags) else 1,
    )


def _with_layers(config: ModelConfig, kinds: tuple[str, ...], old: Collection[int]) -> ModelConfig:
    """The configuration of other layers; `old` has the number each had before."""
    skip, without = config.window.window_skip_freq, config.positions.no_rope_layers
    shared = config.indexer.shared_index_layers
    flags = skip_flags(skip, config.num_layers)
    return config.with_fields(
        num_layers=len(kinds),
        layer_kinds=kinds,
        moe_layer_freq=1,
        window_skip_freq=None if skip is None else tuple(flags[i] for i in old),
        no_rope_layers=None if without is None else tuple(without[i] for i in old),
        shared_index_layers=None if shared is None else tuple(shared[i] for i in old),
    )


def to_hybrid(config: ModelConfig) -> Callable[[str], str]:
    """From names with the numbers of `config`'s layers (any state's) to HybridModel's."""
    kinds, mtp = kinds_of(config), layer_sets.mtp_branches(config)
    first = [sum(map(len, kinds[:i])) for i in range(len(kinds))]

    def name(text: str) -> str:
        if match := _LAYER.fullmatch(text):
            layer, rest = int(match[2]), match[3]
            return f"{match[1]}{first[layer] + _branch(kinds[layer], rest)}.{rest}"
        if (match := _MTP.fullmatch(text)) and not config.mtp.num_mtp_inner:
            return f"{match[1]}mtp_model_layer.layers.{_branch(mtp, match[3])}.{match[3]}"
        return text.replace(*_FINAL)

    return name


def from_hybrid(config: ModelConfig) -> Callable[[str], str]:
    """From HybridModel's names to those with the numbers of `config`'s layers.

    Raises (when called):
        MappingError: a layer that the configuration does not have, or of another kind.
    """
    kinds = kinds_of(config)
    of_branch = [(i, symbol) for i, kind in enumerate(kinds) for symbol in kind]

    def name(text: str) -> str:
        if match := _LAYER.fullmatch(text):
            number, rest = int(match[2]), match[3]
            if number >= len(of_branch):
                raise MappingError(
                    f"there is a layer {number}, and the configuration has {len(of_branch)}",
                    tensor=text,
                    hint="the configuration belongs to another model",
                )
            layer, symbol = of_branch[number]
            if (symbol in _FEEDS) != _is_of_feed(rest):
                raise MappingError(
                    f"layer {number} is of the kind {symbol!r} by the pattern, which has no such "
                    "tensor",
                    tensor=text,
                    hint="the pattern belongs to another model",
                )
            return f"{match[1]}{layer}.{rest}"
        if (match := _MTP.fullmatch(text)) and match[2] and not config.mtp.num_mtp_inner:
            return f"{match[1]}transformer_layer.{match[3]}"
        return text.replace(_FINAL[1], _FINAL[0])

    return name


def layers_of_branches(config: ModelConfig, layers: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The numbers that HybridModel has for the branches of some layers, and for how many in all."""
    kinds = kinds_of(config)
    first = [sum(map(len, kinds[:i])) for i in range(len(kinds) + 1)]
    return tuple(n for i in layers for n in range(first[i], first[i + 1])), first[-1]


def _is_of_feed(rest: str) -> bool:
    """Whether the name of a tensor or module in a layer is one of an MLP or of experts."""
    return _OF_FEED.match(rest) is not None


def _branch(kind: str, rest: str) -> int:
    """The number of the branch of a layer that has a tensor."""
    is_feed = _is_of_feed(rest)
    return next((k for k, s in enumerate(kind) if (s in _FEEDS) == is_feed), 0)


def are_hybrid(keys: Collection[str], config: ModelConfig) -> bool:
    """Whether module keys are HybridModel's, not GPTModel's, in a model that either can hold.

    Some releases call the last norm of a GPTModel `final_norm`, too.
    """
    if needs_hybrid(config):
        return True
    numbered = [m for k in keys if (m := _LAYER.fullmatch(k))]
    mixing = {int(m[2]) for m in numbered if not _is_of_feed(m[3])}
    feeding = {int(m[2]) for m in numbered if _is_of_feed(m[3])}
    if not numbered or mixing & feeding or any(k.startswith(_FINAL[0]) for k in keys):
        return False
    has_hybrid_norm = any(k.startswith(_FINAL[1]) for k in keys)
    return has_hybrid_norm or max(mixing | feeding) >= config.num_layers


def moe_flags(fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have experts, by fields or args that were read."""
    freq = fields.get("moe_layer_freq") or 1
    if not fields.get("num_experts"):
        return [False] * layers
    if isinstance(freq, int):
        return [i % freq == 0 for i in range(layers)]
    return [bool(f) for f in freq]
