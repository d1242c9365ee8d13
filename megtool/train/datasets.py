"""Feeds of a run: what it learns from and what it is measured on, and by what both are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megtool.console import Progress, silent
from megtool.data.dataset import BlendedDataset, open_dataset
from megtool.data.dataset import TokenDataset as OneFeed
from megtool.data.token_cache import Encoding
from megtool.data.tokenizer import Tokenizer
from megtool.parallel.process_groups import ALONE, Group
from megtool.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDatasets:
    """The data of a run. `identity` says which data it is, however it is spelled; `counts` what
    became of samples."""

    train: OneFeed | BlendedDataset
    evaluation: OneFeed | BlendedDataset | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)


def open_datasets(
    settings: TrainConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_length: int,
    cache: Path | None,
    world: Group = ALONE,
    progress: Progress = silent,
) -> TrainDatasets:
    """The data that settings name, encoded; every rank of `world` has to call this.

    `cache` is where encoded text is kept, None for nowhere.

    Raises:
        FormatError: a broken line (it is named), or nothing to learn.
        UsageError: no such source, or a part held out that is nothing or everything.
        StorageError: the cache cannot be written.
    """
    options: dict[str, Any] = {
        "cache": cache,
        "vocab_size": vocab_size,
        "mode": None if settings.packing else "padded",
        "encoding": Encoding(
            field=settings.field, split=settings.split, answers_only=not settings.train_on_inputs
        ),
        "long": settings.overflow,
        "world": world,
        "progress": progress,
    }
    train = open_dataset(
        settings.data,
        tokenizer,
        seq_length,
        shares=settings.blend_shares,
        seed=settings.seed,
        **options,
    )
    evaluation: OneFeed | BlendedDataset | None = None
    if settings.eval_split:
        train, evaluation = train.divided(settings.eval_split)
    elif settings.eval_data is not None:
        evaluation = open_dataset([settings.eval_data], tokenizer, seq_length, seed=None, **options)
    return TrainDatasets(
        train=train,
        evaluation=evaluation,
        identity={
            "seq_length": seq_length,
            "seed": settings.seed,
            "hold_out": settings.eval_split,
            "digest": train.fingerprint,
        },
        counts=asdict(train.counts),
    )
