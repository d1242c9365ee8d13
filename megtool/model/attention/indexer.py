"""DeepSeek Sparse Attention (DSA): an indexer chooses the tokens that attention is limited to.

An indexer scores every token before a token by a few small heads, and attention sees only those
that score highest. As in transformers, the choice has no gradient, and its parameters are not
trained; DeepSeek's rotation of queries and keys (a Hadamard transform), which changes no score, and
their rounding to FP8 are left out. Sources: DeepSeek-V3.2-Exp, `inference/model.py`;
transformers' `deepseek_v32` and `glm_moe_dsa`; megatron-core 0.19.2,
`transformer/experimental_attention_variant/dsa.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.attention.mask import AttentionSizes, Mask
from megtool.kernels.elementwise.rotary import rotate
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ActivationHook
from megtool.model.positions.rotary import Rotation
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

EPS = 1e-6
"""Of the norm of keys, in every model."""

_SCORES = 1 << 25  # of all heads, that are in memory at once


def query_parts(num_queries: int, num_scores: int) -> Iterator[slice]:
    """Queries whose scores, so many for each, are in memory at a time."""
    step = max(1, _SCORES // num_scores)
    for start in range(0, num_queries, step):
        yield slice(start, min(start + step, num_queries))


def highest(scores_BRL: Tensor, allowed_BRL: Tensor | None, count: int) -> Tensor:
    """The numbers of the keys with the highest scores among those that are allowed, int32
    [B, R, count] or fewer; -1 for what lists are filled up with.

    Of equal scores the first ones count, however many keys there are: so every layout of ranks
    chooses the same.
    """
    count = min(count, scores_BRL.shape[-1])
    if allowed_BRL is not None:
        scores_BRL = scores_BRL.masked_fill(~allowed_BRL, float("-inf"))
    least_BR1 = scores_BRL.topk(count, dim=-1).values[..., -1:]
    chosen, equal = scores_BRL > least_BR1, scores_BRL == least_BR1
    missing_BR1 = count - chosen.sum(-1, keepdim=True)
    chosen = chosen | (equal & (equal.cumsum(-1) <= missing_BR1))
    if allowed_BRL is not None:
        chosen = chosen & allowed_BRL
    marked, numbers = chosen.to(torch.uint8).topk(count, dim=-1)
    return torch.where(marked > 0, numbers, -1).to(torch.int32)


def check_sources(config: ModelConfig, layers: Iterable[int]) -> None:
    """Refuse a part of a model in which a layer lacks the one whose choice it shares.

    Raises:
        LayoutError: naming both layers.
    """
    here = set(layers)
    for layer in (
        sorted(here & layer_sets.attn_layers(config)) if config.indexer.shared_index_layers else ()
    ):
        if (source := layer_sets.index_source(config, layer)) not in here:
            raise LayoutError(
                f"layer {layer} attends to the tokens that layer {source} chooses, which is on "
                "another pipeline stage",
                hint="cut the pipeline before layers with an indexer of their own "
                "(--pipeline-layout)",
            )


class DuplicatedLinear(nn.Module):
    """`y = x W^T` with all of W on every rank, and no gradient; `tap` is handed the rows of x."""

    def __init__(
        self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.tap: ActivationHook | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The product, computed in the weight's dtype."""
        if self.tap is not None:
            x = self.tap(x.flatten(0, -2)).view(x.shape)
        return F.linear(x.to(self.weight.dtype), self.weight)


