"""The decoder: embedding, layers, final norm and output layer, or one rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError, UsageError
from megtool.kernels.recurrence.causal_conv import runs_of
from megtool.kernels.vocabulary.cross_entropy import cross_entropy, linear_cross_entropy
from megtool.model.attention.context_parallel import check_cache, check_exchange
from megtool.model.attention.indexer import check_sources
from megtool.model.attention.shared_kv import check_kv_sources
from megtool.model.batch import Batch, check_ids, check_positions
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import KVCache
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.dropout import Draws, Dropout
from megtool.model.layers.hooks import ActivationHook
from megtool.model.layers.linear import ColumnLinear, vocab_logits
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.masks import masks_of
from megtool.model.positions.rotary import Rotary
from megtool.model.stacks.decoder_checks import check_compressed_pass, check_kind, check_whole
from megtool.model.stacks.ends import Embedding, MaskedHead, VocabBias
from megtool.model.stacks.hyper_connections import HyperHead
from megtool.model.stacks.label_scores import LabelHead
from megtool.model.stacks.layer import TransformerLayer
from megtool.model.stacks.mtp import MtpLayer, MultiTokenPrediction, is_hybrid, with_mtp_layers
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import copy_to, gather_rows
from megtool.parallel.context_parallel import chunk_size, own_tokens, whole_tokens
from megtool.parallel.process_groups import ALONE, ProcessGroups
from megtool.spec.model_config import ModelConfig

VOCAB_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by
# Logits of one pass and rank that are kept for the backward pass, which saves one product of four;
# more are computed block by block, twice.
KEPT_LOGITS_BYTES = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The part of a model on one rank, or in one virtual chunk of it.

    The stage with the head of a model with tied embeddings, or with layers of multi-token
    prediction, holds the embedding for it. The final norm is where the last layer is: `norm` says
    where that is not the stage with the head. `encoder_layers` are those of an encoder beside a
    decoder, and behind the last one is its norm, where `encoder_norm` says so.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True
    norm: bool | None = None
    encoder_layers: tuple[int, ...] = ()
    encoder_norm: bool = False

    @property
    def has_norm(self) -> bool:
        """Whether the final norm is here."""
        return self.head if self.norm is None else self.norm


def rows_of_rank(tokens: int, tp: int, cp: int = 1) -> int:
    """How many of so many tokens, B*S / cp, are a rank's rows with sequence parallelism.

    Raises:
        LayoutError: tp does not divide them.
    """
    if tokens % tp:
        share, divisor = ("B*S", "tp") if cp == 1 else ("B*S / cp", "tp * cp")
        raise LayoutError(
            f"sequence parallelism over tp={tp} cannot share out {share} = {tokens} tokens",
            hint=f"B*S has to be a multiple of {divisor}: {(tokens + -tokens % tp) * cp} tokens, "
            "or go without sequence parallelism",
        )
    return tokens // tp


def check_direction(
    config: ModelConfig, parallel: ParallelConfig, *, has_cache: bool = False
) -> None:
    """Refuse what only models have whose tokens attend to no others than those before them.

    Raises:
        LayoutError: there is context parallelism.
        UsageError: there is a cache.
    """
    if config.bidirectional and parallel.cp > 1:
        raise LayoutError(
            f"cp is {parallel.cp}, but tokens of an encoder attend to those behind them as well",
            hint="--tp and --pp split it; context parallelism is for decoders",
        )
    if config.bidirectional and has_cache:
        raise UsageError(
            "an encoder generates no text, and has no cache of keys and values",
            hint="it predicts masked tokens: `megtool evaluate` scores them",
        )


class Block(HyperHead):
    """The layers, under their numbers in the entire model, and the norm after the last one.

    The norm is called `final_layernorm`, or `final_norm` in a model that only Megatron's
    HybridModel has.
    """

    def __init__(
        self, layers: dict[str, nn.Module], norm: NormLayer | None, *, is_hybrid: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.norm_name = "final_norm" if is_hybrid else "final_layernorm"
        self.add_module(self.norm_name, norm)

    @property
    def norm(self) -> NormLayer | None:
        """The norm after the last layer, where this stage has it."""
        return cast("NormLayer | None", getattr(self, self.norm_name))

    @contextmanager
    def hooked(
        self, numbers: Iterable[int], hook: Callable[..., None], *, before: bool = False
    ) -> Iterator[None]:
        """Call `hook` behind layers (or `before` them) with their number, and what a forward hook
        (a forward pre-hook) of torch is given.

        A layer that is computed again for the backward pass does not call it a second time.
        """
        layers = [(number, self.layers[str(number)]) for number in numbers]
        handles = [
            layer.register_forward_pre_hook(partial(hook, number))
            if before
            else layer.register_forward_hook(partial(hook, number))
            for number, layer in layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Decoder(LabelHead):
    """A transformer of one stack of layers, built from its configuration.

    In a `bidirectional` one tokens attend to all others, and its logits are those of the tokens
    themselves, which may be masked.

    Parameters have Megatron's names, one key per layer, and this rank's shapes. On the device
    `meta`, the default, they hold nothing until a loader puts tensors in. Between blocks, tokens
    are rows x_TH; with `sequence_parallel` those of this rank, an equal part of all, except where
    heads or vocabulary are cut instead. With context parallelism each rank is given whole rows,
    and works on its own tokens of them: x_TH are those, B rows of S / cp tokens each.

    Raises:
        LayoutError: sizes do not go evenly over the ranks.
        MappingError: the configuration asks for something unknown, or for two stacks of layers.
    """

    layer_class: ClassVar[type[TransformerLayer]] = TransformerLayer

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
        sequence_parallel: bool = False,
        stage: StageLayers | None = None,
        vocab_multiple: int = VOCAB_MULTIPLE,
    ) -> None:
        super().__init__()
        check_kind(config, is_alone=self.layer_class is TransformerLayer)
        check_sources(config, range(config.num_layers) if stage is None else stage.layers)
        check_kv_sources(config, range(config.num_layers) if stage is None else stage.layers)
        check_whole(config, range(config.num_layers) if stage is None else stage.layers)
        groups = ProcessGroups.alone() if groups is None else groups
        check_exchange(config, groups.parallel)
        stage = StageLayers(layers=tuple(range(config.num_layers))) if stage is None else stage
        self.config, self.groups, self.stage, self.dtype = config, groups, stage, dtype
        self.sequence_parallel = sequence_parallel and groups.tp.size > 1
        multiple = vocab_multiple * groups.tp.size
        self.padded_vocab = -(-config.embedding.vocab_size // multiple) * multiple
        self._numbered = with_mtp_layers(config)
        self.rotary = Rotary(self._numbered, dtype=dtype)
        self.head_tap: ActivationHook | None = None
        self.dropout = Dropout()  # in training mode, of passes without a cache
        self.before_head: Callable[[], None] | None = None  # who loads on demand is asked first
        # Rounded to the model's dtype, as released models were trained.
        self.embedding_scale = torch.tensor(config.embedding.embedding_scale, dtype=dtype).item()
        self.embedding = None
        has_mtp = stage.head and config.mtp.num_mtp_layers > 0
        if stage.embedding or has_mtp or (stage.head and config.embedding.tied_embeddings):
            self.embedding = Embedding(
                config,
                groups,
                self.padded_vocab,
                positions=stage.embedding,
                sequence_parallel=self.sequence_parallel,
                dtype=dtype,
                device=device,
            )
        layers: dict[str, nn.Module] = {
            str(number): self.layer_class(
                config,
                number,
                groups,
                sequence_parallel=self.sequence_parallel,
                dtype=dtype,
                device=device,
            )
            for number in stage.layers
        }
        norm = NormLayer(
            NormSpec.of(config),
            config.hidden_size,
            partial=self.sequence_parallel,
            dtype=dtype,
            device=device,
        )
        has_norm = stage.has_norm and config.norms.final_norm
        self.decoder = Block(layers, norm if has_norm else None, is_hybrid=is_hybrid(config))
        if has_norm and config.residual.hyper_streams:
            self.decoder.init_head(config, partial=self.sequence_parallel, device=device)
        self.lm_head: MaskedHead | None = None
        if stage.head and config.head.masked_head:
            self.lm_head = MaskedHead(
                config, partial=self.sequence_parallel, dtype=dtype, device=device
            )
        self._streams_TH: Tensor | None = None  # of the last pass, before they are made one
        self.mtp: MultiTokenPrediction | None = None
        if has_mtp:
            self.mtp = MultiTokenPrediction(
                config,
                groups,
                sequence_parallel=self.sequence_parallel,
                dtype=dtype,
                device=device,
            )
        self.label_kind, self.score, self.score_dense = "classes", None, None
        if stage.head and config.head.num_labels:
            self.init_scores(config, dtype=dtype, device=device)
        self.output_layer: ColumnLinear | VocabBias | None = None
        has_output = stage.head and not config.head.num_labels
        if has_output and not config.embedding.tied_embeddings:
            self.output_layer = ColumnLinear(
                config.hidden_size,
                self.padded_vocab,
                groups.tp,
                bias=config.head.head_bias,
                dtype=dtype,
                device=device,
            )
        elif has_output and config.head.head_bias:
            self.output_layer = VocabBias(self.padded_vocab, groups.tp, dtype=dtype, device=device)

    def forward(
        self, batch: Batch, cache: KVCache | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Logits of every next token: [B, S, vocab_size], on every tp and cp rank. In a model with
        labels, their scores.

        With `last_only` of the last valid token of each row alone: [B, 1, vocab_size], without
        gradients.
        """
        x_TH = self.hidden(batch, cache)
        return self.head(x_TH, batch, last_only=last_only, is_whole=cache is not None)

    def head(
        self, x_TH: Tensor, batch: Batch, *, last_only: bool = False, is_whole: bool = False
    ) -> Tensor:
        """The output of `forward`, from the states of `hidden` (of whole rows with a cache)."""
        (rows, tokens), cp = batch.shape, ALONE if is_whole else self.groups.cp
        if self.config.head.num_labels:
            return self.label_scores(x_TH, rows)
        if last_only:
            x_TH = self._gathered(x_TH).detach()
            x_BSH = whole_tokens(x_TH.view(rows, tokens // cp.size, -1), cp)
            if batch.valid_BS is None:
                x_TH = x_BSH[:, -1]
            else:
                places_S = torch.arange(tokens, device=x_TH.device)
                last_B = (batch.valid_BS * places_S).argmax(1)
                x_TH = x_BSH[torch.arange(rows, device=x_TH.device), last_B]
            return self._logits(x_TH, sequence_parallel=False).view(rows, 1, -1)
        return whole_tokens(self.logits(x_TH).view(rows, tokens // cp.size, -1), cp)

    def loss(self, batch: Batch, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of all tokens' losses (float32), and how many there are (int64).

        `labels_BS` holds the token that is to follow each of the batch's; -100 counts for nothing.
        With context parallelism both are of this rank's tokens.
        """
        return self.loss_of(self.hidden(batch), labels_BS)

    def mtp_loss(
        self, x_TH: Tensor, batch: Batch, labels_BS: Tensor, frame: ForwardContext
    ) -> Tensor | None:
        """What layers of multi-token prediction add to the loss, from the states of `hidden` and
        the context of their pass; None if there are none, or they are not trained."""
        if self.mtp is None or not self.mtp.is_trained:
            return None
        return self.mtp.loss(
            self.mtp_input(x_TH),
            batch,
            labels_BS,
            frame,
            embed=self.embed_tokens,
            loss_of=self.loss_of,
        )

    def mtp_input(self, x_TH: Tensor) -> Tensor:
        """What layers of multi-token prediction read of the last pass: its states of `hidden`, or
        the residuals side by side that they were made of, once."""
        streams_TH, self._streams_TH = self._streams_TH, None
        return x_TH if streams_TH is None else streams_TH

    def loss_of(self, x_TH: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The output of `loss` (or `label_loss`), from the states of `hidden`."""
        if self.config.head.num_labels:
            return self.label_loss(x_TH, labels_BS)
        config, tp = self.config, self.groups.tp
        x_TH, weight_VH = self.head_factors(x_TH)
        labels_T = own_tokens(labels_BS, self.groups.cp).flatten()
        if labels_T.numel() * weight_VH.shape[0] * weight_VH.element_size() <= KEPT_LOGITS_BYTES:
            logits_TV = vocab_logits(
                x_TH, weight_VH, tp, sequence_parallel=self.sequence_parallel, gather=False
            )
            losses_T = cross_entropy(
                logits_TV,
                labels_T,
                vocab_size=config.embedding.vocab_size,
                softcap=config.head.logit_softcap,
                scale=config.head.logit_scale,
                group=tp.handle,
            )
        else:
            losses_T = linear_cross_entropy(
                self._gathered(x_TH) if self.sequence_parallel else copy_to(x_TH, tp),
                weight_VH,
                labels_T,
                vocab_size=config.embedding.vocab_size,
                softcap=config.head.logit_softcap,
                scale=config.head.logit_scale,
                group=tp.handle,
            )
        return losses_T.sum(), (labels_T != -100).sum()

    def hidden(self, batch: Batch, cache: KVCache | None = None) -> Tensor:
        """The states after the final norm, x_TH (with sequence parallelism this rank's rows)."""
        frame = self.frame(batch, cache)
        x_TH = self.finish(self.run(self.embed(batch, frame), frame))
        self.rotary.forget()
        if cache is not None:
            cache.advance()
        return x_TH

    def mtp_hidden(self, depth: int, x_TH: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """What a layer of multi-token prediction, which `cache` is for, gives to the next one.

        `x_TH` is its input, and the batch has the tokens that it adds. `mtp_state` is what its
        logits are made of.

        Raises:
            UsageError: this stage has no such layers.
        """
        frame, layer = self.frame(batch, cache), self._mtp_layer(depth)
        x_TH = layer.advance(x_TH, self.embed_tokens(batch.tokens_BS, frame), frame)
        self.rotary.forget()
        cache.advance()
        return x_TH if layer.num_streams else layer.finish(x_TH)

    def mtp_state(self, depth: int, x_TH: Tensor) -> Tensor:
        """The states after a layer's final norm, of what `mtp_hidden` gives.

        Raises:
            UsageError: this stage has no such layers.
        """
        layer = self._mtp_layer(depth)
        return layer.finish(x_TH) if layer.num_streams else x_TH

    def _mtp_layer(self, depth: int) -> MtpLayer:
        if self.mtp is None:
            raise UsageError("this stage has no layers of multi-token prediction")
        return self.mtp.layer(depth)

    def frame(self, batch: Batch, cache: KVCache | None = None) -> ForwardContext:
        """The context that all layers of a pass over the batch share; allocates the cache's slots
        for it.

        Raises:
            UsageError: tokens on the CPU that are not in the vocabulary, or at places that no
                embedding was learned for.
            LayoutError: sequence or context parallelism does not divide the tokens, ranks of it
                cannot share the cache, or the model is bidirectional, with either.
        """
        (rows, tokens), cp = batch.shape, self.groups.cp if cache is None else ALONE
        check_direction(self.config, self.groups.parallel, has_cache=cache is not None)
        check_compressed_pass(self.config, batch, has_cache=cache is not None)
        check_ids(batch.tokens_BS, self.config.embedding.vocab_size)
        if cp.size > 1:
            tokens = 2 * chunk_size(tokens, cp.size)
        if cache is not None:
            check_cache(self.config, self.groups, cache.cp)
        if self.sequence_parallel:
            rows_of_rank(rows * tokens, self.groups.tp.size, cp.size)
        span = KeySpan.fresh(batch) if cache is None else cache.begin(batch)
        if self.config.positions.position_embedding == "learned":
            check_positions(span.positions_BS, self.config.positions.max_positions)
        self.rotary.forget()
        has_windows = self.config.layer_kinds is not None or self.config.compression.is_compressed
        make_masks = partial(
            masks_of,
            self._numbered,
            span,
            batch.documents_BS,
            tp=self.groups.tp,
            run_starts_BM=batch.run_starts_BM,
        )
        return ForwardContext(
            num_rows=rows,
            num_tokens=tokens,
            positions_BS=own_tokens(span.positions_BS, cp),
            rotary=self.rotary,
            masks=make_masks(cp),
            make_masks=make_masks,
            span=span,
            cache=cache,
            cp=cp,
            key_ranks=ALONE if cache is None else cache.cp,
            last_B=span.positions_BS.amax(1) if cp.size > 1 else None,
            counted_BS=None if batch.counted_BS is None else own_tokens(batch.counted_BS, cp),
            draws=Draws.of(self.dropout, self.groups.tp, self.sequence_parallel)
            if self.training and cache is None
            else None,
            real_BS=span.real_BS,
            tokens_BS=own_tokens(batch.tokens_BS, cp)
            if self.config.router.num_hash_layers
            else None,
            runs_BS=None
            if batch.documents_BS is None or not has_windows
            else runs_of(batch.documents_BS),
        )

    def embed(self, batch: Batch, frame: ForwardContext) -> Tensor:
        """The first residual, x_TH (with sequence parallelism this rank's rows)."""
        if self.embedding is None or not self.stage.embedding:
            raise UsageError(
                "this stage has no embedding", hint="pass it the previous stage's output"
            )
        x_TH = self.embed_tokens(batch.tokens_BS, frame)
        return x_TH.repeat(1, self.config.residual.hyper_streams or 1)

    def embed_tokens(self, tokens_BS: Tensor, frame: ForwardContext) -> Tensor:
        """As `embed`, of other tokens at the places of a pass, and also where a copy is.

        Raises:
            UsageError: this stage has neither.
        """
        if self.embedding is None:
            raise UsageError("this stage has no embedding, and no copy of it")
        tokens_BS = own_tokens(tokens_BS, frame.cp)
        x_TH: Tensor = self.embedding(tokens_BS, frame.positions_BS, self.embedding_scale)
        if not tokens_BS.is_meta:
            _require_values(self.embedding.word_embeddings.weight)
        frame.layer_inputs = self.embedding.layer_inputs(tokens_BS, x_TH)
        return x_TH if frame.draws is None else frame.draws.embedded(x_TH)

    def advance(self, batch: Batch, frame: ForwardContext, *rows: Tensor) -> tuple[Tensor, ...]:
        """A stage's part of a pass: what the previous one sent in, and what it sends out.

        They are the residual, x_TH, or behind the last stage the states after the final norm.
        """
        x_TH = rows[0] if rows else self.embed(batch, frame)
        return (self.finish(self.run(x_TH, frame)),)

    def received(self, batch: Batch, *, is_whole: bool = False) -> tuple[int, ...]:
        """How many rows each of the tensors has that `advance` gets for a batch. Raises: see
        `rows_of`."""
        return () if self.stage.embedding else self.sent(batch, is_whole=is_whole)

    def sent(self, batch: Batch, *, is_whole: bool = False) -> tuple[int, ...]:
        """How many rows each of the tensors has that `advance` gives back."""
        return (self.rows_of(batch.tokens_BS, is_whole=is_whole),)

    def rows_of(self, tokens_BS: Tensor, *, is_whole: bool = False) -> int:
        """How many rows of this rank tokens are, also where a pass with a cache `is_whole`.

        Raises:
            LayoutError: sequence or context parallelism does not divide them.
        """
        (num, tokens), cp = tokens_BS.shape, 1 if is_whole else self.groups.cp.size
        tokens = num * (tokens if cp == 1 else 2 * chunk_size(tokens, cp))
        return rows_of_rank(tokens, self.groups.tp.size, cp) if self.sequence_parallel else tokens

    def run(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual behind this stage's layers."""
        for number in self.stage.layers:
            x_TH = self.decoder.layers[str(number)](x_TH, frame)
        return x_TH

    def finish(self, x_TH: Tensor) -> Tensor:
        """The final norm and what comes between it and the output layer, if this stage has them;
        `head_tap` receives the output.
        """
        if self.decoder.norm is not None:
            if self.config.residual.hyper_streams:
                is_read = self.mtp is not None and (self.mtp.is_trained or not self.training)
                self._streams_TH = x_TH if is_read else None
                x_TH = self.decoder.read_head(x_TH)
            x_TH = self.decoder.norm(x_TH)
        if not self.stage.head:
            return x_TH
        if self.lm_head is not None:
            x_TH = self.lm_head(x_TH)
        return x_TH if self.head_tap is None else self.head_tap(x_TH)

    def logits(self, x_TH: Tensor) -> Tensor:
        """Logits [T, vocab_size] of the rows of `hidden`, on every tp rank."""
        return self._logits(x_TH, sequence_parallel=self.sequence_parallel)

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer, or of the embedding where they are tied."""
        holder: nn.Module | None = self.output_layer
        if holder is None or isinstance(holder, VocabBias):
            if self.embedding is None or not self.stage.head:
                raise UsageError("this stage has no output layer")
            holder = self.embedding.word_embeddings
        if self.before_head is not None:
            self.before_head()
        return cast(Tensor, holder.weight)

    def head_factors(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and this rank's weight, whose product the logits are.

        They are the rows of `hidden` and `output_weight`; a bias is one more column, the rows of
        which are ones (and further columns are zeros, since kernels want multiples of eight).

        Raises:
            UsageError: nothing is loaded, and the rows are no shapes alone.
        """
        weight_VH, bias_V = self.output_weight, getattr(self.output_layer, "bias", None)
        if not x_TH.is_meta:
            _require_values(weight_VH)
        if bias_V is None:
            return x_TH, weight_VH
        ones = F.pad(x_TH.new_ones(*x_TH.shape[:-1], 1), (0, 7))
        return torch.cat((x_TH, ones), -1), torch.cat(
            (weight_VH, F.pad(bias_V[:, None], (0, 7))), 1
        )

    def _gathered(self, x_TH: Tensor) -> Tensor:
        return gather_rows(x_TH, self.groups.tp) if self.sequence_parallel else x_TH

    def _logits(self, x_TH: Tensor, *, sequence_parallel: bool) -> Tensor:
        config = self.config
        head = config.head
        logits_TV = vocab_logits(
            *self.head_factors(x_TH),
            self.groups.tp,
            vocab_size=config.embedding.vocab_size,
            sequence_parallel=sequence_parallel,
        )
        if head.logit_scale != 1:
            logits_TV = logits_TV * head.logit_scale
        if head.logit_softcap:
            logits_TV = torch.tanh(logits_TV / head.logit_softcap) * head.logit_softcap
        return logits_TV


def _require_values(weight: Tensor) -> None:
    """Refuse weights on `meta`: a product with one returns uninitialized memory without an error.

    Raises:
        UsageError: the weight is on `meta`.
    """
    if weight.is_meta:
        raise UsageError(
            f"a weight of shape {list(weight.shape)} is not loaded yet",
            hint="load a checkpoint into the decoder first: megtool.inference.load.load",
        )
