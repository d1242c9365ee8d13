"""Text generation: prompts continued token by token, in batches that refill as sequences end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from megtool.errors import CheckpointError, UsageError
from megtool.inference.batching import BatchScheduler, GenerateRequest, InOrder, Running
from megtool.inference.forward import Forward
from megtool.inference.sampling import NO_NUMBER, Sampling, choose
from megtool.inference.slots import BlockSlots, RowSlots, Slots, SourceSlots
from megtool.inference.speculative import SpeculativeSlots
from megtool.inference.stop_strings import Stops
from megtool.model.batch import check_ids
from megtool.model_config import ModelConfig

Finish = Literal["eos", "stop", "length"]
"""Why a text ended: an end-of-sequence token, a stop string, or no more tokens allowed."""

_MOST_PREFILL_TOKENS = 8192


class IncrementalDetokenizer(Protocol):
    """Tokens to text, one by one: `push` gives the text that is certain, `finish` the rest."""

    def push(self, token: int) -> str:
        """The text that this token makes certain; never half a character."""

    def finish(self) -> str:
        """What text is left at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How tokens are chosen, what ends a text, and how many texts are generated at once.

    A text ends at a token of `eos_ids` or before a `stop` string. With `graphed`, steps are
    replayed as CUDA graphs where that is possible. With `speculative`, layers of multi-token
    prediction draft tokens, and a step verifies several.
    """

    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    num_slots: int = 16
    graphed: bool = True
    speculative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What followed a prompt: its tokens (with the one that ended it), and their text (without)."""

    number: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish


