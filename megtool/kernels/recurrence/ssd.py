"""The recurrence of Mamba-2, chunk by chunk (state-space duality; Dao and Gu, arXiv 2405.21060).

For every head: `state[t] = exp(dt[t] a) state[t-1] + dt[t] x[t] b[t]^T` and `y[t] = state[t] c[t] +
d x[t]`; the heads of a group share b and c.

Shape suffixes besides those of `model.batch`: here N are heads of the recurrence, D their size, G
groups, Z the state size, Q tokens of a chunk; X = B*N and Y = B*G are flattened.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megtool.kernels.dispatch import Chosen, Kernel
from megtool.kernels.recurrence import packages, ssd_triton

CHUNK = 64


class ScanInputs(NamedTuple):
    """What the recurrence is given: x [B, S, N, D], dt [B, S, N] (fp32, not negative), a [N] (fp32,
    negative), b and c [B, S, G, Z], d [N]; optionally the state before the first token [B, N, D, Z]
    and the runs of tokens, [B, S] (int64, from `causal_conv.runs_of`), before each of which the
    state is zero."""

    x_BSND: Tensor
    dt_BSN: Tensor
    a_N: Tensor
    b_BSGZ: Tensor
    c_BSGZ: Tensor
    d_N: Tensor
    state_BNDZ: Tensor | None = None
    runs_BS: Tensor | None = None


def ssd_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """`y` [B, S, N, D] in x's dtype, and the state after the last token [B, N, D, Z] (fp32).

    Computed in fp32. A token whose dt is 0 leaves the state as it is (padding). No gradient comes
    from, or goes to, states.
    """
    # torch.compile has a loop over chunks here, with a backward of its own.
    cannot: tuple[Chosen, ...] = ("compile", *packages.mamba_cannot(inputs.x_BSND))
    if not ssd_triton.fits(inputs.x_BSND, inputs.b_BSGZ):
        cannot = (*cannot, "triton")
    return _SSD_SCAN.on(inputs.x_BSND.device, without=cannot)(*inputs)


def ssd_step(inputs: ScanInputs, state_BNDZ: Tensor) -> tuple[Tensor, Tensor]:
    """`ssd_scan` of a single token for each row, after a state; without gradients."""
    x_BND, dt_BN, b_BGZ, c_BGZ = (
        t[:, 0].to(state_BNDZ.dtype)
        for t in (inputs.x_BSND, inputs.dt_BSN, inputs.b_BSGZ, inputs.c_BSGZ)
    )
    share = x_BND.shape[1] // b_BGZ.shape[1]
    b_BNZ, c_BNZ = b_BGZ.repeat_interleave(share, 1), c_BGZ.repeat_interleave(share, 1)
    decay_BN = torch.exp(dt_BN * inputs.a_N)
    added = (x_BND * dt_BN[:, :, None])[..., None] * b_BNZ[:, :, None]
    state = torch.addcmul(added, state_BNDZ, decay_BN[:, :, None, None])
    y_BND = (state @ c_BNZ[..., None])[..., 0] + x_BND * inputs.d_N.to(x_BND)[:, None]
    return y_BND[:, None].to(inputs.x_BSND.dtype), state


def ssd_steps(inputs: ScanInputs, state_BNDZ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`ssd_scan` of a few tokens, one after the other as `ssd_step` has them: `y` [B, S, N, D], the
    states before each of them [B, S, N, D, Z], and the state after the last."""
    outs, states = [], []
    for n in range(inputs.x_BSND.shape[1]):
        x_B1ND, dt_B1N, b_B1GZ, c_B1GZ = (
            t[:, n : n + 1] for t in (inputs.x_BSND, inputs.dt_BSN, inputs.b_BSGZ, inputs.c_BSGZ)
        )
        token = inputs._replace(x_BSND=x_B1ND, dt_BSN=dt_B1N, b_BSGZ=b_B1GZ, c_BSGZ=c_B1GZ)
        states.append(state_BNDZ)
        out, state_BNDZ = ssd_step(token, state_BNDZ)
        outs.append(out)
    return torch.cat(outs, 1), torch.stack(states, 1), state_BNDZ


