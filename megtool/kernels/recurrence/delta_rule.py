"""The gated delta rule (Qwen3-Next's linear attention): over chunks of tokens, or token by token.

Shape suffixes: K key heads, N value heads (a multiple of K; head n reads the keys of head
`n // (N / K)`), D size of a key, P size of a value; inside, the chunks of a row of tokens: Z chunks
of C tokens, and R = B*N rows of states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.dispatch import Chosen, Kernel
from megtool.kernels.recurrence import delta_rule_triton, packages

CHUNK = 64  # tokens
_EPS = 1e-6  # of the norms of queries and keys


def gated_delta_rule(
    query_BSKD: Tensor,
    key_BSKD: Tensor,
    value_BSNP: Tensor,
    decay_BSN: Tensor,
    beta_BSN: Tensor,
    *,
    state_BNDP: Tensor | None = None,
    runs_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of every token, in the values' dtype, and the state behind the last (float32).

    Of each head, with q and k of length 1 and q divided by the square root of its size:

        S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    `decay_BSN` is not above 0. `state_BNDP` is the state before the first token, None stands for
    zeros. It is zero again before every run but the first (`runs_BS`, int64, as
    `causal_conv.runs_of` numbers them). A token with beta and decay of 0 leaves the state as it is.
    Computed in float32, or in float64 of values in that.
    """
    cannot: tuple[Chosen, ...] = packages.fla_cannot(value_BSNP, key_BSKD, runs_BS)
    if not delta_rule_triton.fits(key_BSKD, value_BSNP):
        cannot = (*cannot, "triton")
    run = _DELTA_RULE.on(value_BSNP.device, without=cannot)
    return run(query_BSKD, key_BSKD, value_BSNP, decay_BSN, beta_BSN, state_BNDP, runs_BS)


