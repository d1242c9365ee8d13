"""Speculative decoding: layers of multi-token prediction draft tokens, one pass verifies them all.

After t tokens of a row, layer m (from 0) combines its input's state at position i with token
i + m + 1 and drafts the token after that. The model then reads the newest token and all drafts at
once, and keeps those that it would have chosen itself, and one more. Keys and values from a draft
on that it rejects are forgotten, and recurrent mixers have the states before it again. The drafts
decide how fast a text grows, not which text it is: greedily it is the same, and sampled it has the
same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.batching import ChosenToken, GenerateRequest, Reservation, Running
from megtool.inference.forward import Forward
from megtool.inference.sampling import (
    NO_NUMBER,
    Sampling,
    choose,
    choose_each,
    draw,
    probabilities,
)
from megtool.inference.slots import BLOCK_SIZE, MOST_PREFILL_TOKENS
from megtool.model.batch import Batch
from megtool.model.paged_cache import PagedCache
from megtool.model_config import ModelConfig

_PAD = 0  # never attended to, so any token does


def check_speculative(config: ModelConfig, *, stream_layers: bool = False) -> None:
    """Refuse models that cannot draft for themselves.

    Raises:
        UsageError: there are no layers of multi-token prediction, or layers are not kept in memory.
    """
    if not config.num_mtp_layers:
        raise UsageError(
            "--speculative mtp, and the model has no layers of multi-token prediction",
            hint="--speculative none",
        )
    if stream_layers:
        raise UsageError(
            "--speculative mtp and --stream-layers: every pass would read the layers again for "
            "the drafts",
            hint="--speculative none",
        )


@dataclass(slots=True, kw_only=True)
class _Row:
    """What is kept of a sequence between passes.

    `hidden` is what layer 0 has not read yet of the model's last tokens: states after the final
    norm, or the residuals side by side that they are made of. Layer m has
    read `starts[m]` tokens for good, and `tails[m]` are the states of its input that it has to read
    again since their further token was a draft. `drafts` are tokens, and with sampling `probs` the
    probabilities that they were drawn from.
    """

    sampling: Sampling
    generator: torch.Generator
    starts: list[int]
    tails: list[Tensor | None]
    hidden: Tensor | None = None
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class _Part(NamedTuple):
    """Tokens that a layer reads of a sequence, and the states of its input."""

    number: int
    tokens: list[int]
    x_SH: Tensor


class SpeculativeSlots:
    """Slots of sequences that grow by up to one token more than there are drafts in a pass.

    Every rank calls the same methods with the same arguments, and gets the same tokens. Ranks of
    other stages than the last wait for the drafts. `num_drafted` and `num_accepted` count drafts.

    Raises:
        UsageError: see `check_speculative`.
    """

    num_graphed = 0  # rows grow by different numbers of tokens
    is_chunked = False
    prefill_tokens = MOST_PREFILL_TOKENS

    def __init__(self, forward: Forward, *, num_slots: int, num_pages: int) -> None:
        check_speculative(forward.config)
        self._forward, self.num_slots = forward, num_slots
        self._depths = forward.config.num_mtp_layers
        self._pages = Reservation(num_pages, BLOCK_SIZE)
        sizes = {
            "num_blocks": num_pages + 1,
            "block_size": BLOCK_SIZE,
            "num_sequences": num_slots,
        }
        self._cache: PagedCache = forward.blocks_cache(**sizes)
        self._mtp_caches: list[PagedCache] = []
        if forward.decoder.mtp is not None:
            self._mtp_caches = [forward.mtp_cache(m, **sizes) for m in range(self._depths)]
        self._has_states = any(c.states.tensors for c in self._mtp_caches)
        self._rows: dict[int, _Row] = {}
        self.num_drafted = self.num_accepted = 0

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that is longer than the cache, or asks for log-probabilities.

        Raises:
            UsageError: it is, or does.
        """
        self._pages.check(request)
        if request.text.num_log_probs is not None:
            raise UsageError(
                "log-probabilities are asked for, and drafts are verified several at a time",
                hint="--speculative none",
            )

    def enter(self, running: Running) -> bool:
        """Take all pages that it may need."""
        return self._pages.enter(running)

    def grow(self, running: Running) -> bool:
        """It has them."""
        return True

    def waits_for(self, running: Running, other: Running) -> bool:
        """Nothing is shared."""
        return False

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> list[list[ChosenToken]]:
        """Read the prompts of rows that have just entered, whole; the first token of each."""
        for running in rows:
            self._rows[running.number] = _Row(
                sampling=running.request.text.sampling,
                generator=running.generator,
                starts=[0] * self._depths,
                tails=[None] * self._depths,
            )
        prompts = [list(r.request.prompt) for r in rows]
        x_BSH = self._hidden(self._cache, [r.request.number for r in rows], prompts)
        tokens_B = None
        if x_BSH is not None:
            read_BSC = self._mtp_input(x_BSH)
            for n, running in enumerate(rows):
                self._rows[running.request.number].hidden = read_BSC[n, : len(prompts[n])]
            last_BH = torch.stack([x_BSH[n, len(p) - 1] for n, p in enumerate(prompts)])
            tokens_B = choose_each(
                self._forward.logits(last_BH),
                [r.request.text.sampling for r in rows],
                [r.generator for r in rows],
            )
        return [[ChosenToken(t)] for t in self._forward.agree(tokens_B, len(rows)).tolist()]

    def step(self, rows: Sequence[Running]) -> list[list[ChosenToken]]:
        """Draft, and verify; the tokens that every running row has more."""
        begun = [r for r in rows if self._of(r).starts[0]]
        for part in (begun, [r for r in rows if not self._of(r).starts[0]]):
            self._draft(part)
        numbers = [r.request.number for r in rows]
        tokens = [[r.tokens[-1], *self._of(r).drafts] for r in rows]
        x_BSH = self._hidden(self._cache, numbers, tokens, revertible=True)
        width = self._depths + 2
        result_BN = read_BSC = None
        if x_BSH is not None:
            read_BSC = self._mtp_input(x_BSH)
            accepted = [
                self._verify(self._of(r), logits_SV)
                for r, logits_SV in zip(rows, self._all_logits(x_BSH), strict=True)
            ]
            padded = [[len(f), *f, *[_PAD] * (width - 1 - len(f))] for f in accepted]
            result_BN = torch.tensor(padded, device=x_BSH.device).flatten()
        agreed = self._forward.agree(result_BN, len(rows) * width).view(-1, width).tolist()
        out, lengths = [], {}
        for n, (running, (count, *more)) in enumerate(zip(rows, agreed, strict=True)):
            row = self._of(running)
            self.num_drafted += len(row.drafts)
            self.num_accepted += count - 1
            lengths[running.request.number] = running.length - 1 + count
            if read_BSC is not None:
                row.hidden = read_BSC[n, :count]
            out.append([ChosenToken(t) for t in more[:count]])
        self._cache.truncate(lengths)
        return out

    def leave(self, running: Running) -> None:
        """Its blocks are free for the next."""
        number = running.number
        self._rows.pop(number, None)
        self._cache.release(number)
        for cache in self._mtp_caches:
            cache.release(number)
        self._pages.leave(running)

    def _of(self, running: Running) -> _Row:
        return self._rows[running.request.number]

    def _hidden(
        self,
        cache: PagedCache,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        revertible: bool = False,
    ) -> Tensor | None:
        """States [B, S, H] of rows of tokens, padded on the right."""
        batch = self._batch(cache, numbers, tokens, revertible=revertible)
        x_TH = self._forward.hidden(batch, cache)
        return None if x_TH is None else x_TH.view(*batch.shape, -1)

    def _batch(
        self,
        cache: PagedCache,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        revertible: bool = False,
    ) -> Batch:
        """Rows padded on the right, for which the cache has taken slots."""
        counts = [len(row) for row in tokens]
        width, device = max(counts), self._forward.device
        cache.choose(list(zip(numbers, counts, strict=True)), revertible=revertible)
        valid_BS = None
        if min(counts) < width:
            places_S = torch.arange(width, device=device)
            valid_BS = places_S < torch.tensor(counts, device=device)[:, None]
        padded = [[*row, *[_PAD] * (width - len(row))] for row in tokens]
        return Batch(tokens_BS=torch.tensor(padded, device=device), valid_BS=valid_BS)

    def _mtp_input(self, x_BSH: Tensor) -> Tensor:
        """What layer 0 reads of the pass that these states are of, [B, S, C]."""
        read_TC = self._forward.decoder.mtp_input(x_BSH.flatten(0, 1))
        return read_TC.view(*x_BSH.shape[:2], -1)

    def _all_logits(self, x_BSH: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        rows, width, _ = x_BSH.shape
        return self._forward.logits(x_BSH.reshape(rows * width, -1)).view(rows, width, -1)

    # ---- drafts

    def _draft(self, rows: Sequence[Running]) -> None:
        """Set the drafts of rows; as many as may still follow, less the token after them."""
        inputs: dict[int, Tensor] = {}
        for running in rows:
            row = self._of(running)
            row.drafts, row.probs = [], []
            if row.hidden is not None:
                inputs[running.request.number], row.hidden = row.hidden, None
        for depth in range(self._depths):
            rows = [r for r in rows if r.request.max_new_tokens - len(r.tokens) - 1 > depth]
            if not rows:
                return
            tokens_B = None
            if self._mtp_caches:
                tokens_B = self._propose(rows, self._read(depth, rows, inputs))
            for running, token in zip(
                rows, self._forward.agree(tokens_B, len(rows)).tolist(), strict=True
            ):
                row = self._of(running)
                row.drafts.append(token)
                row.starts[depth] = max(0, running.length - 1 - depth)

    def _read(self, depth: int, rows: Sequence[Running], inputs: dict[int, Tensor]) -> Tensor:
        """Let a layer read what it has not; its states [B, H] at the last positions.

        `inputs` has the states of its input from where the layer before it began to read, and
        afterwards the layer's own.
        """
        certain: list[_Part] = []
        doubtful: list[_Part] = []
        lengths = {}
        for running in rows:
            row, number = self._of(running), running.request.number
            x_SH, tail_SH = inputs[number], row.tails[depth]
            if tail_SH is not None:
                x_SH = torch.cat((tail_SH, x_SH))
            start, last = row.starts[depth], running.length - 1
            lengths[number] = max(0, last - depth)
            again = lengths[number] - start
            if depth:  # what is to be read again next time
                row.tails[depth] = x_SH[again : max(0, last - depth + 1) - start]
            known = [*running.request.prompt, *running.tokens, *row.drafts]
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
        self._mtp_caches[depth].truncate(lengths)
        last_BC = torch.stack([inputs[number][-1] for number in lengths])
        return self._forward.decoder.mtp_state(depth, last_BC)

    def _read_parts(
        self, depth: int, parts: Sequence[_Part], *, revertible: bool
    ) -> dict[int, Tensor]:
        """What a layer gives to the next one of the tokens that it reads of each sequence."""
        if not parts:
            return {}
        cache = self._mtp_caches[depth]
        numbers, tokens = [p.number for p in parts], [p.tokens for p in parts]
        batch = self._batch(cache, numbers, tokens, revertible=revertible)
        x_BSH = torch.nn.utils.rnn.pad_sequence([p.x_SH for p in parts], batch_first=True)
        y_TH = self._forward.decoder.mtp_hidden(depth, x_BSH.flatten(0, 1), batch, cache)
        y_BSH = y_TH.view(*batch.shape, -1)
        return {p.number: y_BSH[n, : len(p.tokens)] for n, p in enumerate(parts)}

    def _propose(self, rows: Sequence[Running], x_BH: Tensor) -> Tensor:
        """The next draft of each row, from the states behind which it comes."""
        logits_BV = self._forward.logits(x_BH)
        if all(self._of(r).sampling.is_greedy for r in rows):
            return logits_BV.argmax(-1)
        drafts = []
        for running, logits_V in zip(rows, logits_BV.nan_to_num(), strict=True):
            row = self._of(running)
            if row.sampling.is_greedy:
                drafts.append(int(logits_V.argmax()))
                continue
            probs_V = probabilities(logits_V[None], row.sampling)[0]
            row.probs.append(probs_V)
            drafts.append(draw(probs_V, row.generator))
        return torch.tensor(drafts, device=x_BH.device)

    # ---- verification

    def _verify(self, row: _Row, logits_SV: Tensor) -> list[int]:
        """The drafts that are kept, and the model's own token after them.

        A draft that was drawn with probability q, where the model has p, is kept with probability
        min(1, p / q); after one that is not, a token is drawn from what p exceeds q by. So tokens
        are distributed as the model's own (Leviathan et al., 2023).
        """
        count = len(row.drafts) + 1
        if row.sampling.is_greedy:
            chosen = choose(logits_SV[:count], row.sampling).tolist()
            num_equal = 0
            while num_equal < len(row.drafts) and chosen[num_equal] == row.drafts[num_equal]:
                num_equal += 1
            return [*row.drafts[:num_equal], chosen[num_equal]]
        out: list[int] = []
        for n in range(count):
            if bool(logits_SV[n].isnan().any()):
                return [*out, NO_NUMBER]
            own_V = probabilities(logits_SV[n : n + 1], row.sampling)[0]
            if n == len(row.drafts):
                return [*out, draw(own_V, row.generator)]
            draft, proposed_V = row.drafts[n], row.probs[n]
            chance = float(torch.rand(1, generator=row.generator))
            if chance * float(proposed_V[draft]) < float(own_V[draft]):
                out.append(draft)
                continue
            left_V = (own_V - proposed_V).clamp_min(0)
            return [*out, draw(left_V if float(left_V.sum()) > 0 else own_V, row.generator)]
        return out
