"""What the Triton kernels of recurrences share: rows and decays of a chunk, parts of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megtool.kernels.launch import power

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 32  # tokens
_MOST_STATE = 64 * 128  # elements of a state, of which a program keeps several in fast memory


def num_cuts(head_size: int, state_size: int) -> int:
    """The least number of equal parts of a head whose states are small enough; 0 if there is none.

    The elements of a head, each of which has a state of `state_size`, have nothing to do with each
    other.
    """
    most = _MOST_STATE // max(16, power(state_size))
    sizes = (n for n in range(1, head_size + 1) if not head_size % n)
    return next((n for n in sizes if max(16, power(head_size // n)) <= most), 0)


def load_column(
    ptr: Any,
    row: Any,
    head: Any,
    start: Any,
    num_tokens: Any,
    num_heads: Any,
    CHUNK: tl.constexpr,
) -> Any:
    """The numbers of one head, one for each token of a chunk, in fp32; zeros beyond the last."""
    token = start + tl.arange(0, CHUNK)
    places = (row * num_tokens + token) * num_heads + head
    return tl.load(ptr + places, mask=token < num_tokens, other=0.0).to(tl.float32)


def store_column(
    ptr: Any,
    values: Any,
    row: Any,
    head: Any,
    start: Any,
    num_tokens: Any,
    num_heads: Any,
    CHUNK: tl.constexpr,
) -> None:
    """The way back of `load_column`."""
    token = start + tl.arange(0, CHUNK)
    places = (row * num_tokens + token) * num_heads + head
    tl.store(ptr + places, values.to(ptr.dtype.element_ty), mask=token < num_tokens)


def load_rows(
    ptr: Any,
    row: Any,
    part: Any,
    start: Any,
    num_tokens: Any,
    num_parts: Any,
    size: Any,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """The elements of one head or group, for the tokens of a chunk, in fp32."""
    token, col = start + tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    offsets = ((row * num_tokens + token) * num_parts + part)[:, None] * size + col[None, :]
    inside = (token < num_tokens)[:, None] & (col < size)[None, :]
    return tl.load(ptr + offsets, mask=inside, other=0.0).to(tl.float32)


def store_rows(
    ptr: Any,
    values: Any,
    row: Any,
    part: Any,
    start: Any,
    num_tokens: Any,
    num_parts: Any,
    size: Any,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The way back of `load_rows`."""
    token, col = start + tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    offsets = ((row * num_tokens + token) * num_parts + part)[:, None] * size + col[None, :]
    inside = (token < num_tokens)[:, None] & (col < size)[None, :]
    tl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=inside)


def chunk_decays(
    logs: Any,
    runs_ptr: Any,
    row: Any,
    start: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> Any:
    """What is left of a state between the tokens of a chunk, from its begin to each token, from
    each token to its end, and from begin to end. `logs` are the logarithms of each token's decay.
    """
    place = tl.arange(0, CHUNK)
    sums = tl.cumsum(logs, 0)
    total = tl.sum(logs, 0)
    later = place[:, None] < place[None, :]
    inner = tl.exp(tl.where(later, float("-inf"), sums[:, None] - sums[None, :]))
    since = tl.exp(sums)
    until = tl.exp(total - sums)
    whole = tl.exp(total)
    if RUNS:
        last = tl.minimum(start + CHUNK, num_tokens) - 1
        at_end = tl.load(runs_ptr + row * num_tokens + last)
        before = tl.load(runs_ptr + row * num_tokens + tl.maximum(start - 1, 0))
        token = tl.minimum(start + place, num_tokens - 1)
        own = tl.load(runs_ptr + row * num_tokens + token)
        inner = tl.where(own[:, None] == own[None, :], inner, 0.0)
        since = tl.where(own == before, since, 0.0)
        until = tl.where(own == at_end, until, 0.0)
        whole = tl.where(at_end == before, whole, 0.0)
    return inner, since, until, whole
