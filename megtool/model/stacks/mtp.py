"""Multi-token prediction: layers behind the final norm, each for one token further ahead.

Layer m (from 0) combines the state of token i, which layer m - 1 (or the decoder) has made, with
the embedding of token i + m + 1, and predicts the token after that one. Embedding and output layer
are the decoder's own. Source: megatron-core 0.16.1, `transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from megtool.model.batch import Batch
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.stacks.hyper_connections import HyperHead
from megtool.model.stacks.layer import TransformerLayer
from megtool.parallel.collectives import gather_columns, scatter_rows
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import ATTENTION, EXPERTS, MAMBA, MLP
from megtool.spec.model_config import ModelConfig

LOSS_FACTOR = 0.1
"""Megatron's `--mtp-loss-scaling-factor`, by default."""

IGNORED = -100


def is_hybrid(config: ModelConfig) -> bool:
    """Whether some layer is not one of Megatron's GPTModel: a mixer alone, an MLP alone, Mamba.

    Where sizes vary by layer, GPTModel has layers without one of their branches. Layers of
    multi-token prediction have numbered layers inside in a HybridModel alone.
    """
    if config.layer_sizes is not None:
        return False
    return bool(config.mtp.num_mtp_inner) or any(
        MAMBA in kind or len(kind) != 2 for kind in config.layer_kinds or ()
    )


def with_mtp_layers(config: ModelConfig) -> ModelConfig:
    """The configuration in which layers of multi-token prediction are numbered like the others,
    on from the last one: one for each, or (HybridModel) one for each of its branches.

    Where layers turn queries and keys if they have a window, and do not if they have none, these
    have none (K-EXAONE: TensorRT-LLM's `modeling_exaone_moe.py`, vLLM's `exaone_moe.py`). With
    `mtp_window` they have one, and the sizes of layers that do.
    """
    depths = config.mtp.num_mtp_layers
    if not depths:
        return config
    moe = layer_sets.moe_layers(config)
    kinds = config.layer_kinds or tuple(
        ATTENTION + (EXPERTS if n in moe else MLP) for n in range(config.num_layers)
    )
    further = layer_sets.mtp_branches(config)
    kinds += tuple(further if is_hybrid(config) else [further]) * depths
    ratios = config.compression.compress_ratios
    skip, without = config.window.window_skip_freq, config.positions.no_rope_layers
    flags = tuple(int(config.window.has_window(n)) for n in range(config.num_layers))
    is_global = any(flags) and without == tuple(1 - f for f in flags)
    if is_global:
        skip = (*flags, 0)
    elif config.mtp.mtp_window:
        skip = (*flags, 1)
    sizes, like = config.layer_sizes, layer_sets.mtp_size_layer(config)
    shared = config.indexer.shared_index_layers
    return config.with_fields(
        num_layers=len(kinds),
        num_mtp_layers=0,
        layer_kinds=kinds,
        moe_layer_freq=1,
        mtp_kind="",
        layer_sizes=None
        if sizes is None
        else {name: _longer(n, len(kinds), n[like]) for name, n in sizes.items()},
        window_skip_freq=_longer(skip, len(kinds), skip[-1]) if isinstance(skip, tuple) else skip,
        no_rope_layers=None if without is None else _longer(without, len(kinds), int(is_global)),
        shared_index_layers=None if shared is None else _longer(shared, len(kinds), 0),
        compress_ratios=None if ratios is None else _longer(ratios, len(kinds), 0),
    )


def _longer(flags: tuple[int, ...], length: int, last: int) -> tuple[int, ...]:
    return flags[:length] + (last,) * (length - len(flags))


