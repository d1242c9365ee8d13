"""`megtool.Engine`: a model that continues texts for as long as it is open, as requests arrive."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from megtool.console import Progress, silent
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, MegtoolError, OutOfMemoryError, UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest, TextScope
from megtool.inference.generation.generate import (
    Completion,
    Decoding,
    Finish,
    GeneratedToken,
    GenerationLoop,
    Meter,
    make_block_slots,
)
from megtool.inference.generation.prompts import (
    NEW_TOKENS,
    Message,
    check_numbers,
    encode_prompt,
    make_request,
)
from megtool.inference.generation.slots import BLOCK_SIZE
from megtool.inference.generation.speculative import choose_drafting
from megtool.inference.runtime import LESS_MEMORY, load_forward, memory_errors, on_ranks
from megtool.options.groups import AdaptedSource, RuntimeOptions
from megtool.options.kernels import Implementation
from megtool.options.sampling import Sampling
from megtool.plan.memory import free_memory
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder
from megtool.storage.location.path import location as to_location

_MOST_TOKENS = 4096
"""Positions of the cache for each sequence, where nothing is said and memory reaches."""

_SHARE_OF_MEMORY = 0.5
"""How much of the free memory such a cache takes at most."""

_LESS = f"smaller cache_tokens or prefill_tokens, fewer max_sequences, or {LESS_MEMORY}"

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, its tokens, or messages for the model's chat template."""


