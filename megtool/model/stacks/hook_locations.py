"""Locations of activation hooks in a decoder, by the canonical name of an activation site."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from megtool.errors import MappingError
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec import layer_sets

if TYPE_CHECKING:
    from megtool.model.stacks.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class HookLocation:
    """The location of one input: `attribute` of `module` takes the hook.

    `rows` are the ranks that have different rows of it (alone: all have the same ones), `columns`
    those that have different columns: each has runs of the widths `runs` (empty: one run), as keys
    and values, of which `repeats` ranks next to each other have the same. Where a token has a row
    for each group of heads, `groups` counts this rank's (0: tokens are rows), and `rows` have other
    groups of all tokens. `expert` counts this rank's experts; it is outside of them where others
    hold it.
    """

    module: nn.Module
    attribute: str = "tap"
    rows: Group = ALONE
    columns: Group = ALONE
    runs: tuple[int, ...] = ()
    repeats: int = 1
    groups: int = 0
    expert: int | None = None

    def set(self, tap: Callable[..., Any] | None) -> None:
        """Put a tap there, or take it away."""
        setattr(self.module, self.attribute, tap)

    @property
    def is_here(self) -> bool:
        """This rank sees it; of experts, it may be another one of the ep group."""
        if self.expert is None:
            return True
        weight = self.module.get_parameter("weight")
        return 0 <= self.expert < weight.shape[0]


@contextmanager
def tapped(taps: Iterable[tuple[HookLocation, Callable[..., Any]]]) -> Iterator[None]:
    """Put taps in their places, and those that were there before back again."""
    before: list[tuple[HookLocation, Any]] = []
    try:
        for place, tap in taps:
            before.append((place, getattr(place.module, place.attribute)))
            place.set(tap)
        yield
    finally:
        for place, tap in reversed(before):
            place.set(tap)


_POINT = re.compile(r"layers\.(\d+)\.(.+)")


_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(fc1|down)")


_INDEXER = "self_attention.core_attention.indexer"
_COMPRESSORS = (
    *((f"attn.{x}_", "self_attention.core_attention") for x in ("heavy", "overlap")),
    ("attn.index_overlap_", _INDEXER),
)
_WITHIN = {
    "attn.qkv": "self_attention.linear_qkv",
    "attn.o": "self_attention.linear_proj",
    "attn.q_up": "self_attention.linear_q_up_proj",
    "attn.kv_up": "self_attention.linear_kv_up_proj",
    "attn.index_q": f"{_INDEXER}.linear_wq_b",
    "attn.index_k": f"{_INDEXER}.linear_wk",
    "attn.index_heads": f"{_INDEXER}.linear_weights_proj",
    **{
        f"{name}{ours}": f"{core}.compressor.linear_{megatron}"
        for name, core in _COMPRESSORS
        for ours, megatron in (("kv", "wkv"), ("gate", "wgate"))
    },
    "delta.qkvz": "self_attention.in_proj",
    "delta.ba": "self_attention",
    "delta.o": "self_attention.out_proj",
    "kda.qkv": "self_attention.in_proj",
    "kda.b": "self_attention.beta_proj",
    **{
        f"kda.{x}_{ours}": f"self_attention.{x}_{megatron}_proj"
        for x in "fg"
        for ours, megatron in (("down", "a"), ("up", "b"))
    },
    "kda.o": "self_attention.out_proj",
    "mamba.in": "mixer.in_proj",
    "mamba.out": "mixer.out_proj",
    "short_conv.in": "short_conv.in_proj",
    "short_conv.out": "short_conv.out_proj",
    "mlp.fc1": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
    "mlp.shared.fc1": "mlp.shared_experts.linear_fc1",
    "mlp.shared.down": "mlp.shared_experts.linear_fc2",
    "input_gate": "input_gate",
    "input_proj": "input_proj",
}


_OF_WHOLE_ROWS = ("attn.index_", *(name for name, _ in _COMPRESSORS))
_CUT_COLUMNS = (
    *("attn.o", "delta.o", "kda.o", "mamba.out", "short_conv.out"),
    *("mlp.down", "mlp.shared.down"),
)


_DOWN = ("linear_q_down_proj", "linear_q_proj", "linear_kv_down_proj", "linear_kv_proj")


def places(decoder: Decoder, point: str) -> tuple[HookLocation, ...]:
    """The locations of an activation site, by its canonical name (`layers.3.attn.qkv`,
    `layers.3.attn.kv`, `head`).

    The first is where it is looked at; where one input goes to several modules, as before latent
    attention, all of them take a tap to change it.

    Raises:
        MappingError: this decoder, or this stage of it, has no such point.
    """
    tp, config = decoder.groups.tp, decoder.config
    rows = tp if decoder.sequence_parallel else ALONE
    if point == "head":
        return (HookLocation(module=decoder, attribute="head_tap", rows=rows),)
    match = _POINT.fullmatch(point)
    layers = decoder.decoder.layers
    if match is None or match[1] not in layers:
        raise MappingError(
            f"{point!r} is not an activation site of layers {', '.join(layers) or 'none'}"
        )
    layer, name = layers[match[1]], match[2]
    try:
        if name == "attn.kv":
            attention = layer.get_submodule("self_attention")
            if config.latent.kv_lora_rank:
                return (HookLocation(module=attention, attribute="cache_tap"),)
            sizes = config.at_layer(int(match[1])).attention
            repeats = max(1, tp.size // sizes.num_kv_heads)
            heads = max(1, sizes.num_kv_heads // tp.size)
            runs = (heads * sizes.head_dim, heads * sizes.value_size)
            cut = HookLocation(
                module=attention, attribute="cache_tap", columns=tp, runs=runs, repeats=repeats
            )
            return (cut,)
        if name == "attn.down":
            submodules = dict(layer.get_submodule("self_attention").named_children())
            if not config.latent.kv_lora_rank and not config.compression.is_compressed:
                raise KeyError(name)
            return tuple(
                HookLocation(module=submodules[n], rows=rows) for n in _DOWN if n in submodules
            )
        if name == "attn.o_down":
            attention = layer.get_submodule("self_attention")
            groups = config.compression.out_groups // tp.size
            if not groups:
                raise KeyError(name)
            return (HookLocation(module=attention, attribute="group_tap", rows=tp, groups=groups),)
        if expert := _EXPERT.fullmatch(name):
            return (_expert(decoder, layer, int(expert[1]), expert[2]),)
        if name == "mlp.shared.router":  # reads what the shared experts read
            return places(decoder, point.removesuffix("router") + "fc1")
        within = _WITHIN[name]
        if int(match[1]) in layer_sets.parallel_layers(config):
            within = within.replace("mixer.", "mamba_mixer.")
        module = layer.get_submodule(within)
    except (AttributeError, KeyError):
        raise MappingError(f"layer {match[1]} of this model has no {name!r}") from None
    is_cut = name in _CUT_COLUMNS
    return (
        HookLocation(
            module=module,
            attribute="gate_tap" if name == "delta.ba" else "tap",
            rows=ALONE if is_cut or name.startswith(_OF_WHOLE_ROWS) else rows,
            columns=tp if is_cut else ALONE,
        ),
    )


def _expert(decoder: Decoder, layer: nn.Module, expert: int, name: str) -> HookLocation:
    groups = decoder.groups
    linear = "linear_fc1" if name == "fc1" else "linear_fc2"
    module = layer.get_submodule(f"mlp.experts.experts.{linear}")
    local = module.get_parameter("weight").shape[0]
    return HookLocation(
        module=module,
        columns=groups.etp if name == "down" else ALONE,
        expert=expert - groups.ep.rank * local,
    )