def _ssd_scan(
    x_BSND: Tensor,
    dt_BSN: Tensor,
    a_N: Tensor,
    b_BSGZ: Tensor,
    c_BSGZ: Tensor,
    d_N: Tensor,
    state_BNDZ: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    values = (x_BSND, dt_BSN, a_N, b_BSGZ, c_BSGZ, d_N, state_BNDZ, runs_BS)
    out: tuple[Tensor, Tensor] = _Scan.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _Flat(NamedTuple):
    """Inputs in fp32 with heads first, so that a chunk is a slice that needs no copy."""

    x_XSD: Tensor
    dt_XS: Tensor
    a_X: Tensor
    b_YSZ: Tensor
    c_YSZ: Tensor

    @classmethod
    def of(cls, inputs: ScanInputs, kind: torch.dtype) -> _Flat:
        return cls(
            _heads_first(inputs.x_BSND.to(kind)),
            inputs.dt_BSN.to(kind).transpose(1, 2).flatten(0, 1),
            inputs.a_N.to(kind).repeat(inputs.x_BSND.shape[0]),
            _heads_first(inputs.b_BSGZ.to(kind)),
            _heads_first(inputs.c_BSGZ.to(kind)),
        )

    def part(self, chunk: slice) -> _Flat:
        return _Flat(
            self.x_XSD[:, chunk],
            self.dt_XS[:, chunk],
            self.a_X,
            self.b_YSZ[:, chunk],
            self.c_YSZ[:, chunk],
        )

    def grouped(self, x_XQD: Tensor) -> Tensor:
        """The heads of a group next to each other: [Y, Q, heads * D]."""
        groups = self.b_YSZ.shape[0]
        return _by_group(x_XQD, groups).transpose(1, 2).flatten(2)

    def ungrouped(self, x_YQE: Tensor) -> Tensor:
        """The way back, a view: [Y, heads, Q, D]."""
        heads = self.x_XSD.shape[0] // self.b_YSZ.shape[0]
        return x_YQE.view(*x_YQE.shape[:2], heads, -1).transpose(1, 2)


class _Decays:
    """What is left of a state between the tokens of a chunk, its begin and its end."""

    def __init__(self, part: _Flat, runs_BS: Tensor | None, chunk: slice) -> None:
        sums_XQ = (part.dt_XS * part.a_X[:, None]).cumsum(1)
        size = sums_XQ.shape[1]
        later_QQ = torch.ones(size, size, dtype=torch.bool, device=sums_XQ.device).triu(1)
        inner_XQQ = sums_XQ[:, :, None] - sums_XQ[:, None, :]
        self.inner_XQQ = inner_XQQ.masked_fill_(later_QQ, float("-inf")).exp_()
        self.since_XQ = sums_XQ.exp()  # from the begin to a token
        self.until_XQ = (sums_XQ[:, -1:] - sums_XQ).exp()  # from a token to the end
        self.whole_X = self.since_XQ[:, -1]
        if runs_BS is not None:
            own_BQ = runs_BS[:, chunk]
            heads = sums_XQ.shape[0] // own_BQ.shape[0]
            before_B1 = runs_BS[:, max(0, chunk.start - 1)][:, None]
            same_BQQ = own_BQ[:, :, None] == own_BQ[:, None, :]
            self.inner_XQQ *= same_BQQ.repeat_interleave(heads, 0)
            self.since_XQ *= (own_BQ == before_B1).repeat_interleave(heads, 0)
            self.until_XQ *= (own_BQ == own_BQ[:, -1:]).repeat_interleave(heads, 0)
            self.whole_X = self.since_XQ[:, -1]


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]


