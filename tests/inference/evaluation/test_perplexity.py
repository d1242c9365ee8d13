"""Evaluate: transformers' losses over the same windows, and every token counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megtool.console import silent
from megtool.errors import UsageError
from megtool.inference.evaluation.perplexity import evaluate
from megtool.inference.runtime import load_forward, on_ranks
from megtool.inference.windows import TokenDocument, num_counted, windows
from megtool.options.groups import RuntimeOptions
from megtool.source.open import open_decoder
from tests.support.emulated.graph_rules import check_graphs
from tests.support.errors import raises
from tests.support.models import tiny_text


@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_every_token_is_counted_once_with_context_before_it(
    length: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window))
    counted: list[int] = []
    for w in windows(length, window=window, stride=stride):
        assert w.stop - w.start <= window
        assert w.start < w.first <= w.stop < length
        counted += range(w.first, w.stop + 1)
    assert counted == list(range(1, length))


@pytest.mark.parametrize(("window", "stride"), [(0, 1), (8, 0), (8, 9)])
def test_sizes_that_make_no_sense_are_refused(window: int, stride: int) -> None:
    with pytest.raises(UsageError, match=r"windows of .* cannot move"):
        list(windows(50, window=window, stride=stride))


def documents() -> list[TokenDocument]:
    generator = torch.Generator().manual_seed(2)
    sizes = (90, 2, 33, 1)
    made = [
        TokenDocument(tokens=torch.randint(0, 256, (n,), generator=generator).tolist())
        for n in sizes
    ]
    some = [n % 3 == 0 for n in range(33)]
    made[2] = TokenDocument(tokens=made[2].tokens, counted=some)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_text.save(tmp_path_factory.mktemp("scored") / "hf")


def theirs(folder: Path, window: int, stride: int) -> tuple[float, int]:
    """The sum of losses and the hits of what counts, by transformers' logits, window by window."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss, hits = 0.0, 0
    for d in documents():
        for w in windows(len(d.tokens), window=window, stride=stride):
            with torch.no_grad():
                logits = peer(torch.tensor([d.tokens[w.start : w.stop]])).logits[0].double()
            for at in range(w.first, w.stop + 1):
                if d.counted is None or d.counted[at]:
                    row = logits[at - w.start - 1]
                    loss -= float(row.log_softmax(-1)[d.tokens[at]])
                    hits += int(row.argmax()) == d.tokens[at]
    return loss, hits


@pytest.mark.parametrize(("window", "stride", "rows"), [(32, 32, 1), (32, 16, 3), (128, 128, 4)])
def test_losses_are_those_of_transformers(
    folder: Path, window: int, stride: int, rows: int
) -> None:
    manner = RuntimeOptions(device="cpu")
    runnable = open_decoder(folder)
    seen: list[int] = []
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
        how: dict[str, Any] = {"window": window, "stride": stride, "batch_size": rows}
        score = evaluate(forward, documents(), **how, counted=seen.append)
        with check_graphs():
            rehearsed = evaluate(forward, documents(), **how, graphed=True)
    loss, hits = theirs(folder, window, stride)
    assert score.num_tokens == num_counted(documents()) == sum(seen) == 89 + 1 + 10
    assert score.loss_sum == pytest.approx(loss, rel=1e-6)
    assert score.num_hits == hits
    assert rehearsed == score


def test_data_without_a_token_to_predict_is_refused(folder: Path) -> None:
    manner = RuntimeOptions(device="cpu")
    runnable = open_decoder(folder)
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
        with pytest.raises(UsageError, match="no token to predict"):
            evaluate(forward, [TokenDocument(tokens=[5])], window=8, stride=8)
        foreign = [TokenDocument(tokens=[5, 6]), TokenDocument(tokens=[5, 10**6, 6])]
        with raises(UsageError, "1 holds", "1000000"):
            evaluate(forward, foreign, window=8, stride=8)
