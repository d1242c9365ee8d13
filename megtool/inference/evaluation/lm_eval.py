"""lm-eval tasks on a loaded model, through lm-eval's model interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from megtool.data.tokenizer import Tokenizer
from megtool.errors import MissingPackageError, UsageError
from megtool.inference.evaluation.perplexity import hidden_of, predictions
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, generate
from megtool.inference.windows import TokenDocument, batches
from megtool.model.batch import check_ids
from megtool.options.sampling import Sampling

_MOST_NEW_TOKENS = 256  # lm-eval's own default
_MISSING = "pip install 'megtool[tasks]'"


def run_tasks(
    forward: Forward,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    window: int,
    batch_size: int,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, Any]]:
    """What lm-eval measures on each task.

    `limit` is the number of questions of each task, `num_fewshot` the number of solved examples
    before each; `chat` puts them into the model's chat template. Every rank of the model has to
    call this.

    Raises:
        MissingPackageError: lm-eval is not installed.
        UsageError: it knows no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as e:
        raise MissingPackageError(f"tasks need the {e.name} package", hint=_MISSING) from e
    manager = TaskManager()
    task_names = set(manager.all_tasks)
    if unknown := [t for t in tasks if t not in task_names]:
        near = sorted(t for t in task_names if unknown[0].split("_")[0] in t)[:5]
        raise UsageError(
            f"lm-eval has no task {unknown[0]!r}",
            hint=f"such as {', '.join(near)}" if near else "`lm-eval ls tasks` lists them",
        )
    model = language_model(forward, tokenizer, window=window, batch_size=batch_size)
    results = simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        log_samples=False,
        bootstrap_iters=0,
    )
    if results is None:
        return {}
    return {
        task: {
            name.removesuffix(",none"): value.item() if hasattr(value, "item") else value
            for name, value in values.items()
            if name != "alias" and not name.startswith(("name", "sample_")) and "stderr" not in name
        }
        for task, values in results["results"].items()
    }


def language_model(forward: Forward, tokenizer: Tokenizer, *, window: int, batch_size: int) -> Any:
    """The model as lm-eval's `LM`: log-likelihoods of texts, and texts until a string.

    `window` is how many tokens it sees at once; longer contexts lose their beginning.

    Raises:
        MissingPackageError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ModuleNotFoundError as e:
        raise MissingPackageError(f"tasks need the {e.name} package", hint=_MISSING) from e
    prefix = prefix_of(tokenizer)

    class MegtoolLM(LM):  # type: ignore[misc]
        """Answers lm-eval's requests in their order, whatever order they are computed in."""

        def loglikelihood(self, requests: Iterable[Any]) -> list[tuple[float, bool]]:
            """Log-probability of each continuation, and whether it is what greedy search says."""
            documents = []
            for context, continuation in (r.args for r in requests):
                before, after = split_pair(tokenizer, context, continuation, prefix)
                tokens = [*before, *after][-(window + 1) :]
                first = max(1, len(tokens) - len(after))
                counted = [False] * first + [True] * (len(tokens) - first)
                documents.append(TokenDocument(tokens=tokens, counted=counted))
            return _sums(forward, documents, window, batch_size)

        def loglikelihood_rolling(self, requests: Iterable[Any]) -> list[float]:
            """Log-probability of each whole text, in windows one after the other."""
            parts = [list(rolling(tokenizer, r.args[0], prefix, window)) for r in requests]
            documents = [document for part in parts for document in part]
            sums = iter(_sums(forward, documents, window, batch_size))
            return [sum((s for s, _ in islice(sums, len(part))), 0.0) for part in parts]

        def generate_until(self, requests: Iterable[Any]) -> list[str]:
            """What follows each context, up to a string or a number of tokens."""
            arguments = [r.args for r in requests]
            alike: dict[str, list[int]] = {}
            for number, (_, options) in enumerate(arguments):
                alike.setdefault(repr(sorted(options.items())), []).append(number)
            out = [""] * len(arguments)
            for numbers in alike.values():
                texts = [arguments[n][0] for n in numbers]
                texts_out = _written(
                    forward, tokenizer, texts, dict(arguments[numbers[0]][1]), batch_size
                )
                for number, text in zip(numbers, texts_out, strict=True):
                    out[number] = text
            return out

        @property
        def tokenizer_name(self) -> str:
            """What distinguishes cached requests of one tokenizer from another's."""
            return f"megtool-{tokenizer.vocab_size}"

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """A conversation as text."""
            return tokenizer.chat_text(
                chat_history,
                add_generation_prompt=add_generation_prompt,
                **({} if add_generation_prompt else {"continue_final_message": True}),
            )

    return MegtoolLM()


