"""The training and validation data of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.console import Progress, silent
from megtool.convert.families.label_head import label_names
from megtool.data.dataset import BlendedDataset, TokenDataset
from megtool.data.fill_in_middle import FillInMiddle, FimTokens
from megtool.data.labeled_texts import LabeledDataset, LabelForm, read_labeled_texts
from megtool.data.masking import Masking
from megtool.data.open_dataset import RowForm, open_dataset
from megtool.data.source_target import SourceTarget
from megtool.data.token_cache import Encoding, is_indexed
from megtool.errors import MegtoolError, UsageError
from megtool.options.layout import LabelKind
from megtool.parallel.process_groups import ALONE, Group
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.train.options.config import TrainConfig
from megtool.train.run_plan import row_length

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDatasets:
    """The data of a run. `identity` identifies their content, whatever the paths; `counts` are the
    numbers of documents and rows, and of documents that were split, truncated or skipped;
    `label_kind` says what labels of whole texts are."""

    train: TokenDataset | BlendedDataset | LabeledDataset
    evaluation: TokenDataset | BlendedDataset | LabeledDataset | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    label_kind: LabelKind = "classes"


def open_datasets(
    settings: TrainConfig,
    source: CheckpointSource,
    *,
    cache: Path | None,
    world: Group = ALONE,
    progress: Progress = silent,
) -> TrainDatasets:
    """Tokenize the data that options name with the model's tokenizer, for every rank of `world`.

    Data that are tokens already (Megatron's `.bin` and `.idx`) need no tokenizer. `cache` is the
    folder of tokenized data, None for no cache.

    Raises:
        FormatError: a line is malformed (it is named), or there is nothing to learn.
        UsageError: a source does not exist, or the validation split is empty or everything.
        StorageError: the cache cannot be written.
    """
    config = source.config
    if config.head.num_labels:
        return _open_labeled(settings, source)
    seq_length = row_length(settings, config)
    open_texts = partial(
        open_dataset,
        cache=cache,
        vocab_size=config.embedding.vocab_size,
        encoding=Encoding(
            field=settings.records.field,
            split=settings.records.split,
            answers_only=not settings.all_turns,
        ),
        world=world,
        progress=progress,
    )
    tokenizer = _open_tokenizer(settings, source)
    rows = RowForm(
        length=seq_length,
        seed=settings.seed,
        mode=None if settings.is_packed else "padded",
        overflow=settings.overflow,
        shares=settings.blend_shares,
        masking=Masking.of(
            tokenizer,
            config.embedding.vocab_size,
            share=settings.rows.mask_prob,
            seed=settings.seed,
        )
        if config.bidirectional
        else None,
        targets=SourceTarget.of(
            tokenizer,
            config,
            share=settings.rows.mask_prob,
            mean_span=settings.rows.mean_noise_span_length,
            seed=settings.seed,
        )
        if config.num_decoder_layers
        else None,
        target_length=settings.decoder_seq_length,
        fill_in=_find_fill_in(settings, config, tokenizer) if settings.rows.fim_rate else None,
    )
    train = open_texts(settings.data, tokenizer, rows)
    evaluation: TokenDataset | BlendedDataset | None = None
    if settings.eval_split:
        train, evaluation = train.divided(settings.eval_split)
    elif settings.eval_data is not None:
        evaluation = open_texts(
            [settings.eval_data], tokenizer, replace(rows, seed=None, shares=None)
        )
    return TrainDatasets(
        train=train,
        evaluation=evaluation,
        identity={
            "seq_length": seq_length,
            "seed": settings.seed,
            "eval_split": settings.eval_split,
            "digest": train.fingerprint,
        },
        counts=asdict(train.counts),
    )


def _find_fill_in(
    settings: TrainConfig, config: ModelConfig, tokenizer: Tokenizer | None
) -> FillInMiddle:
    """How texts are rearranged.

    Raises:
        UsageError: the model is not causal, or has no tokens for it.
    """
    if config.bidirectional or config.num_decoder_layers:
        raise UsageError(
            "--fim-rate rearranges texts for a causal model, and this one "
            + ("has an encoder" if config.num_decoder_layers else "attends both ways"),
            hint="--mask-prob says how much of a text it is to fill in",
        )
    return FillInMiddle.of(
        tokenizer,
        config.embedding.vocab_size,
        FimTokens(
            prefix=settings.rows.fim_prefix_token,
            middle=settings.rows.fim_middle_token,
            suffix=settings.rows.fim_suffix_token,
        ),
        split_token=settings.rows.fim_split_sample,
        rate=settings.rows.fim_rate,
        spm_rate=settings.rows.fim_spm_rate,
        fragment_rate=settings.rows.fim_fragment_rate,
        no_prefix=settings.rows.fim_no_prefix,
        seed=settings.seed,
    )


def _open_labeled(settings: TrainConfig, source: CheckpointSource) -> TrainDatasets:
    """The data of a model that scores labels: a text, or a pair of answers, in each row.

    Raises:
        FormatError: a record has no label of the model's.
        UsageError: an option has no effect on such data.
    """
    for name, is_given in (
        ("--blend", settings.blend_shares),
        ("--fim-rate", settings.rows.fim_rate),
    ):
        if is_given:
            raise UsageError(
                f"{name} is for models of tokens, and this one scores labels", hint="leave it out"
            )
    config, length = source.config, row_length(settings, source.config)
    tokenizer = source.tokenizer(settings.tokenizer)
    label_settings = LabelForm(
        names=label_names(config),
        both_ways=config.bidirectional,
        field=settings.records.field,
        split=settings.records.split,
    )
    layout = settings.layout
    options: dict[str, Any] = {
        "both_ways": config.bidirectional,
        "pad_id": tokenizer.pad_id or 0,
        "overflow": settings.overflow,
        "multiple": 2 * layout.cp * layout.tp,
    }
    labeled = read_labeled_texts(settings.data, tokenizer, label_settings)
    train = LabeledDataset(labeled, length, seed=settings.seed, **options)
    evaluation: LabeledDataset | None = None
    if settings.eval_split:
        train, evaluation = train.divided(settings.eval_split)
    elif settings.eval_data is not None:
        other = read_labeled_texts([settings.eval_data], tokenizer, label_settings)
        evaluation = LabeledDataset(other, length, seed=None, **options)
        if other.kind != labeled.kind:
            raise UsageError(
                f"the data has {labeled.kind}, and the validation data {other.kind}",
                hint="both have labels of one kind",
            )
    return TrainDatasets(
        train=train,
        evaluation=evaluation,
        identity={
            "seq_length": length,
            "seed": settings.seed,
            "eval_split": settings.eval_split,
            "digest": train.fingerprint,
        },
        counts=asdict(train.counts),
        label_kind=labeled.kind,
    )


def _open_tokenizer(settings: TrainConfig, source: CheckpointSource) -> Tokenizer | None:
    """The tokenizer, or None where there is none and all data are tokens already."""
    data = [*settings.data, *([] if settings.eval_data is None else [settings.eval_data])]
    if settings.tokenizer is not None or not all(map(is_indexed, data)):
        return source.tokenizer(settings.tokenizer)
    try:
        return source.tokenizer()
    except MegtoolError as e:  # it would only say which token pads rows
        _LOG.info("the data are tokens already, and no tokenizer is used: %s", e.message)
        return None
