"""Windows of tokens that are compressed to one key each (DeepSeek-V4), in a pass over whole rows.

Windows begin anew in every document, and padding belongs to none. After a cache, the first window
of a pass may begin with tokens of the passes before, of which the cache keeps the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.model.cache.key_span import KeySpan
from megtool.spec.sparse_attention import OVERLAP_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWindows:
    """The windows of `ratio` tokens that are whole after a pass, W of them in each row.

    Tokens are numbered among those that a cache kept (`num_kept_tokens`) and those of the pass
    behind them, `counts_B` in each row, which padding does not stand between (`order_BS` moves it
    to the end). `starts_BW` are the numbers of the windows' first tokens; None where they follow
    one another from the first token on. `numbers_BW` count windows from 0 in a document, and
    `exists_BW` is false for what fills rows with fewer windows up. Queries are at `places_BS` in
    their documents (batch may be 1); where a row has several, `ended_BS` windows have ended up to
    each.
    """

    ratio: int
    num_windows: int
    numbers_BW: Tensor
    places_BS: Tensor
    starts_BW: Tensor | None = None
    exists_BW: Tensor | None = None
    order_BS: Tensor | None = None
    counts_B: Tensor | None = None
    ended_BS: Tensor | None = None

    @classmethod
    def of(cls, ratio: int, span: KeySpan, runs_BS: Tensor | None = None) -> KeyWindows:
        """Those of a pass; `runs_BS` numbers the documents of a row."""
        if span.past_B is not None:
            return cls._after(ratio, span, span.past_B)
        tokens, device = span.queries_BS.shape[1], span.queries_BS.device
        slots_BS = torch.arange(tokens, device=device)[None]
        numbers_BW = torch.arange(tokens // ratio, device=device)[None]
        if runs_BS is not None:
            return cls._of_documents(ratio, runs_BS, slots_BS)
        if span.real_BS is None:
            return cls(
                ratio=ratio, num_windows=tokens // ratio, numbers_BW=numbers_BW, places_BS=slots_BS
            )
        counts_B = span.real_BS.sum(1)
        return cls(
            ratio=ratio,
            num_windows=tokens // ratio,
            numbers_BW=numbers_BW,
            places_BS=(span.real_BS.cumsum(1) - 1).clamp_min(0),
            starts_BW=(numbers_BW * ratio).expand(len(counts_B), -1),
            exists_BW=numbers_BW < counts_B[:, None] // ratio,
            order_BS=_order(span.real_BS),
            counts_B=counts_B,
        )

    @classmethod
    def _after(cls, ratio: int, span: KeySpan, past_B: Tensor) -> KeyWindows:
        """Those of a pass with a cache of so many tokens of each row."""
        real_BS, tokens = span.real_BS, span.queries_BS.shape[1]
        new_S = torch.arange(tokens, device=past_B.device)
        num, past_B1 = (tokens + ratio - 1) // ratio, past_B[:, None]
        numbers_BW = past_B1 // ratio + torch.arange(num, device=past_B.device)
        counts_B = None if real_BS is None else real_BS.sum(1)
        last_B = past_B + (tokens if counts_B is None else counts_B)
        places_BS = new_S if real_BS is None else (real_BS.cumsum(1) - 1).clamp_min(0)
        return cls(
            ratio=ratio,
            num_windows=num,
            numbers_BW=numbers_BW,
            places_BS=past_B1 + places_BS,
            starts_BW=numbers_BW * ratio - past_B1 + num_kept_tokens(ratio),
            exists_BW=numbers_BW < last_B[:, None] // ratio,
            order_BS=None if real_BS is None else _order(real_BS),
            counts_B=counts_B,
        )

    @classmethod
    def _of_documents(cls, ratio: int, runs_BS: Tensor, slots_BS: Tensor) -> KeyWindows:
        begins_BS = torch.ones_like(runs_BS, dtype=torch.bool)
        begins_BS[:, 1:] = runs_BS[:, 1:] != runs_BS[:, :-1]
        places_BS = slots_BS - (slots_BS * begins_BS).cummax(1).values
        ends_BS = (places_BS + 1) % ratio == 0
        num = runs_BS.shape[1] // ratio
        ends_BW = _order(ends_BS)[:, :num]
        return cls(
            ratio=ratio,
            num_windows=num,
            numbers_BW=places_BS.gather(1, ends_BW) // ratio,
            places_BS=places_BS,
            starts_BW=(ends_BW - ratio + 1).clamp_min(0),
            exists_BW=ends_BS.gather(1, ends_BW),
            ended_BS=ends_BS.cumsum(1),
        )

    def tokens_of(self, x_BSC: Tensor, *, before: bool = False) -> Tensor:
        """The tokens of every window, [B, W, ratio, C]; or those of the window before each."""
        num, ratio = self.num_windows, self.ratio
        if self.starts_BW is None:
            x_BWRC = x_BSC[:, : num * ratio].reshape(len(x_BSC), num, ratio, -1)
            if before:
                x_BWRC = torch.cat((torch.zeros_like(x_BWRC[:, :1]), x_BWRC[:, :-1]), 1)
            return x_BWRC
        first = self.starts_BW - ratio if before else self.starts_BW
        places = first[..., None] + torch.arange(ratio, device=x_BSC.device)
        places = places.clamp(0, x_BSC.shape[1] - 1).flatten(1)[..., None]
        x_BLC = x_BSC.gather(1, places.expand(len(x_BSC), -1, x_BSC.shape[2]))
        return x_BLC.reshape(len(x_BSC), num, ratio, -1)

    def ordered(self, x_BSC: Tensor) -> Tensor:
        """Tokens with padding behind them."""
        if self.order_BS is None:
            return x_BSC
        return x_BSC.gather(1, self.order_BS[..., None].expand_as(x_BSC))

    def ready(self, num_keys: int) -> tuple[Tensor, Tensor]:
        """The first and the last of the keys that each query comes after and may attend to,
        [B, S] (batch may be 1), behind each other where there is none.

        Keys are those of this pass' windows; with a cache those of all windows of a row, by their
        numbers.
        """
        counts_BS = ((self.places_BS + 1) // self.ratio).clamp_max(num_keys)
        if self.ended_BS is None:
            return torch.zeros_like(counts_BS), counts_BS - 1
        return self.ended_BS - counts_BS, self.ended_BS - 1


def num_kept_tokens(ratio: int) -> int:
    """Of how many tokens at the end a cache keeps what they give to the windows after them.

    Where windows overlap, so does the one before the next.
    """
    return (2 * ratio if ratio == OVERLAP_RATIO else ratio) - 1


def _order(first_BS: Tensor) -> Tensor:
    """Numbers that put the marked elements of each row first, in their order."""
    return (~first_BS).to(torch.int8).argsort(dim=1, stable=True)
