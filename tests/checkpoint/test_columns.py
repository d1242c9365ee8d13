"""Columns: what is put in comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.checkpoint import columns
from megtool.checkpoint.columns import NotPlainError, from_plain, to_plain


@given(st.lists(st.binary()))
def test_blobs_survive(blobs):
    kept = {}
    columns.put_blobs(kept, "k", blobs)
    assert columns.blobs(kept, "k") == blobs


@given(st.lists(st.text(st.characters())), st.text())
def test_names_and_texts_survive(names, text):
    kept = {}
    columns.put_names(kept, "n", [*names, "lone \udc80"])
    columns.put_text(kept, "t", text)
    assert columns.names(kept, "n") == [*names, "lone \udc80"]
    assert columns.text(kept, "t") == text


def test_sizes_that_do_not_add_up_are_refused():
    kept = {}
    columns.put_blobs(kept, "k", [b"abc"])
    kept["k.sizes"] = np.array([2], np.int64)
    with pytest.raises(ValueError, match="3 bytes, 2 expected"):
        columns.blobs(kept, "k")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.just(Path("a/b")),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)  # fmt: skip


@given(plain)
def test_plain_values_survive(value):
    assert from_plain(to_plain(value)) == value


def test_other_values_are_not_plain():
    with pytest.raises(NotPlainError, match="set"):
        to_plain([{1}])
