"""The delta rule whose state decays element by element of a key (Kimi delta attention).

Shape suffixes: N heads, D size of a key, P size of a value; inside, the chunks of a row of tokens:
Z chunks of C tokens, R = B*N rows of states, and X matrices that meet the same keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.kernels.dispatch import Kernel
from megtool.kernels.recurrence import packages
from megtool.kernels.recurrence.delta_rule import CHUNK, runs_in_chunks, split_chunks, unit_vectors

_BLOCK = 8  # tokens between which decays are computed pair by pair


def kimi_delta_rule(
    query_BSND: Tensor,
    key_BSND: Tensor,
    value_BSNP: Tensor,
    decay_BSND: Tensor,
    beta_BSN: Tensor,
    *,
    state_BNDP: Tensor | None = None,
    runs_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of every token, in the values' dtype, and the state behind the last (float32).

    Of each head, with q and k of length 1 and q divided by the square root of its size:

        S <- diag(exp(decay)) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    `decay_BSND` is not above 0. The rest is as in `gated_delta_rule`, whose decay is one number for
    each head. Source: Kimi Linear, https://arxiv.org/abs/2510.26692, section 3.
    """
    cannot = packages.fla_cannot(value_BSNP, key_BSND, runs_BS)
    run = _KIMI_DELTA_RULE.on(value_BSNP.device, without=cannot)
    return run(query_BSND, key_BSND, value_BSNP, decay_BSND, beta_BSN, state_BNDP, runs_BS)