class TextRequest:
    """A prompt that an engine continues: its tokens one after another, as they come.

        for token in request:
            print(token.text, end="", flush=True)

    Whoever waits for a token, in any thread, lets the engine work for all requests. `async for`
    waits in a thread of its own. The text of the tokens, joined, is the text of `result()`.
    """

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self._engine, self._request = engine, request
        self._tokens: deque[GeneratedToken] = deque()
        self._completion: Completion | None = None
        self._error: MegtoolError | None = None

    @property
    def number(self) -> int:
        """Its number in the engine, from 0."""
        return self._request.number

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None while it goes on, and after an error."""
        return None if self._completion is None else self._completion.finish

    @property
    def is_finished(self) -> bool:
        """No token comes any more."""
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """End it, and free what it has of the cache; tokens that have come can still be read."""
        self._engine._cancel(self)

    def result(self) -> Completion:
        """The whole text, its tokens, and why it ended; waits for the end.

        Raises:
            CheckpointError: the logits contain a NaN.
        """
        while self._completion is None:
            self._engine._work_for(self, until_end=True)
            if self._error is not None:
                raise self._error
        return self._completion

    def __iter__(self) -> Iterator[GeneratedToken]:
        return self

    def __next__(self) -> GeneratedToken:
        if not self._tokens:
            self._engine._work_for(self)
        if self._tokens:
            return self._tokens.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        return self

    async def __anext__(self) -> GeneratedToken:
        token = await asyncio.to_thread(next, self, None)
        if token is None:
            raise StopAsyncIteration
        return token


class Engine:
    """A model in any format that continues texts: requests come at any time, and are batched.

        with megtool.Engine("ckpt") as engine:
            request = engine.submit("The capital of France is", max_new_tokens=20)
            for token in request:
                print(token.text, end="", flush=True)

    There is no thread behind it: it works while somebody waits for a token or calls `step`. A step
    reads the newest token of every text, then at most `prefill_tokens` of prompts, so that a long
    prompt holds up the others for one part at a time. Sequences that begin with the same tokens
    share blocks of the cache. When the cache ends, the least important request waits, and is read
    again later. A text is the one that it would be alone, and so are its draws.

    Under torchrun every process makes the same calls, and gets the same tokens; or, with
    `followers`, rank 0 alone takes requests and the others call `follow`.

    Args:
        location: A checkpoint of any format: a folder, a save folder or a file.
        tokenizer: A folder with the tokenizer; by default the one with the checkpoint.
        max_sequences: How many texts grow at once; others wait.
        cache_tokens: Positions of the cache, for all texts together. By default 4096 for each (or
            the model's positions), as far as half of the free memory reaches.
        prefill_tokens: How many tokens of prompts a step reads.
        share_prefixes: False reads every prompt anew. Models with recurrent mixers (Mamba, gated
            delta nets, short convolutions) and those whose rotary embedding depends on the length
            (dynamic, longrope) always do; see `shares_prefixes`.
        speculative: `mtp` lets the model's layers of multi-token prediction draft tokens; the
            folder of an EAGLE-3 head lets that do so.
        num_drafts: How many tokens a head drafts in a step; by default 3.
        followers: Whether the other ranks follow this one.
        dtype: What the model runs in; by default as stored, float32 on a CPU.
        device: `cpu` or `cuda`; by default CUDA if there is one.
        tp: Tensor-parallel size; so are `pp` and `ep`.
        threads: Threads of a CPU.
        stream_layers: Keep one layer in memory at a time.
        kernels: Which implementation of fused operations runs.
        family: The model family, if the checkpoint names none.
        like: A Hugging Face folder to take config and tokenizer from.
        drop_setting: Settings, by name, that the model is taken to be without.
        iteration: Which iteration of a save folder; by default the latest.
        adapter: The folder of an adapter (LoRA), or several, to merge into the weights.
        progress: Called while weights are loaded.

    Raises:
        UsageError: an argument has no such value, or there is no room for a cache.
        MegtoolError: the checkpoint, its tokenizer or the layout cannot be used.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        tokenizer: str | Path | None = None,
        max_sequences: int = 16,
        cache_tokens: int | None = None,
        prefill_tokens: int = 512,
        share_prefixes: bool = True,
        speculative: str | Path = "none",
        num_drafts: int | None = None,
        followers: bool = False,
        dtype: str | None = None,
        device: str | None = None,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        threads: int | None = None,
        stream_layers: bool = False,
        kernels: Implementation = "auto",
        family: str | None = None,
        like: str | Path | None = None,
        iteration: int | str | None = None,
        drop_setting: str | Sequence[str] = (),
        adapter: str | Path | Sequence[str | Path] = (),
        progress: Progress = silent,
    ) -> None:
        sizes = {"max_sequences": max_sequences, "prefill_tokens": prefill_tokens}
        sizes |= {} if cache_tokens is None else {"cache_tokens": cache_tokens}
        check_numbers(sizes)
        for name, size in sizes.items():
            if size < 1:
                raise UsageError(f"{name} is {size}", hint="1 or more")
        manner = RuntimeOptions(
            dtype=dtype,
            device=device,
            tp=tp,
            pp=pp,
            ep=ep,
            threads=threads,
            stream_layers=stream_layers,
            kernels=kernels,
        )
        known = AdaptedSource(
            family=family,
            like=None if like is None else to_location(like),
            iteration=None if iteration is None else str(iteration),
            drop_setting=drop_setting,  # type: ignore[arg-type] # converted
            adapter=adapter,  # type: ignore[arg-type] # converted
        )
        source = open_decoder(to_location(location), known, two_stacks=True)
        drafting = choose_drafting(
            str(speculative), num_drafts, source.config, stream_layers=stream_layers
        )
        self._tokenizer = _find_tokenizer(source, tokenizer)
        self._condition = threading.Condition()
        self._is_working, self._num_visitors = False, 0
        self._live: tuple[Forward, GenerationLoop] | None = None
        self._requests: dict[int, TextRequest] = {}
        self._num_requests = 0
        self._error: BaseException | None = None
        self._open = ExitStack()
        try:
            groups = self._open.enter_context(on_ranks(manner, less=_LESS))
            self._leads = followers and groups.world.size > 1
            with memory_errors(groups.device, _LESS):
                forward = load_forward(source, manner, groups, progress, keeps_mtp=drafting is True)
                options = Decoding(
                    num_slots=max_sequences,
                    graphed=groups.device.type == "cuda",
                    speculative=drafting,
                    prefill_tokens=prefill_tokens,
                    shares_prefixes=share_prefixes,
                )
                self._live = forward, self._make_loop(forward, options, cache_tokens)
        except BaseException:
            self._open.close()
            raise

    def _make_loop(
        self, forward: Forward, options: Decoding, cache_tokens: int | None
    ) -> GenerationLoop:
        tokens = cache_tokens or _choose_cache_tokens(forward, options.num_slots)
        self.cache_tokens = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
        slots = make_block_slots(
            forward,
            options,
            num_pages=self.cache_tokens // BLOCK_SIZE,
            most_source_tokens=max(1, self.cache_tokens // options.num_slots),
        )
        self.shares_prefixes: bool = getattr(slots, "shares_prefixes", False)
        new_detokenizer = NoText if self._tokenizer is None else self._tokenizer.stream
        return GenerationLoop(forward, slots, new_detokenizer=new_detokenizer)

    @property
    def _forward(self) -> Forward:
        return self._check_open()[0]

    @property
    def _loop(self) -> GenerationLoop:
        return self._check_open()[1]

    def _check_open(self) -> tuple[Forward, GenerationLoop]:
        if self._error is not None:
            raise UsageError(
                f"the engine has ended with an error: {self._error}", hint="make a new one"
            ) from self._error
        if self._live is None:
            raise UsageError("the engine is closed", hint="make a new one")
        return self._live

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        priority: int = 0,
    ) -> TextRequest:
        """Ask for what follows a prompt; it begins with the next step that has room for it.

        Args:
            prompt: A text, its tokens, or messages for the chat template.
            max_new_tokens: The limit; by default 128, if the model has positions for them, and
                the cache room.
            temperature: 0 takes the likeliest token, more is more random.
            top_p: Draw from the likeliest tokens with this total probability.
            top_k: Draw from so many likeliest tokens.
            seed: Makes the draws, whatever else runs. By default the request's number does: the
                same prompt twice gives two texts.
            stop: Texts before which it ends.
            ignore_eos: Go on after an end-of-sequence token.
            logprobs: Give every new token its log-probability (nats, of the model's own
                distribution), and those of so many likeliest tokens.
            prompt_logprobs: The same of the prompt's tokens, in the result.
            priority: Higher ones enter first, and are the last to be thrown out of the cache.

        Raises:
            UsageError: a value is impossible, the prompt is empty, too long for the model or for
                the cache, or text without a tokenizer; or the engine is closed.
            FormatError: the tokenizer has no chat template.
        """
        numbers = {"max_new_tokens": max_new_tokens, "top_p": top_p, "top_k": top_k}
        numbers |= {"seed": seed, "logprobs": logprobs}
        check_numbers({name: value for name, value in numbers.items() if value is not None})
        check_numbers({"temperature": temperature, "priority": priority})
        stops = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, Sequence) or not all(isinstance(s, str) for s in stops):
            raise UsageError(f"stop is {stop!r}", hint="a text, or a list of texts")
        text = TextScope(
            sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed or 0),
            eos_ids=frozenset(() if ignore_eos else self._eos_ids),
            stop=tuple(stops),
            num_log_probs=logprobs,
            prompt_log_probs=prompt_logprobs,
        )
        tokens = self._encode(prompt)
        with self._between_steps():
            request = make_request(
                self._num_requests,
                tokens,
                self._forward.config,
                self._tokenizer,
                limit=self._usual_limit(tokens) if max_new_tokens is None else max_new_tokens,
                text=text,
                priority=priority,
                draw=None if seed is None else 0,
            )
            self._loop.check(request)
            self._tell("submit", request)
            return self._add(request)

    def _usual_limit(self, tokens: Sequence[int]) -> int:
        """New tokens where nothing is said, as far as the model and the cache reach."""
        config = self._forward.config
        if config.num_decoder_layers:
            return min(NEW_TOKENS, self.cache_tokens)
        room = min(config.positions.max_positions, self.cache_tokens) - len(tokens)
        return max(1, min(NEW_TOKENS, room))

    def _add(self, request: GenerateRequest) -> TextRequest:
        self._loop.add(request)
        self._num_requests += 1
        handle = self._requests[request.number] = TextRequest(self, request)
        return handle

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        return () if self._tokenizer is None else self._tokenizer.eos_ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise UsageError(f"the prompt is {prompt!r}", hint="a text, tokens, or messages")
        if not isinstance(prompt, str) and all(isinstance(t, int) for t in prompt):
            return [int(t) for t in prompt if isinstance(t, int)]
        if self._tokenizer is None:
            raise UsageError("there is no tokenizer", hint="give tokens, or tokenizer=FOLDER")
        if isinstance(prompt, str):
            return encode_prompt(prompt, self._tokenizer)
        messages = [m for m in prompt if isinstance(m, Mapping)]
        if len(messages) != len(prompt):
            kinds = sorted({type(m).__name__ for m in prompt})
            raise UsageError(
                f"the prompt is a list of {', '.join(kinds)}", hint="a text, tokens, or messages"
            )
        return encode_prompt(messages, self._tokenizer)

    def _cancel(self, request: TextRequest) -> None:
        with self._between_steps():
            if not request.is_finished:
                self._tell("cancel", request.number)
                self._end(request.number)

    def _end(self, number: int) -> None:
        completion = self._loop.cancel(number)
        self._requests.pop(number)._completion = completion

    # ---- work

    @property
    def is_busy(self) -> bool:
        """Some request has not ended."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests whose texts grow, or whose prompts are read."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return self._loop.num_waiting

    @property
    def meter(self) -> Meter:
        """What the work took so far: tokens, seconds, preemptions."""
        return self._loop.meter

    def step(self) -> bool:
        """One more token for every text, and the next part of prompts; whether work is left.

        Raises:
            UsageError: the engine is closed, or has failed before.
            OutOfMemoryError: there is no memory left.
        """
        self._take_turn(lambda: False)
        return self.is_busy

    def run(self) -> None:
        """Work until every request has ended."""
        while self.step():
            pass

    def _work_for(self, request: TextRequest, *, until_end: bool = False) -> None:
        """Work until a request has a token that was not read, or has ended."""

        def is_served() -> bool:
            return request.is_finished or bool(request._tokens and not until_end)

        while not is_served():
            self._take_turn(is_served)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """What no step may run beside; it goes before the next one."""
        with self._condition:
            self._num_visitors += 1
            try:
                while self._is_working:
                    self._condition.wait()
                yield
            finally:
                self._num_visitors -= 1
                self._condition.notify_all()

    def _take_turn(self, is_served: Callable[[], bool]) -> None:
        """Do a step, or let another thread's end, unless that has served this one already."""
        with self._condition:
            while not is_served() and (self._is_working or self._num_visitors):
                self._condition.wait()
            if is_served():
                return
            if not self._loop.is_busy:
                return
            self._is_working = True
        try:
            self._tell("step")
            self._step()
        finally:
            with self._condition:
                self._is_working = False
                self._condition.notify_all()

    def _step(self) -> None:
        try:
            with memory_errors(self._forward.device, _LESS):
                events = self._loop.step()
        except BaseException as e:  # between two passes nothing is half done, in one it may be
            self._error = e
            raise
        for event in events:
            handle = self._requests[event.number]
            if event.token is not None:
                handle._tokens.append(event.token)
            handle._completion, handle._error = event.completion, event.error
            if handle.is_finished:
                del self._requests[event.number]

    # ---- other ranks

    def follow(self) -> None:
        """Do what rank 0 does, until it closes: the part of the other ranks, with `followers`.

        Raises:
            UsageError: the engine was made without followers, or this is rank 0.
        """
        if not self._leads or self._forward.groups.rank == 0:
            raise UsageError(
                "there is no rank to follow",
                hint="Engine(..., followers=True) on every rank, and follow() on all but rank 0",
            )
        while (command := self._broadcast(self._forward, [None]))[0] != "close":
            match command:
                case "submit", request:
                    self._add(request)
                case "cancel", number:
                    self._end(number)
                case _:
                    self._step()
        self.close()

    def _tell(self, *command: Any) -> None:
        """Tell followers what comes next."""
        if self._leads:
            if self._forward.groups.rank:
                raise UsageError("rank 0 takes requests", hint="call follow() on this one")
            self._broadcast(self._forward, list(command))

    @staticmethod
    def _broadcast(forward: Forward, command: list[Any]) -> list[Any]:
        """A command of rank 0, which is a process of this run, on every rank."""
        group = forward.groups.world
        box = [command]
        dist.broadcast_object_list(box, src=group.ranks[0], group=group.handle)
        return box[0]

    # ---- the end

    def close(self) -> None:
        """End all requests, and free the model; nothing if it is closed."""
        with self._between_steps():
            if self._live is None:
                return
            (forward, loop), self._live = self._live, None
            if self._leads and self._error is None and not forward.groups.rank:
                self._broadcast(forward, ["close"])
            for number, request in self._requests.items():
                request._completion = loop.cancel(number)
            self._requests.clear()
            self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NoText:
    """Tokens of a model without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _find_tokenizer(source: CheckpointSource, folder: str | Path | None) -> Tokenizer | None:
    """The tokenizer of a folder, or the checkpoint's, None where it has none."""
    if folder is not None:
        return source.tokenizer(to_location(folder))
    try:
        return source.tokenizer()
    except FormatError as e:
        if e.error_id != "no-tokenizer":
            raise
        return None


def _choose_cache_tokens(forward: Forward, max_sequences: int) -> int:
    """Positions for all sequences, as far as memory reaches.

    Raises:
        OutOfMemoryError: not even those of one block.
    """
    config, step = forward.config, 16 * BLOCK_SIZE
    most = min(config.positions.max_positions, _MOST_TOKENS) * max_sequences
    each = max(1, (forward.cache_bytes(2 * step) - forward.cache_bytes(step)) // step)
    device = forward.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    fitting = most if free is None else int(free * _SHARE_OF_MEMORY) // each
    tokens = forward.least(min(most, fitting)) // BLOCK_SIZE * BLOCK_SIZE
    if not tokens:
        raise OutOfMemoryError(
            f"{device} has no memory for a cache of {BLOCK_SIZE} tokens, of {each:,} bytes each",
            hint=_LESS,
        )
    return tokens
