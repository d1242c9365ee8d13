"""Text generation: prompts continued token by token, in batches that refill as sequences end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from megtool.errors import CheckpointError, MegtoolError, UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import (
    BatchScheduler,
    ChosenToken,
    GenerateRequest,
    InOrder,
    Running,
    TextScope,
    TokenLogProb,
)
from megtool.inference.generation.log_probs import rank_next_tokens
from megtool.inference.generation.sampling import NO_NUMBER, choose_each
from megtool.inference.generation.slots import (
    BLOCK_SIZE,
    MOST_PREFILL_TOKENS,
    BlockSlots,
    RowSlots,
    Slots,
    SourceSlots,
)
from megtool.inference.generation.speculative import Drafting, SpeculativeSlots
from megtool.inference.generation.stop_strings import Stops
from megtool.model.batch import check_ids
from megtool.spec.model_config import ModelConfig

Finish = Literal["eos", "stop", "length", "cancelled"]
"""Why a text ended: an end-of-sequence token, a stop string, no more tokens allowed, or nobody
wants it any more."""


class IncrementalDetokenizer(Protocol):
    """Tokens to text, one by one: `push` gives the text that is certain, `finish` the rest."""

    def push(self, token: int) -> str:
        """The text that this token makes certain; never half a character."""

    def finish(self) -> str:
        """What text is left at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding(TextScope):
    """How all of several texts are generated, and how many at once.

    With `graphed`, steps are replayed as CUDA graphs where that is possible. With `speculative`,
    layers of multi-token prediction draft tokens, or a head does, and a step verifies several. A
    pass reads
    `prefill_tokens` of prompts, and with `shares_prefixes` tokens that several begin with once.
    """

    num_slots: int = 16
    graphed: bool = True
    speculative: Drafting = False
    prefill_tokens: int = MOST_PREFILL_TOKENS
    shares_prefixes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """A new token, and the text that it makes certain: never half a character, and nothing that may
    be the beginning of a stop string. With log-probabilities where they were asked for."""

    id: int
    text: str
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What followed a prompt: its tokens (with the one that ended it), and their text (without).

    `prompt_log_probs` are those of the prompt's tokens from the second on.
    """

    number: int
    num_prompt_tokens: int
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish: Finish
    prompt_log_probs: tuple[TokenLogProb, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """The numbers of its tokens."""
        return tuple(t.id for t in self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """What a step did for one request: a token, its end, or an error that ended it."""

    number: int
    token: GeneratedToken | None = None
    completion: Completion | None = None
    error: MegtoolError | None = None


@dataclass(slots=True, kw_only=True)
class Meter:
    """What the work took so far: seconds and tokens of reading prompts, and of writing texts.

    The first token of every text comes with the reading of its prompt, the others with steps. Of
    drafted tokens, those count that a step has verified, in `num_verified` passes over a text each;
    `accepted` are the first, the second, ... drafts that were kept. `num_shared` tokens of prompts
    were found in the cache, and `num_preempted` times a text was thrown out of it.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    num_steps: int = 0
    num_graphed: int = 0
    num_verified: int = 0
    num_drafted: int = 0
    accepted: tuple[int, ...] = ()
    num_shared: int = 0
    num_preempted: int = 0

    @property
    def num_accepted(self) -> int:
        """Drafts that were kept."""
        return sum(self.accepted)


def check_requests(requests: Sequence[GenerateRequest], config: ModelConfig) -> None:
    """Refuse prompts that are empty, run beyond the model's positions, or out of its vocabulary.

    Raises:
        UsageError: the first such prompt, with what would fit.
    """
    max_positions, has_source = config.positions.max_positions, config.num_decoder_layers > 0
    for request in requests:
        if has_source and request.text.prompt_log_probs:
            raise UsageError(
                "an encoder reads the prompt, whose tokens have no probabilities",
                hint="leave out the log-probabilities of the prompt",
            )
        if not (request.source if has_source else request.prompt):
            raise UsageError(
                f"prompt {request.number} is empty, and the tokenizer adds no first token",
                hint="give some text",
            )
        for ids in (request.prompt, request.source):
            check_ids(ids, config.embedding.vocab_size, f"prompt {request.number}")
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


