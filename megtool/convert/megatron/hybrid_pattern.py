"""The layer patterns of Megatron's HybridModel: `M-M*-|M-*E/*E` as symbols, stages and MTP.

A symbol is one layer with one branch, `|` begins another pipeline chunk, and every `/` another
layer of multi-token prediction, all of which are the same. Source: megatron-core 0.19.2,
models/hybrid/hybrid_layer_allocation.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.errors import LayoutError, MappingError
from megtool.options.layout import ParallelConfig
from megtool.parallel.pipeline_split import Pipeline, compact
from megtool.spec.layer_symbols import ATTENTION, HYBRID_SYMBOLS, MAMBA, MLP
from megtool.spec.model_config import MOST_LAYERS, ModelConfig

PATTERN = "hybrid_layer_pattern"
OLD_PATTERN = "hybrid_override_pattern"
_OLD_MTP = "mtp_hybrid_override_pattern"
LATENT, SPARSE = "+", "D"
"""Latent attention without and with an indexer; `ModelConfig` has `*` for every attention."""
_OTHER_SYMBOLS = {"C": "compressed attention", "W": "attention within a window"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPattern:
    """A parsed pattern: symbols of every pipeline chunk, and of each of `depths` MTP layers.

    `is_cut` says that the pattern itself tells chunks apart.
    """

    chunks: tuple[str, ...]
    mtp: str = ""
    depths: int = 0

    @property
    def symbols(self) -> str:
        """The symbols of all layers."""
        return "".join(self.chunks)

    @property
    def is_cut(self) -> bool:
        """The pattern says which layers each chunk has."""
        return len(self.chunks) > 1

    def layout(self) -> str:
        """The pipeline layout that the chunks are, in Megatron's text for GPT models."""
        rows = ["t" * len(chunk) for chunk in self.chunks]
        rows[0] = "E" + rows[0]
        rows[-1] += "m" * self.depths + "L"
        return compact(rows)


def parse_pattern(text: str) -> HybridPattern:
    """Parse a pattern.

    Raises:
        MappingError: unknown symbols, MTP layers that differ, or too many layers.
    """
    stored = text
    text = text.replace(LATENT, ATTENTION).replace(SPARSE, ATTENTION)
    if text != stored and ATTENTION in stored:
        raise MappingError(
            f"the layer pattern {stored[:60]!r} has {ATTENTION} beside {LATENT} or {SPARSE}",
            hint=f"attention is latent ({LATENT}, {SPARSE}) in all layers of a model, or in none",
            error_id="unsupported-model",
        )
    main, *mtp = text.split("/")
    for part in (main.replace("|", ""), *mtp):
        unknown = next((s for s in part if s not in HYBRID_SYMBOLS), None)
        if unknown is not None:
            meaning = _OTHER_SYMBOLS.get(unknown)
            raise MappingError(
                f"the layer pattern {text[:60]!r} has the symbol {unknown!r}"
                + (f" ({meaning})" if meaning else ""),
                hint=f"known: {' '.join(HYBRID_SYMBOLS)}, | between chunks, / before MTP",
                error_id="unsupported-model",
            )
    if len(set(mtp)) > 1 or (mtp and not mtp[0]):
        raise MappingError(
            f"the layer pattern {text[:60]!r} has MTP layers that are empty or differ",
            hint="every part behind a / is the same",
        )
    if not 0 < len(main.replace("|", "")) <= MOST_LAYERS:
        raise MappingError(
            f"the layer pattern {text[:60]!r} has {len(main.replace('|', ''))} layers",
            hint=f"1 to {MOST_LAYERS:,} symbols",
        )
    return HybridPattern(chunks=tuple(main.split("|")), mtp=mtp[0] if mtp else "", depths=len(mtp))


