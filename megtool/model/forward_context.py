"""The state that all layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from torch import Tensor

from megtool.kernels.attention.mask import Mask
from megtool.model.cache.key_windows import KeyWindows
from megtool.parallel.process_groups import ALONE, Group

if TYPE_CHECKING:
    from megtool.model.cache.key_span import KeySpan
    from megtool.model.cache.kv_cache import KVCache
    from megtool.model.cache.source import EncodedSource
    from megtool.model.layers.dropout import Draws
    from megtool.model.masks import Masks
    from megtool.model.positions.rotary import Rotary, Rotation


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """State shared by all layers of one forward pass: sizes, positions, rotations, masks, the
    cache.

    Rotations and masks are made when a layer first asks for its kind, and kept for the others, and
    for the backward pass where layers are computed again: other passes may have run since.
    `positions_BS` has a batch of 1 where all rows have the same. `balanced` are the layers whose
    routers have counted their choices (see `moe.aux_loss`), and `draws` the elements that dropout
    zeroes, if any (see `dropout`). With context parallelism (`cp`)
    all this is of this rank's tokens, two stretches of every row, each with masks of its own, and
    `last_B` are the largest positions of whole rows. Recurrent mixers ask for `real_BS`, false for
    padding, and `runs_BS`, the number of a token's document in its row; both are of whole rows, as
    `span` is, of which windows of tokens are compressed.
    Routers whose experts a table chooses ask for `tokens_BS`.
    `chosen` are the `stretches` of layers of sparse attention, with masks of the tokens that an
    indexer has chosen: while such a layer runs, or for as long as others share the choice.
    With a cache all ranks have all tokens, and those of `key_ranks` a part of the keys each.
    Where ranks exchange heads for tokens, `make_masks` makes the masks of what they then have: for
    the ranks that pass keys and values round, and those that exchange.
    `shared_kv` are keys and values, [B, K, L, D], of the layers that others share them with, and
    `layer_inputs` what an embedding of their own gives each layer for this rank's rows. `source` is
    what a decoder attends to of an encoder.
    """

    num_rows: int
    num_tokens: int
    positions_BS: Tensor
    rotary: Rotary
    masks: tuple[Masks, ...]
    span: KeySpan | None = None
    cache: KVCache | None = None
    cp: Group = ALONE
    key_ranks: Group = ALONE
    last_B: Tensor | None = None
    counted_BS: Tensor | None = None
    balanced: set[int] = field(default_factory=set)
    draws: Draws | None = None
    real_BS: Tensor | None = None
    runs_BS: Tensor | None = None
    tokens_BS: Tensor | None = None
    chosen: dict[int, list[tuple[int, Mask]]] = field(default_factory=dict)
    source: EncodedSource | None = None
    shared_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layer_inputs: tuple[Tensor, ...] = ()
    make_masks: Callable[[Group, Group], tuple[Masks, ...]] | None = None
    _masks_over: dict[tuple[int, ...], tuple[Masks, ...]] = field(default_factory=dict)
    _turns: dict[int, Rotation | None] = field(default_factory=dict)
    _windows: dict[int, KeyWindows] = field(default_factory=dict)

    def rotation(self, layer: int) -> Rotation | None:
        """Cosines and sines for a layer; None for a layer without rotary embedding."""
        if layer not in self._turns:
            self._turns[layer] = self.rotary.of(layer, self.positions_BS, self.last_B)
        return self._turns[layer]

    def windows(self, ratio: int) -> KeyWindows:
        """The windows of so many tokens of whole rows that are compressed to one key each."""
        if ratio not in self._windows:
            self._windows[ratio] = KeyWindows.of(ratio, cast("KeySpan", self.span), self.runs_BS)
        return self._windows[ratio]

    def stretches(self, layer: int) -> list[tuple[int, Mask]]:
        """For each stretch of this rank's queries, all equally long: the number of keys up to its
        end, and which of these a layer's queries may attend to."""
        if layer in self.chosen:
            return self.chosen[layer]
        return [(masks.span.num_keys, masks.of(layer)) for masks in self.masks]

    def stretches_over(self, layer: int, outer: Group, inner: Group) -> list[tuple[int, Mask]]:
        """As `stretches`, where the ranks of `inner` have exchanged heads for tokens, and those of
        `outer` pass keys and values round."""
        if outer.ranks == self.cp.ranks or self.make_masks is None:
            return self.stretches(layer)
        key = (*outer.ranks, -1, *inner.ranks)
        if key not in self._masks_over:
            self._masks_over[key] = self.make_masks(outer, inner)
        return [(masks.span.num_keys, masks.of(layer)) for masks in self._masks_over[key]]