def generate(
    forward: Forward,
    requests: Sequence[GenerateRequest],
    options: Decoding,
    *,
    new_detokenizer: Callable[[], IncrementalDetokenizer],
    on_text: Callable[[int, str], None] | None = None,
    meter: Meter | None = None,
) -> Iterator[Completion]:
    """Continue every prompt; completions come in the order of their numbers (0, 1, ...).

    All requests get the texts' options of `options`. If there are no more prompts than slots, and
    steps can be recorded as CUDA graphs, all enter together, into a cache without blocks;
    otherwise each leaves when it is finished and the next takes its
    blocks. `on_text` is called with a prompt's number and each piece of its text as soon as it is
    certain. Every rank of the model has to call this, with the same arguments, and gets the same
    tokens.

    Raises:
        UsageError: a prompt is empty, too long for the model or another tokenizer's, or a stop
            string is empty; or the model cannot draft.
        CheckpointError: the logits of a prompt contain a NaN.
    """
    requests = [replace(r, text=options) for r in requests]
    check_requests(requests, forward.config)
    Stops(options.stop)  # refuses empty ones
    if not requests:
        return
    loop = GenerationLoop(
        forward,
        _make_slots(forward, requests, options),
        new_detokenizer=new_detokenizer,
        meter=meter,
    )
    for request in requests:
        loop.add(request)
    ready: InOrder[Completion] = InOrder()
    while loop.is_busy:
        for event in loop.step():
            if event.error is not None:
                raise event.error
            if event.token is not None and event.token.text and on_text is not None:
                on_text(event.number, event.token.text)
            if event.completion is not None:
                yield from ready.add(event.number, event.completion)


