"""What a kernel of a delta rule has to do, with one decay for each head or for each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.recurrence.causal_conv import runs_of

F64 = torch.float64
Rule = Callable[..., tuple[Tensor, Tensor]]


def inputs(
    tokens: int,
    *,
    rows: int = 2,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (6, 5),
    dtype: torch.dtype = F64,
    seed: int = 0,
    by_element: bool = False,
) -> tuple[Tensor, ...]:
    """Queries, keys, values, decays, betas, and a state; `heads` and `sizes` of keys and values.

    With `by_element` every element of a key has a decay of its own.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    (keys, values), (key_size, value_size) = heads, sizes
    decays = (rows, tokens, values, key_size) if by_element else (rows, tokens, values)
    return tuple(
        x.to(dtype)
        for x in (
            noise(rows, tokens, keys, key_size),
            noise(rows, tokens, keys, key_size),
            noise(rows, tokens, values, value_size),
            -noise(*decays).exp(),
            noise(rows, tokens, values).sigmoid(),
            noise(rows, values, key_size, value_size),
        )
    )


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    groups = value.shape[2] // key.shape[2]
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(groups, 2)
        for x in (query, key)
    )
    decay = decay if decay.ndim == 4 else decay[..., None]
    outs = []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        held = torch.einsum("bndp,bnd->bnp", state, key[:, t])
        change = beta[:, t].unsqueeze(-1) * (value[:, t] - held)
        state = state + torch.einsum("bnd,bnp->bndp", key[:, t], change)
        outs.append(torch.einsum("bndp,bnd->bnp", state, query[:, t]) / key.shape[-1] ** 0.5)
    return torch.stack(outs, 1), state


def check_finite_differences(rule: Rule, given: Sequence[Tensor], *, has_runs: bool) -> None:
    """Gradients of all inputs, of 7 tokens in two rows."""
    leaves = [x.requires_grad_() for x in given]
    runs = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2, 2]]) if has_runs else None
    assert torch.autograd.gradcheck(
        lambda *x: rule(*x[:5], state_BNDP=x[5], runs_BS=runs), tuple(leaves)
    )


def check_transformers(rule: Rule, theirs: Rule, given: Sequence[Tensor]) -> None:
    """Values and gradients are those of a function of transformers."""
    leaves = [x.requires_grad_() for x in given]
    ours = rule(*leaves[:5], state_BNDP=leaves[5])
    wanted = theirs(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    pulls = [torch.ones_like(x).cumsum(1) / x.shape[1] for x in ours]
    grads = [torch.autograd.grad(outs, leaves, pulls) for outs in (ours, wanted)]
    for got, want in zip((*ours, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_runs(rule: Rule, given: Sequence[Tensor], lengths: list[int]) -> None:
    """Every run of a row begins with a state of zeros; the first with the given one."""
    *tokens, state = given
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out, last = rule(*tokens, state_BNDP=state, runs_BS=runs_of(documents[None]))
    wanted: list[Tensor] = []
    for part in zip(*(x.split(lengths, 1) for x in tokens), strict=True):
        alone, behind = recurrence(*part, state)
        wanted.append(alone)
        state = torch.zeros_like(state)
    torch.testing.assert_close(out, torch.cat(wanted, 1))
    torch.testing.assert_close(last, behind)


def check_equal_keys(rule: Rule, given: Sequence[Tensor]) -> None:
    """Systems whose powers would overflow, and decays whose inverses would, stay finite."""
    query, key, value, decay, beta, state = given
    key = key[:, :1].expand_as(key).contiguous()
    for strong in (0.0, 200.0):
        leaves = [x.clone().requires_grad_() for x in (query, key, value, decay * strong)]
        leaves.append(torch.ones_like(beta).requires_grad_())
        out, _ = rule(*leaves)
        zeros = torch.zeros_like(state).double()
        exact, _ = recurrence(*(x.detach().double() for x in leaves), zeros)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def check_16_bits(rule: Rule, given: Sequence[Tensor]) -> None:
    """Numbers of 16 bits are computed in 32, and so is the last state."""
    dtype = given[0].dtype
    leaves: list[Any] = [x.requires_grad_() for x in given[:5]]
    out, last = rule(*leaves)
    want, want_last = rule(*(x.detach().float() for x in leaves))
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    assert torch.equal(out, want.to(dtype))
    assert torch.equal(last, want_last)
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), leaves))
