"""Continue prompts with a model in any format, greedily or by sampling."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.commands.options.models import GenerateOptions
from megtool.commands.reports.generate import Answer, GeneratePlan, GenerateReport, ScoredToken
from megtool.console import Progress, silent
from megtool.convert.megatron.sharding import check_layout
from megtool.errors import FormatError, StorageError, UsageError
from megtool.export.hf.engine_arithmetic import check_dequantize, run_as_engine
from megtool.inference.runtime import LESS_MEMORY, load_forward, on_ranks
from megtool.options.effects import check_effects
from megtool.options.layout import ParallelConfig
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder
from megtool.storage.files import read_limited

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer
    from megtool.inference.generation.batching import GenerateRequest
    from megtool.inference.generation.generate import Completion, Decoding
    from megtool.inference.generation.prompts import Conversation

_RECORDS = (".jsonl", ".json", ".ndjson", ".parquet", ".gz")
_FIELDS = ("prompt", "messages", "text")
_MAX_BATCH = 16
_MAX_PROMPTS_BYTES = 64 << 20
_LESS_MEMORY = f"a smaller --batch-size or --max-new-tokens, --stream-layers, {LESS_MEMORY}"


def generate(
    options: GenerateOptions,
    *,
    on_text: Callable[[str], None] | None = None,
    on_answer: Callable[[Answer], None] | None = None,
    progress: Progress = silent,
) -> GenerateReport | GeneratePlan:
    """Continue prompts: those in `prompt`, or those of the file `prompts`.

    A file has a prompt per line, or is JSON lines (or parquet) with the prompt in `field`: a text,
    or a list of messages; without `field` it is `prompt`, `messages` or `text`. With `chat` a
    prompt is a user's message, put into the model's chat template, after the `system` message.
    Without it the text is continued as it is. An encoder (T5) reads all of a prompt, and the
    decoder answers it.

    Temperature 0 takes the most likely token; otherwise `seed` and the number of a prompt decide,
    whatever it is batched with. A text ends before a `stop` string, at an end-of-sequence token of
    the model, or after `max_new_tokens` (128, if the model has positions for them). `batch_size`
    (16) texts are generated at once. With `logprobs` every token of an answer has its
    log-probability, and those of so many likeliest ones; with `prompt_logprobs` those of the
    prompt, too.

    With `speculative` tokens are drafted, and several verified in a step: by layers of multi-token
    prediction (`mtp`), or by the EAGLE-3 head in a folder, `num_drafts` (3) at a time.

    `on_text` is called with each piece of a single text as it comes, `on_answer` with each answer
    in order. Under `torchrun` every process calls this, in the layout `tp`, `pp`, `ep`; only rank 0
    calls back. Of a quantized folder inputs and KV cache are rounded as an engine that loads it
    does, unless `dequantize`.

    Raises:
        UsageError: an option has no effect, or no such value.
        MegtoolError: the checkpoint, its tokenizer, the layout or a prompt cannot be used.
    """
    from megtool.inference.generation.generate import Decoding, check_requests
    from megtool.inference.generation.prompts import encode_prompt, make_request
    from megtool.inference.generation.speculative import choose_drafting
    from megtool.inference.generation.stop_strings import Stops

    check_effects(options)
    conversations = _read_conversations(options)
    source = open_decoder(options.source, options, two_stacks=True)
    tokenizer = source.tokenizer(options.tokenizer)
    check_dequantize(options.dequantize, source)
    drafting = choose_drafting(
        options.speculative,
        options.num_drafts,
        source.config,
        stream_layers=options.stream_layers,
    )
    Stops(options.stop)  # refuses empty stop strings
    decoding = Decoding(
        sampling=options.sampling,
        eos_ids=frozenset(tokenizer.eos_ids),
        stop=options.stop,
        num_log_probs=options.logprobs,
        prompt_log_probs=options.prompt_logprobs,
        num_slots=min(len(conversations), options.batch_size or _MAX_BATCH),
        speculative=drafting,
    )
    requests = [
        make_request(
            number,
            encode_prompt(conversation, tokenizer),
            source.config,
            tokenizer,
            limit=options.max_new_tokens,
            text=decoding,
        )
        for number, conversation in enumerate(conversations)
    ]
    check_requests(requests, source.config)
    if options.dry_run:
        check_layout(source.config, options.layout)
        return _plan(source, requests, decoding.num_slots, options.layout)
    return _run(
        source,
        tokenizer,
        _Prompts(conversations=conversations, requests=requests),
        options,
        decoding,
        callbacks=_Callbacks(on_text=on_text, on_answer=on_answer, progress=progress),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Prompts as they were given, and as tokens."""

    conversations: list[Conversation]
    requests: list[GenerateRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Callbacks:
    """What is called while texts are generated."""

    on_text: Callable[[str], None] | None
    on_answer: Callable[[Answer], None] | None
    progress: Progress


def _run(
    source: CheckpointSource,
    tokenizer: Tokenizer,
    prompts: _Prompts,
    options: GenerateOptions,
    decoding: Decoding,
    *,
    callbacks: _Callbacks,
) -> GenerateReport:
    """Load the model, continue every prompt, and report."""
    from megtool.inference.generation.generate import Meter
    from megtool.inference.generation.generate import generate as generate_texts

    conversations, requests = prompts.conversations, prompts.requests
    on_answer, progress = callbacks.on_answer, callbacks.progress
    start = time.monotonic()
    with on_ranks(options, less=_LESS_MEMORY) as groups:
        forward = load_forward(
            source, options, groups, progress, keeps_mtp=decoding.speculative is True
        )
        if not options.dequantize:
            run_as_engine(forward, source)
        loaded = time.monotonic()
        is_first = groups.rank == 0
        meter = Meter()
        is_list = options.prompts is not None or options.logprobs is not None
        on_text = callbacks.on_text if is_first and len(requests) == 1 and not is_list else None
        answers = []
        max_tokens = sum(r.max_new_tokens for r in requests)
        if on_text is None:
            progress("generate", 0, max_tokens)
        for text in generate_texts(
            forward,
            requests,
            replace(decoding, graphed=groups.device.type == "cuda" and not options.stream_layers),
            new_detokenizer=tokenizer.stream,
            on_text=None if on_text is None else lambda number, piece: on_text(piece),
            meter=meter,
        ):
            answer = _answer(text, conversations[text.number], requests[text.number], tokenizer)
            answers.append(answer)
            if on_text is None:
                progress("generate", requests[text.number].max_new_tokens, max_tokens)
            if on_answer is not None and is_first:
                on_answer(answer)
        device, dtype = str(groups.device), str(forward.decoder.dtype).removeprefix("torch.")
    end = time.monotonic()
    return GenerateReport(
        adapters=tuple(map(str, source.adapters)),
        path=str(source.path),
        format=source.format,
        family=source.family_name,
        device=device,
        dtype=dtype,
        answers=tuple(answers),
        num_prompt_tokens=meter.prompt_tokens,
        num_tokens=meter.new_tokens,
        load_seconds=loaded - start,
        seconds=end - loaded,
        prompt_tokens_per_second=_rate(meter.prompt_tokens, meter.prompt_seconds),
        tokens_per_second=_rate(meter.step_tokens, meter.step_seconds),
        num_graphed=meter.num_graphed,
        num_drafted=meter.num_drafted,
        num_accepted=meter.num_accepted,
        num_verified=meter.num_verified,
        accepted=meter.accepted,
        is_shown=not is_first or on_text is not None or on_answer is not None,
        is_list=is_list,
    )


def _answer(
    completion: Completion, prompt: Conversation, request: GenerateRequest, tokenizer: Tokenizer
) -> Answer:
    """A completion as it is reported, with the texts of scored tokens."""

    def scored(token: int, log_prob: float, top: Sequence[tuple[int, float]]) -> ScoredToken:
        likeliest = tuple((t, text_of(t), p) for t, p in top)
        return ScoredToken(token=token, text=text_of(token), log_prob=log_prob, top=likeliest)

    def text_of(token: int) -> str:
        return tokenizer.decode([token], skip_special=False)

    tokens = completion.tokens
    return Answer(
        number=completion.number,
        prompt=_show_prompt(prompt),
        text=completion.text,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_tokens=len(tokens),
        finish=completion.finish,
        scores=tuple(scored(t.id, t.log_prob, t.top) for t in tokens if t.log_prob is not None),
        prompt_scores=tuple(
            scored(t.token, t.log_prob, t.top) for t in completion.prompt_log_probs
        ),
    )


def _read_conversations(options: GenerateOptions) -> list[Conversation]:
    """All prompts, of the options or of a file."""
    file = options.prompts
    prompts = list(options.prompt) if file is None else list(_read_prompts(file, options.field))
    if not prompts:
        if file is not None:
            raise FormatError(
                "the file has no prompt", file=file, hint="one line, or JSON object, each"
            )
        raise UsageError("there is no prompt", hint="--prompt TEXT, or --prompts FILE")
    system = options.system
    opening = () if system is None else ({"role": "system", "content": system},)
    conversations: list[Conversation] = []
    for prompt in prompts:
        if options.chat and isinstance(prompt, str):
            prompt = ({"role": "user", "content": prompt},)
        conversations.append(prompt if isinstance(prompt, str) else (*opening, *prompt))
    return conversations


def _read_prompts(path: Path, field: str | None) -> Iterator[Conversation]:
    """The prompts of a file: lines that are not blank, or records."""
    if path.suffix.lower() in _RECORDS:
        from megtool.data.documents import documents

        for document in documents(path, field=field or _find_field(path)):
            yield document.messages or document.text
        return
    if field is not None:
        raise UsageError(
            f"--field {field}, and {path.name} is plain text",
            hint=f"records are read from {', '.join(_RECORDS[:4])}",
        )
    try:
        text = read_limited(path, _MAX_PROMPTS_BYTES).decode()
    except UnicodeDecodeError as e:
        raise FormatError(f"the file is not UTF-8 at byte {e.start}", file=path) from e
    yield from (line for line in text.splitlines() if line.strip())


def _find_field(path: Path) -> str | None:
    """The field that holds the prompt, by the first record of a JSON file."""
    from megtool.data.documents import MAX_DOCUMENT_BYTES

    if path.suffix.lower() not in _RECORDS[:3]:
        return None
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_DOCUMENT_BYTES), b"")
            record = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror}", file=path) from e
    except (ValueError, RecursionError):
        return None  # the error is raised when the records are read
    return next((f for f in _FIELDS if isinstance(record, dict) and f in record), None)