def prefix_of(tokenizer: Tokenizer) -> int | None:
    """The token that begins a text, or stands before one that has no beginning of its own."""
    return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id


def split_pair(
    tokenizer: Tokenizer, context: str, continuation: str, prefix: int | None
) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it, cut as lm-eval cuts them: both are encoded
    together, spaces that end the context belong to the continuation, and an empty context is the
    token that begins a text."""
    if not context:
        tokens = tokenizer.encode(continuation, add_special=False)
        if prefix is None or tokens[:1] == [prefix]:
            return tokens[:1], tokens[1:]
        return [prefix], tokens
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    joined = encoded(tokenizer, stripped + continuation, prefix)
    before = encoded(tokenizer, stripped, prefix)
    return before, joined[len(before) :]


def encoded(tokenizer: Tokenizer, text: str, prefix: int | None) -> list[int]:
    """The tokens of a text, with what the tokenizer puts around one; of a text that begins with
    the token `prefix` already, as chat templates write it, without: one is enough."""
    spelled = "" if prefix is None else tokenizer.decode([prefix], skip_special=False)
    begins = bool(spelled) and text.startswith(spelled)
    return tokenizer.encode(text, add_special=not begins)


def rolling(
    tokenizer: Tokenizer, text: str, prefix: int | None, window: int
) -> Iterator[TokenDocument]:
    """A whole text after the token that begins one, in windows of which each predicts what the
    one before left; the last is as long as the others, and shows again what it does not count."""
    lead = [] if prefix is None else [prefix]
    tokens = [*lead, *encoded(tokenizer, text, prefix)]
    for start in range(0, len(tokens) - 1, window):
        stop = min(start + window, len(tokens) - 1)
        first = max(0, stop - window)
        counted = [False] * (start + 1 - first) + [True] * (stop - start)
        yield TokenDocument(tokens=tokens[first : stop + 1], counted=counted)


@torch.inference_mode()
def _sums(
    forward: Forward, documents: Sequence[TokenDocument], window: int, batch_size: int
) -> list[tuple[float, bool]]:
    """Of each document the log-probability of what counts, and whether all of it is likeliest.

    Long ones come first, so that a batch is little padded, and memory that does not do fails soon.
    """
    for number, document in enumerate(documents):
        check_ids(
            document.tokens, forward.config.embedding.vocab_size, f"text {number} of the task"
        )
    order = sorted(range(len(documents)), key=lambda n: -len(documents[n].tokens))
    sums, hits = [0.0] * len(documents), [True] * len(documents)
    hidden: Callable[..., Any] = hidden_of(forward, graphed=False)
    for rows in batches(
        [documents[n] for n in order],
        window=window,
        stride=window,
        batch_size=batch_size,
        device=forward.device,
    ):
        if not rows.num_counted:
            continue
        for (place, _), (log_prob, hit) in zip(
            rows.places, predictions(forward, hidden(rows.batch), rows).tolist(), strict=True
        ):
            sums[order[place]] += log_prob
            hits[order[place]] &= bool(hit)
    return list(zip(sums, hits, strict=True))


def _written(
    forward: Forward,
    tokenizer: Tokenizer,
    contexts: Sequence[str],
    options: dict[str, Any],
    batch_size: int,
) -> list[str]:
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else [s for s in until if s]
    positions, prefix = forward.config.positions.max_positions, prefix_of(tokenizer)
    new = min(int(options.get("max_gen_toks", _MOST_NEW_TOKENS)), positions - 1)
    sampled = bool(options.get("do_sample", float(options.get("temperature") or 0) > 0))
    top_p, top_k = options.get("top_p"), options.get("top_k")
    sampling = (
        Sampling(temperature=float(options.get("temperature") or 1), top_p=top_p, top_k=top_k)
        if sampled
        else Sampling()
    )
    requests = [
        GenerateRequest(
            number=n,
            prompt=tuple(encoded(tokenizer, c, prefix)[-(positions - new) :]),
            max_new_tokens=new,
        )
        for n, c in enumerate(contexts)
    ]
    return [
        done.text
        for done in generate(
            forward,
            requests,
            Decoding(
                sampling=sampling,
                eos_ids=frozenset(tokenizer.eos_ids),
                stop=stop,
                num_slots=batch_size,
                graphed=forward.device.type == "cuda",
            ),
            new_detokenizer=tokenizer.stream,
        )
    ]
