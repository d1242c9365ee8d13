"""DeepSeek-V4's attention: a window of tokens, and keys that several tokens are compressed to.

A token's key, which is its value too, is one vector for all heads; so is what every r tokens are
compressed to. Where such keys overlap (r = 4), an indexer with compressed keys of its own chooses
among them. Source: transformers' `deepseek_v4`.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.attention.mask import AttentionSizes, Mask
from megtool.kernels.elementwise.norm import rms_norm
from megtool.kernels.elementwise.rotary import rotate
from megtool.kernels.recurrence.causal_conv import last_inputs
from megtool.model.attention.grouped_query import attend
from megtool.model.attention.indexer import DuplicatedLinear, highest, query_parts
from megtool.model.attention.mla import DownLinear, adjacent_pairs
from megtool.model.cache.key_windows import KeyWindows
from megtool.model.cache.kv_cache import KVCache
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ActivationHook
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.model.positions.rotary import Rotation
from megtool.parallel.collectives import copy_to, gather_rows
from megtool.parallel.context_parallel import gather_tokens, own_tokens
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.spec.sparse_attention import OVERLAP_RATIO


class Compressor(nn.Module):
    """What makes one key of `size` elements of every `ratio` tokens: their sum by a softmax over
    them, element by element, and its norm.

    With `overlaps` every token has two series of elements, one for the key of its own tokens and
    one for the next key, so that a key is made of twice as many tokens. Ranks of a tp group have
    all of it and give the same; with sequence parallelism they add up the gradients of parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: Group,
        *,
        size: int,
        ratio: int,
        overlaps: bool,
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config, self.size, self.ratio, self.overlaps = config, size, ratio, overlaps
        self.tp, self.sequence_parallel = tp, sequence_parallel and tp.size > 1
        columns, partial = size * (1 + overlaps), self.sequence_parallel
        self.linear_wkv, self.linear_wgate = (
            DownLinear(
                config.hidden_size,
                columns,
                tp,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
            for _ in range(2)
        )
        zeros = torch.zeros(ratio, columns, dtype=torch.float32, device=device)
        self.ape = mark(nn.Parameter(zeros), partial=partial)
        self.norm = NormLayer(
            NormSpec.of(config), size, partial=partial, dtype=dtype, device=device
        )

    def project(self, x_BSH: Tensor) -> Tensor:
        """What each token of whole rows gives to keys: elements, and their weights behind them."""
        x_TH = x_BSH.flatten(0, 1)
        tokens_TC = torch.cat((self.linear_wkv(x_TH), self.linear_wgate(x_TH)), -1)
        return tokens_TC.view(*x_BSH.shape[:2], -1)

    def forward(self, tokens_BSC: Tensor, frame: ForwardContext) -> Tensor:
        """The keys of the windows of a pass, turned, [B, W, D], from what tokens give to them."""
        windows, size = frame.windows(self.ratio), self.size
        if not windows.num_windows:
            return tokens_BSC.new_zeros(len(tokens_BSC), 0, size)
        keys_BSC, gates_BSC = tokens_BSC.chunk(2, -1)
        keys, gates = (windows.tokens_of(t[..., -size:]) for t in (keys_BSC, gates_BSC))
        gates = gates + self.ape[:, -size:]
        if self.overlaps:
            first = (windows.numbers_BW == 0)[..., None, None]
            earlier, weights = (
                windows.tokens_of(t[..., :size], before=True) for t in (keys_BSC, gates_BSC)
            )
            weights = (weights + self.ape[:, :size]).masked_fill(first, float("-inf"))
            keys, gates = torch.cat((earlier, keys), 2), torch.cat((weights, gates), 2)
        shares = gates.softmax(2, dtype=torch.float32).to(keys.dtype)
        out = self.norm((keys * shares).sum(2))
        places_BW = windows.numbers_BW * self.ratio
        turn = adjacent_pairs(frame.rotary.rotation(places_BW), self.config)
        turned = turn_last(out[:, :, None], turn).squeeze(2)
        # Every rank's heads attend to them, so that their gradient is a sum over ranks.
        return turned if self.sequence_parallel else copy_to(turned, self.tp)


class CompressedIndexer(nn.Module):
    """Chooses among overlapping compressed keys; the same on every rank, and not trained, since a
    choice has no gradient."""

    def __init__(
        self, config: ModelConfig, tp: Group, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        heads, size = config.indexer.index_num_heads, config.indexer.index_head_dim
        self.linear_wq_b = DuplicatedLinear(
            config.latent.q_lora_rank, heads * size, dtype=dtype, device=device
        )
        self.linear_weights_proj = DuplicatedLinear(
            config.hidden_size, heads, dtype=torch.float32, device=device
        )
        self.compressor = Compressor(
            config, tp, size=size, ratio=OVERLAP_RATIO, overlaps=True, dtype=dtype, device=device
        )
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self,
        x_BSH: Tensor,
        query_BSC: Tensor,
        keys_BLE: Tensor,
        ready: Mask,
        turn: Rotation | None,
    ) -> Mask:
        """The mask of the compressed keys that each token attends to, chosen among those that are
        `ready` by keys of its own."""
        config, (b, s, _) = self.config, x_BSH.shape
        sizes = AttentionSizes(s, keys_BLE.shape[1], keys_BLE.device)
        count = min(config.indexer.index_topk, sizes.num_keys)
        if not count:
            return ready
        query = self.linear_wq_b(query_BSC).view(b, s, config.indexer.index_num_heads, -1)
        query_BSIE = turn_last(query, turn).float()
        weights_BSI = self.linear_weights_proj(x_BSH).float() * config.indexer.index_num_heads**-0.5
        parts = []
        for rows in query_parts(s, b * config.indexer.index_num_heads * sizes.num_keys):
            heads = torch.einsum("bsie,ble->bsil", query_BSIE[:, rows], keys_BLE.float())
            heads = F.relu(heads) * config.indexer.index_head_dim**-0.5
            scores_BRL = torch.einsum("bsil,bsi->bsl", heads, weights_BSI[:, rows])
            seen = ready.visible(rows, slice(0, sizes.num_keys), sizes)
            allowed = None if seen is None else seen[:, 0]
            parts.append(highest(scores_BRL, allowed, count))
        return Mask(chosen_BSC=torch.cat(parts, 1))


class CompressedCore(nn.Module):
    """What Megatron calls the core of such attention, as far as it has parameters."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: Group,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        heads = config.attention.num_heads // tp.size
        sinks = nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device))
        self.attn_sink = mark(sinks, split_dim=0)
        ratio = (
            (config.compression.compress_ratios or ())[layer] if layer < config.num_layers else 0
        )
        self.ratio, self.compressor, self.indexer = ratio, None, None
        if ratio:
            self.compressor = Compressor(
                config,
                tp,
                size=config.attention.head_dim,
                ratio=ratio,
                overlaps=layer in layer_sets.index_layers(config),
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
        if layer in layer_sets.index_layers(config):
            self.indexer = CompressedIndexer(config, tp, dtype=dtype, device=device)

    def keys(
        self, x_BSH: Tensor, frame: ForwardContext, layer: int
    ) -> tuple[Tensor, Tensor | None]:
        """The compressed keys that queries of a pass may attend to, [B, L, D], and, where they are
        chosen among, those that an indexer goes by."""
        compressor = cast(Compressor, self.compressor)
        windows, cache = frame.windows(self.ratio), frame.cache
        tokens = [windows.ordered(*gather_tokens((compressor.project(x_BSH),), frame.cp))]
        if self.indexer is not None:
            with torch.no_grad():
                given = gather_tokens((self.indexer.compressor.project(x_BSH),), frame.cp)
                tokens.append(windows.ordered(*given))
        if cache is not None:
            sizes = [t.shape[-1] for t in tokens]
            both = _with_kept(torch.cat(tokens, -1), cache, windows, layer)
            tokens = list(torch.split(both, sizes, -1))
        keys: list[Tensor] = [compressor(tokens[0], frame)]
        if self.indexer is not None:
            with torch.no_grad():
                keys.append(self.indexer.compressor(tokens[1], frame))
        if cache is not None:
            keys = [cache.compressed.append(layer, n, k, windows) for n, k in enumerate(keys)]
        return keys[0], keys[1] if len(keys) > 1 else None


def _with_kept(new_BSC: Tensor, cache: KVCache, windows: KeyWindows, layer: int) -> Tensor:
    """The tokens of a pass behind those that the cache kept, and keeps them for the next one."""
    kept_BPC = cache.read_state(layer, "conv")
    both = torch.cat((kept_BPC, new_BSC.to(kept_BPC.dtype)), 1)
    if cache.is_revertible:
        cache.write_steps(layer, "conv", both)
        cache.write_steps(layer, "recurrent", both.new_zeros(*new_BSC.shape[:2], 0, 0, 0))
    cache.write_state(layer, "conv", last_inputs(new_BSC, kept_BPC, windows.counts_B))
    return both


class CompressedAttention(nn.Module):
    """Self-attention of one layer; the norm before it belongs to the layer.

    Queries go through `q_lora_rank` numbers and are normalized head by head, without weights. The
    last part of a head turns; the output is turned back by its position, since values have turned
    too. It is projected by groups of heads first (`linear_o_group_proj`); ranks have groups, and
    N = num_heads / tp heads. `group_tap` is handed what is projected so, `[T * groups, C]`.

    Raises:
        LayoutError: the groups do not go evenly over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        tp = groups.tp
        if config.compression.out_groups % tp.size:
            raise LayoutError(
                f"{config.compression.out_groups} groups of heads cannot be split over "
                f"tp={tp.size}",
                hint="tp divides out_groups",
            )
        self.config, self.layer, self.tp = config, layer, tp
        self.group_tap: ActivationHook | None = None
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.num_heads, size = config.attention.num_heads // tp.size, config.attention.head_dim
        self.num_groups = config.compression.out_groups // tp.size
        hidden, rank = config.hidden_size, config.latent.q_lora_rank
        options = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": device}
        norm, partial = NormSpec.of(config), self.sequence_parallel
        self.linear_q_down_proj = DownLinear(hidden, rank, tp, **options)  # type: ignore[arg-type]
        self.q_layernorm = NormLayer(norm, rank, partial=partial, dtype=dtype, device=device)
        self.linear_q_up_proj = ColumnLinear(rank, config.attention.num_heads * size, tp, **options)  # type: ignore[arg-type]
        self.linear_kv_proj = DownLinear(hidden, size, tp, **options)  # type: ignore[arg-type]
        self.kv_layernorm = NormLayer(norm, size, partial=partial, dtype=dtype, device=device)
        self.core_attention = CompressedCore(
            config, layer, tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        columns = config.attention.num_heads * size // config.compression.out_groups
        weight = torch.empty(
            self.num_groups * config.compression.out_lora_rank, columns, dtype=dtype, device=device
        )
        self.linear_o_group_proj = mark(nn.Parameter(weight), split_dim=0)
        self.linear_proj = RowLinear(
            config.compression.out_groups * config.compression.out_lora_rank,
            hidden,
            tp,
            **options,  # type: ignore[arg-type]
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """What attention adds to the residuals, in x_TH's rows."""
        config, b, s = self.config, frame.num_rows, frame.num_tokens
        turn = adjacent_pairs(frame.rotation(self.layer), config)
        query_TC = self.q_layernorm(self.linear_q_down_proj(x_TH))
        query = self.linear_q_up_proj(query_TC).view(b, s, self.num_heads, -1)
        query = turn_last(rms_norm(query, None, config.norms.norm_eps), turn)
        keys = self.kv_layernorm(self.linear_kv_proj(x_TH))
        keys = self._whole(keys if self.sequence_parallel else copy_to(keys, self.tp), frame)
        keys_BLD = turn_last(keys[:, :, None], turn).squeeze(2)
        if frame.cache is not None:
            nothing = keys_BLD[:, None, :, :0]  # keys are the values, too
            keys_BLD = frame.cache.append(self.layer, keys_BLD[:, None], nothing)[0].squeeze(1)
        (keys_BLD,) = gather_tokens((keys_BLD,), frame.cp)
        more, ready = self._compressed(x_TH, query_TC, frame)
        out = self._attend(query.transpose(1, 2), keys_BLD, more, ready, frame)
        back = None if turn is None else Rotation(turn.cos_BSR, -turn.sin_BSR)
        out_TGC = turn_last(out, back).reshape(b * s, self.num_groups, -1)
        if self.group_tap is not None:
            out_TGC = self.group_tap(out_TGC.flatten(0, 1)).view(out_TGC.shape)
        weight_GRC = self.linear_o_group_proj.view(
            self.num_groups, config.compression.out_lora_rank, -1
        )
        result: Tensor = self.linear_proj(
            torch.einsum("tgc,grc->tgr", out_TGC, weight_GRC).flatten(1)
        )
        return result

    def _compressed(
        self, x_TH: Tensor, query_TC: Tensor, frame: ForwardContext
    ) -> tuple[Tensor | None, Mask]:
        """The compressed keys of whole rows, [B, L, D], and which of them each of this rank's
        tokens attends to; None in a layer without."""
        core = self.core_attention
        if core.compressor is None:
            return None, Mask()
        x_BSH = self._whole(x_TH, frame)
        keys_BLD, index_keys = core.keys(x_BSH, frame, self.layer)
        intervals = frame.windows(core.ratio).ready(keys_BLD.shape[1])
        first_BS, last_BS = (own_tokens(x_BS, frame.cp) for x_BS in intervals)
        ready = Mask(first_BS=first_BS, last_BS=last_BS)
        if core.indexer is not None and index_keys is not None:
            query_BSC, turn = self._whole(query_TC, frame), frame.rotation(self.layer)
            turn = adjacent_pairs(turn, self.config)
            ready = core.indexer(x_BSH, query_BSC, index_keys, ready, turn)
        return keys_BLD, ready

    def _attend(
        self,
        query_BNSD: Tensor,
        keys_BLD: Tensor,
        more_BLD: Tensor | None,
        ready: Mask,
        frame: ForwardContext,
    ) -> Tensor:
        """What each token reads of its window and of the compressed keys that are ready,
        [B, S, N, D]."""
        outs = []
        stretches = frame.stretches(self.layer)
        size = query_BNSD.shape[2] // len(stretches)
        for number, (num_keys, mask) in enumerate(stretches):
            part = slice(number * size, (number + 1) * size)
            keys = keys_BLD[:, :num_keys]
            if more_BLD is not None:
                mask = mask.beside(num_keys, ready.of_queries(part))
                keys = torch.cat((keys, more_BLD), 1)
            outs.append(
                attend(
                    query_BNSD[:, :, part],
                    keys[:, None],
                    keys[:, None],
                    mask,
                    scale=self.config.attention.head_dim**-0.5,
                    sinks_N=self.core_attention.attn_sink,
                    chance=None
                    if frame.draws is None
                    else frame.draws.attention(self.layer, number),
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _whole(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """What a rank has some rows of (sequence parallelism), for all tokens, [B, S, H]."""
        rows = gather_rows(x_TH, self.tp) if self.sequence_parallel else x_TH
        return rows.view(frame.num_rows, frame.num_tokens, -1)


def turn_last(x_BSND: Tensor, turn: Rotation | None) -> Tensor:
    """Heads whose last elements are turned, in pairs of neighbours."""
    if turn is None:
        return x_BSND
    size = turn.cos_BSR.shape[-1]
    still, last = x_BSND[..., :-size], x_BSND[..., -size:]
    return torch.cat((still, rotate(last, *turn, interleaved=True)), -1)
