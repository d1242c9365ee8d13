"""The settings of a Retro project, `config.json`, by Megatron's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from megtool.errors import FormatError, UsageError
from megtool.storage.files import Files

CONFIG = "config.json"

_KEYS = {
    "chunk_length": "retro_gpt_chunk_length",
    "sequence_length": "retro_gpt_seq_length",
    "data": "retro_gpt_data_path",
    "split": "retro_gpt_split",
    "block_size": "retro_block_size",
    "data_cache": "retro_gpt_data_cache_path",
    "neighbor_folders": "retro_neighbor_dirs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroSettings:
    """What belongs to the data in `config.json`; `other` has what else is there, kept as it is.

    Lengths are tokens: `sequence_length` of a sample, `chunk_length` of a chunk. `block_size` is
    the number of chunks in a file of neighbors. `data` are the weights and the prefixes of the
    indexed data sets below `data/`. `split` are Megatron's percentages of training, validation and
    test. `data_cache` is where Megatron keeps the order of samples. `neighbor_folders` names the
    folder of each split below `query/`.

    Raises:
        UsageError: a value that cannot be.
    """

    chunk_length: int
    sequence_length: int
    data: tuple[tuple[float, str], ...]
    split: str
    block_size: int = 100_000
    data_cache: str | None = None
    neighbor_folders: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("chunk_length", "sequence_length", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}, not a positive number")
        if self.sequence_length % self.chunk_length:
            raise UsageError(
                f"chunks of {self.chunk_length} tokens do not fill samples of "
                f"{self.sequence_length}",
                hint="sequence_length is a multiple of chunk_length",
            )
        for _, prefix in self.data:
            if not is_inside(prefix):
                raise UsageError(
                    f"data set {prefix!r} is not below data/ of the project",
                    hint="copy or link it there, and name it as PREFIX",
                )
        if not 0 < self.train_share <= 1:
            raise UsageError(
                f"split {self.split!r} does not begin with a percentage of documents to train on",
                hint="such as 98,2,0: Retro divides the first number by 100",
            )

    @property
    def num_chunks(self) -> int:
        """The number of chunks in a sample."""
        return self.sequence_length // self.chunk_length

    @property
    def train_share(self) -> float:
        """The share of each data set's documents that are in the database; 0 if it is no number."""
        try:
            return float(self.split.split(",")[0]) / 100
        except (ValueError, AttributeError):
            return 0.0

    @classmethod
    def read(cls, project: Path) -> RetroSettings:
        """Read `config.json` of a project.

        Raises:
            FormatError: it is missing, or not that of a Retro project.
        """
        file = project / CONFIG
        try:
            values = json.loads(file.read_bytes())
            blend = values["retro_gpt_data_path"]
            folders = values["retro_neighbor_dirs"]
            settings = cls(
                data=tuple(
                    (float(w), str(p)) for w, p in zip(blend[::2], blend[1::2], strict=True)
                ),
                neighbor_folders={k: str(v) for k, v in folders.items() if v is not None},
                other={k: v for k, v in values.items() if k not in _KEYS.values()},
                **{
                    name: values[_KEYS[name]]
                    for name in ("chunk_length", "sequence_length", "split", "block_size")
                },
                data_cache=values.get("retro_gpt_data_cache_path"),
            )
        except FileNotFoundError as e:
            raise FormatError(
                "a Retro project has config.json, and this folder has none",
                file=project,
                hint="name the folder that Megatron's preprocessing got as --retro-project-dir",
                error_id="source-not-found",
            ) from e
        except UsageError as e:
            raise FormatError(e.message, file=file, hint=e.hint) from e
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise FormatError(
                f"not the settings of a Retro project: {type(e).__name__} {e}",
                file=file,
                hint="name a project that tools/retro/preprocess_data.py or megtool wrote",
            ) from e
        for folder in settings.neighbor_folders.values():
            if not is_inside(folder):
                raise FormatError(
                    f"the neighbors are in {folder!r}, outside the project",
                    file=file,
                    hint="retro_neighbor_dirs are names of folders below query/",
                    error_id="unsafe-path",
                )
        return settings

    def to_json(self) -> dict[str, Any]:
        """The settings by Megatron's names."""
        out = {key: getattr(self, name) for name, key in _KEYS.items() if hasattr(self, name)}
        out["retro_gpt_data_path"] = [str(x) for pair in self.data for x in pair]
        splits = dict.fromkeys(("train", "valid", "test"))
        out["retro_neighbor_dirs"] = splits | dict(self.neighbor_folders)
        return {**self.other, **out}

    def write(self, project: Path, *, files: Files | None = None) -> None:
        """Replace `config.json` of a project, whole or not at all."""
        text = json.dumps(self.to_json(), indent=4, sort_keys=True)
        (files or Files()).replace_file(
            project / CONFIG, text.encode(), f".{CONFIG}.megtool", fsync=True
        )


def is_inside(path: str) -> bool:
    """Whether a relative path stays below its folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not PurePosixPath(path).is_absolute() and ".." not in parts
