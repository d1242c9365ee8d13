"""Drafts of an EAGLE-3 head, each from the one before.

After t tokens of a row the head reads the model's states at the positions that are certain, each
with the token behind it, and drafts token t + 1; then its own state with that draft, and so on.
Keys and values of its own states are forgotten after each step, for the model's come instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from megtool.errors import LayoutError
from megtool.inference.forward import Forward
from megtool.inference.generation.draft_head_files import DraftHeadFiles
from megtool.inference.generation.drafting import DraftRow, add_drafts, pad_rows, propose
from megtool.inference.generation.slots import BLOCK_SIZE
from megtool.model.batch import Batch
from megtool.model.cache.paged import PagedCache
from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.layer_states import LayerStates


class HeadDrafter:
    """A `Drafter` by a head that every rank has whole.

    Raises:
        LayoutError: the model is on several pipeline stages, of which one alone has a state, or
            ranks share tokens.
        FormatError: the head cannot be read.
    """

    def __init__(
        self, forward: Forward, files: DraftHeadFiles, *, num_slots: int, num_pages: int
    ) -> None:
        groups = forward.groups
        if groups.pp.size > 1 or groups.cp.size > 1:
            raise LayoutError(
                f"pp={groups.pp.size}, cp={groups.cp.size}, and a draft head reads whole rows of "
                "the states of several layers",
                hint="--tp splits the model; or --speculative none",
            )
        self._forward, self.num_drafts = forward, files.num_drafts
        self.head = files.load(dtype=forward.decoder.dtype, device=forward.device)
        self._layers = LayerStates(forward.decoder, files.layers)
        self._numbers = files.layers
        self._cache = PagedCache(
            files.config,
            num_blocks=num_pages + 1,
            block_size=BLOCK_SIZE,
            num_sequences=num_slots,
            dtype=forward.decoder.dtype,
            device=forward.device,
        )
        self._unread: dict[int, Tensor] = {}

    def within(self) -> AbstractContextManager[None]:
        """Keep the states that the head reads."""
        return self._layers.kept()

    def read_pass(self, x_BSH: Tensor) -> Tensor:
        """The head's first states of the last pass, [B, S, H]."""
        states = self._layers.take()
        read_TC = torch.cat([states[n] for n in self._numbers], -1)
        return self.head.combine(read_TC).view(*x_BSH.shape[:2], -1)

    def enter(self, number: int) -> None:
        """Nothing: a sequence begins with what is kept of it."""

    def keep(self, number: int, read_SC: Tensor) -> None:
        """Keep states that the head has not read yet."""
        unread = self._unread.get(number)
        self._unread[number] = read_SC if unread is None else torch.cat((unread, read_SC))

    def leave(self, number: int) -> None:
        """Its blocks are free for the next."""
        self._unread.pop(number, None)
        self._cache.release(number)

    def draft(self, rows: Sequence[DraftRow]) -> None:
        """Draft one token after another."""
        rows = [r for r in rows if r.num_wanted > 0]
        if not rows:
            return
        states = [self._unread.pop(r.number) for r in rows]
        tokens = [r.running.known[-len(x) :] for r, x in zip(rows, states, strict=True)]
        certain = {r.number: r.running.length - 1 for r in rows}
        last_BH = self._read(rows, tokens, states)
        while True:
            add_drafts(self._forward, rows, self._propose(rows, last_BH))
            going = [
                n for n, r in enumerate(rows) if len(r.drafts) < min(self.num_drafts, r.num_wanted)
            ]
            if not going:
                break
            rows, last_BH = [rows[n] for n in going], last_BH[going]
            last_BH = self._read(rows, [r.drafts[-1:] for r in rows], last_BH[:, None].unbind())
        self._cache.truncate(certain)

    def _read(
        self, rows: Sequence[DraftRow], tokens: Sequence[list[int]], states: Sequence[Tensor]
    ) -> Tensor:
        """Read states [S, H] of rows with the token behind each; the head's own last states."""
        batch = pad_rows(self._cache, [r.number for r in rows], tokens)
        x_BSH = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)
        frame = self.head.frame(batch, self._cache)
        y_TH = self.head(x_BSH.flatten(0, 1), self._embed(batch, frame), frame)
        self._cache.advance()
        y_BSH: Tensor = y_TH.view(*batch.shape, -1)
        last = [len(row) - 1 for row in tokens]
        return y_BSH[torch.arange(len(last), device=y_BSH.device), last]

    def _embed(self, batch: Batch, frame: ForwardContext) -> Tensor:
        """The embeddings of tokens; these are one position behind the states beside them."""
        if self.head.embedding is not None:
            return self.head.embed(batch.tokens_BS)
        behind = replace(frame, positions_BS=frame.positions_BS + 1)
        return self._forward.decoder.embed_tokens(batch.tokens_BS, behind)

    def _propose(self, rows: Sequence[DraftRow], x_BH: Tensor) -> Tensor:
        """The next draft of each row, from the states behind which it comes."""
        x_BH = self.head.norm(x_BH)
        own = self.head.logits if self.head.lm_head is not None else self._forward.logits
        return propose(rows, own(x_BH))
