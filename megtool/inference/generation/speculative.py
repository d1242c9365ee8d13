"""Speculative decoding: a drafter proposes tokens, one pass of the model verifies them all.

The model reads the newest token and all drafts at once, and keeps those that it would have chosen
itself, and one more. Keys and values from a draft on that it rejects are forgotten, and recurrent
mixers have the states before it again. The drafts decide how fast a text grows, not which text it
is: greedily it is the same, and sampled it has the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import ChosenToken, GenerateRequest, Reservation, Running
from megtool.inference.generation.draft_head_files import DraftHeadFiles
from megtool.inference.generation.drafting import Drafter, DraftRow, pad_rows
from megtool.inference.generation.head_drafter import HeadDrafter
from megtool.inference.generation.mtp_drafter import MtpDrafter, check_mtp
from megtool.inference.generation.sampling import (
    NO_NUMBER,
    choose,
    choose_each,
    draw,
    probabilities,
)
from megtool.inference.generation.slots import BLOCK_SIZE, MOST_PREFILL_TOKENS
from megtool.model.cache.paged import PagedCache
from megtool.spec.model_config import ModelConfig
from megtool.storage.location.path import location

NO_DRAFTS, MTP = "none", "mtp"

Drafting = DraftHeadFiles | bool
"""What drafts: a head; or, by True, layers of multi-token prediction; by False nothing."""

_PAD = 0


def choose_drafting(
    name: str, num_drafts: int | None, config: ModelConfig, *, stream_layers: bool = False
) -> Drafting:
    """What drafts by `--speculative` (`none`, `mtp`, or the folder of a draft head), checked
    against the model.

    Raises:
        UsageError: the model has no layers that draft, another number of drafts is asked for than
            they make, layers are not kept in memory, or the head is of another model.
        MegtoolError: the head cannot be read.
    """
    if name != NO_DRAFTS and stream_layers:
        raise UsageError(
            f"--speculative {name} and --stream-layers: every pass would read the layers again for "
            "the drafts",
            hint="--speculative none",
        )
    if name not in (NO_DRAFTS, MTP):
        return DraftHeadFiles.open(location(name), config, num_drafts)
    if num_drafts is not None:
        raise UsageError(
            f"--num-drafts {num_drafts} and --speculative {name}",
            hint="a draft head makes any number of drafts, a layer of multi-token prediction one",
        )
    if name == MTP:
        check_mtp(config)
    return name == MTP


class SpeculativeSlots:
    """Slots of sequences that grow by up to one token more than there are drafts in a pass.

    Every rank calls the same methods with the same arguments, and gets the same tokens.
    `num_verified` counts passes over each sequence, `num_drafted` drafts, and `accepted` those
    that were kept: the first, the second, ...

    Raises:
        UsageError: the model cannot draft.
        LayoutError: a draft head's model is on several stages.
    """

    num_graphed = 0  # rows grow by different numbers of tokens
    is_chunked = False
    prefill_tokens = MOST_PREFILL_TOKENS

    def __init__(
        self, forward: Forward, *, num_slots: int, num_pages: int, drafting: Drafting = True
    ) -> None:
        self.drafter: Drafter
        sizes = {"num_slots": num_slots, "num_pages": num_pages}
        if isinstance(drafting, DraftHeadFiles):
            self.drafter = HeadDrafter(forward, drafting, **sizes)
        else:
            self.drafter = MtpDrafter(forward, **sizes)
        self._forward, self.num_slots = forward, num_slots
        self._pages = Reservation(num_pages, BLOCK_SIZE)
        self._cache: PagedCache = forward.blocks_cache(
            num_blocks=num_pages + 1, block_size=BLOCK_SIZE, num_sequences=num_slots
        )
        self._rows: dict[int, DraftRow] = {}
        self.num_verified = self.num_drafted = 0
        self.accepted = [0] * self.drafter.num_drafts

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
        return False

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> list[list[ChosenToken]]:
        """Read the prompts of rows that have just entered, whole; the first token of each."""
        for running in rows:
            self._rows[running.number] = DraftRow(running=running)
            self.drafter.enter(running.number)
        prompts = [list(r.request.prompt) for r in rows]
        states = self._read([r.number for r in rows], prompts)
        tokens_B = None
        if states is not None:
            x_BSH, read_BSC = states
            for n, running in enumerate(rows):
                self.drafter.keep(running.number, read_BSC[n, : len(prompts[n])])
            last_BH = torch.stack([x_BSH[n, len(p) - 1] for n, p in enumerate(prompts)])
            tokens_B = choose_each(
                self._forward.logits(last_BH),
                [r.request.text.sampling for r in rows],
                [r.generator for r in rows],
            )
        return [[ChosenToken(t)] for t in self._forward.agree(tokens_B, len(rows)).tolist()]

    def step(self, rows: Sequence[Running]) -> list[list[ChosenToken]]:
        """Draft, and verify; the tokens that every running row has more."""
        drafted = [self._rows[r.number] for r in rows]
        for row in drafted:
            row.drafts, row.probs = [], []
        for is_begun in (True, False):  # the others read whole prompts, which would pad these
            self.drafter.draft([row for row in drafted if row.is_begun == is_begun])
        tokens = [[row.running.tokens[-1], *row.drafts] for row in drafted]
        states = self._read([row.number for row in drafted], tokens, revertible=True)
        width = self.drafter.num_drafts + 2
        result_BN = None
        if states is not None:
            accepted = [
                self._verify(row, logits_SV)
                for row, logits_SV in zip(drafted, self._all_logits(states[0]), strict=True)
            ]
            padded = [[len(f), *f, *[_PAD] * (width - 1 - len(f))] for f in accepted]
            result_BN = torch.tensor(padded, device=states[0].device).flatten()
        agreed = self._forward.agree(result_BN, len(rows) * width).view(-1, width).tolist()
        out, lengths = [], {}
        for n, (row, (count, *more)) in enumerate(zip(drafted, agreed, strict=True)):
            self.num_verified += 1
            self.num_drafted += len(row.drafts)
            for place in range(count - 1):
                self.accepted[place] += 1
            lengths[row.number] = row.running.length - 1 + count
            if states is not None:
                self.drafter.keep(row.number, states[1][n, :count])
            out.append([ChosenToken(t) for t in more[:count]])
        self._cache.truncate(lengths)
        return out

    def leave(self, running: Running) -> None:
        """Its blocks are free for the next."""
        self._rows.pop(running.number, None)
        self._cache.release(running.number)
        self.drafter.leave(running.number)
        self._pages.leave(running)

    def _read(
        self,
        numbers: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        revertible: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """States [B, S, H] of rows of tokens, padded on the right, and what drafts are made from;
        None on ranks of other stages than the last."""
        batch = pad_rows(self._cache, numbers, tokens, revertible=revertible)
        with self.drafter.within():
            x_TH = self._forward.hidden(batch, self._cache)
            if x_TH is None:
                return None
            x_BSH = x_TH.view(*batch.shape, -1)
            return x_BSH, self.drafter.read_pass(x_BSH)

    def _all_logits(self, x_BSH: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        rows, width, _ = x_BSH.shape
        return self._forward.logits(x_BSH.reshape(rows * width, -1)).view(rows, width, -1)

    # ---- verification

    def _verify(self, row: DraftRow, logits_SV: Tensor) -> list[int]:
        """The drafts that are kept, and the model's own token after them.

        A draft that was drawn with probability q, where the model has p, is kept with probability
        min(1, p / q); after one that is not, a token is drawn from what p exceeds q by. So tokens
        are distributed as the model's own (Leviathan et al., 2023).
        """
        count, generator = len(row.drafts) + 1, row.running.generator
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
                return [*out, draw(own_V, generator)]
            draft, proposed_V = row.drafts[n], row.probs[n]
            chance = float(torch.rand(1, generator=generator))
            if chance * float(proposed_V[draft]) < float(own_V[draft]):
                out.append(draft)
                continue
            left_V = (own_V - proposed_V).clamp_min(0)
            return [*out, draw(left_V if float(left_V.sum()) > 0 else own_V, generator)]
        return out
