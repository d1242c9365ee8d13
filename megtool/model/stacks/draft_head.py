"""An EAGLE-3 draft head: a small decoder on the states of a model (arXiv 2503.01840).

At position i it combines the model's states there, of some of its layers, with the embedding of
token i + 1, and predicts token i + 2. Further on, where the model has no states yet, its own stand
for them. Source: ModelOpt 0.47, `torch/speculative/plugins/modeling_eagle.py`; vLLM,
`model_executor/models/llama_eagle3.py` (`norm_before_residual`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.model.attention.grouped_query import Attention
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import KVCache
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear
from megtool.model.layers.mlp import Mlp
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.masks import masks_of
from megtool.model.positions.rotary import Rotary
from megtool.model.stacks.layer import TransformerLayer
from megtool.parallel.process_groups import ALONE, ProcessGroups
from megtool.spec.model_config import ModelConfig


class FirstDraftLayer(nn.Module):
    """The layer that reads a token's embedding beside the state, [T, 2 H], both normalized.

    With `norm_before_residual` the normalized state is the residual, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        norm_before_residual: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        hidden, spec = config.hidden_size, NormSpec.of(config)
        self.embedding_norm = NormLayer(spec, hidden, dtype=dtype, device=device)
        self.hidden_norm = NormLayer(spec, hidden, dtype=dtype, device=device)
        self.self_attention = Attention(config, 0, groups, dtype=dtype, device=device)
        self.self_attention.linear_qkv = ColumnLinear(
            2 * hidden,
            self.self_attention.linear_qkv.weight.shape[0],
            bias=config.attention.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.mlp = Mlp(config, 0, groups, dtype=dtype, device=device)

    def forward(self, x_TH: Tensor, embedded_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The residual behind the layer."""
        normal_TH = self.hidden_norm(x_TH)
        read = torch.cat((self.embedding_norm(embedded_TH), normal_TH), -1)
        residual_TH = normal_TH if self.norm_before_residual else x_TH
        normal_TH, x_TH = self.mlp.linear_fc1.of_sum(self.self_attention(read, frame), residual_TH)
        out: Tensor = x_TH + self.mlp(normal_TH)
        return out


class DraftHead(nn.Module):
    """A head with `num_states` states of `state_size` elements to read; each rank has all of it.

    `config` is that of a decoder with the head's layers and the model's vocabulary. Without
    `lm_head` [V', H] and `embedding` [V, H] those of the model are used. `tokens` [V'] are the
    model's tokens that the head's stand for, where these are fewer.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        num_states: int,
        state_size: int,
        norm_before_residual: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.rotary = Rotary(config, dtype=dtype)
        self.fc = ColumnLinear(num_states * state_size, hidden, dtype=dtype, device=device)
        self.first_layer = FirstDraftLayer(
            config,
            groups,
            norm_before_residual=norm_before_residual,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(
            TransformerLayer(config, n, groups, dtype=dtype, device=device)
            for n in range(1, config.num_layers)
        )
        self.norm = NormLayer(NormSpec.of(config), hidden, dtype=dtype, device=device)
        self.lm_head: Tensor | None = None
        self.embedding: Tensor | None = None
        self.tokens: Tensor | None = None

    def combine(self, states_TC: Tensor) -> Tensor:
        """The first state [T, H] of the model's, side by side."""
        out: Tensor = self.fc(states_TC)
        return out

    def frame(self, batch: Batch, cache: KVCache) -> ForwardContext:
        """The context of a pass over the batch; allocates the cache's slots for it."""
        rows, tokens = batch.shape
        span = cache.begin(batch)
        self.rotary.forget()
        return ForwardContext(
            num_rows=rows,
            num_tokens=tokens,
            positions_BS=span.positions_BS,
            rotary=self.rotary,
            masks=masks_of(self.config, span, None, ALONE),
            span=span,
            cache=cache,
            real_BS=span.real_BS,
        )

    def forward(self, x_TH: Tensor, embedded_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The head's own states [T, H], before the norm; they stand for the model's further on."""
        x_TH = self.first_layer(x_TH, embedded_TH, frame)
        for layer in self.layers:
            x_TH = layer(x_TH, frame)
        return x_TH

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The head's own embedding of the model's tokens, x_TH."""
        if self.embedding is None:
            raise UsageError("the head has no embedding of its own")
        return F.embedding(tokens_BS.flatten(), self.embedding)

    def logits(self, x_TH: Tensor) -> Tensor:
        """Logits over the model's vocabulary [T, V], of normalized states, by the head's own output
        layer; -inf for tokens that the head does not know."""
        if self.lm_head is None:
            raise UsageError("the head has no output layer of its own")
        logits_TV = F.linear(x_TH, self.lm_head).float()
        if self.tokens is None:
            return logits_TV
        all_TV = logits_TV.new_full(
            (len(logits_TV), self.config.embedding.vocab_size), float("-inf")
        )
        return all_TV.index_copy_(1, self.tokens, logits_TV)