def gated_delta_step(
    query_BKD: Tensor,
    key_BKD: Tensor,
    value_BNP: Tensor,
    decay_BN: Tensor,
    beta_BN: Tensor,
    state_BNDP: Tensor,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of one token: its output, and the state behind it.

    Every element of a key may have a decay of its own, [B, N, D] (`kimi_delta_rule`).
    """
    kind = state_BNDP.dtype
    groups = state_BNDP.shape[1] // key_BKD.shape[1]
    query, key = (
        unit_vectors(x, kind).repeat_interleave(groups, 1).flatten(0, 1).unsqueeze(1)
        for x in (query_BKD, key_BKD)
    )
    decay = decay_BN.to(kind).reshape(len(key), -1, 1)
    beta = beta_BN.to(kind).reshape(-1, 1, 1)
    value = value_BNP.to(kind).flatten(0, 1).unsqueeze(1)
    state = state_BNDP.flatten(0, 1) * decay.exp()
    change = beta * torch.baddbmm(value, key, state, alpha=-1)
    state = torch.baddbmm(state, key.transpose(1, 2), change)
    out = torch.bmm(query * query.shape[-1] ** -0.5, state)
    return out.view(value_BNP.shape).to(value_BNP.dtype), state.view(state_BNDP.shape)


def gated_delta_steps(
    query_BSKD: Tensor,
    key_BSKD: Tensor,
    value_BSNP: Tensor,
    decay_BSN: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_delta_rule` of a few tokens, one after the other as `gated_delta_step` has them: the
    output [B, S, N, P], the states before each of them [B, S, N, D, P], and the one after the last.
    """
    outs, states = [], []
    for n in range(value_BSNP.shape[1]):
        states.append(state_BNDP)
        out, state_BNDP = gated_delta_step(
            query_BSKD[:, n],
            key_BSKD[:, n],
            value_BSNP[:, n],
            decay_BSN[:, n],
            beta_BSN[:, n],
            state_BNDP,
        )
        outs.append(out)
    return torch.stack(outs, 1), torch.stack(states, 1), state_BNDP


def unit_vectors(x: Tensor, kind: torch.dtype) -> Tensor:
    """Vectors of length 1, but for an epsilon: along the last dim."""
    x = x.to(kind)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _delta_rule(
    query_BSKD: Tensor,
    key_BSKD: Tensor,
    value_BSNP: Tensor,
    decay_BSN: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(value_BSNP.dtype, torch.float32)
    (b, s, n, p), d = value_BSNP.shape, key_BSKD.shape[-1]
    if state_BNDP is None:
        state_BNDP = torch.zeros(b, n, d, p, dtype=kind, device=value_BSNP.device)
    size = min(CHUNK, s)
    query, key = unit_vectors(query_BSKD, kind) * d**-0.5, unit_vectors(key_BSKD, kind)
    runs = None if runs_BS is None else runs_in_chunks(runs_BS, n, size)
    out_ZRCP, last_RDP = _Chunks.apply(  # type: ignore[no-untyped-call]
        *(split_chunks(x, size) for x in (query, key, value_BSNP.to(kind))),
        *(split_chunks(x.to(kind).unsqueeze(-1), size).squeeze(-1) for x in (decay_BSN, beta_BSN)),
        state_BNDP.to(kind).reshape(b * n, d, p),
        runs,
    )
    out_BSNP = out_ZRCP.view(-1, b, n, size, p).permute(1, 0, 3, 2, 4).reshape(b, -1, n, p)[:, :s]
    return out_BSNP.to(value_BSNP.dtype), last_RDP.view(b, n, d, p)


def split_chunks(x_BSHD: Tensor, size: int) -> Tensor:
    """[Z, B*H, C, D], contiguous; the tokens that fill the last chunk up are zeros."""
    b, s, h, d = x_BSHD.shape
    x_BSHD = F.pad(x_BSHD, (0, 0, 0, 0, 0, -s % size)) if s % size else x_BSHD
    x = x_BSHD.view(b, -1, size, h, d).permute(1, 0, 3, 2, 4)
    return x.reshape(-1, b * h, size, d)


def runs_in_chunks(runs_BS: Tensor, heads: int, size: int) -> Tensor:
    """[Z, R, C + 1]: the number of the token before a chunk stands first; the tokens that fill the
    last chunk up belong to the last run.
    """
    missing = -runs_BS.shape[1] % size
    ends = (runs_BS[:, :1], runs_BS, runs_BS[:, -1:].expand(-1, missing))
    return torch.cat(ends, 1).unfold(1, size + 1, size).transpose(0, 1).repeat_interleave(heads, 1)


def _decays(decay_ZRC: Tensor, runs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of decays within a chunk: from its start to each token [Z, R, C], from each token to
    its end [Z, R, C], from its start to its end [Z, R, 1, 1], between tokens [Z, R, C, C].
    """
    total = decay_ZRC.cumsum(-1)
    last = total[..., -1:]
    c = total.shape[-1]
    later = torch.ones(c, c, dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    since, until, across = total.exp(), (last - total).exp(), last.exp()
    if runs is not None:
        before, own, end = runs[..., :1], runs[..., 1:], runs[..., -1:]
        since, until = since * (own == before), until * (own == end)
        across = across * (before == end)
        between = between * (own.unsqueeze(-1) == own.unsqueeze(-2))
    return since, until, across.unsqueeze(-1), between


def _products(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """`x y^T` of each chunk, computed once for the value heads that share it."""
    return torch.matmul(x, y.transpose(-1, -2)).repeat_interleave(heads, 1)


class _Chunks(torch.autograd.Function):
    """All chunks: what they do within themselves at once, and the states one after another.

    With S the state before a chunk, and products of decays e (since its start), f (until its end),
    D (between tokens): M = 1 + tril(beta k k^T D, -1) turns what tokens add one by one into
    U = M^-1 (beta v - beta e k S), which they add at once; o = e q S + (q k^T D) U, and the next
    state is (e at the end) S + (f k)^T U. The inverse of M is the UT transform.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        runs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        heads = value.shape[1] // key.shape[1]
        since, until, across, between = _decays(decay, runs)
        # No product is changed in place: who recomputes may have kept it.
        system = _products(key, key, heads) * between * beta.unsqueeze(-1)
        inverse = torch.linalg.solve_triangular(
            system, _eye(system), upper=False, unitriangular=True
        )
        keys = key.repeat_interleave(heads, 1)
        read = keys * (beta * since).unsqueeze(-1)
        write = (keys * until.unsqueeze(-1)).transpose(-1, -2)
        change = value * beta.unsqueeze(-1)
        states = torch.empty(len(value) + 1, *state.shape, dtype=state.dtype, device=state.device)
        states[0] = state
        for z in range(len(value)):
            target = torch.baddbmm(change[z], read[z], states[z], alpha=-1)
            torch.bmm(inverse[z], target, out=change[z])
            torch.mul(states[z], across[z], out=states[z + 1])
            states[z + 1].baddbmm_(write[z], change[z])
        within = _products(query, key, heads) * between
        lookup = query.repeat_interleave(heads, 1) * since.unsqueeze(-1)
        flat = (x.flatten(0, 1) for x in (torch.matmul(lookup, states[:-1]), within, change))
        out = torch.baddbmm(*flat).view_as(change)
        ctx.save_for_backward(query, key, value, decay, beta, inverse, change, states, runs)
        return out, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, decay, beta, inverse, change, states, runs = ctx.saved_tensors
        g_out, g_state = grads
        heads = value.shape[1] // key.shape[1]
        since, until, across, between = _decays(decay, runs)
        queries, keys = (x.repeat_interleave(heads, 1) for x in (query, key))
        alike, within = _products(key, key, heads), _products(query, key, heads)
        within_lower = within * between
        lookup = (queries * since.unsqueeze(-1)).transpose(-1, -2)
        read = (keys * (beta * since).unsqueeze(-1)).transpose(-1, -2)
        write = keys * until.unsqueeze(-1)
        # The states, from the last to the first: gradients of the states behind each chunk.
        g_target = torch.matmul(within_lower.transpose(-1, -2), g_out)
        g_states = torch.empty_like(states)
        g_states[-1] = g_state
        for z in reversed(range(len(value))):
            g_change = g_target[z].baddbmm_(write[z], g_states[z + 1])
            g_target[z] = torch.bmm(inverse[z].transpose(-1, -2), g_change)
            torch.mul(g_states[z + 1], across[z], out=g_states[z])
            g_states[z].baddbmm_(lookup[z], g_out[z]).baddbmm_(read[z], g_target[z], alpha=-1)
        before, behind = states[:-1].transpose(-1, -2), g_states[1:]
        changes = change.transpose(-1, -2)
        g_lookup = torch.matmul(g_out, before)
        g_read = torch.matmul(g_target, before).neg_()
        g_write = torch.matmul(change, behind.transpose(-1, -2))
        g_within = torch.matmul(g_out, changes).mul_(between)
        g_alike = torch.matmul(g_target, changes).neg_().tril_(-1).mul_(between)
        # Betas and decays, by what they scale.
        times_read, times_write = (g_read * keys).sum(-1), (g_write * keys).sum(-1) * until
        g_beta = (g_alike * alike).sum(-1) + (g_target * value).sum(-1) + times_read * since
        g_alike.mul_(beta.unsqueeze(-1))
        pairs = (g_alike * alike).addcmul_(g_within, within)
        g_total = pairs.sum(-1) - pairs.sum(-2) - times_write
        g_total += ((g_lookup * queries).sum(-1) + times_read * beta) * since
        g_last = (states[:-1] * behind).sum((-1, -2)) * across.flatten(-3)
        g_total[..., -1] += times_write.sum(-1) + g_last
        g_decay = g_total.flip(-1).cumsum(-1).flip(-1)
        # Queries and keys, summed over the value heads that share them.
        g_query = g_lookup.mul_(since.unsqueeze(-1))
        g_key = g_read.mul_((beta * since).unsqueeze(-1)).addcmul_(g_write, until.unsqueeze(-1))
        g_query, g_key = (_shared(x, heads) for x in (g_query, g_key))
        g_within, g_alike = (_shared(x, heads) for x in (g_within, g_alike))
        g_query = g_query + torch.matmul(g_within, key)
        g_key = g_key + torch.matmul(g_within.transpose(-1, -2), query)
        g_key += torch.matmul(g_alike + g_alike.transpose(-1, -2), key)
        g_value = g_target * beta.unsqueeze(-1)
        return g_query, g_key, g_value, g_decay, g_beta, g_states[0], None


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _shared(x: Tensor, heads: int) -> Tensor:
    """The sum over the value heads that share a key head."""
    return x if heads == 1 else x.view(len(x), -1, heads, *x.shape[2:]).sum(2)


_DELTA_RULE = Kernel(
    "gated_delta_rule",
    _delta_rule,
    triton=delta_rule_triton.gated_delta_rule,
    packages={"fla": packages.gated_delta_rule},
    preferred=("fla",),
)