class _Scan(torch.autograd.Function):
    """Keeps its inputs, and the state at the begin of every chunk, for backward."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        inputs = ScanInputs(*values)
        x_BSND, (rows, tokens, heads, size) = inputs.x_BSND, inputs.x_BSND.shape
        kind = torch.promote_types(x_BSND.dtype, torch.float32)
        flat = _Flat.of(inputs, kind)
        state_size, groups = inputs.b_BSGZ.shape[3], flat.b_YSZ.shape[0]
        if inputs.state_BNDZ is None:
            state_XDZ = flat.x_XSD.new_zeros(rows * heads, size, state_size)
        else:
            state_XDZ = inputs.state_BNDZ.to(kind).flatten(0, 1)
        y_XSD = torch.empty_like(flat.x_XSD)
        begins = []
        for chunk in _chunks(tokens):
            part = flat.part(chunk)
            decays = _Decays(part, inputs.runs_BS, chunk)
            scores_YQQ = part.c_YSZ @ part.b_YSZ.mT
            weights = _by_group(decays.inner_XQQ, groups)
            weights *= scores_YQQ[:, None]
            decays.inner_XQQ *= part.dt_XS[:, None]
            y_XQD = decays.inner_XQQ @ part.x_XSD
            seen = part.ungrouped(part.c_YSZ @ state_XDZ.view(groups, -1, state_size).mT)
            y_YRQD = _by_group(y_XQD, groups)
            y_YRQD.addcmul_(seen, _by_group(decays.since_XQ, groups)[..., None])
            y_XSD[:, chunk] = y_XQD
            begins.append(state_XDZ)
            fed = part.x_XSD * (decays.until_XQ * part.dt_XS)[..., None]
            added = (part.grouped(fed).mT @ part.b_YSZ).view_as(state_XDZ)
            state_XDZ = added.addcmul_(state_XDZ, decays.whole_X[:, None, None])
        y_BNSD = y_XSD.view(rows, heads, tokens, size)
        y_BSND = y_BNSD.transpose(1, 2).to(x_BSND.dtype, memory_format=torch.contiguous_format)
        if x_BSND.dtype == kind:
            y_BSND.addcmul_(x_BSND, inputs.d_N.to(kind)[:, None])
        else:
            skipped = x_BSND.to(kind) * inputs.d_N.to(kind)[:, None]
            y_BSND = (y_BNSD.transpose(1, 2) + skipped).to(x_BSND.dtype)
        ctx.save_for_backward(*inputs[:6], inputs.runs_BS, *begins)
        state_BNDZ = state_XDZ.view(rows, heads, size, state_size)
        ctx.mark_non_differentiable(state_BNDZ)
        return y_BSND, state_BNDZ

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        inputs, begins = ScanInputs(*saved[:6])._replace(runs_BS=saved[6]), saved[7:]
        rows, tokens, heads, _ = inputs.x_BSND.shape
        kind = torch.promote_types(inputs.x_BSND.dtype, torch.float32)
        flat, g_BSND = _Flat.of(inputs, kind), grads[0].to(kind)
        g_XSD = _heads_first(g_BSND)
        out = _Flat(*(torch.empty_like(t) for t in flat))
        out.a_X.zero_()
        later_XDZ: Tensor | None = None
        for chunk, begin_XDZ in zip(reversed(_chunks(tokens)), reversed(begins), strict=True):
            decays = _Decays(flat.part(chunk), inputs.runs_BS, chunk)
            later_XDZ = _backward_of_chunk(
                flat.part(chunk), decays, begin_XDZ, g_XSD[:, chunk], later_XDZ, out.part(chunk)
            )
        d_N = inputs.d_N.to(kind)
        gx_BSND = _heads_last(out.x_XSD, rows) + g_BSND * d_N[:, None]
        gd_N = (g_BSND * inputs.x_BSND).sum((0, 1, 3))
        gdt_BSN = out.dt_XS.view(rows, heads, tokens).transpose(1, 2)
        return (
            gx_BSND.to(inputs.x_BSND.dtype),
            gdt_BSN.to(inputs.dt_BSN.dtype),
            out.a_X.view(rows, heads).sum(0).to(inputs.a_N.dtype),
            _heads_last(out.b_YSZ, rows).to(inputs.b_BSGZ.dtype),
            _heads_last(out.c_YSZ, rows).to(inputs.c_BSGZ.dtype),
            gd_N.to(inputs.d_N.dtype),
            None,
            None,
        )


def _backward_of_chunk(
    part: _Flat,
    decays: _Decays,
    begin_XDZ: Tensor,
    g_XQD: Tensor,
    later_XDZ: Tensor | None,
    out: _Flat,
) -> Tensor:
    """Write the gradients of a chunk into `out`; returns that of the state at its begin.

    `later_XDZ` is the gradient of the state at its end.
    """
    x, dt_XQ, groups = part.x_XSD, part.dt_XS, part.b_YSZ.shape[0]
    inner_YRQQ = _by_group(decays.inner_XQQ, groups)
    scores_YQQ = part.c_YSZ @ part.b_YSZ.mT
    weights_XQQ = (inner_YRQQ * scores_YQQ[:, None]).flatten(0, 1)
    gweights_XQQ = g_XQD @ x.mT
    # Within the chunk. Sums over queries need no dt yet, which is the same for all of them.
    gscores = (gweights_XQQ * decays.inner_XQQ).mul_(dt_XQ[:, None])
    gscores_YQQ = _by_group(gscores, groups).sum(1)
    shares_XQQ = gweights_XQQ.mul_(weights_XQQ)
    gx_XQD = (weights_XQQ.mT @ g_XQD).mul_(dt_XQ[..., None])
    gdt_XQ = shares_XQQ.sum(1)
    gsums_XQ = (shares_XQQ @ dt_XQ[..., None])[..., 0] - gdt_XQ * dt_XQ
    torch.matmul(gscores_YQQ.mT, part.c_YSZ, out=(gb_YQZ := torch.empty_like(out.b_YSZ)))
    torch.matmul(gscores_YQQ, part.b_YSZ, out=(gc_YQZ := torch.empty_like(out.c_YSZ)))
    # What tokens see of the state at the begin.
    begin_YEZ = begin_XDZ.reshape(groups, -1, begin_XDZ.shape[2])
    seen = part.ungrouped(part.c_YSZ @ begin_YEZ.mT)
    g_since_XQD = g_XQD * decays.since_XQ[..., None]
    g_since_YQE = part.grouped(g_since_XQD)
    gsums_XQ += (_by_group(g_since_XQD, groups) * seen).sum(-1).flatten(0, 1)
    gc_YQZ.baddbmm_(g_since_YQE, begin_YEZ)
    gbegin_XDZ = (g_since_YQE.mT @ part.c_YSZ).view_as(begin_XDZ)
    if later_XDZ is not None:  # what tokens add to the state at the end
        later_YEZ = later_XDZ.reshape(groups, -1, later_XDZ.shape[2])
        fed_XQ = decays.until_XQ * dt_XQ
        taken_XQD = part.ungrouped(part.b_YSZ @ later_YEZ.mT).flatten(0, 1)
        gx_XQD.addcmul_(taken_XQD, fed_XQ[..., None])
        gfed_XQ = (x * taken_XQD).sum(-1) * decays.until_XQ
        gdt_XQ = gdt_XQ + gfed_XQ
        gfed_XQ = gfed_XQ * dt_XQ
        gsums_XQ -= gfed_XQ
        kept_X = (begin_XDZ * later_XDZ).sum((1, 2)) * decays.whole_X
        gsums_XQ[:, -1] += gfed_XQ.sum(1) + kept_X
        gb_YQZ.baddbmm_(part.grouped(x * fed_XQ[..., None]), later_YEZ)
        gbegin_XDZ.addcmul_(later_XDZ, decays.whole_X[:, None, None])
    glogs_XQ = gsums_XQ.flip(1).cumsum(1).flip(1)
    out.x_XSD.copy_(gx_XQD)
    out.dt_XS.copy_(gdt_XQ + glogs_XQ * part.a_X[:, None])
    out.a_X.add_((glogs_XQ * dt_XQ).sum(1))
    out.b_YSZ.copy_(gb_YQZ)
    out.c_YSZ.copy_(gc_YQZ)
    return gbegin_XDZ


def _by_group(x_X: Tensor, groups: int) -> Tensor:
    return x_X.view(groups, -1, *x_X.shape[1:])


def _heads_first(x_BSND: Tensor) -> Tensor:
    return x_BSND.transpose(1, 2).flatten(0, 1)


def _heads_last(x_XSD: Tensor, rows: int) -> Tensor:
    return _by_group(x_XSD, rows).transpose(1, 2)


_SSD_SCAN = Kernel(
    "ssd_scan",
    _ssd_scan,
    triton=ssd_triton.ssd_scan,
    packages={"mamba-ssm": packages.ssd_scan},
    preferred=("mamba-ssm",),
)
