"""Compare: torch's own KL, known differences, and models that are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megtool.console import silent
from megtool.errors import UsageError
from megtool.inference.evaluation.compare import compare, differences, percentiles
from megtool.inference.runtime import load_forward, on_ranks
from megtool.inference.windows import TokenDocument
from megtool.options.groups import RuntimeOptions
from megtool.source.open import open_decoder
from tests.support.models import tiny_text


def test_differences_are_what_torch_computes() -> None:
    generator = torch.Generator().manual_seed(0)
    a_TV, b_TV = (torch.randn(6, 40, generator=generator) * 3 for _ in range(2))
    b_TV[0] = a_TV[0] + 2.5  # the same probabilities
    found = differences(a_TV, b_TV)
    kl_T = F.kl_div(
        b_TV.double().log_softmax(-1),
        a_TV.double().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert torch.allclose(found.kl_T, kl_T, rtol=1e-5, atol=1e-6)
    assert found.max_T[0] < 1e-5
    assert torch.equal(found.ours_T, a_TV.argmax(-1))


def test_percentiles_are_values_that_are_there() -> None:
    assert percentiles(torch.arange(1001.0)) == (500.0, 900.0, 990.0, 999.0)


def test_models_are_compared_where_they_differ(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    texts = [
        TokenDocument(tokens=[(7 * n) % 256 for n in range(60)]),
        TokenDocument(tokens=[3, 4, 5]),
    ]
    forwards = []
    manner = RuntimeOptions(device="cpu")
    for number, seed in enumerate((0, 0, 1)):
        folder = tiny_text.save(tmp_path / f"hf{number}", seed=seed)
        with on_ranks(manner) as groups:
            runnable = open_decoder(folder)
            forwards.append(load_forward(runnable, manner, groups, silent))
    same = compare(forwards[0], forwards[1], texts, window=32, stride=16, batch_size=2)
    assert (same.kl_max, same.agreement, same.worst) == (0.0, 1.0, ())
    far = compare(forwards[0], forwards[2], texts, window=32, stride=16, batch_size=2)
    assert far.ours == same.ours != far.reference
    assert far.kl_max == far.worst[0].kl > far.kl_mean > far.kl_percentiles[0] / 2 > 0
    assert far.agreement < 0.5
    one = far.worst[0]
    assert texts[one.document].tokens[one.place] == one.expected_id
    with pytest.raises(UsageError, match="no token to predict"):
        compare(forwards[0], forwards[1], [], window=8, stride=8)
