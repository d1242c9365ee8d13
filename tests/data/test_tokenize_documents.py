"""Encoding: special tokens once, and the answers alone are learned."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megtool.data.documents import Document
from megtool.data.tokenize_documents import encode
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer

PLACE = {"file": "a.jsonl", "number": 1}
TURNS = (
    {"role": "system", "content": "the text"},
    {"role": "user", "content": "the model reads"},
    {"role": "assistant", "content": "it writes — ä"},
    {"role": "user", "content": "every word"},
    {"role": "assistant", "content": "again"},
)
REWRITES = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if loop.last %}{{ m['content'] }}{% else %}...{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module", params=[False, True])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_folder(tiny_tokenizer.save(folder, bos=request.param))


def test_a_text_ends_once(tokenizer: Tokenizer) -> None:
    plain, ended, empty = (Document(text=t, **PLACE) for t in ("the", "the<|eos|>", ""))
    one, two = encode([plain, empty, ended], tokenizer)
    assert one.ids.tolist() == two.ids.tolist() == tokenizer.encode("the<|eos|>")
    assert one.learned is None
    (bare,) = encode([plain], tokenizer, append_eos=False)
    assert bare.ids.tolist() == tokenizer.encode("the")


def test_a_completion_is_learned_with_its_end(tokenizer: Tokenizer) -> None:
    document = Document(text="the model", completion=" reads a text", **PLACE)
    (one,) = encode([document], tokenizer)
    assert one.learned is not None
    answer = [*tokenizer.encode(" reads a text", add_special=False), 1]
    assert one.ids[one.learned].tolist() == answer
    assert one.ids[~one.learned].tolist() == tokenizer.encode("the model")
    (whole,) = encode([document], tokenizer, answers_only=False)
    assert whole.learned is None
    assert whole.ids.tolist() == one.ids.tolist()


def test_the_assistants_turns_are_learned(tokenizer: Tokenizer) -> None:
    (one,) = encode([Document(messages=TURNS, **PLACE)], tokenizer)
    assert one.learned is not None
    assert one.ids.tolist() == tokenizer.chat(TURNS, add_generation_prompt=False)
    learned = tokenizer.decode(one.ids[one.learned].tolist(), skip_special=False)
    assert learned == "it writes — ä<|end|>\nagain<|end|>\n"


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    rewriting = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, template=REWRITES))
    with raises(MappingError, match="turn 3", file="a.jsonl:1"):
        list(encode([Document(messages=TURNS, **PLACE)], rewriting))


def test_no_token_to_end_with(tmp_path: Path) -> None:
    root = tiny_tokenizer.save(tmp_path)
    (root / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(MappingError, match="no end-of-document token"):
        list(encode([Document(text="the", **PLACE)], Tokenizer.from_folder(root)))
