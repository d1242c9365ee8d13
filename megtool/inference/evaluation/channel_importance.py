"""How much channels, neurons, heads and experts matter, by the size of their activations.

The scores are Minitron's (Muralidharan et al., 2024, arXiv 2407.14679, section 2.2), aggregated as
ModelOpt's `mcore_minitron` does: over a window the mean of an activation's absolute values, over
windows the L2 norm of the means. A neuron is measured in front of the MLP's second projection, a
head in front of attention's (the norm over its elements), a channel of hidden states behind the
norms before mixers and MLPs, added up over all of them. An expert's score is the mean over its
tokens of the norm of what it adds, its share of the token included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.convert.pruning_scores import ByLayer
from megtool.errors import UsageError
from megtool.kernels.experts.grouped_gemm import permute
from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import HookLocation, places, tapped
from megtool.parallel.collectives import gather_columns
from megtool.parallel.context_parallel import own_tokens
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_MIXER_INPUTS = (
    (layer_sets.delta_layers, "delta.qkvz"),
    (layer_sets.kda_layers, "kda.qkv"),
    (layer_sets.mamba_layers, "mamba.in"),
    (layer_sets.conv_layers, "short_conv.in"),
)


class ChannelImportance:
    """The scores over all passes within `measured`; padding does not count.

    Raises:
        UsageError: experts are measured on one rank of a stage alone.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._config = decoder, decoder.config
        groups = decoder.groups
        if layer_sets.moe_layers(self._config) and groups.world.size > groups.pp.size:
            raise UsageError(
                "--pruning-scores of a model with experts, on more ranks than stages",
                hint="--pp alone splits the model",
            )
        self._rows_T = torch.zeros(0, dtype=torch.int64)
        self._num_rows = 0
        self._sums: dict[str, Tensor] = {}
        self._places: dict[str, HookLocation] = {}
        self._experts: dict[int, Tensor] = {}
        self._routed: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure passes."""
        decoder, config = self._decoder, self._config
        with ExitStack() as stack:
            layers = decoder.stage.layers
            stack.enter_context(decoder.decoder.hooked(layers, self._start, before=True))
            for layer in layers:
                for name in _sites(config, layer):
                    site = f"layers.{layer}.{name}"
                    self._watch(places(decoder, site)[0], site, stack)
                if layer in layer_sets.moe_layers(config):
                    self._watch_experts(layer, stack)
            yield

    def hidden(self) -> tuple[float, ...]:
        """The scores of the channels of hidden states, on every rank."""
        names = [n for n in self._sums if not n.endswith((".attn.o", ".mlp.down"))]
        zeros = torch.zeros(self._config.hidden_size, dtype=torch.float64)
        total_H = sum((self._score(n) for n in names), zeros)
        return tuple(sum((t for t in self._gathered(total_H)), zeros).tolist())

    def ffn(self) -> ByLayer:
        """The scores of neurons by layer, on every rank."""
        return self._by_layer("mlp.down", lambda score_F: score_F)

    def heads(self) -> ByLayer:
        """The scores of query heads by layer, on every rank."""
        n = self._config.attention.num_heads
        return self._by_layer("attn.o", lambda score_Q: score_Q.view(n, -1).norm(dim=1))

    def experts(self) -> ByLayer:
        """The scores of experts by layer, on every rank; 0 where no token came."""
        own = {
            layer: (sums_E2[:, 0] / sums_E2[:, 1].clamp(min=1)).tolist()
            for layer, sums_E2 in self._experts.items()
        }
        return self._merged(own)

    def _start(
        self, _number: int, _layer: nn.Module, inputs: tuple[Tensor, ForwardContext]
    ) -> None:
        """Note which row of the batch each token is of; -1 for padding."""
        frame = inputs[1]
        self._num_rows = frame.num_rows
        device = inputs[0].device
        rows_BS = torch.arange(frame.num_rows, device=device)[:, None]
        rows_BS = rows_BS.expand(-1, frame.num_tokens)
        if frame.real_BS is not None:
            real_BS = own_tokens(frame.real_BS, frame.cp)
            rows_BS = rows_BS.masked_fill(~real_BS, -1)
        self._rows_T = rows_BS.flatten()

    def _watch(self, place: HookLocation, site: str, stack: ExitStack) -> None:
        before = getattr(place.module, place.attribute)
        self._places[site] = place

        def tap(x_TF: Tensor) -> Tensor:
            self._add(site, x_TF)
            out: Tensor = x_TF if before is None else before(x_TF)
            return out

        stack.enter_context(tapped([(place, tap)]))

    def _add(self, site: str, x_TF: Tensor) -> None:
        """Add the squared means of the rows of a batch."""
        rows_T = self._rows_T
        if len(rows_T) != len(x_TF):
            raise ValueError(f"{site} has {len(x_TF)} rows, and the batch has others")
        is_real_T1 = (rows_T >= 0)[:, None].float()
        counted = torch.cat((x_TF.float().abs() * is_real_T1, is_real_T1), 1)
        sums_BF = counted.new_zeros(self._num_rows, counted.shape[1])
        sums_BF.index_add_(0, rows_T.clamp(min=0), counted)
        cp = self._decoder.groups.cp
        if cp.size > 1:
            dist.all_reduce(sums_BF, group=cp.handle)
        means_BF = sums_BF[:, :-1] / sums_BF[:, -1:].clamp(min=1)
        total_F = means_BF.double().square().sum(0)
        old_F = self._sums.get(site)
        self._sums[site] = total_F if old_F is None else old_F + total_F

    def _watch_experts(self, layer: int, stack: ExitStack) -> None:
        mlp = self._decoder.decoder.layers[str(layer)].get_submodule("mlp")
        num = self._config.moe.num_experts
        device = self._decoder.groups.device
        self._experts.setdefault(layer, torch.zeros(num, 2, dtype=torch.float64, device=device))
        handles = (
            mlp.get_submodule("router").register_forward_hook(partial(self._route, layer)),
            mlp.get_submodule("experts.experts").register_forward_hook(
                partial(self._add_experts, layer)
            ),
        )
        for handle in handles:
            stack.callback(handle.remove)

    def _route(
        self, layer: int, _router: nn.Module, _inputs: object, out: tuple[Tensor, Tensor]
    ) -> None:
        self._routed[layer] = out

    def _add_experts(
        self, layer: int, _experts: nn.Module, inputs: tuple[Tensor, Tensor], out_RH: Tensor
    ) -> None:
        """Add the norms of what experts add to tokens, and their numbers."""
        experts_TK, probs_TK = self._routed.pop(layer)
        rows_T, num = self._rows_T, self._config.moe.num_experts
        if self._config.router.router_scales_input:
            probs_TK = torch.ones_like(probs_TK)
        # As rows went to their experts, so do their numbers.
        numbers_T1 = torch.arange(len(rows_T), device=out_RH.device)[:, None]
        numbers_R1, row_ids_R, counts_E = permute(numbers_T1, experts_TK, num)
        probs_R = probs_TK.flatten()[row_ids_R].double()
        real_R = (rows_T[numbers_R1[:, 0]] >= 0).double()
        norms_R = out_RH.float().norm(dim=1).double() * probs_R * real_R
        of_R = torch.arange(num, device=out_RH.device).repeat_interleave(counts_E)
        self._experts[layer].index_add_(0, of_R, torch.stack((norms_R, real_R), 1))

    def _score(self, site: str) -> Tensor:
        """The L2 norm over windows, of all columns."""
        score_F = self._sums[site].sqrt()
        group = self._places[site].columns
        if group.size > 1:
            score_F = gather_columns(score_F[None], group)[0]
        return score_F.cpu()

    def _by_layer(self, site: str, of: Callable[[Tensor], Tensor]) -> ByLayer:
        own = {
            int(name.split(".")[1]): of(self._score(name)).tolist()
            for name in self._sums
            if name.endswith("." + site)
        }
        return self._merged(own)

    def _merged(self, own: dict[int, list[float]]) -> ByLayer:
        merged: dict[int, list[float]] = {}
        for part in self._gathered(own):
            merged |= part
        return {layer: tuple(merged[layer]) for layer in sorted(merged)}

    def _gathered(self, own: Any) -> list[Any]:
        pp = self._decoder.groups.pp
        if pp.size == 1:
            return [own]
        out: list[Any] = [own] * pp.size
        dist.all_gather_object(out, own, pp.handle)
        return out


def _sites(config: ModelConfig, layer: int) -> Iterator[str]:
    """The inputs of a layer that are measured: behind its norms, and before what projects back."""
    if layer in layer_sets.attn_layers(config):
        yield (
            "attn.down"
            if config.latent.kv_lora_rank or config.compression.is_compressed
            else "attn.qkv"
        )
        yield "attn.o"
    else:
        for layers, site in _MIXER_INPUTS:
            if layer in layers(config):
                yield site
                break
    if layer in layer_sets.moe_layers(config):
        yield "mlp.router"
    elif layer in layer_sets.dense_layers(config):
        if not config.norms.shared_norm:
            yield "mlp.fc1"
        yield "mlp.down"
