"""Evaluate how well a model predicts a text, and how far it is from another model there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.commands.evaluate_labels import evaluate_labels
from megtool.commands.options.models import EvaluateOptions
from megtool.commands.reports.evaluate import (
    Divergence,
    EvaluatePlan,
    EvaluateReport,
    LabelReport,
    WorstPosition,
)
from megtool.console import Progress, silent
from megtool.convert.megatron.sharding import check_layout
from megtool.convert.pruning_scores import PruningScores, encode_scores, model_sizes
from megtool.errors import UsageError
from megtool.export.hf.engine_arithmetic import check_dequantize, run_as_engine
from megtool.inference.evaluation.texts import (
    mask_documents,
    pair_documents,
    read_token_documents,
)
from megtool.inference.runtime import LESS_MEMORY, load_forward, on_ranks
from megtool.options.effects import check_effects
from megtool.options.groups import SourceOptions
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder
from megtool.spec.model_config import ModelConfig
from megtool.staging.destination.check import check_file
from megtool.storage.files import Files

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer
    from megtool.inference.evaluation.channel_importance import ChannelImportance
    from megtool.inference.evaluation.compare import Comparison
    from megtool.inference.evaluation.layer_influence import LayerInfluence
    from megtool.inference.evaluation.perplexity import Score
    from megtool.inference.forward import Forward
    from megtool.inference.windows import TokenDocument
    from megtool.parallel.process_groups import ProcessGroups

_MAX_WINDOW = 2048
_BATCH_TOKENS = 4096
_LESS_MEMORY = f"a smaller --batch-size or --window, --stream-layers, {LESS_MEMORY}"


def evaluate(
    options: EvaluateOptions, *, progress: Progress = silent
) -> EvaluateReport | LabelReport | EvaluatePlan:
    """Score a model on `data`, on tasks of lm-eval, or on both.

    Each document is scored by itself, or all as one with `join`. Of conversations (put into the
    model's chat template) and of prompts with completions only what the assistant says counts,
    unless `all_turns`. A window of `window` tokens (the model's positions, at most 2048; tasks may
    use all positions) begins every `stride` tokens (a window); each token counts once, in the first
    window that predicts it. Of an encoder the tokens that count are those masked (15 of 100). Of an
    encoder and a decoder (T5) a prompt is the source of its completion, both in one piece, and of
    plain texts spans are left out (15 of 100 tokens), of parts whose source has `window` tokens.
    `against` is a second model, in any format, that is run on the same windows and compared token
    by token. `layer_scores` measures how much each layer changes the states of tokens, and
    `pruning_scores` is a file for the scores of all parts that `reshard` can leave out.

    A model that scores labels is evaluated on records of texts with a `label`, or, if it has one
    label, of a number, or of a `chosen` and a `rejected` answer; `predictions` is a file for the
    scores of every text.

    Raises:
        UsageError: an option has no effect, or no such value.
        MegtoolError: a checkpoint, its tokenizer, the layout or the data cannot be used.
    """
    check_effects(options)
    data = options.data
    if data is None and options.tasks is None:
        raise UsageError("there is nothing to evaluate on", hint="--data FILE, or --tasks NAMES")
    source = open_decoder(options.source, options, encoders=True, two_stacks=True, labels=True)
    if source.config.head.num_labels:
        return evaluate_labels(source, options, progress)
    if options.predictions is not None:
        raise UsageError(
            "--predictions is for models that score labels, and this one predicts tokens",
            hint="--json prints the whole report",
        )
    tokenizer = source.tokenizer(options.tokenizer)
    reference = (
        None if options.against is None else _open_reference(options.against, options, source)
    )
    check_dequantize(options.dequantize, source, reference)
    sizes = _Sizes.of(options, source.config)
    texts: list[TokenDocument] = []
    if data is not None:
        texts = read_token_documents(
            data,
            tokenizer,
            field=options.field,
            split=options.split,
            join=options.join,
            all_turns=options.all_turns,
            max_tokens=options.max_tokens,
        )
    has_source = source.config.num_decoder_layers > 0
    if options.tasks is not None and (source.config.bidirectional or has_source):
        what = "has an encoder" if has_source else "is an encoder"
        raise UsageError(
            f"tasks ask for the text behind a prompt, and the model {what}",
            hint="--data FILE scores how well it predicts "
            + ("targets" if has_source else "masked tokens"),
        )
    if has_source and options.layer_scores:
        raise UsageError(
            "--layer-scores of a model with an encoder and a decoder",
            hint="it is for models of one stack of layers, which `reshard --layers` makes shorter",
        )
    if options.pruning_scores is not None:
        if has_source:
            raise UsageError(
                "--pruning-scores of a model with an encoder and a decoder",
                hint="it is for models of one stack of layers",
            )
        check_file(options.pruning_scores)
    if source.config.bidirectional:
        texts = mask_documents(texts, tokenizer, source.config.embedding.vocab_size)
    if has_source:
        texts = pair_documents(texts, tokenizer, source.config, sizes.window)
        sizes = sizes.of_targets(texts)
    if options.dry_run:
        check_layout(source.config, options.layout)
        return _plan(source, str(data or options.tasks), texts, sizes)
    return _Evaluation(source, reference, tokenizer, texts, options, sizes).run(progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Tokens of windows and texts of a batch. Of questions longer than `task_window` only the last
    tokens are shown."""

    window: int
    task_window: int
    stride: int
    batch_size: int

    @classmethod
    def of(cls, options: EvaluateOptions, config: ModelConfig) -> _Sizes:
        max_positions, has_source = config.positions.max_positions, config.num_decoder_layers > 0
        window = options.window or min(max_positions, _MAX_WINDOW)
        stride = options.stride or window
        if has_source and options.stride is not None:
            raise UsageError(
                "--stride, and a target is scored in one piece", hint="leave out --stride"
            )
        if window > max_positions and not has_source:
            raise UsageError(
                f"a window of {window} tokens, and the model has {max_positions} positions",
                hint=f"--window {max_positions} is the largest",
            )
        if stride > window:
            raise UsageError(
                f"a window of {window} tokens cannot move by {stride}",
                hint="the stride is at least 1, and at most the window",
            )
        return cls(
            window=window,
            task_window=options.window or max_positions,
            stride=stride,
            batch_size=options.batch_size or max(1, _BATCH_TOKENS // window),
        )

    def of_targets(self, texts: Sequence[TokenDocument]) -> _Sizes:
        """Sizes with which every target is one window."""
        longest = max((len(text.tokens) for text in texts), default=1)
        return replace(self, window=longest, stride=longest)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """What is scored, and how."""

    source: CheckpointSource
    reference: CheckpointSource | None
    tokenizer: Tokenizer
    texts: list[TokenDocument]
    options: EvaluateOptions
    sizes: _Sizes

    def _load(
        self, source: CheckpointSource, groups: ProcessGroups, progress: Progress
    ) -> tuple[Forward, str]:
        """A model that computes as the engine that loads it does, and what is rounded."""
        forward = load_forward(source, self.options, groups, progress)
        return forward, "" if self.options.dequantize else run_as_engine(forward, source)

    def run(self, progress: Progress) -> EvaluateReport:
        """Load the models, score them, and report."""
        from megtool.inference.evaluation.channel_importance import ChannelImportance
        from megtool.inference.evaluation.compare import compare
        from megtool.inference.evaluation.layer_influence import LayerInfluence
        from megtool.inference.evaluation.perplexity import Score, check_documents
        from megtool.inference.evaluation.perplexity import evaluate as score_texts

        options, texts, sizes, source = self.options, self.texts, self.sizes, self.source
        has_data = options.data is not None
        total = check_documents(texts, source.config.embedding.vocab_size) if has_data else 0
        start = time.monotonic()
        with on_ranks(options, less=_LESS_MEMORY) as groups:
            forward, quantization = self._load(source, groups, progress)
            reference = None
            if self.reference is not None:
                reference, _ = self._load(self.reference, groups, progress)
            loaded = time.monotonic()
            score, comparison = Score(), None
            is_scored = options.pruning_scores is not None
            influence = importance = None
            if options.layer_scores or is_scored:
                influence = LayerInfluence(forward.decoder)
            if is_scored:
                importance = ChannelImportance(forward.decoder)
            shared: dict[str, Any] = {
                "window": sizes.window,
                "stride": sizes.stride,
                "batch_size": sizes.batch_size,
                "graphed": groups.device.type == "cuda"
                and not (options.stream_layers or influence),
                "counted": lambda n: progress("evaluate", n, total),
            }
            if has_data:
                progress("evaluate", 0, total)
                with ExitStack() as measured:
                    if influence is not None:
                        measured.enter_context(influence.measured())
                    if importance is not None:
                        measured.enter_context(importance.measured())
                    if reference is None:
                        score = score_texts(forward, texts, **shared)
                    else:
                        comparison = compare(forward, reference, texts, **shared)
                        score = comparison.ours
            end = time.monotonic()
            if influence is not None and importance is not None:
                self._write_scores(influence, importance, score, groups.rank)
            tasks: dict[str, dict[str, Any]] = {}
            if options.tasks is not None:
                from megtool.inference.evaluation.lm_eval import run_tasks

                tasks = run_tasks(
                    forward,
                    self.tokenizer,
                    [t.strip() for t in options.tasks.split(",") if t.strip()],
                    batch_size=sizes.batch_size,
                    window=sizes.task_window,
                    limit=options.limit,
                    num_fewshot=options.num_fewshot,
                    chat=options.chat,
                )
            divergence = None
            if comparison is not None and self.reference is not None:
                divergence = _report_divergence(comparison, self.reference, texts, self.tokenizer)
            return EvaluateReport(
                path=str(source.path),
                format=source.format,
                family=source.family_name,
                data=options.data,
                device=str(groups.device),
                dtype=str(forward.decoder.dtype).removeprefix("torch."),
                quantization=quantization,
                documents=len(texts),
                tokens=score.num_tokens,
                loss=score.loss if score.num_tokens else 0.0,
                perplexity=score.perplexity if score.num_tokens else 0.0,
                accuracy=score.accuracy if score.num_tokens else 0.0,
                window=sizes.window,
                stride=sizes.stride,
                load_seconds=loaded - start,
                seconds=end - loaded,
                against=divergence,
                tasks=tasks,
                layer_scores=influence.scores() if influence and options.layer_scores else (),
                pruning_scores=None
                if options.pruning_scores is None
                else str(options.pruning_scores),
                is_shown=groups.rank != 0,
            )

    def _write_scores(
        self, influence: LayerInfluence, importance: ChannelImportance, score: Score, rank: int
    ) -> None:
        """Write the scores of the model's parts; the file appears when it is complete."""
        scores = PruningScores(
            sizes=model_sizes(self.source.config),
            layers=influence.scores(),
            hidden=importance.hidden(),
            ffn=importance.ffn(),
            heads=importance.heads(),
            experts=importance.experts(),
            about={
                "source": str(self.source.path),
                "data": self.options.data,
                "tokens": score.num_tokens,
                "window": self.sizes.window,
                "stride": self.sizes.stride,
            },
        )
        path = self.options.pruning_scores
        if rank == 0 and path is not None:
            Files().replace_file(path, encode_scores(scores), f"{path.name}.part")


def _open_reference(
    path: Path, options: EvaluateOptions, source: CheckpointSource
) -> CheckpointSource:
    """Open the second model; --family and --like apply to it too, where it needs them."""
    like = SourceOptions(family=options.family, like=options.like)
    config = source.config
    reference = open_decoder(
        path, like, encoders=config.bidirectional, two_stacks=config.num_decoder_layers > 0
    )
    if reference.config.bidirectional != config.bidirectional:
        raise UsageError(
            f"of {source.path} and {path}, one predicts masked tokens, and the other predicts the "
            "next tokens",
            hint="models are compared by the same predictions",
        )
    if bool(reference.config.num_decoder_layers) != bool(config.num_decoder_layers):
        raise UsageError(
            f"of {source.path} and {path}, one has an encoder, and the other has none",
            hint="models are compared by the same predictions",
        )
    sizes = source.config.embedding.vocab_size, reference.config.embedding.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{source.path} has a vocabulary of {sizes[0]} tokens, and {path} one of {sizes[1]}",
            hint="models are compared token by token, and need the same vocabulary",
        )
    return reference


def _report_divergence(
    c: Comparison, source: CheckpointSource, texts: Sequence[TokenDocument], tokenizer: Tokenizer
) -> Divergence:
    def show(*ids: int) -> str:
        return tokenizer.decode(ids, skip_special=False)

    worst = tuple(
        WorstPosition(
            document=p.document,
            place=p.place,
            kl=p.kl,
            before=show(*texts[p.document].tokens[max(0, p.place - 12) : p.place]),
            expected=show(p.expected_id),
            predicted=show(p.our_id),
            reference=show(p.reference_id),
        )
        for p in c.worst
    )
    return Divergence(
        path=str(source.path),
        format=source.format,
        family=source.family_name,
        perplexity=c.reference.perplexity,
        loss=c.reference.loss,
        accuracy=c.reference.accuracy,
        kl_mean=c.kl_mean,
        kl_median=c.kl_percentiles[0],
        kl_90=c.kl_percentiles[1],
        kl_99=c.kl_percentiles[2],
        kl_999=c.kl_percentiles[3],
        kl_max=c.kl_max,
        agreement=c.agreement,
        logits_mean_difference=c.logits_mean_difference,
        logits_max_difference=c.logits_max_difference,
        worst=worst,
    )


def _plan(
    source: CheckpointSource, data: str, texts: list[TokenDocument], sizes: _Sizes
) -> EvaluatePlan:
    from megtool.inference.windows import num_counted, windows

    return EvaluatePlan(
        path=str(source.path),
        format=source.format,
        family=source.family_name,
        data=data,
        documents=len(texts),
        tokens=num_counted(texts),
        window=sizes.window,
        stride=sizes.stride,
        num_windows=sum(
            1
            for text in texts
            for _ in windows(len(text.tokens), window=sizes.window, stride=sizes.stride)
        ),
        batch_size=sizes.batch_size,
        weight_bytes=source.num_bytes,
    )
