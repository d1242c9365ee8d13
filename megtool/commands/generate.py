"""Generate: prompts continued by a model in any format, greedily or by chance."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.commands.generate_report import Answer, GeneratePlan, GenerateReport
from megtool.console import Progress, silent
from megtool.convert.sharding import check_layout
from megtool.errors import FormatError, StorageError, UsageError
from megtool.inference.runtime import (
    LESS_MEMORY,
    Manner,
    Runnable,
    Source,
    load_forward,
    on_ranks,
    open_runnable,
)

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer
    from megtool.inference.batching import GenerateRequest
    from megtool.inference.sampling import Sampling
    from megtool.kernels.dispatch import Implementation

_RECORDS = (".jsonl", ".json", ".ndjson", ".parquet", ".gz")
_FIELDS = ("prompt", "messages", "text")
_MOST_AT_ONCE = 16
_NEW_TOKENS = 128
_LESS_MEMORY = f"a smaller --batch-size or --max-new-tokens, --on-demand, {LESS_MEMORY}"

Message = Mapping[str, Any]
Conversation = str | tuple[Message, ...]
"""A text to be continued as it stands, or messages to be answered."""


def generate(
    source: str | Path,
    *,
    prompt: Sequence[str] = (),
    prompts: str | Path | None = None,
    field: str | None = None,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch_size: int | None = None,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    on_demand: bool = False,
    kernels: Implementation = "auto",
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_answer: Callable[[Answer], None] | None = None,
    progress: Progress = silent,
) -> GenerateReport | GeneratePlan:
    """Continue prompts: those in `prompt`, or those of the file `prompts`.

    A file has a prompt a line, or is JSON lines (or parquet) with the prompt in `field`: a text, or
    a list of messages; without `field` it is `prompt`, `messages` or `text`. With `chat` a prompt
    is what a user says, put into the model's chat template, after what `system` says. Without it
    the text is continued as it stands.

    Temperature 0 takes the likeliest token; otherwise `seed` and the number of a prompt decide,
    whatever it is batched with. A text ends before a `stop` string, at an end-of-sequence token of
    the model, or after `max_new_tokens` (128, if the model has positions for them). `batch_size`
    (16) texts are written at once.

    `on_text` is given each piece of a single text as it comes, `on_answer` each answer in order.
    Under `torchrun` every process calls this, in the layout `tp`, `pp`, `ep`; only that of rank 0
    hands anything on.

    Raises:
        MegtoolError: the checkpoint, its tokenizer, the layout, a prompt or an option is no good.
    """
    from megtool.inference.batching import GenerateRequest
    from megtool.inference.generate import check_requests
    from megtool.inference.sampling import Sampling
    from megtool.inference.stop_strings import Stops

    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    conversations = _conversations(prompt, prompts, field, chat, system)
    manner = Manner(
        device=device,
        dtype=dtype,
        on_demand=on_demand,
        kernels=kernels,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        threads=threads,
    )
    runnable = open_runnable(
        Source(
            path=Path(source),
            iteration=iteration,
            family=family,
            like=None if like is None else Path(like),
        )
    )
    spoken = runnable.tokenizer(tokenizer)
    positions = runnable.config.max_positions
    requests = []
    for n, one in enumerate(conversations):
        tokens = _tokens(one, spoken)
        new = max_new_tokens
        if new is None:
            new = max(1, min(_NEW_TOKENS, positions - len(tokens)))
        requests.append(GenerateRequest(number=n, prompt=tokens, max_new_tokens=new))
    check_requests(requests, runnable.config)
    Stops(stop)  # refuses what is no stop string
    num_slots = min(len(requests), batch_size or _MOST_AT_ONCE)
    if dry_run:
        check_layout(runnable.config, manner.layout)
        return _plan(runnable, requests, num_slots, manner)
    return _run(
        runnable,
        spoken,
        _Prompts(conversations=conversations, requests=requests, are_of_file=prompts is not None),
        manner,
        sampling,
        stop=stop,
        num_slots=num_slots,
        on_text=on_text,
        on_answer=on_answer,
        progress=progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Prompts as they were given, and as tokens."""

    conversations: list[Conversation]
    requests: list[GenerateRequest]
    are_of_file: bool


