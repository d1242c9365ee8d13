"""The ends of a model around its layers: the embedding, and what comes before the output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megtool.kernels.elementwise.activation import activate
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import VocabEmbedding
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.parallel.collectives import scatter_rows
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig


class Embedding(nn.Module):
    """Words, the positions that are learned, types of words, and the norm of their sum.

    All words are of the first type. Where layers get vectors of their own (`layer_input_size`), a
    second embedding, `layer_embeddings`, has those of all layers for each word.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        padded_vocab: int,
        *,
        positions: bool,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        learned = config.positions.position_embedding == "learned"
        self.config, self.group = config, groups.tp
        # What is learned beside the words is added to all rows before they are scattered.
        self.scatters = sequence_parallel and (learned or config.embedding.num_token_types > 0)
        self.word_embeddings = VocabEmbedding(
            padded_vocab,
            hidden,
            groups.tp,
            sequence_parallel=sequence_parallel and not self.scatters,
            dtype=dtype,
            device=device,
        )
        if positions and learned:
            places = config.positions.max_positions + config.positions.position_offset
            self.position_embeddings = nn.Embedding(places, hidden, dtype=dtype, device=device)
        if positions and config.embedding.num_token_types:
            types = config.embedding.num_token_types
            self.tokentype_embeddings = nn.Embedding(types, hidden, dtype=dtype, device=device)
        if positions and (size := config.residual.layer_input_size):
            self.layer_embeddings = VocabEmbedding(
                padded_vocab,
                config.num_layers * size,
                groups.tp,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
            self.layer_proj = DownLinear(
                hidden,
                config.num_layers * size,
                groups.tp,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
            self.layer_norm = NormLayer(
                NormSpec.of(config), size, partial=sequence_parallel, dtype=dtype, device=device
            )
        self.norm: NormLayer | None = None
        if positions and config.norms.embedding_norm:
            self.norm = NormLayer(
                NormSpec.of(config), hidden, partial=sequence_parallel, dtype=dtype, device=device
            )

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, scale: float) -> Tensor:
        """The first residual, x_TH (with sequence parallelism this rank's rows); words are
        multiplied by `scale`.
        """
        x_TH: Tensor = self.word_embeddings(tokens_BS.flatten())
        if scale != 1:
            x_TH = x_TH * scale
        if self.config.positions.position_embedding == "learned":
            places = self.position_embeddings(positions_BS + self.config.positions.position_offset)
            x_TH = (x_TH.view(*tokens_BS.shape, -1) + places).flatten(0, 1)
        if self.config.embedding.num_token_types:
            x_TH = x_TH + self.tokentype_embeddings.weight[0]
        if self.scatters:
            x_TH = scatter_rows(x_TH, self.group)
        return x_TH if self.norm is None else self.norm(x_TH)

    def layer_inputs(self, tokens_BS: Tensor, x_TH: Tensor) -> tuple[Tensor, ...]:
        """What each layer gets beside the residual, [T, layer_input_size], from words and from the
        first residual x_TH: their sum over the square root of two, as Gemma 4 has it.
        """
        config = self.config
        if not (size := config.residual.layer_input_size):
            return ()
        shape = (-1, config.num_layers, size)
        scale = torch.tensor(size**0.5, dtype=x_TH.dtype).item()
        words = self.layer_embeddings(tokens_BS.flatten()) * scale
        read = self.layer_norm((self.layer_proj(x_TH) * config.hidden_size**-0.5).view(shape))
        return tuple(((read + words.view(shape)) * 2**-0.5).unbind(1))


class MaskedHead(nn.Module):
    """What a model that predicts masked tokens has before its output layer: a linear layer, an
    activation and a norm, which every rank has whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        partial: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.activation = config.head.head_activation or config.mlp.activation
        hidden = config.hidden_size
        self.dense = nn.Linear(
            hidden, hidden, bias=config.head.head_dense_bias, dtype=dtype, device=device
        )
        for parameter in self.dense.parameters():
            mark(parameter, partial=partial)
        self.layer_norm = NormLayer(
            NormSpec.of(config), hidden, partial=partial, dtype=dtype, device=device
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        """The rows that the output layer multiplies."""
        out: Tensor = self.layer_norm(activate(self.dense(x_TH), self.activation))
        return out


class VocabBias(nn.Module):
    """The bias of an output layer whose weight is the embedding's: this rank's `bias` [V/tp]."""

    def __init__(
        self, size: int, group: Group, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        bias = torch.zeros(group.part(size, "padded_vocab"), dtype=dtype, device=device)
        self.bias = mark(nn.Parameter(bias), split_dim=0)
