"""A transformer of two stacks: an encoder, and a decoder that attends to its output (T5)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.kernels.attention.mask import Mask
from megtool.model.attention.relative_bias import RelativeBias, biased_masks
from megtool.model.batch import Batch, check_ids
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import KVCache
from megtool.model.cache.source import EncodedSource, source_mask
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.dropout import Draws
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.model.masks import Masks
from megtool.model.positions.rotary import Rotary
from megtool.model.stacks.cross_attention import CrossLayer
from megtool.model.stacks.decoder import VOCAB_MULTIPLE, Block, Decoder, StageLayers
from megtool.model.stacks.layer import TransformerLayer
from megtool.parallel.pipeline_split import split_stacks
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig

_OWN_BIASES = "relative_pos_emb"
"""A layer's own relative position biases are a module of its attention."""


def encoder_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the encoder of a model of two stacks, as a stack of its own."""
    return config.with_fields(num_decoder_layers=0, bidirectional=True)


def decoder_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the decoder, which counts its own layers alone."""
    return config.with_fields(num_layers=config.num_decoder_layers)


class EncoderDecoder(Decoder):
    """An encoder, and a decoder whose layers attend to the encoder's output.

    A batch has a source for each row, `source_BE`, which the encoder reads, all of it both ways.
    With a cache that has keys and values of sources (`KVCache.sources`) later passes have none.
    Both stacks share the embedding; each has its relative position biases, or each layer has. Of
    `config`, the decoder's, `num_layers` counts the decoder's layers; `encoder_config` is that of
    the encoder.

    A pipeline stage has layers of one stack (see `stack_stage`). The encoder's send its rows, and
    the decoder's, up to the last one, send them on with theirs. The first stage of each has the
    embedding, and every stage both position biases.

    Raises:
        LayoutError: sizes do not go evenly over the ranks, or there is context parallelism.
        MappingError: the configuration asks for something unknown.
    """

    layer_class = CrossLayer

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
        check_stacks(config)
        stage = stack_stage(config, ProcessGroups.alone()) if stage is None else stage
        super().__init__(
            decoder_config(config),
            groups,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
            stage=stage,
            vocab_multiple=vocab_multiple,
        )
        if self.groups.cp.size > 1:
            raise LayoutError(
                f"cp is {self.groups.cp.size}, and a model of an encoder and a decoder has no "
                "such parts",
                hint="--tp and --pp split it",
            )
        own = self.encoder_config = encoder_config(config)
        self.encoder_rotary = Rotary(own, dtype=dtype)
        partial = self.sequence_parallel
        layers: dict[str, nn.Module] = {
            str(number): TransformerLayer(
                own, number, self.groups, sequence_parallel=partial, dtype=dtype, device=device
            )
            for number in stage.encoder_layers
        }
        norm = NormLayer(
            NormSpec.of(own), own.hidden_size, partial=partial, dtype=dtype, device=device
        )
        self.encoder = Block(layers, norm if stage.encoder_norm else None)
        self.encoder_relative_pos_emb = self._place_biases(own, self.encoder, dtype, device)
        self.decoder_relative_pos_emb = self._place_biases(self.config, self.decoder, dtype, device)
        pp = self.groups.pp
        if self.embedding is not None and pp.size > 1:
            mark(
                self.embedding.word_embeddings.weight,
                split_dim=0,
                tied=True,
                copy=not pp.is_first,
                over="ends" if config.embedding.tied_embeddings else "inputs",
            )

    def _place_biases(
        self, config: ModelConfig, stack: Block, dtype: torch.dtype, device: torch.device | str
    ) -> RelativeBias | None:
        """The relative position biases of a stack, unless each layer is given its own."""
        if not config.positions.relative_per_layer:
            return RelativeBias(config, self.groups, dtype=dtype, device=device)
        for layer in stack.layers.values():
            bias = RelativeBias(config, self.groups, is_shared=False, dtype=dtype, device=device)
            layer.get_submodule("self_attention").register_module(_OWN_BIASES, bias)
        return None

    @property
    def is_encoder(self) -> bool:
        """Whether this stage has layers of the encoder, and none of the decoder."""
        return self.groups.pp.rank < self.groups.parallel.encoder_pp

    def received(self, batch: Batch, *, is_whole: bool = False) -> tuple[int, ...]:
        """As of a decoder; behind the first stage also rows of the source, last, where a batch has
        it."""
        is_first = self.groups.pp.is_first
        own = () if self.is_encoder or self.stage.embedding else super().sent(batch)
        return own if is_first or batch.source_BE is None else (*own, self.rows_of(batch.source_BE))

    def sent(self, batch: Batch, *, is_whole: bool = False) -> tuple[int, ...]:
        """As of a decoder; the source's rows, last, are needed up to the last stage."""
        own = () if self.is_encoder else super().sent(batch)
        if self.stage.head or batch.source_BE is None:
            return own
        return (*own, self.rows_of(batch.source_BE))

    def advance(self, batch: Batch, frame: ForwardContext, *rows: Tensor) -> tuple[Tensor, ...]:
        """As of a decoder; see `received` and `sent`."""
        source_BE = batch.source_BE
        if self.groups.pp.size == 1:
            return super().advance(batch, frame)
        if self.is_encoder:
            if source_BE is None:
                return ()
            return (self.encode(source_BE, batch.source_valid_BE, *rows),)
        states_EH = None if source_BE is None else rows[-1]
        self.look_up(batch, frame, states_EH)
        x_TH = super().embed(batch, frame) if self.stage.embedding else rows[0]
        x_TH = self.finish(self.run(x_TH, frame))
        if self.stage.head or states_EH is None:
            return (x_TH,)
        return x_TH, states_EH.view_as(states_EH)  # an output of its own, with its own gradient

    def frame(self, batch: Batch, cache: KVCache | None = None) -> ForwardContext:
        """As of a decoder alone; its masks get their biases, and `source` is set, by `embed`.

        Raises:
            UsageError: there is no source, or tokens are not in the vocabulary.
            LayoutError: sequence parallelism does not divide the tokens of one of the stacks.
        """
        frame = super().frame(batch, cache)
        if batch.source_BE is None:
            if cache is None or cache.sources is None:
                raise UsageError("the batch has no source for the encoder to read")
        else:
            check_ids(batch.source_BE, self.config.embedding.vocab_size, "the source")
            self.rows_of(batch.source_BE)
        if cache is not None:
            frame.source = EncodedSource(num_tokens=0, mask=Mask(), cache=cache.sources)
        return frame

    def embed(self, batch: Batch, frame: ForwardContext) -> Tensor:
        """The decoder's first residual, x_TH, after the encoder has read the sources."""
        x_TH = super().embed(batch, frame)
        source_BE = batch.source_BE
        read = None if source_BE is None else self.encode(source_BE, batch.source_valid_BE)
        self.look_up(batch, frame, read)
        return x_TH

    def look_up(self, batch: Batch, frame: ForwardContext, states_EH: Tensor | None) -> None:
        """Set in a pass what the decoder's layers attend to: biases, and the encoder's states, or,
        where there are none, what the cache has of them."""
        masks = frame.masks[0]
        biases = _biases(self.decoder, self.decoder_relative_pos_emb)
        frame.masks = biased_masks(biases, masks, self.groups.cp)
        cache = None if frame.source is None else frame.source.cache
        source_BE, valid_BE = batch.source_BE, batch.source_valid_BE
        if source_BE is not None:
            width = source_BE.shape[1]
            if cache is not None:
                cache.begin((len(source_BE), width), valid_BE)
            frame.source = EncodedSource(
                num_tokens=width,
                mask=source_mask(valid_BE),
                states_EH=states_EH,
                cache=cache,
            )
        elif cache is not None:
            frame.source = EncodedSource(num_tokens=cache.width, mask=cache.mask(), cache=cache)

    def encode(
        self, source_BE: Tensor, valid_BE: Tensor | None = None, x_TH: Tensor | None = None
    ) -> Tensor:
        """The encoder's output for tokens, as rows (with sequence parallelism this rank's).

        `valid_BE` is false for padding. Of a stage it is that of its layers, and `x_TH` the
        previous stage's.
        """
        places = torch.arange(source_BE.shape[1], device=source_BE.device)[None]
        span = KeySpan.fresh(Batch(tokens_BS=source_BE, positions_BS=places, valid_BS=valid_BE))
        masks = Masks(self.encoder_config, span)
        biases = _biases(self.encoder, self.encoder_relative_pos_emb)
        frame = ForwardContext(
            num_rows=source_BE.shape[0],
            num_tokens=source_BE.shape[1],
            positions_BS=span.positions_BS,
            rotary=self.encoder_rotary,
            masks=biased_masks(biases, masks, self.groups.cp),
            draws=Draws.of(self.dropout, self.groups.tp, self.sequence_parallel)
            if self.training
            else None,
        )
        x_TH = self.embed_tokens(source_BE, frame) if x_TH is None else x_TH
        for layer in self.encoder.layers.values():
            x_TH = layer(x_TH, frame)
        return x_TH if self.encoder.norm is None else self.encoder.norm(x_TH)