@dataclass(slots=True, kw_only=True)
class Meter:
    """What the work took so far: seconds and tokens of reading prompts, and of writing texts.

    The first token of every text comes with the reading of its prompt, the others with steps. Of
    drafted tokens, those count that a step has verified.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    num_steps: int = 0
    num_graphed: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def check_requests(requests: Sequence[GenerateRequest], config: ModelConfig) -> None:
    """Refuse prompts that are empty, run beyond the model's positions, or out of its vocabulary.

    Raises:
        UsageError: the first such prompt, with what would fit.
    """
    max_positions, has_source = config.max_positions, config.num_decoder_layers > 0
    for request in requests:
        if not (request.source if has_source else request.prompt):
            raise UsageError(
                f"prompt {request.number} is empty, and the tokenizer adds no first token",
                hint="give some text",
            )
        for ids in (request.prompt, request.source):
            check_ids(ids, config.vocab_size, f"prompt {request.number}")
        length, new = len(request.prompt), request.max_new_tokens
        if new < 1:
            raise UsageError(f"max_new_tokens is {new}", hint="1 or more")
        if length + new > max_positions and not has_source:
            remaining = max_positions - length
            raise UsageError(
                f"prompt {request.number} has {length} tokens, and {new} new ones make "
                f"{length + new}: the model has {max_positions} positions",
                hint=f"--max-new-tokens {remaining} fits"
                if remaining > 0
                else "shorten the prompt",
            )


@torch.inference_mode()
def generate(
    forward: Forward,
    requests: Sequence[GenerateRequest],
    options: DecodingOptions,
    *,
    new_detokenizer: Callable[[], IncrementalDetokenizer],
    on_text: Callable[[int, str], None] | None = None,
    meter: Meter | None = None,
) -> Iterator[Completion]:
    """Continue every prompt; completions come in the order of their numbers (0, 1, ...).

    If there are no more prompts than slots, all enter together, into a cache without blocks whose
    steps a CUDA graph replays; otherwise each leaves when it is finished and the next takes its
    blocks. `on_text` is called with a prompt's number and each piece of its text as soon as it is
    certain. Every rank of the model has to call this, with the same arguments, and gets the same
    tokens.

    Raises:
        UsageError: a prompt is empty, too long for the model or another tokenizer's, or a stop
            string is empty; or the model cannot draft (`check_speculative`).
        CheckpointError: the logits of a prompt contain a NaN.
    """
    meter = Meter() if meter is None else meter
    check_requests(requests, forward.config)
    Stops(options.stop)  # refuses empty ones
    if not requests:
        return
    num_slots = options.num_slots
    slots = _make_slots(forward, requests, options)
    schedule = BatchScheduler(
        requests,
        num_slots=min(num_slots, len(requests)),
        num_pages=slots.num_pages,
        page_size=slots.page_size,
    )
    ready: InOrder[Completion] = InOrder()
    writers: dict[int, _Writer] = {}
    while schedule.is_busy:
        began = time.monotonic()
        entered = schedule.enter(most_tokens=slots.most_prefill_tokens or _MOST_PREFILL_TOKENS)
        for running in entered:
            number = running.request.number
            writers[number] = _Writer(running, options, new_detokenizer(), on_text)
        rows = entered or list(schedule.running.values())
        generators = [writers[r.request.number].generator for r in rows]
        new_tokens = (slots.prefill if entered else slots.step)(rows, generators)
        took = time.monotonic() - began
        if entered:
            meter.prompt_tokens += sum(r.request.num_prompt_tokens for r in rows)
            meter.prompt_seconds += took
        else:
            meter.step_seconds += took
            meter.num_steps += 1
        for running, tokens in zip(rows, new_tokens, strict=True):
            number, before = running.request.number, len(running.tokens)
            done = _add_tokens(forward, writers[number], running, tokens)
            meter.new_tokens += len(running.tokens) - before
            meter.step_tokens += 0 if entered else len(running.tokens) - before
            if done is not None:
                slots.leave(running)
                schedule.leave(running)
                del writers[number]
                yield from ready.add(number, done)
    meter.num_graphed += slots.num_graphed
    if isinstance(slots, SpeculativeSlots):
        meter.num_drafted += slots.num_drafted
        meter.num_accepted += slots.num_accepted


def _make_slots(
    forward: Forward, requests: Sequence[GenerateRequest], options: DecodingOptions
) -> OneByOne | SpeculativeSlots:
    num_slots = options.num_slots
    if options.speculative:
        return SpeculativeSlots(forward, requests, num_slots=num_slots, sampling=options.sampling)
    slots: Slots
    if forward.config.num_decoder_layers:
        slots = SourceSlots(forward, requests, num_slots=min(num_slots, len(requests)))
    elif len(requests) <= num_slots:
        slots = RowSlots(forward, requests, graphed=options.graphed)
    else:
        slots = BlockSlots(forward, requests, num_slots=num_slots)
    return OneByOne(forward, slots, options.sampling)


def _add_tokens(
    forward: Forward, writer: _Writer, running: Running, tokens: Sequence[int]
) -> Completion | None:
    """Take in the next tokens of a text; the completion, if it ends with one of them.

    Raises:
        CheckpointError: the logits of a token contained a NaN.
    """
    for token in tokens:
        if token == NO_NUMBER:
            number = running.request.number
            raise CheckpointError(
                f"the logits after {running.length} tokens of prompt {number} contain a NaN",
                **forward.where_is_nan(),
            )
        done = writer.add(token)
        if done is not None:
            return done
    return None


class OneByOne:
    """Slots whose sequences grow by one token in a step, chosen by one rank for all of them.

    Every rank draws, so that generators stay in step; only the chooser's draw counts.
    """

    def __init__(self, forward: Forward, slots: Slots, sampling: Sampling) -> None:
        self._forward, self._slots, self._sampling = forward, slots, sampling
        self.num_pages, self.page_size = slots.num_pages, slots.page_size
        self.most_prefill_tokens = slots.most_prefill_tokens

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""
        return self._slots.num_graphed

    def prefill(
        self, rows: Sequence[Running], generators: Sequence[torch.Generator]
    ) -> list[list[int]]:
        """Read the prompts of rows that have just entered; the first token of each."""
        return self._choose(self._slots.prefill(rows), generators)

    def step(
        self, rows: Sequence[Running], generators: Sequence[torch.Generator]
    ) -> list[list[int]]:
        """Read the newest token of every running row; the next of each."""
        return self._choose(self._slots.step(rows), generators)

    def leave(self, running: Running) -> None:
        """A row is finished."""
        self._slots.leave(running)

    def _choose(
        self, logits_BV: torch.Tensor | None, generators: Sequence[torch.Generator]
    ) -> list[list[int]]:
        tokens_B = None
        if logits_BV is not None:
            tokens_B = choose(logits_BV, self._sampling, generators)
        return [[token] for token in self._forward.agree(tokens_B, len(generators)).tolist()]


class _Writer:
    """The text of one request, up to its end."""

    def __init__(
        self,
        running: Running,
        options: DecodingOptions,
        detokenizer: IncrementalDetokenizer,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self._running, self._detokenizer = running, detokenizer
        self._eos_ids, self._stops = options.eos_ids, Stops(options.stop)
        self._on_text = on_text
        self.generator = options.sampling.generator(running.request.number)
        self._pieces: list[str] = []

    def add(self, token: int) -> Completion | None:
        """Take in the next token; the completion, if the text ends with it."""
        running = self._running
        running.tokens.append(token)
        finish: Finish | None = None
        if token in self._eos_ids:
            finish = "eos"
        else:
            self._show(self._stops.add(self._detokenizer.push(token)))
            if not self._stops.stopped and len(running.tokens) == running.request.max_new_tokens:
                finish = "length"
        if finish:
            self._show(self._stops.add(self._detokenizer.finish()))
        if self._stops.stopped:
            finish = "stop"
        if finish is None:
            return None
        self._show(self._stops.finish())
        return Completion(
            number=running.request.number,
            num_prompt_tokens=running.request.num_prompt_tokens,
            tokens=tuple(running.tokens),
            text="".join(self._pieces),
            finish=finish,
        )

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            if self._on_text is not None:
                self._on_text(self._running.request.number, text)
