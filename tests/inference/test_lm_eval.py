"""lm-eval: its requests answered as its own model for transformers answers them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megtool.commands.running import Manner, Source, load_forward, on_ranks, open_runnable
from megtool.inference.lm_eval import language_model, split_pair
from megtool.log import silent
from tests.inference import tiny_text


@dataclass(frozen=True)
class Asked:
    """What lm-eval hands a model."""

    args: tuple[Any, ...]


def test_spaces_that_end_a_context_belong_to_what_follows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = open_runnable(Source(path=tiny_text.save(tmp_path / "hf"))).tokenizer()
    assert split_pair(tokenizer, "a b ", "c", 256) == (
        tokenizer.encode("a b"),
        tokenizer.encode(" c"),
    )
    assert split_pair(tokenizer, "", "c", 256) == ([256], tokenizer.encode("c"))


@pytest.mark.slow
def test_answers_are_those_of_lm_eval_itself(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    folder = tiny_text.save(tmp_path / "hf")
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", max_length=64)
    manner = Manner(device="cpu")
    runnable = open_runnable(Source(path=folder))
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
        ours = language_model(forward, runnable.tokenizer(), window=64, batch_size=3)
        pairs = [
            Asked(p) for p in (("Two and", " two"), ("The ", "end"), ("", "x"), ("a" * 90, "b"))
        ]
        found = ours.loglikelihood(pairs)
        for one, other in zip(found, theirs.loglikelihood(pairs, disable_tqdm=True), strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-5)
            assert one[1] == other[1]
        whole = [Asked(("It was a dark night.",))]
        assert ours.loglikelihood_rolling(whole) == pytest.approx(
            theirs.loglikelihood_rolling(whole, disable_tqdm=True), rel=1e-5
        )
        options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        asked = [Asked((text, dict(options))) for text in ("Hello", "a b c")]
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