class IndexNorm(nn.Module):
    """The layer norm of an indexer's keys."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        ones = torch.ones(size, dtype=dtype, device=device)
        zeros = torch.zeros(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(ones, requires_grad=False)
        self.bias = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized over its last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)


class Indexer(nn.Module):
    """The indexer of one layer; every tensor-parallel rank has all of it, and chooses the same.

    I heads of E = `index_head_dim` elements read the compressed queries, and one key of that size,
    which all heads share, the hidden state. The weights of the heads are float32.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        heads, size, hidden = (
            config.indexer.index_num_heads,
            config.indexer.index_head_dim,
            config.hidden_size,
        )
        self.linear_wq_b = DuplicatedLinear(
            config.latent.q_lora_rank, heads * size, dtype=dtype, device=device
        )
        self.linear_wk = DuplicatedLinear(hidden, size, dtype=dtype, device=device)
        self.k_norm = IndexNorm(size, dtype=dtype, device=device)
        self.linear_weights_proj = DuplicatedLinear(
            hidden, heads, dtype=torch.float32, device=device
        )

    @torch.no_grad()
    def keys(self, x_BSH: Tensor, turn: Rotation | None) -> Tensor:
        """What tokens are ranked by: [B, S, 1, E]."""
        return self._rotate(self.k_norm(self.linear_wk(x_BSH))[:, :, None], turn)

    @torch.no_grad()
    def choose(
        self,
        x_BSH: Tensor,
        query_BSC: Tensor,
        keys_BLE: Tensor,
        turn: Rotation | None,
        frame: ForwardContext,
        layer: int,
    ) -> list[tuple[int, Mask]]:
        """The `stretches` of a layer under masks of the tokens that are chosen among them.

        `query_BSC` are the compressed queries after their norm; `keys_BLE` are the keys of all
        tokens that queries may attend to.
        """
        config = self.config
        stretches = frame.stretches(layer)
        if max(keys for keys, _ in stretches) <= config.indexer.index_topk:
            return stretches
        b, s = x_BSH.shape[:2]
        query = self.linear_wq_b(query_BSC).view(b, s, config.indexer.index_num_heads, -1)
        query = self._rotate(query, turn).float()
        weights_BSI = self.linear_weights_proj(x_BSH).float() * config.indexer.index_num_heads**-0.5
        out, size = [], s // len(stretches)
        for number, (keys, mask) in enumerate(stretches):
            part = slice(number * size, (number + 1) * size)
            keys_B1EL = keys_BLE[:, :keys].float().transpose(1, 2)[:, None]
            out.append((keys, self._limited(mask, query[:, part], weights_BSI[:, part], keys_B1EL)))
        return out

    def _limited(
        self, mask: Mask, query_BSIE: Tensor, weights_BSI: Tensor, keys_B1EL: Tensor
    ) -> Mask:
        """The mask without the keys that are not among the highest scores of its own."""
        b, s, heads, size = query_BSIE.shape
        sizes = AttentionSizes(s, keys_B1EL.shape[-1], query_BSIE.device)
        parts = []
        for rows in query_parts(s, b * heads * sizes.num_keys):
            heads_BRIL = F.relu(torch.matmul(query_BSIE[:, rows], keys_B1EL) * size**-0.5)
            scores_BRL = torch.matmul(weights_BSI[:, rows, None], heads_BRIL).squeeze(2)
            seen = mask.visible(rows, slice(0, sizes.num_keys), sizes)
            allowed = None if seen is None else seen[:, 0]
            parts.append(highest(scores_BRL, allowed, self.config.indexer.index_topk))
        return Mask(chosen_BSC=torch.cat(parts, 1), start=sizes.offset if mask.is_causal else None)

    def _rotate(self, x_BSIE: Tensor, turn: Rotation | None) -> Tensor:
        """Heads whose first elements are turned: in halves, or in pairs."""
        if turn is None:
            return x_BSIE
        config, interleaved = self.config, self.config.indexer.index_interleaved
        positions = config.positions
        if positions.rope_interleaved != interleaved:
            half = turn[0].shape[-1] // 2
            angles = [t[..., ::2] if positions.rope_interleaved else t[..., :half] for t in turn]
            cos, sin = (
                t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in angles
            )
            turn = Rotation(cos, sin)
        return rotate(x_BSIE, *turn, interleaved=interleaved)


class SparseAttention(nn.Module):
    """What Megatron calls the core of sparse attention, as far as it has parameters."""

    def __init__(self, indexer: Indexer) -> None:
        super().__init__()
        self.indexer = indexer
