"""A model on all of its ranks behind one interface: tokens in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.layer_streaming import find_streamer
from megtool.kernels.vocabulary.token_statistics import token_log_probs
from megtool.model.attention.context_parallel import check_cache
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache, KVCache, num_cache_bytes
from megtool.model.cache.paged import PagedCache
from megtool.model.cache.source import SourceCache
from megtool.model.moe.experts import MoeMlp
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.mtp import with_mtp_layers
from megtool.model.stacks.pipeline import hidden_of_stages
from megtool.parallel.context_parallel import whole_tokens
from megtool.parallel.mesh import Mesh
from megtool.parallel.process_groups import ALONE, ProcessGroups
from megtool.spec.model_config import ModelConfig


class ErrorLocation(TypedDict, total=False):
    """Where something is wrong, as the arguments of an error."""

    tensor: str
    hint: str


Finder = Callable[[Decoder], str | None]
"""Names the first weight that holds a NaN or an infinity, if one does."""


class Forward:
    """A decoder whose layers may be spread over pipeline stages, each on one or several ranks.

    Every rank calls the same methods in the same order with the same tokens. Only ranks of the last
    stage have hidden states and logits; the others get None. `agree` and `share` tell all ranks
    what the first rank of the last stage found. With a cache ranks of context parallelism run all
    tokens, and keep a part of the keys each.
    """

    def __init__(
        self,
        decoder: Decoder,
        groups: ProcessGroups | None = None,
        *,
        find_nan: Finder | None = None,
    ) -> None:
        self.decoder = decoder
        self.groups = decoder.groups if groups is None else groups
        self.config: ModelConfig = decoder.config
        self.device = self.groups.device
        self._find_nan = find_nan
        mesh = Mesh(self.groups.parallel, self.groups.order)
        self._first_with_logits = int(mesh.rank(pp=mesh.sizes.pp - 1))

    @property
    def is_alone(self) -> bool:
        """One process has all of the model."""
        return self.groups.world.size == 1

    @property
    def is_graphable(self) -> bool:
        """A step may be recorded and replayed: nothing in it waits for another stage, for numbers
        on the host (experts that are looped over, or on other ranks) or for the disk."""
        return (
            self.groups.pp.size == self.groups.cp.size == 1
            and not self.config.num_decoder_layers  # sources differ in length
            and find_streamer(self.decoder) is None
            and all(m.is_graphable for m in self.decoder.modules() if isinstance(m, MoeMlp))
        )

    def hidden(self, batch: Batch, cache: KVCache | None = None) -> Tensor | None:
        """States after the final norm, x_TH; each stage hands its rows to the next.

        They are of all tokens, also where context parallelism shared these out (to which end rows
        are filled up).
        """
        (rows, tokens), cp = batch.shape, self.groups.cp
        if cp.size > 1 and cache is None:
            batch = batch.padded(-tokens % (2 * cp.size))
        x_TH = hidden_of_stages(self.decoder, batch, cache)
        if x_TH is None or cp.size == 1 or cache is not None:
            return x_TH
        x_BSH = whole_tokens(x_TH.view(rows, -1, x_TH.shape[1]), cp)
        return x_BSH[:, :tokens].flatten(0, 1)

    def logits(self, x_TH: Tensor) -> Tensor:
        """Logits [T, V] of rows of `hidden`, on every rank of the last stage."""
        return self.decoder.logits(x_TH)

    def token_log_probs(self, x_TH: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (fp32, nats) of the label of each row of `hidden`, and whether it is the
        likeliest token; no rank ever holds the logits of all rows."""
        return token_log_probs(
            *self.decoder.head_factors(x_TH),
            labels_T,
            vocab_size=self.config.embedding.vocab_size,
            softcap=self.config.head.logit_softcap,
            scale=self.config.head.logit_scale,
            group=self.groups.tp.handle,
        )

    def last_logits(
        self, batch: Batch, cache: KVCache, counts: Sequence[int] | None = None
    ) -> Tensor | None:
        """Logits [B, V] of the last token of each row; of token `counts[row] - 1` where given."""
        x_TH = self.hidden(batch, cache)
        if x_TH is None:
            return None
        rows, width = batch.shape
        x_BSH = x_TH.view(rows, width, -1)
        if counts is None:
            return self.logits(x_BSH[:, -1])
        places = torch.tensor([n - 1 for n in counts], device=x_TH.device)
        return self.logits(x_BSH[torch.arange(rows, device=x_TH.device), places])

    def rows_cache(self, *, num_rows: int, max_tokens: int, graphable: bool) -> ContiguousCache:
        """A cache for this rank's layers, a row for each sequence.

        Raises:
            LayoutError: there is context parallelism.
        """
        check_cache(self.config, self.groups, ALONE)
        return ContiguousCache(
            self.config,
            num_rows=num_rows,
            max_tokens=max_tokens,
            layers=self.decoder.stage.layers,
            tp=self.groups.tp.size,
            graphable=graphable,
            dtype=self.decoder.dtype,
            device=self.device,
        )

    def blocks_cache(self, *, num_blocks: int, block_size: int, num_sequences: int) -> PagedCache:
        """A cache for this rank's layers, in blocks that so many sequences at once share.

        Ranks of context parallelism share the tokens of each block.

        Raises:
            LayoutError: they cannot.
        """
        check_cache(self.config, self.groups, self.groups.cp)
        return PagedCache(
            self.config,
            num_blocks=num_blocks,
            block_size=block_size,
            num_sequences=num_sequences,
            layers=self.decoder.stage.layers,
            groups=self.groups,
            dtype=self.decoder.dtype,
            device=self.device,
        )

    def source_cache(self, *, num_slots: int, max_tokens: int) -> SourceCache:
        """A cache of keys and values of sources, for the decoder of a model with an encoder."""
        return SourceCache(
            self.config,
            num_slots=num_slots,
            max_tokens=max_tokens,
            layers=self.decoder.stage.layers,
            tp=self.groups.tp.size,
            dtype=self.decoder.dtype,
            device=self.device,
        )

    def mtp_cache(
        self, depth: int, *, num_blocks: int, block_size: int, num_sequences: int
    ) -> PagedCache:
        """As `blocks_cache`, for a layer of multi-token prediction, on a rank that has it.

        Raises:
            LayoutError: there is context parallelism.
            UsageError: the layer is not here.
        """
        check_cache(self.config, self.groups, ALONE)
        if self.decoder.mtp is None:
            raise UsageError("this stage has no layers of multi-token prediction")
        return PagedCache(
            with_mtp_layers(self.config),
            num_blocks=num_blocks,
            block_size=block_size,
            num_sequences=num_sequences,
            layers=self.decoder.mtp.layer(depth).numbers,
            groups=self.groups,
            dtype=self.decoder.dtype,
            device=self.device,
        )

    def cache_bytes(self, num_tokens: int) -> int:
        """What a sequence of so many tokens takes in a cache of this rank's layers."""
        return num_cache_bytes(
            self.config,
            -(-num_tokens // self.groups.cp.size),
            dtype=self.decoder.dtype,
            layers=self.decoder.stage.layers,
            tp=self.groups.tp.size,
        )

    def least(self, number: int) -> int:
        """The least of the numbers that ranks have."""
        if self.is_alone:
            return number
        value = torch.tensor(number, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.groups.world.handle)
        return int(value)

    def agree(self, tokens_B: Tensor | None, count: int) -> Tensor:
        """The int64 [count] of the first rank with logits, on the CPU of every rank."""
        if self.is_alone and tokens_B is not None:
            return tokens_B.cpu()
        if tokens_B is None:
            tokens_B = torch.zeros(count, dtype=torch.int64, device=self.device)
        return self.share(tokens_B).cpu()

    def share(self, value: Tensor) -> Tensor:
        """The value of the first rank with logits, on every rank."""
        if not self.is_alone:
            dist.broadcast(value, src=self._first_with_logits, group=self.groups.world.handle)
        return value

    def where_is_nan(self) -> ErrorLocation:
        """The weight that is to blame for NaN logits, as arguments of the error about them."""
        tensor = None if self._find_nan is None else self._find_nan(self.decoder)
        if tensor is not None:
            return ErrorLocation(
                tensor=tensor, hint="`megtool inspect SRC --stats` shows NaN and Inf counts"
            )
        return ErrorLocation(
            hint="every weight is finite; try --dtype float32, for float16 overflows"
        )
