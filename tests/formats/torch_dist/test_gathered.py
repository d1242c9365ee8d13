"""Objects of gathered optimizer state that are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool.errors import FormatError
from megtool.formats.torch_dist.gathered import _buffers
from megtool.pickles.reader import decode
from tests.support.errors import raises

FLOAT, BFLOAT = (decode(b"ctorch\n%s\n." % n, file="x") for n in (b"float32", b"bfloat16"))


def names(by_dtype: Any) -> list[str]:
    return [name for name, _ in _buffers({0: by_dtype, "per_bucket_numel": []}, "o", Path("f"))]


def test_a_buffer_is_named_by_both_dtypes() -> None:
    found = names({(FLOAT, BFLOAT): {"param": ["node"], "numel_unpadded": 3}})
    assert found == ["gbuf_idx_0.dtype_(torch.float32, torch.bfloat16).bucket_idx_0.param"]


@pytest.mark.parametrize("wrong", [(FLOAT, 3), (3, FLOAT), (3, 3), (FLOAT,), 3])
def test_a_pair_with_a_wrong_half_is_refused(wrong: Any) -> None:
    with raises(FormatError, "gathered optimizer state holds", tensor="o"):
        names({wrong: {"param": ["node"]}})
