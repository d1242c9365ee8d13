"""Prompts as requests: texts and conversations turned into tokens, and how much may follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from megtool.errors import UsageError
from megtool.inference.generation.batching import GenerateRequest, TextScope

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer
    from megtool.spec.model_config import ModelConfig

NEW_TOKENS = 128
"""How many tokens follow a prompt at most, where nothing is said."""

Message = Mapping[str, Any]
Conversation = str | tuple[Message, ...]
"""A text to continue as it is, or messages to answer."""


def encode_prompt(prompt: Conversation | Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text, or of messages in the model's chat template."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(list(prompt))


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse what is no number before it is compared with one.

    Raises:
        UsageError: one is of another type.
    """
    for name, value in given.items():
        is_whole = name not in ("temperature", "top_p")
        kind: type[Integral] | type[Real] = Integral if is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            hint = "a whole number" if is_whole else "a number"
            raise UsageError(f"{name} is {value!r}", hint=hint)


def make_request(
    number: int,
    tokens: Sequence[int],
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    limit: int | None = None,
    text: TextScope | None = None,
    priority: int = 0,
    draw: int | None = None,
) -> GenerateRequest:
    """A prompt to continue, or, with an encoder, to read; `limit` new tokens follow, by default
    `NEW_TOKENS`, or as many as the model has positions for."""
    from megtool.data.source_target import start_token

    prompt, source = tuple(tokens), tuple[int, ...]()
    if config.num_decoder_layers:
        prompt, source = (start_token(config, tokenizer),), prompt
    if limit is None:
        limit = NEW_TOKENS
        if not config.num_decoder_layers:
            limit = max(1, min(limit, config.positions.max_positions - len(prompt)))
    return GenerateRequest(
        number=number,
        prompt=prompt,
        max_new_tokens=limit,
        source=source,
        text=TextScope() if text is None else text,
        priority=priority,
        draw=draw,
    )
