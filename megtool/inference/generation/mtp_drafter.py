"""Drafts of layers of multi-token prediction.

After t tokens of a row, layer m (from 0) combines its input's state at position i with token
i + m + 1 and drafts the token after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.drafting import DraftRow, add_drafts, pad_rows, propose
from megtool.inference.generation.slots import BLOCK_SIZE
from megtool.model.cache.paged import PagedCache
from megtool.spec.model_config import ModelConfig


def check_mtp(config: ModelConfig) -> None:
    """Refuse models that cannot draft for themselves.

    Raises:
        UsageError: there are no layers of multi-token prediction.
    """
    if not config.mtp.num_mtp_layers:
        raise UsageError(
            "--speculative mtp, and the model has no layers of multi-token prediction",
            hint="--speculative none, or the folder of a draft head",
        )


@dataclass(slots=True)
class _Progress:
    """What is kept of a sequence between passes.

    `hidden` is what layer 0 has not read yet of the model's last tokens: states after the final
    norm, or the residuals side by side that they are made of. Layer m has
    read `starts[m]` tokens for good, and `tails[m]` are the states of its input that it has to read
    again since their further token was a draft.
    """

    starts: list[int]
    tails: list[Tensor | None]
    hidden: Tensor | None = None


class _Part(NamedTuple):
    """Tokens that a layer reads of a sequence, and the states of its input."""

    number: int
    tokens: list[int]
    x_SH: Tensor


class MtpDrafter:
    """A `Drafter` by the model's own layers; ranks of other stages than the last wait for them.

    Raises:
        UsageError: see `check_mtp`.
    """

    def __init__(self, forward: Forward, *, num_slots: int, num_pages: int) -> None:
        check_mtp(forward.config)
        self._forward = forward
        self.num_drafts = forward.config.mtp.num_mtp_layers
        self._caches: list[PagedCache] = []
        if forward.decoder.mtp is not None:
            self._caches = [
                forward.mtp_cache(
                    m, num_blocks=num_pages + 1, block_size=BLOCK_SIZE, num_sequences=num_slots
                )
                for m in range(self.num_drafts)
            ]
        self._has_states = any(c.states.tensors for c in self._caches)
        self._sequences: dict[int, _Progress] = {}

    def within(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read_pass(self, x_BSH: Tensor) -> Tensor:
        """What layer 0 reads of the pass that these states are of, [B, S, C]."""
        read_TC = self._forward.decoder.mtp_input(x_BSH.flatten(0, 1))
        return read_TC.view(*x_BSH.shape[:2], -1)

    def enter(self, number: int) -> None:
        """Begin a sequence."""
        self._sequences[number] = _Progress([0] * self.num_drafts, [None] * self.num_drafts)

    def keep(self, number: int, read_SC: Tensor) -> None:
        """Keep what layer 0 will read."""
        self._sequences[number].hidden = read_SC

    def leave(self, number: int) -> None:
        """Its blocks are free for the next."""
        self._sequences.pop(number, None)
        for cache in self._caches:
            cache.release(number)

    def draft(self, rows: Sequence[DraftRow]) -> None:
        """Draft by one layer after another."""
        inputs: dict[int, Tensor] = {}
        for row in rows:
            sequence = self._sequences[row.number]
            if sequence.hidden is not None:
                inputs[row.number], sequence.hidden = sequence.hidden, None
        for depth in range(self.num_drafts):
            rows = [r for r in rows if r.num_wanted > depth]
            if not rows:
                return
            tokens_B = None
            if self._caches:
                tokens_B = self._propose(rows, self._read(depth, rows, inputs))
            add_drafts(self._forward, rows, tokens_B)
            for row in rows:
                start = max(0, row.running.length - 1 - depth)
                self._sequences[row.number].starts[depth] = start

    def _propose(self, rows: Sequence[DraftRow], x_BH: Tensor) -> Tensor:
        """The next draft of each row, from the states behind which it comes."""
        return propose(rows, self._forward.logits(x_BH))

    def _read(self, depth: int, rows: Sequence[DraftRow], inputs: dict[int, Tensor]) -> Tensor:
        """Let a layer read what it has not; its states [B, H] at the last positions.

        `inputs` has the states of its input from where the layer before it began to read, and
        afterwards the layer's own.
        """
        certain: list[_Part] = []
        doubtful: list[_Part] = []
        lengths = {}
        for row in rows:
            sequence, number, running = self._sequences[row.number], row.number, row.running
            x_SH, tail_SH = inputs[number], sequence.tails[depth]
            if tail_SH is not None:
                x_SH = torch.cat((tail_SH, x_SH))
            start, last = sequence.starts[depth], running.length - 1
            lengths[number] = max(0, last - depth)
            again = lengths[number] - start
            if depth:  # what is to be read again next time
                sequence.tails[depth] = x_SH[again : max(0, last - depth + 1) - start]
            known = [*running.known, *row.drafts]
            tokens = known[start + depth + 1 : last + depth + 1]
            if depth and self._has_states:  # which go back to the begin of a pass of few tokens
                certain.append(_Part(number, tokens[:again], x_SH[:again]))
                doubtful.append(_Part(number, tokens[again:], x_SH[again:]))
            else:
                certain.append(_Part(number, tokens, x_SH))
        outs = [
            self._read_parts(depth, [p for p in parts if p.tokens], revertible=parts is doubtful)
            for parts in (certain, doubtful)
        ]
        for number in lengths:
            inputs[number] = torch.cat([out[number] for out in outs if number in out])
        self._caches[depth].truncate(lengths)
        last_BC = torch.stack([inputs[number][-1] for number in lengths])
        return self._forward.decoder.mtp_state(depth, last_BC)

    def _read_parts(
        self, depth: int, parts: Sequence[_Part], *, revertible: bool
    ) -> dict[int, Tensor]:
        """What a layer gives to the next one of the tokens that it reads of each sequence."""
        if not parts:
            return {}
        cache = self._caches[depth]
        numbers, tokens = [p.number for p in parts], [p.tokens for p in parts]
        batch = pad_rows(cache, numbers, tokens, revertible=revertible)
        x_BSH = torch.nn.utils.rnn.pad_sequence([p.x_SH for p in parts], batch_first=True)
        y_TH = self._forward.decoder.mtp_hidden(depth, x_BSH.flatten(0, 1), batch, cache)
        y_BSH = y_TH.view(*batch.shape, -1)
        return {p.number: y_BSH[n, : len(p.tokens)] for n, p in enumerate(parts)}