def _show_prompt(conversation: Conversation) -> str:
    """A prompt as the answer repeats it: the text, or the last message."""
    if isinstance(conversation, str):
        return conversation
    return str(conversation[-1].get("content", ""))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _plan(
    source: CheckpointSource,
    requests: Sequence[GenerateRequest],
    num_slots: int,
    layout: ParallelConfig,
) -> GeneratePlan:
    import torch

    from megtool.model.cache.kv_cache import num_cache_bytes

    c = source.config
    attention = c.attention
    sizes = (r.num_positions + len(r.source) for r in requests)
    positions = sorted(sizes, reverse=True)[:num_slots]
    if c.num_decoder_layers:  # whose keys and values are those of both, a token's of each alike
        cache_bytes = (
            4 * attention.num_kv_heads * attention.head_dim * c.num_decoder_layers * sum(positions)
        )
    else:
        cache_bytes = sum(num_cache_bytes(c, n, dtype=torch.bfloat16) for n in positions)
    axes = [f"{a}={n}" for a in ("tp", "pp", "ep", "cp") if (n := getattr(layout, a)) > 1]
    return GeneratePlan(
        path=str(source.path),
        format=source.format,
        family=source.family_name,
        layout=" ".join(axes) or "one process",
        num_prompts=len(requests),
        num_prompt_tokens=sum(r.num_prompt_tokens for r in requests),
        max_tokens=sum(r.max_new_tokens for r in requests),
        batch_size=num_slots,
        weight_bytes=source.num_bytes,
        cache_bytes=cache_bytes,
    )
