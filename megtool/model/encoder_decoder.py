"""A transformer of two stacks: an encoder, and a decoder that attends to its output (T5)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.model.batch import Batch, check_ids
from megtool.model.cache import KeySpan, KVCache
from megtool.model.cross_attention import CrossLayer
from megtool.model.decoder import VOCAB_MULTIPLE, Block, Decoder, rows_of_rank
from megtool.model.dropout import Draws
from megtool.model.forward_context import ForwardContext
from megtool.model.layer import TransformerLayer
from megtool.model.masks import Mask, Masks
from megtool.model.norm import NormLayer, NormSpec
from megtool.model.relative_bias import RelativeBias, biased_masks
from megtool.model.rotary import Rotary
from megtool.model.source_cache import EncodedSource
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ProcessGroups


def encoder_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the encoder of a model of two stacks, as a stack of its own."""
    return replace(config, num_decoder_layers=0, bidirectional=True)


def decoder_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the decoder, which counts its own layers alone."""
    return replace(config, num_layers=config.num_decoder_layers)


class EncoderDecoder(Decoder):
    """An encoder, and a decoder whose layers attend to the encoder's output.

    A batch has a source for each row, `source_BE`, which the encoder reads, all of it both ways.
    With a cache that has keys and values of sources (`KVCache.sources`) later passes have none.
    Both stacks share the embedding; each has its relative position biases. Of `config`, the
    decoder's, `num_layers` counts the decoder's layers; `encoder_config` is that of the encoder.

    Raises:
        LayoutError: sizes do not go evenly over the ranks, or there are pipeline stages.
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
        vocab_multiple: int = VOCAB_MULTIPLE,
    ) -> None:
        check_stacks(config)
        super().__init__(
            decoder_config(config),
            groups,
            dtype=dtype,
            device=device,
            sequence_parallel=sequence_parallel,
            vocab_multiple=vocab_multiple,
        )
        if self.groups.pp.size > 1 or self.groups.cp.size > 1:
            axis = "pp" if self.groups.pp.size > 1 else "cp"
            raise LayoutError(
                f"{axis} is {getattr(self.groups, axis).size}, and a model of an encoder and a "
                "decoder has no such parts",
                hint="--tp splits it; megatron-core dropped pipelines of encoders and decoders",
            )
        own = self.encoder_config = encoder_config(config)
        self.encoder_rotary = Rotary(own, dtype=dtype)
        partial = self.sequence_parallel
        layers: dict[str, nn.Module] = {
            str(number): TransformerLayer(
                own, number, self.groups, sequence_parallel=partial, dtype=dtype, device=device
            )
            for number in range(own.num_layers)
        }
        norm = NormLayer(
            NormSpec.of(own), own.hidden_size, partial=partial, dtype=dtype, device=device
        )
        self.encoder = Block(layers, norm)
        self.encoder_relative_pos_emb = RelativeBias(own, self.groups, dtype=dtype, device=device)
        self.decoder_relative_pos_emb = RelativeBias(
            self.config, self.groups, dtype=dtype, device=device
        )

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
            check_ids(batch.source_BE, self.config.vocab_size, "the source")
            if self.sequence_parallel:
                rows_of_rank(batch.source_BE.numel(), self.groups.tp.size)
        if cache is not None:
            frame.source = EncodedSource(num_tokens=0, mask=Mask(), cache=cache.sources)
        return frame

    def embed(self, batch: Batch, frame: ForwardContext) -> Tensor:
        """The decoder's first residual, x_TH, after the encoder has read the sources."""
        x_TH = super().embed(batch, frame)
        masks = frame.masks[0]
        frame.masks = biased_masks(self.decoder_relative_pos_emb, masks, self.groups.cp)
        cache = None if frame.source is None else frame.source.cache
        source_BE, valid_BE = batch.source_BE, batch.source_valid_BE
        if source_BE is not None:
            width = source_BE.shape[1]
            if cache is not None:
                cache.begin((len(source_BE), width), valid_BE)
            frame.source = EncodedSource(
                num_tokens=width,
                mask=Mask(allowed=None if valid_BE is None else valid_BE[:, None, None]),
                states_EH=self.encode(source_BE, valid_BE),
                cache=cache,
            )
        elif cache is not None:
            frame.source = EncodedSource(num_tokens=cache.width, mask=cache.mask(), cache=cache)
        return x_TH

    def encode(self, source_BE: Tensor, valid_BE: Tensor | None = None) -> Tensor:
        """The encoder's output for tokens, as rows (with sequence parallelism this rank's);
        `valid_BE` is false for padding."""
        places = torch.arange(source_BE.shape[1], device=source_BE.device)[None]
        span = KeySpan.fresh(Batch(tokens_BS=source_BE, positions_BS=places, valid_BS=valid_BE))
        masks = Masks(self.encoder_config, span)
        frame = ForwardContext(
            num_rows=source_BE.shape[0],
            num_tokens=source_BE.shape[1],
            positions_BS=span.positions_BS,
            rotary=self.encoder_rotary,
            masks=biased_masks(self.encoder_relative_pos_emb, masks, self.groups.cp),
            draws=Draws.of(self.dropout, self.groups.tp, self.sequence_parallel)
            if self.training
            else None,
        )
        x_TH = self.embed_tokens(source_BE, frame)
        for layer in self.encoder.layers.values():
            x_TH = layer(x_TH, frame)
        return x_TH if self.encoder.norm is None else self.encoder.norm(x_TH)


def check_stacks(config: ModelConfig) -> None:
    """Refuse what no model of an encoder and a decoder is run with.

    Raises:
        MappingError: there is no decoder, positions are not relative, or layers are of other kinds
            than attention and an MLP.
    """
    if not config.num_decoder_layers or config.position_embedding != "relative":
        raise MappingError(
            f"num_decoder_layers is {config.num_decoder_layers}, and position_embedding "
            f"{config.position_embedding!r}",
            hint="an encoder and a decoder that are run have relative positions, as T5's",
        )
    odd = (
        config.num_experts,
        config.kv_lora_rank,
        config.layer_kinds,
        config.attn_softcap,
        config.attn_sinks,
        config.num_mtp_layers,
        config.num_kv_heads != config.num_heads,
    )
    if any(odd):
        raise MappingError(
            "an encoder and a decoder have layers that are not T5's",
            hint="attention with as many heads of keys as of queries, and an MLP",
        )
