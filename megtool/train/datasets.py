"""The training and validation data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megtool.console import Progress, silent
from megtool.data.dataset import BlendedDataset, TokenDataset, open_dataset
from megtool.data.token_cache import Encoding
from megtool.parallel.process_groups import ALONE, Group
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig
from megtool.train.run_plan import row_length


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDatasets:
    """The data of a run. `identity` identifies their content, whatever the paths; `counts` are the
    numbers of documents and rows, and of documents that were split, truncated or skipped."""

    train: TokenDataset | BlendedDataset
    evaluation: TokenDataset | BlendedDataset | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)


def open_datasets(
    settings: TrainConfig,
    source: CheckpointSource,
    *,
    cache: Path | None,
    world: Group = ALONE,
    progress: Progress = silent,
) -> TrainDatasets:
    """Tokenize the data that options name with the model's tokenizer, for every rank of `world`.

    `cache` is the folder of tokenized data, None for no cache.

    Raises:
        FormatError: a line is malformed (it is named), or there is nothing to learn.
        UsageError: a source does not exist, or the validation split is empty or everything.
        StorageError: the cache cannot be written.
    """
    config = source.config
    seq_length = row_length(settings, config.max_positions)
    open_texts = partial(
        open_dataset,
        cache=cache,
        vocab_size=config.vocab_size,
        mode=None if settings.packing else "padded",
        encoding=Encoding(
            field=settings.field, split=settings.split, answers_only=not settings.all_turns
        ),
        long=settings.overflow,
        world=world,
        progress=progress,
    )
    tokenizer = source.tokenizer(settings.tokenizer)
    train = open_texts(
        settings.data, tokenizer, seq_length, shares=settings.blend_shares, seed=settings.seed
    )
    evaluation: TokenDataset | BlendedDataset | None = None
    if settings.eval_split:
        train, evaluation = train.divided(settings.eval_split)
    elif settings.eval_data is not None:
        evaluation = open_texts([settings.eval_data], tokenizer, seq_length, seed=None)
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
