"""Where the assistant's turns lie in the text of a conversation that a chat template renders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


def answer_spans(
    messages: Messages, tokenizer: Tokenizer, place: str, *, first: int = 0
) -> tuple[str, list[Span]]:
    """A conversation's text, and the characters (begin, end) of the assistant's turns in it.

    Turns before number `first` are left out. A turn is what the template adds for it after the
    words that open a turn to generate. Some templates write earlier turns differently once later
    ones follow, as those that drop reasoning do: then `{% generation %}` marks say where turns lie,
    or else the place of each turn's content in the whole text, and what the template puts around.

    Raises:
        MappingError: neither tells where a turn lies.
    """
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant" and n >= first]
    prefixes = [(len(messages), False)]
    for number in turns:
        prefixes += [(number, True), (number + 1, False)]
    text, *parts = tokenizer.chat_prefixes(messages, prefixes)
    earlier, afters = parts[::2], parts[1::2]
    if all(
        after.startswith(before) and text.startswith(after)
        for before, after in zip(earlier, afters, strict=True)
    ):
        return text, [(len(a), len(b)) for a, b in zip(earlier, afters, strict=True)]
    marked = _find_marked(messages, tokenizer, text)
    spans: list[Span] = []
    for number, before in zip(turns, earlier, strict=True):
        span = marked.get(number) or _find_content(messages, number, tokenizer, text, before)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise MappingError(
                f"where turn {number + 1} lies in its conversation is not known: the chat template "
                "changes it when other turns follow",
                file=place,
                hint="mark answers by {% generation %} in the template, or give plain texts",
            )
        spans.append(span)
    return text, spans


def _find_marked(messages: Messages, tokenizer: Tokenizer, text: str) -> dict[int, Span]:
    """Return the spans of `{% generation %}` blocks by turn; none if they are not one a turn."""
    key = os.urandom(8).hex()
    marks = f"\ue000{key}<", f"\ue000{key}>"
    (marked,) = tokenizer.chat_prefixes(
        messages, [(len(messages), False)], generation_marks=list(marks)
    )
    pieces = marked.split(marks[0])
    if len(pieces) == 1:
        return {}
    spans, length = [], len(pieces[0])
    plain = [pieces[0]]
    for piece in pieces[1:]:
        inner, mark, rest = piece.partition(marks[1])
        if not mark or marks[1] in rest:
            return {}  # blocks in blocks
        spans.append((length, length + len(inner)))
        plain += [inner, rest]
        length += len(inner) + len(rest)
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    if "".join(plain) != text or len(turns) != len(spans):
        return {}
    return dict(zip(turns, spans, strict=True))


def _find_content(
    messages: Messages, number: int, tokenizer: Tokenizer, text: str, before: str
) -> Span | None:
    """Return the span of a turn by its content, for which another text is rendered in its place.

    The turn begins behind the words that open it, and ends with what follows its content where the
    conversation ends with it.
    """
    (plain,) = tokenizer.chat_prefixes(messages, [(number, False)]) if number else ("",)
    opening = before[len(plain) :] if before.startswith(plain) else ""
    other = f"\ue001{os.urandom(8).hex()}\ue001"
    changed = [*messages]
    changed[number] = {**messages[number], "content": other}
    whole, alone = tokenizer.chat_prefixes(changed, [(len(messages), False), (number + 1, False)])
    head, mark, tail = whole.partition(other)
    _, alone_mark, closing = alone.partition(other)
    is_in_place = text.startswith(head) and text.endswith(tail)
    if not (opening and mark and alone_mark and is_in_place):
        return None
    end = len(text) - len(tail)
    begin = text.rfind(opening, 0, len(head))
    if begin < 0 or end < len(head) or not text.startswith(closing, end):
        return None
    return begin + len(opening), end + len(closing)