def pattern_of(args: Mapping[str, Any]) -> HybridPattern | None:
    """The pattern that a checkpoint's args have, under any of its names; None for a GPT model.

    Raises:
        MappingError: it is malformed, or the args count other layers.
    """
    text = next((t for k in (PATTERN, OLD_PATTERN) if (t := args.get(k))), None)
    if text is None:
        text = _pattern_by_ratios(args)
    if text is None:
        return None
    if not isinstance(text, str):
        raise MappingError(f"the layer pattern is {text!r:.60}", hint="text, such as M-M*-")
    mtp, depths = args.get(_OLD_MTP), args.get("mtp_num_layers")
    if isinstance(mtp, str) and mtp and "/" not in text and isinstance(depths, int):
        text += f"/{mtp}" * min(depths, MOST_LAYERS)
    pattern = parse_pattern(text)
    declared = args.get("num_layers")
    if isinstance(declared, int) and declared != len(pattern.symbols):
        raise MappingError(
            f"the layer pattern has {len(pattern.symbols)} layers, and num_layers is {declared}",
            hint="the args belong to another model",
        )
    return pattern


def _pattern_by_ratios(args: Mapping[str, Any]) -> str | None:
    """Return the pattern that Megatron makes of shares of the layers; None for a GPT model."""
    attention, mlp = (float(args.get(f"hybrid_{k}_ratio") or 0.0) for k in ("attention", "mlp"))
    if not (attention or mlp or args.get("is_hybrid_model")):
        return None
    layers = args.get("num_layers")
    is_share = min(attention, mlp) >= 0 and attention + mlp <= 1
    if not (is_share and isinstance(layers, int) and 0 < layers <= MOST_LAYERS):
        raise MappingError(
            f"hybrid_attention_ratio is {attention}, hybrid_mlp_ratio {mlp}, of {layers!r} layers",
            hint="shares of the layers, together at most 1; --like HF_FOLDER gives the layers",
            error_id="unsupported-model",
        )
    return allocate_layers(layers, attention, mlp)


def allocate_layers(num_layers: int, attention: float, mlp: float) -> str:
    """Return the symbols of a hybrid model by the shares of its layers that are attention and MLPs.

    Attention lies evenly between Mamba-2 layers, and MLPs evenly among those, to the right. Source:
    megatron-core 0.16.1, ssm/mamba_hybrid_layer_allocation.py.
    """
    symbols = [MAMBA] * num_layers
    num_attention, num_mlp = round(num_layers * attention), round(num_layers * mlp)
    step = (num_layers - num_attention) / (num_attention + 1)
    _spread(symbols, ATTENTION, step, among=range(num_layers))
    if num_mlp:
        among = [i for i, symbol in enumerate(symbols) if symbol == MAMBA]
        _spread(symbols, MLP, (num_layers - num_attention - num_mlp) / num_mlp, among=among)
    return "".join(symbols)


def _spread(symbols: list[str], symbol: str, step: float, *, among: Sequence[int]) -> None:
    """Replace a layer behind every `step` others."""
    left = step
    for i in among:
        if left < 0.5:
            symbols[i] = symbol
            left += step
        else:
            left -= 1


def attention_symbol(config: ModelConfig) -> str:
    """What a pattern calls attention."""
    if not config.latent.kv_lora_rank:
        return ATTENTION
    return SPARSE if config.indexer.index_num_heads else LATENT


def pattern_text(symbols: Sequence[str], mtp: str, depths: int, parallel: ParallelConfig) -> str:
    """A pattern with the chunks of a layout, where that has several.

    Raises:
        LayoutError: the layout does not take so many layers.
    """
    text = "".join(symbols)
    if parallel.pp > 1:
        sizes = Pipeline.of(parallel).sizes(len(text)).ravel().tolist()
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        if not text or ends[-1] != len(text):
            raise LayoutError(f"{len(text)} layers do not fall into {len(sizes)} chunks")
        text = "|".join(text[e - n : e] for e, n in zip(ends, sizes, strict=True))
    return text + f"/{mtp}" * depths