def _kimi_delta_rule(
    query_BSND: Tensor,
    key_BSND: Tensor,
    value_BSNP: Tensor,
    decay_BSND: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(value_BSNP.dtype, torch.float32)
    (b, s, n, p), d = value_BSNP.shape, key_BSND.shape[-1]
    if state_BNDP is None:
        state_BNDP = torch.zeros(b, n, d, p, dtype=kind, device=value_BSNP.device)
    size = min(CHUNK, -(-s // _BLOCK) * _BLOCK)
    query, key = unit_vectors(query_BSND, kind) * d**-0.5, unit_vectors(key_BSND, kind)
    query, key, value, decay, beta = (
        split_chunks(x.to(kind), size)
        for x in (query, key, value_BSNP, decay_BSND, beta_BSN.unsqueeze(-1))
    )
    total = decay.cumsum(-2)
    pairs = _PairProducts.apply(  # type: ignore[no-untyped-call]
        torch.stack((query, key)).flatten(1, 2), key.flatten(0, 1), total.flatten(0, 1)
    )
    within, alike = pairs.view(2, *key.shape[:2], size, size)
    last = total[..., -1:, :]
    since, until, across = total.exp(), (last - total).exp(), last.exp()
    if runs_BS is not None:
        runs = runs_in_chunks(runs_BS, n, size)
        before, own, end = runs[..., :1], runs[..., 1:], runs[..., -1:]
        since, until = since * (own == before)[..., None], until * (own == end)[..., None]
        across = across * (before == end)[..., None]
        same = own.unsqueeze(-1) == own.unsqueeze(-2)
        within, alike = within * same, alike * same
    out_ZRCP, last_RDP = _States.apply(  # type: ignore[no-untyped-call]
        query * since,
        key * since * beta,
        key * until,
        across.transpose(-1, -2),
        torch.stack((within, alike * beta)),
        value * beta,
        state_BNDP.to(kind).reshape(b * n, d, p),
    )
    out_BSNP = out_ZRCP.view(-1, b, n, size, p).permute(1, 0, 3, 2, 4).reshape(b, -1, n, p)[:, :s]
    return out_BSNP.to(value_BSNP.dtype), last_RDP.view(b, n, d, p)


class _PairProducts(torch.autograd.Function):
    """The sums over d of `x_id y_jd exp(total_id - total_jd)` for j up to i, [X, M, C, C].

    x [X, M, C, D], y and total [M, C, D], of M chunks. No exponent is above 0, however fast states
    decay: tokens of one block are multiplied pair by pair, and those of two by a product of
    matrices, with decays to and from the last token before the later block.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, total)
        count, m, c, _ = x.shape
        out = x.new_zeros(count, m, c, c)
        for first, left, right in _between_blocks(total):
            rows = slice(first, first + _BLOCK)
            keys = (y[:, :first] * right).transpose(-1, -2)
            out[:, :, rows, :first] = torch.matmul(x[:, :, rows] * left, keys)
        inside = _diagonal_blocks(out)
        x, y, total = (_in_blocks(t) for t in (x, y, total))
        for back in range(_BLOCK):
            keys = y[..., : _BLOCK - back, :] * _decay_over(total, back)
            products = torch.einsum("xmbid,mbid->xmbi", x[..., back:, :], keys)
            inside.diagonal(-back, -2, -1).copy_(products)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, total = ctx.saved_tensors
        (g,) = grads
        g_x, g_y = torch.empty_like(x), torch.zeros_like(y)
        g_x[:, :, :_BLOCK] = 0
        for first, left, right in _between_blocks(total):
            rows = slice(first, first + _BLOCK)
            block = g[:, :, rows, :first]
            g_x[:, :, rows] = torch.matmul(block, y[:, :first] * right) * left
            past = torch.matmul(block.transpose(-1, -2), x[:, :, rows] * left)
            g_y[:, :first].addcmul_(past.sum(0), right)
        inside = _diagonal_blocks(g)
        x_B, y_B, total_B, g_x_B, g_y_B = (_in_blocks(t) for t in (x, y, total, g_x, g_y))
        for back in range(_BLOCK):
            decay = _decay_over(total_B, back)
            g_B = inside.diagonal(-back, -2, -1).unsqueeze(-1)
            later, earlier = slice(back, None), slice(0, _BLOCK - back)
            g_x_B[..., later, :].addcmul_(g_B, y_B[..., earlier, :] * decay)
            g_y_B[..., earlier, :].addcmul_((g_B * x_B[..., later, :]).sum(0), decay)
        return g_x, g_y, (g_x * x).sum(0) - g_y * y


def _between_blocks(total: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Of every block but the first: its first token, and the decays from the token before it to
    those of the block, and to it from all earlier ones.
    """
    out = []
    for first in range(_BLOCK, total.shape[-2], _BLOCK):
        before = total[:, first - 1 : first]
        left = (total[:, first : first + _BLOCK] - before).exp()
        out.append((first, left, (before - total[:, :first]).exp()))
    return out


def _in_blocks(x: Tensor) -> Tensor:
    """A view of the tokens of a chunk (the last dim but one) as blocks of tokens."""
    return x.view(*x.shape[:-2], -1, _BLOCK, x.shape[-1])


def _diagonal_blocks(x_XMCC: Tensor) -> Tensor:
    """A view of the blocks on the diagonal, [X, M, blocks, block, block]."""
    count, m, c, _ = x_XMCC.shape
    x = x_XMCC.view(count, m, c // _BLOCK, _BLOCK, c // _BLOCK, _BLOCK)
    return x.diagonal(dim1=2, dim2=4).movedim(-1, 2)


def _decay_over(total_MBCD: Tensor, back: int) -> Tensor:
    """The decay over `back` tokens to each token of a block that has so many before it there."""
    size = total_MBCD.shape[-2]
    return (total_MBCD[..., back:, :] - total_MBCD[..., : size - back, :]).exp_()


class _States(torch.autograd.Function):
    """The states of all chunks, one after another, and what tokens read of them.

    `products` are two, within and system. With S the state before a chunk,
    U = (1 + tril(system, -1))^-1 (value - read S) is what the chunk's tokens add at once; their
    output is lookup S + within U, and the next state is across S + write^T U.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Tensor,
        read: Tensor,
        write: Tensor,
        across: Tensor,
        products: Tensor,
        value: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        within, system = products
        eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
        change = torch.empty_like(value)
        states = torch.empty(len(value) + 1, *state.shape, dtype=state.dtype, device=state.device)
        states[0] = state
        for z in range(len(value)):
            target = torch.baddbmm(value[z], read[z], states[z], alpha=-1)
            torch.bmm(inverse[z], target, out=change[z])
            torch.mul(states[z], across[z], out=states[z + 1])
            states[z + 1].baddbmm_(write[z].transpose(-1, -2), change[z])
        flat = (x.flatten(0, 1) for x in (torch.matmul(lookup, states[:-1]), within, change))
        out = torch.baddbmm(*flat).view_as(change)
        ctx.save_for_backward(lookup, read, write, across, within, inverse, change, states)
        return out, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lookup, read, write, across, within, inverse, change, states = ctx.saved_tensors
        g_out, g_state = grads
        g_value = torch.matmul(within.transpose(-1, -2), g_out)
        g_states = torch.empty_like(states)
        g_states[-1] = g_state
        for z in reversed(range(len(change))):
            g_change = g_value[z].baddbmm_(write[z], g_states[z + 1])
            g_value[z] = torch.bmm(inverse[z].transpose(-1, -2), g_change)
            torch.mul(g_states[z + 1], across[z], out=g_states[z])
            g_states[z].baddbmm_(lookup[z].transpose(-1, -2), g_out[z])
            g_states[z].baddbmm_(read[z].transpose(-1, -2), g_value[z], alpha=-1)
        before, behind = states[:-1].transpose(-1, -2), g_states[1:]
        changes = change.transpose(-1, -2)
        return (
            torch.matmul(g_out, before),
            torch.matmul(g_value, before).neg_(),
            torch.matmul(change, behind.transpose(-1, -2)),
            (states[:-1] * behind).sum(-1, keepdim=True),
            torch.stack(
                (
                    torch.matmul(g_out, changes).tril_(),
                    torch.matmul(g_value, changes).neg_().tril_(-1),
                )
            ),
            g_value,
            g_states[0],
        )


_KIMI_DELTA_RULE = Kernel(
    "kimi_delta_rule",
    _kimi_delta_rule,
    packages={"fla": packages.kimi_delta_rule},
    preferred=("fla",),
)
