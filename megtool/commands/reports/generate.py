"""Reports of `generate`: the answers to prompts and what they took, or what a run would take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megtool.console import format_bytes, several
from megtool.report.sections import Report, Row, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token, its text, its log-probability (nats), and the likeliest ones with theirs."""

    token: int
    text: str
    log_prob: float
    top: tuple[tuple[int, str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The token as plain data."""
        values: dict[str, Any] = {
            "token": self.token,
            "text": self.text,
            "logprob": round(self.log_prob, 6),
        }
        if self.top:
            values["top"] = [
                {"token": t, "text": text, "logprob": round(p, 6)} for t, text, p in self.top
            ]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What followed one prompt. `finish` is `eos`, `stop` (a stop string) or `length`.

    `scores` are of its tokens, and `prompt_scores` of the prompt's from the second on, where they
    were asked for.
    """

    number: int
    prompt: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish: str
    scores: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        values: dict[str, Any] = {
            "number": self.number,
            "prompt": self.prompt,
            "text": self.text,
            "prompt_tokens": self.num_prompt_tokens,
            "tokens": self.num_tokens,
            "finish": self.finish,
        }
        for name, scores in (("logprobs", self.scores), ("prompt_logprobs", self.prompt_scores)):
            if scores:
                values[name] = [score.to_json() for score in scores]
        return values

    def line(self) -> str:
        """The answer as one line of JSON."""
        return json.dumps(self.to_json(), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport(Report):
    """Answers in the order of the prompts, and what they took.

    Prompts are read at `prompt_tokens_per_second`, texts written at `tokens_per_second`, all of a
    batch together. `is_shown`: the answers were printed as they came, and are
    not printed again; `is_list`: they are printed as lines of JSON. `adapters` are merged into the
    weights. Of `num_drafted` tokens that speculative decoding verified, in `num_verified` passes
    over a text each, `num_accepted` were the model's own: `accepted` are those of each place.
    """

    path: str
    format: str
    family: str | None
    device: str
    dtype: str
    answers: tuple[Answer, ...]
    num_prompt_tokens: int
    num_tokens: int
    load_seconds: float
    seconds: float
    prompt_tokens_per_second: float
    tokens_per_second: float
    num_graphed: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    accepted: tuple[int, ...] = ()
    is_list: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens that a text grows by in a pass that verifies drafts, on average."""
        return 1 + self.num_accepted / max(1, self.num_verified)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for key in ("answers", "is_list", "accepted", "num_verified"):
            del values[key]
        if self.num_verified:
            values["acceptance_length"] = round(self.acceptance_length, 4)
            values["acceptance_rates"] = [round(n / self.num_verified, 4) for n in self.accepted]
        values["prompt_tokens"] = values.pop("num_prompt_tokens")
        values["tokens"] = values.pop("num_tokens")
        return self.add_remarks(values | {"answers": [a.to_json() for a in self.answers]})

    def title(self) -> str:
        return ""

    def sections(self) -> Iterator[Section]:
        if self.is_list:
            yield Section(texts=[a.line() for a in self.answers])
        elif len(self.answers) == 1:
            yield Section(texts=self.answers[0].text.split("\n"))
        else:
            for answer in self.answers:
                yield Section(texts=[*f"> {answer.prompt}".split("\n"), *answer.text.split("\n")])

    def summary(self) -> str:
        """What it took, in one line."""
        texts = several(len(self.answers), "text")
        drafts = ""
        if self.num_drafted:
            share = self.num_accepted / self.num_drafted
            drafts = (
                f"; {share:.1%} of {self.num_drafted:,} drafted tokens accepted, acceptance length "
                f"{self.acceptance_length:.2f}"
            )
        return (
            f"{texts}: {self.num_tokens:,} tokens in {self.seconds:.1f} s "
            f"({self.tokens_per_second:.1f} tokens/s; prompts of {self.num_prompt_tokens:,} tokens "
            f"at {self.prompt_tokens_per_second:.1f} tokens/s; loaded in {self.load_seconds:.1f} s"
            f"{drafts})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan(Report):
    """What a run would do, with nothing loaded. Bytes are of all ranks together."""

    path: str
    format: str
    family: str | None
    layout: str
    num_prompts: int
    num_prompt_tokens: int
    max_tokens: int
    batch_size: int
    weight_bytes: int
    cache_bytes: int

    def title(self) -> str:
        return f"{self.path} ({self.format})"

    def rows(self) -> Iterator[Row]:
        yield "family", f"{self.family or 'not named'}"
        yield "layout", self.layout
        yield "prompts", f"{self.num_prompts:,}, of {self.num_prompt_tokens:,} tokens in all"
        texts = several(self.batch_size, "text")
        yield "new tokens", f"{self.max_tokens:,} at most, {texts} at once"
        yield "weights", f"{format_bytes(self.weight_bytes)} as stored"
        yield "cache", f"{format_bytes(self.cache_bytes)} at most"
