"""What a batch refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.errors import UsageError
from megtool.model.batch import Batch

TOKENS = torch.ones(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens_BS": TOKENS[0]}, r"tokens have shape \[5\]"),
        ({"tokens_BS": TOKENS[:, :0]}, r"tokens have shape \[2, 0\]"),
        ({"positions_BS": TOKENS[:, :4]}, r"positions_BS has shape \[2, 4\], and the tokens"),
        ({"valid_BS": TOKENS[:1].bool()}, r"valid_BS has shape \[1, 5\]"),
        ({"documents_BS": TOKENS[:1]}, r"documents_BS has shape \[1, 5\]"),
        ({"valid_BS": TOKENS}, r"valid_BS is of torch.int64"),
    ],
)
def test_shapes_that_do_not_fit(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Batch(**{"tokens_BS": TOKENS} | fields)


def test_positions_may_be_the_same_for_all_rows() -> None:
    assert Batch(tokens_BS=TOKENS, positions_BS=TOKENS[:1]).shape == (2, 5)