class MtpLayer(HyperHead):
    """One layer of multi-token prediction, with Megatron's names.

    Takes and gives x_TH, of which a rank has all rows, or with sequence parallelism its own. The
    layer inside is `transformer_layer`, or in a HybridModel `mtp_model_layer`, one for each branch;
    `numbers` are theirs in `with_mtp_layers`, which `config` is of.

    Where there are several residuals side by side (DeepSeek-V4) it takes and gives them all
    (`advance`), before what makes one of them. State and embedding have a projection each, and
    their sum is what the residuals are; source: DeepSeek-V4's `inference/model.py`, `MTPBlock`.
    """

    def __init__(
        self,
        config: ModelConfig,
        numbers: tuple[int, ...],
        groups: ProcessGroups,
        *,
        is_hybrid: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = groups.tp, sequence_parallel
        self.numbers, self.num_streams = numbers, config.residual.hyper_streams
        hidden = config.hidden_size

        def norm() -> NormLayer:
            spec = NormSpec.of(config)
            return NormLayer(spec, hidden, partial=sequence_parallel, dtype=dtype, device=device)

        def layer(number: int) -> TransformerLayer:
            return TransformerLayer(
                config,
                number,
                groups,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )

        def projection(size: int) -> ColumnLinear:
            return ColumnLinear(
                size,
                hidden,
                groups.tp,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )

        self.enorm, self.hnorm = norm(), norm()
        if self.num_streams:
            self.e_proj, self.h_proj = projection(hidden), projection(hidden)
            self.init_head(config, partial=sequence_parallel, device=device)
        else:
            self.eh_proj = projection(2 * hidden)
        if is_hybrid:
            inner = nn.ModuleDict({str(k): layer(n) for k, n in enumerate(numbers)})
            self.mtp_model_layer = nn.ModuleDict({"layers": inner})
        else:
            self.transformer_layer = layer(*numbers)
        self.final_layernorm = norm()

    def forward(self, x_TH: Tensor, embedded_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The states of each token after this layer's final norm.

        `embedded_TH` are the embeddings of the tokens that this layer adds.
        """
        return self.finish(self.advance(x_TH, embedded_TH, frame))

    def advance(self, x_TH: Tensor, embedded_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual, or all of them, behind the layers inside."""
        if self.num_streams:
            rows = self.hnorm(x_TH.view(x_TH.shape[0] * self.num_streams, -1))
            streams = self._projected(self.h_proj, rows).view(x_TH.shape[0], self.num_streams, -1)
            embedded_TH = self._projected(self.e_proj, self.enorm(embedded_TH))
            x_TH = (streams + embedded_TH[:, None]).flatten(1)
        else:
            x_TH = torch.cat((self.enorm(embedded_TH), self.hnorm(x_TH)), -1)
            x_TH = self._projected(self.eh_proj, x_TH)
        for layer in self.inner_layers():
            x_TH = layer(x_TH, frame)
        return x_TH

    def finish(self, x_TH: Tensor) -> Tensor:
        """The states after the final norm, of what `advance` gives."""
        out: Tensor = self.final_layernorm(self.read_head(x_TH) if self.num_streams else x_TH)
        return out

    def _projected(self, linear: ColumnLinear, x_TH: Tensor) -> Tensor:
        """All columns of a product, in x_TH's rows."""
        y_TH = gather_columns(linear(x_TH), self.tp)
        return scatter_rows(y_TH, self.tp) if self.sequence_parallel else y_TH

    def inner_layers(self) -> Iterator[TransformerLayer]:
        """The layers inside, in order."""
        for module in self.modules():
            if isinstance(module, TransformerLayer):
                yield module


class MultiTokenPrediction(nn.Module):
    """All layers of multi-token prediction of a model, and what their training needs.

    `loss_factor` is what their mean loss is multiplied by; with 0 they are not run. `sums` has,
    for each of them, the sum of the losses of this rank's tokens since `begin`, and their number.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        numbered, hybrid = with_mtp_layers(config), is_hybrid(config)
        each = (numbered.num_layers - config.num_layers) // config.mtp.num_mtp_layers
        layers = {}
        for m in range(config.mtp.num_mtp_layers):
            first = config.num_layers + m * each
            layers[str(m)] = MtpLayer(
                numbered,
                tuple(range(first, first + each)),
                groups,
                is_hybrid=hybrid,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
        self.layers = nn.ModuleDict(layers)
        self.loss_factor = LOSS_FACTOR
        self.begin()

    def begin(self) -> None:
        """Reset the sums."""
        self.sums: list[tuple[Tensor | float, Tensor | float]] = [(0.0, 0)] * len(self.layers)

    @property
    def is_trained(self) -> bool:
        """Whether there is a loss to be added: of what is frozen there is none."""
        return self.loss_factor > 0 and any(p.requires_grad for p in self.parameters())

    def layer(self, depth: int) -> MtpLayer:
        """The layer that predicts `depth + 1` tokens further than the decoder."""
        return cast(MtpLayer, self.layers[str(depth)])

    def loss(
        self,
        x_TH: Tensor,
        batch: Batch,
        labels_BS: Tensor,
        frame: ForwardContext,
        *,
        embed: Callable[[Tensor, ForwardContext], Tensor],
        loss_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return what these layers add to the decoder's sum of losses (float32).

        `x_TH` are the states after the final norm, or the residuals side by side. `embed` and
        `loss_of` are the decoder's: the embedding of tokens, and the loss of states. The loss of
        each depth is the mean over the labels that are left after shifting, as many times as the
        batch has labels: so it weighs the same in a loss that is divided by labels. The sum over
        depths is divided by their number, and multiplied by `loss_factor`.
        """
        tokens_BS, documents_BS = batch.tokens_BS, batch.documents_BS
        num_labels = (labels_BS != IGNORED).sum()
        total = torch.zeros((), device=x_TH.device)
        for depth in range(len(self.layers)):
            tokens_BS = shifted(tokens_BS, documents_BS, 0)
            labels_BS = shifted(labels_BS, documents_BS, IGNORED)
            embedded_TH = embed(tokens_BS, frame)
            layer = self.layer(depth)
            x_TH = layer.advance(x_TH, embedded_TH, frame)
            state_TH = layer.finish(x_TH)
            loss, count = loss_of(state_TH, labels_BS)
            x_TH = x_TH if layer.num_streams else state_TH
            before = self.sums[depth]
            self.sums[depth] = before[0] + loss.detach(), before[1] + count
            num_left = (labels_BS != IGNORED).sum().clamp(min=1)
            total = total + loss * (num_labels / num_left)
        return total * (self.loss_factor / len(self.layers))


def shifted(values_BS: Tensor, documents_BS: Tensor | None, fill: int) -> Tensor:
    """For each token what the next one of its row and document has; `fill` where none is next."""
    out_BS = torch.full_like(values_BS, fill)
    out_BS[:, :-1] = values_BS[:, 1:]
    if documents_BS is not None:
        out_BS[:, :-1].masked_fill_(documents_BS[:, 1:] != documents_BS[:, :-1], fill)
    return out_BS