def _run(
    runnable: Runnable,
    spoken: Tokenizer,
    prompts: _Prompts,
    manner: Manner,
    sampling: Sampling,
    *,
    stop: Sequence[str],
    num_slots: int,
    on_text: Callable[[str], None] | None,
    on_answer: Callable[[Answer], None] | None,
    progress: Progress,
) -> GenerateReport:
    """Load the model, have it continue every prompt, and say what came of it."""
    from megtool.inference.generate import Meter
    from megtool.inference.generate import generate as run

    conversations, requests = prompts.conversations, prompts.requests
    began = time.monotonic()
    with on_ranks(manner, less=_LESS_MEMORY) as groups:
        forward = load_forward(runnable, manner, groups, progress)
        loaded = time.monotonic()
        first = groups.rank == 0
        meter = Meter()
        alone = on_text if first and len(requests) == 1 else None
        found = []
        most = sum(r.max_new_tokens for r in requests)
        if alone is None:
            progress("generate", 0, most)
        for done in run(
            forward,
            requests,
            spelling=spoken.stream,
            sampling=sampling,
            eos_ids=frozenset(spoken.eos_ids),
            stop=stop,
            num_slots=num_slots,
            graphed=groups.device.type == "cuda" and not manner.on_demand,
            shown=None if alone is None else lambda number, text: alone(text),
            meter=meter,
        ):
            answer = Answer(
                number=done.number,
                prompt=_shown(conversations[done.number]),
                text=done.text,
                num_prompt_tokens=done.num_prompt_tokens,
                num_tokens=len(done.tokens),
                finish=done.finish,
            )
            found.append(answer)
            if alone is None:
                progress("generate", requests[done.number].max_new_tokens, most)
            if on_answer is not None and first:
                on_answer(answer)
        where, kind = str(groups.device), str(forward.decoder.dtype).removeprefix("torch.")
    ended = time.monotonic()
    return GenerateReport(
        path=str(runnable.opened.path),
        format=runnable.format,
        family=runnable.family,
        device=where,
        dtype=kind,
        answers=tuple(found),
        num_prompt_tokens=meter.prompt_tokens,
        num_tokens=meter.new_tokens,
        load_seconds=loaded - began,
        seconds=ended - loaded,
        prompt_tokens_per_second=_rate(meter.prompt_tokens, meter.prompt_seconds),
        tokens_per_second=_rate(meter.step_tokens, meter.step_seconds),
        num_graphed=meter.num_graphed,
        shown=not first or alone is not None or on_answer is not None,
        is_list=prompts.are_of_file,
    )


def _conversations(
    texts: Sequence[str],
    file: str | Path | None,
    field: str | None,
    chat: bool,
    system: str | None,
) -> list[Conversation]:
    """All prompts, of the options or of a file."""
    if texts and file is not None:
        raise UsageError("--prompt and --prompts", hint="give one of them")
    if system is not None and not chat:
        raise UsageError("--system without --chat", hint="a system message belongs to a chat")
    if field is not None and file is None:
        raise UsageError("--field without --prompts", hint="--prompts FILE says what to read")
    found: list[Conversation] = list(texts) if file is None else list(_read(Path(file), field))
    if not found:
        if file is not None:
            raise FormatError("no prompt in it", file=file, hint="a line, or a JSON object, each")
        raise UsageError("no prompt", hint="--prompt TEXT, or --prompts FILE")
    opening = () if system is None else ({"role": "system", "content": system},)
    out: list[Conversation] = []
    for one in found:
        if chat and isinstance(one, str):
            one = ({"role": "user", "content": one},)
        out.append(one if isinstance(one, str) else (*opening, *one))
    return out


def _read(path: Path, field: str | None) -> Iterator[Conversation]:
    """The prompts of a file: lines that are not blank, or records."""
    if path.suffix.lower() in _RECORDS:
        from megtool.data.documents import documents

        for document in documents(path, field=field or _field(path)):
            yield document.messages or document.text
        return
    if field is not None:
        raise UsageError(
            f"--field {field}, and {path.name} is plain text",
            hint=f"records are read from {', '.join(_RECORDS[:4])}",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror}", file=path) from e
    except UnicodeDecodeError as e:
        raise FormatError(f"no UTF-8 at byte {e.start}", file=path) from e
    yield from (line for line in text.splitlines() if line.strip())


def _field(path: Path) -> str | None:
    """The field that holds the prompt, by the first record of a JSON file."""
    if path.suffix.lower() not in _RECORDS[:3]:
        return None
    try:
        with path.open(encoding="utf-8") as lines:
            record = json.loads(next((line for line in lines if line.strip()), "{}"))
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror}", file=path) from e
    except ValueError:
        return None  # whoever reads the records says what is wrong with them
    return next((f for f in _FIELDS if isinstance(record, dict) and f in record), None)


def _tokens(one: Conversation, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(one) if isinstance(one, str) else tokenizer.chat(one))


def _shown(one: Conversation) -> str:
    """A prompt as the answer repeats it: the text, or what was said last."""
    return one if isinstance(one, str) else str(one[-1].get("content", ""))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _plan(
    runnable: Runnable, requests: Sequence[GenerateRequest], num_slots: int, manner: Manner
) -> GeneratePlan:
    c, layout = runnable.config, manner.layout
    places = sorted((r.num_positions for r in requests), reverse=True)[:num_slots]
    sizes = c.kv_lora_rank + c.qk_rope_head_dim if c.kv_lora_rank else 0
    entry = (sizes or 2 * c.num_kv_heads * c.head_dim) * 2 * c.num_layers
    axes = [f"{a}={n}" for a in ("tp", "pp", "ep") if (n := getattr(layout, a)) > 1]
    return GeneratePlan(
        path=str(runnable.opened.path),
        format=runnable.format,
        family=runnable.family,
        layout=" ".join(axes) or "one process",
        num_prompts=len(requests),
        num_prompt_tokens=sum(len(r.prompt) for r in requests),
        most_tokens=sum(r.max_new_tokens for r in requests),
        at_once=num_slots,
        weight_bytes=runnable.num_bytes,
        cache_bytes=entry * sum(places),
    )