def _biases(stack: Block, shared: RelativeBias | None) -> dict[int | None, RelativeBias]:
    """The relative position biases of a stack: those of all layers (None), or of each by number."""
    if shared is not None:
        return {None: shared}
    return {
        int(n): cast(RelativeBias, layer.get_submodule(f"self_attention.{_OWN_BIASES}"))
        for n, layer in stack.layers.items()
    }


def stack_stage(config: ModelConfig, groups: ProcessGroups) -> StageLayers:
    """What a rank's pipeline stage has of both stacks.

    Raises:
        LayoutError: see `split_stacks`.
    """
    pp, second = groups.pp, groups.parallel.encoder_pp
    stacks = split_stacks(groups.parallel, config.num_layers, config.num_decoder_layers)
    encoder, decoder = (tuple(stack[pp.rank]) for stack in stacks)
    return StageLayers(
        layers=decoder,
        embedding=pp.rank in (0, second),
        head=pp.is_last,
        encoder_layers=encoder,
        encoder_norm=pp.rank == max(second, 1) - 1,
    )


def check_stacks(config: ModelConfig) -> None:
    """Refuse what no model of an encoder and a decoder is run with.

    Raises:
        MappingError: there is no decoder, positions are not relative, or layers are of other kinds
            than attention and an MLP.
    """
    if not config.num_decoder_layers or config.positions.position_embedding != "relative":
        raise MappingError(
            f"num_decoder_layers is {config.num_decoder_layers}, and position_embedding "
            f"{config.positions.position_embedding!r}",
            hint="an encoder and a decoder that are run have relative positions, as T5's",
        )
    odd = (
        config.moe.num_experts,
        config.latent.kv_lora_rank,
        config.layer_kinds,
        config.attention.attn_softcap,
        config.attention.attn_sinks,
        config.attention.attn_zero_sinks,
        config.mtp.num_mtp_layers,
        config.attention.num_kv_heads != config.attention.num_heads,
    )
    if any(odd):
        raise MappingError(
            "an encoder and a decoder have layers that are not T5's",
            hint="attention with as many heads of keys as of queries, and an MLP",
        )