def _make_slots(
    forward: Forward, requests: Sequence[GenerateRequest], options: Decoding
) -> Slots | SpeculativeSlots:
    """Slots for requests that are all known: blocks never are what a slot waits for."""
    num_slots = min(options.num_slots, len(requests))
    is_scored = any(r.text.prompt_log_probs for r in requests)
    has_sources = forward.config.num_decoder_layers > 0
    if (
        options.graphed
        and forward.is_graphable
        and not (options.speculative or has_sources or is_scored)
        and len(requests) <= num_slots
    ):
        return RowSlots(forward, requests)
    needs = sorted((-(-r.num_positions // BLOCK_SIZE) for r in requests), reverse=True)
    return make_block_slots(
        forward,
        options,
        num_pages=sum(needs[:num_slots]) + num_slots,
        most_source_tokens=max(len(r.source) for r in requests),
    )


def make_block_slots(
    forward: Forward, options: Decoding, *, num_pages: int, most_source_tokens: int
) -> Slots | SpeculativeSlots:
    """Slots over so many pages of a cache, for requests that may come at any time."""
    num_slots = options.num_slots
    if options.speculative:
        return SpeculativeSlots(
            forward, num_slots=num_slots, num_pages=num_pages, drafting=options.speculative
        )
    if forward.config.num_decoder_layers:
        return SourceSlots(
            forward,
            num_slots=num_slots,
            num_pages=num_pages,
            most_source_tokens=most_source_tokens,
        )
    return BlockSlots(
        forward,
        num_slots=num_slots,
        num_pages=num_pages,
        prefill_tokens=options.prefill_tokens,
        shares_prefixes=options.shares_prefixes,
        graphed=options.graphed,
    )


class GenerationLoop:
    """Requests that come and go, continued by `step`, which is called while the loop `is_busy`.

    A step reads the newest token of every text, and then the next part of prompts: a long prompt
    holds up the others for one part at a time. Every rank of the model makes the same calls.
    """

    def __init__(
        self,
        forward: Forward,
        slots: Slots | SpeculativeSlots,
        *,
        new_detokenizer: Callable[[], IncrementalDetokenizer],
        meter: Meter | None = None,
    ) -> None:
        self._forward, self._new_detokenizer = forward, new_detokenizer
        self._slots = slots
        self._growth = slots if isinstance(slots, SpeculativeSlots) else OneByOne(forward, slots)
        self._schedule = BatchScheduler(slots)
        self._writers: dict[int, _Writer] = {}
        self.meter = Meter() if meter is None else meter

    @property
    def is_busy(self) -> bool:
        """There is something left to do."""
        return self._schedule.is_busy

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return len(self._schedule.running)

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return self._schedule.num_waiting

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that can never be answered.

        Raises:
            UsageError: a prompt is empty, too long for the model or the cache or another
                tokenizer's, or a stop string is empty.
        """
        check_requests([request], self._forward.config)
        Stops(request.text.stop)
        self._slots.check(request)

    def add(self, request: GenerateRequest) -> None:
        """Let a request stand in line; its number is one that no other has.

        Raises:
            UsageError: it can never be answered.
        """
        self.check(request)
        running = self._schedule.add(request)
        self._writers[request.number] = _Writer(running, self._new_detokenizer())

    def cancel(self, number: int) -> Completion | None:
        """End a request; what it has so far. None if it has ended."""
        writer = self._writers.pop(number, None)
        if writer is None:
            return None
        self._schedule.leave(writer.running)
        return writer.complete("cancelled")

    @torch.inference_mode()
    def step(self) -> list[TextEvent]:
        """Read the newest tokens, and the next part of prompts; what became of it, in order."""
        events: list[TextEvent] = []
        meter, schedule = self.meter, self._schedule
        began = time.monotonic()
        rows = schedule.rows_to_grow()
        if rows:
            before = meter.new_tokens
            self._take(rows, self._growth.step(rows), events)
            meter.step_tokens += meter.new_tokens - before
            meter.num_steps += 1
            meter.step_seconds += time.monotonic() - began
        began = time.monotonic()
        schedule.enter()
        parts = schedule.rows_to_read()
        if parts:
            rows, counts = [r for r, _ in parts], [n for _, n in parts]
            ended = [r for r, n in parts if n >= r.num_unread]
            tokens = self._growth.prefill(rows, counts)
            for running in ended:
                running.is_started = True
                meter.prompt_tokens += 0 if running.tokens else running.request.num_prompt_tokens
            self._take(ended, tokens, events)
            meter.prompt_seconds += time.monotonic() - began
        self._count()
        return events

    def _take(
        self,
        rows: Sequence[Running],
        tokens: Sequence[Sequence[ChosenToken]],
        events: list[TextEvent],
    ) -> None:
        """Take in the next tokens of texts; those that end with them leave."""
        for running, chosen in zip(rows, tokens, strict=True):
            number = running.number
            for token in chosen:
                event = self._event(running, token)
                events.append(event)
                self.meter.new_tokens += event.token is not None
                if event.completion is not None or event.error is not None:
                    self._schedule.leave(running)
                    del self._writers[number]
                    break

    def _event(self, running: Running, token: ChosenToken) -> TextEvent:
        number = running.number
        if token.id == NO_NUMBER:
            error = CheckpointError(
                f"the logits after {running.length} tokens of prompt {number} contain a NaN",
                **self._forward.where_is_nan(),
            )
            return TextEvent(number=number, error=error)
        writer = self._writers[number]
        finish = writer.add(token)
        return TextEvent(
            number=number,
            token=writer.tokens[-1],
            completion=None if finish is None else writer.complete(finish),
        )

    def _count(self) -> None:
        meter, slots = self.meter, self._slots
        meter.num_graphed = slots.num_graphed
        meter.num_preempted = self._schedule.num_preempted
        if isinstance(slots, SpeculativeSlots):
            meter.num_verified, meter.num_drafted = slots.num_verified, slots.num_drafted
            meter.accepted = tuple(slots.accepted)
        if isinstance(slots, BlockSlots):
            meter.num_shared = slots.num_shared


class OneByOne:
    """Slots whose sequences grow by one token in a step, chosen by one rank for all of them.

    Every rank draws, so that generators stay in step; only the chooser's draw counts.
    """

    def __init__(self, forward: Forward, slots: Slots) -> None:
        self._forward, self._slots = forward, slots

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> list[list[ChosenToken]]:
        """Read the next `counts` tokens of rows; the first new one of those that are read."""
        ended = [r for r, n in zip(rows, counts, strict=True) if n >= r.num_unread]
        logits_BV = self._slots.prefill(rows, counts)
        return self._choose(logits_BV, ended) if ended else []

    def step(self, rows: Sequence[Running]) -> list[list[ChosenToken]]:
        """Read the newest token of every running row; the next of each."""
        return self._choose(self._slots.step(rows), rows)

    def _choose(
        self, logits_BV: torch.Tensor | None, rows: Sequence[Running]
    ) -> list[list[ChosenToken]]:
        tokens_B = None
        if logits_BV is not None:
            samplings = [r.request.text.sampling for r in rows]
            tokens_B = choose_each(logits_BV, samplings, [r.generator for r in rows])
        tokens = self._forward.agree(tokens_B, len(rows)).tolist()
        ranked = rank_next_tokens(self._forward, logits_BV, rows, tokens)
        return [[ChosenToken(t, p)] for t, p in zip(tokens, ranked, strict=True)]


class _Writer:
    """The text of one request, up to its end."""

    def __init__(self, running: Running, detokenizer: IncrementalDetokenizer) -> None:
        self.running, self._detokenizer = running, detokenizer
        self._eos_ids, self._stops = running.request.text.eos_ids, Stops(running.request.text.stop)
        self.tokens: list[GeneratedToken] = []

    def add(self, chosen: ChosenToken) -> Finish | None:
        """Take in the next token; why the text ends with it, if it does."""
        running = self.running
        running.tokens.append(chosen.id)
        finish: Finish | None = None
        pieces = []
        if chosen.id in self._eos_ids:
            finish = "eos"
        else:
            pieces.append(self._stops.add(self._detokenizer.push(chosen.id)))
            if not self._stops.stopped and len(running.tokens) == running.request.max_new_tokens:
                finish = "length"
        if finish:
            pieces.append(self._stops.add(self._detokenizer.finish()))
        if self._stops.stopped:
            finish = "stop"
        if finish:
            pieces.append(self._stops.finish())
        ranking = chosen.log_prob
        self.tokens.append(
            GeneratedToken(
                id=chosen.id,
                text="".join(pieces),
                log_prob=None if ranking is None else ranking.log_prob,
                top=() if ranking is None else ranking.top,
            )
        )
        return finish

    def complete(self, finish: Finish) -> Completion:
        """The whole of it, as it is now."""
        request = self.running.request
        return Completion(
            number=request.number,
            num_prompt_tokens=request.num_prompt_tokens,
            tokens=tuple(self.tokens),
            text="".join(t.text for t in self.tokens),
            finish=finish,
            prompt_log_probs=tuple(self.running.prompt_log_probs),
        )
