"""lm-eval: its requests answered as its own model for transformers answers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megtool.console import silent
from megtool.inference.evaluation.lm_eval import encoded, language_model, rolling, split_pair
from megtool.inference.runtime import load_forward, on_ranks
from megtool.options.groups import RuntimeOptions
from megtool.source.open import open_decoder
from tests.support.models import tiny_text


@dataclass(frozen=True)
class Asked:
    """What lm-eval hands a model."""

    args: tuple[Any, ...]


def test_spaces_that_end_a_context_belong_to_what_follows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = open_decoder(tiny_text.save(tmp_path / "hf")).tokenizer()
    assert split_pair(tokenizer, "a b ", "c", 256) == (
        tokenizer.encode("a b"),
        tokenizer.encode(" c"),
    )
    assert split_pair(tokenizer, "", "c", 256) == ([256], tokenizer.encode("c"))


def test_a_text_begins_once(tmp_path: Path) -> None:
    """A chat template may have written the token that the tokenizer puts before every text."""
    tokenizer = open_decoder(beginning(tmp_path / "hf")).tokenizer()
    assert tokenizer.encode("<s>a") == [256, *tokenizer.encode("a", add_special=False)]
    assert encoded(tokenizer, "<s>a", 256) == encoded(tokenizer, "a", 256) == tokenizer.encode("a")
    assert split_pair(tokenizer, "<s>a", "b", 256) == split_pair(tokenizer, "a", "b", 256)


def test_a_long_text_is_cut_into_windows_of_which_the_last_is_full(tmp_path: Path) -> None:
    tokenizer = open_decoder(tiny_text.save(tmp_path / "hf")).tokenizer()
    text = "abcdefghij"
    ids = [256, *tokenizer.encode(text)]
    first, second, last = rolling(tokenizer, text, 256, 4)
    assert [d.tokens for d in (first, second, last)] == [ids[0:5], ids[4:9], ids[6:11]]
    assert [sum(d.counted or ()) for d in (first, second, last)] == [4, 4, 2]
    assert last.counted == [False, False, False, True, True]
    assert list(rolling(tokenizer, "", None, 4)) == []


def beginning(folder: Path) -> Path:
    """A model whose tokenizer puts `<s>` before every text."""
    tokenizers = pytest.importorskip("tokenizers")
    tiny_text.save(folder)
    file = str(folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(file)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    made.save(file)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("save", [tiny_text.save, beginning])
def test_answers_are_those_of_lm_eval_itself(save: Callable[[Path], Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    folder = save(tmp_path / "hf")
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", max_length=64)
    manner = RuntimeOptions(device="cpu")
    runnable = open_decoder(folder)
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
        ours = language_model(forward, runnable.tokenizer(), window=64, batch_size=3)
        pairs = [
            Asked(pair)
            for pair in (
                ("Two and", " two"),
                ("The ", "end"),
                ("", "x"),
                ("a" * 90, "b"),
                ("<s>user: Hi</s><s>assistant: ", "yes"),
            )
        ]
        found = ours.loglikelihood(pairs)
        for one, other in zip(found, theirs.loglikelihood(pairs, disable_tqdm=True), strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-5)
            assert one[1] == other[1]
        whole = [Asked((text,)) for text in ("It was a dark night.", "<s>It was", "ab" * 80)]
        assert ours.loglikelihood_rolling(whole) == pytest.approx(
            theirs.loglikelihood_rolling(whole, disable_tqdm=True), rel=1e-5
        )
        options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        asked = [Asked((text, dict(options))) for text in ("Hello", "a b c")]
        asked.append(Asked(("<s>user: Hi</s><s>assistant: ", dict(options))))
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
