"""Packing: every label exactly once, nothing across documents, the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.data.packing import IGNORED, PackedRows, pack, windows
from megtool.data.tokenize_documents import EncodedDocument
from megtool.errors import UsageError

LENGTHS = st.lists(st.integers(0, 25), max_size=12)
MODES = st.sampled_from(["packed", "padded", "whole"])
Mode = Literal["packed", "padded", "whole"]


def made(lengths: list[int]) -> list[EncodedDocument]:
    """Documents whose tokens are all different: 1000 * document + place."""
    return [
        EncodedDocument(ids=np.arange(n, dtype=np.int32) + 1000 * i) for i, n in enumerate(lengths)
    ]


def expected(lengths: list[int]) -> Counter[tuple[int, int]]:
    """Every token with its label."""
    return Counter(
        (1000 * i + k, 1000 * i + k + 1) for i, n in enumerate(lengths) for k in range(n - 1)
    )


def pairs(batches: Iterable[PackedRows]) -> Counter[tuple[int, int]]:
    """What the rows ask to learn, after holding each place against its document."""
    found: Counter[tuple[int, int]] = Counter()
    for rows in batches:
        valid = rows.valid_BS
        assert (rows.labels_BS[~valid] == IGNORED).all()
        assert (rows.tokens_BS[valid] // 1000 == rows.documents_BS[valid]).all()
        counted = rows.labels_BS != IGNORED
        assert rows.num_labels == counted.sum()
        assert (rows.labels_BS[counted] // 1000 == rows.documents_BS[counted]).all()
        for b in range(len(valid)):
            for d in set(rows.documents_BS[b][valid[b]].tolist()):
                here = np.flatnonzero(rows.documents_BS[b] == d)
                assert (np.diff(here) == 1).all()
                assert rows.positions_BS[b][here].tolist() == list(range(len(here)))
                assert (np.diff(rows.tokens_BS[b][here]) == 1).all()
        found.update(
            zip(rows.tokens_BS[counted].tolist(), rows.labels_BS[counted].tolist(), strict=True)
        )
    return found


@given(LENGTHS, st.integers(1, 9), st.integers(1, 3), MODES)
def test_every_label_stands_in_exactly_one_row(
    lengths: list[int], length: int, rows: int, mode: Mode
) -> None:
    batches = list(pack(made(lengths), length, rows=rows, mode=mode, pad_id=7))
    assert all(b.tokens_BS.shape == (rows, length) for b in batches[:-1])
    assert pairs(batches) == expected(lengths)
    assert all((b.tokens_BS[~b.valid_BS] == 7).all() for b in batches)


@given(LENGTHS, st.integers(1, 9))
def test_packed_rows_are_full_but_for_the_last(lengths: list[int], length: int) -> None:
    batches = list(pack(made(lengths), length))
    assert all(b.valid_BS.all() for b in batches[:-1])
    assert len(batches) == -(-sum(max(0, n - 1) for n in lengths) // length)


@given(LENGTHS, st.integers(1, 30))
def test_whole_rows_cut_no_document_that_fits(lengths: list[int], length: int) -> None:
    rows_of: Counter[int] = Counter()
    for b in pack(made(lengths), length, mode="whole"):
        rows_of.update(set(b.documents_BS[b.valid_BS].tolist()))
    for d, n in enumerate(lengths):
        if 1 < n <= length + 1:
            assert rows_of[d] == 1


@given(LENGTHS, st.integers(1, 9), st.integers(1, 9))
def test_windows_count_every_label_once(lengths: list[int], length: int, stride: int) -> None:
    stride = min(stride, length)
    batches = list(windows(made(lengths), length, stride, rows=2))
    assert pairs(batches) == expected(lengths)


def test_windows_see_what_came_before() -> None:
    (batch,) = windows(made([8]), 4, 2, rows=9)
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 0]]
    n = IGNORED
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [n, n, 5, 6], [n, n, 7, n]]


def test_what_is_not_learned_is_context_alone() -> None:
    learned = np.array([False, False, True, True])
    (batch,) = pack([EncodedDocument(ids=np.array([5, 6, 7, 8], np.int32), learned=learned)], 4)
    assert batch.labels_BS.tolist() == [[IGNORED, 7, 8, IGNORED]]
    assert batch.valid_BS.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([], 0), "length is 0"),
        (lambda: pack([], 4, rows=0), "rows is 0"),
        (lambda: windows([], 4, 5), "stride 5 is more than the window of 4"),
        (lambda: windows([], 4, 0), "stride is 0"),
    ],
)
def test_sizes_that_make_no_sense(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]
