"""Turns of the assistant in conversations whose templates rewrite earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megtool.data.answer_spans import answer_spans
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer

THINKING = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{ '<' + m.role + '>\n' }}{%- if m.role == 'assistant' -%}"
    "{% generation %}{%- if loop.index0 > ns.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content + '</>\n' }}{% endgeneration %}{%- else -%}{{ m.content + '</>\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<assistant>\n' }}{%- endif -%}"
)
"""As Qwen3's and R1's: the last answer has a block of thoughts, earlier ones have none."""

UNMARKED = THINKING.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


CASES = {
    "one turn": (turns("a", "b"), ["<think>\n\n</think>\n\nb</>\n"]),
    "two turns": (turns("a", "b", "c", "d"), ["b</>\n", "<think>\n\n</think>\n\nd</>\n"]),
    "a question at the end": (turns("a", "b", "c"), ["b</>\n"]),
    "the same words": (
        turns("x", "x", "x", "x", "x", "x"),
        ["x</>\n", "x</>\n", "<think>\n\n</think>\n\nx</>\n"],
    ),
    "nothing said": (turns("a", "", "c", ""), ["</>\n", "<think>\n\n</think>\n\n</>\n"]),
}


@pytest.mark.parametrize("template", [THINKING, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("case", CASES)
def test_turns_are_found_in_the_whole_text(tmp_path: Path, template: str, case: str) -> None:
    messages, expected = CASES[case]
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, template=template))
    text, spans = answer_spans(messages, tokenizer, "a.jsonl:1")
    (whole,) = tokenizer.chat_prefixes(messages, [(len(messages), False)])
    assert text == whole
    assert [text[begin:end] for begin, end in spans] == expected
    first = answer_spans(messages, tokenizer, "a.jsonl:1", first=2)[1]
    assert first == [s for s, m in zip(spans, (1, 3, 5), strict=False) if m >= 2]


@pytest.mark.parametrize("content", ["{{ m.content | upper }}", "{{ m.content[:1] }}", "..."])
def test_content_that_is_changed_is_refused(tmp_path: Path, content: str) -> None:
    body = f"{{% if loop.last %}}{{{{ m.content }}}}{{% else %}}{content}{{% endif %}}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{body};{{% endfor %}}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, template=template))
    messages: Sequence[dict[str, str]] = turns("abc", "def", "ghi", "jkl")
    with raises(MappingError, match="turn 2", file="a.jsonl:1"):
        answer_spans(messages, tokenizer, "a.jsonl:1")
