"""The checkpoint formats, and detection of the format of a path.

From the top down: torch_checkpointing; deepspeed, gguf, megatron_legacy, safetensors, torch_dist,
torch_file, zarr; the files here.
"""

from __future__ import annotations

import importlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, cast

from megtool.errors import FormatError, UsageError
from megtool.storage.files import Files
from megtool.storage.location.path import location
from megtool.tensors.catalogue import Catalogue


class FormatModule(Protocol):
    """The functions of a format's module.

    A module of a writable format also has a `plan_*_layout`, which returns a `Destination`; its
    arguments differ, and its writer in `reshard/writers/` calls it.
    """

    def detect(self, path: Path) -> bool:
        """Whether the path looks like this format; reads a few bytes at most."""

    def open_checkpoint(self, path: Path, *, iteration: int | str | None = None) -> Catalogue:
        """The catalogue of the checkpoint, from its headers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """One format, or several that share a module.

    `contents` says for each name (of `--to` and of `Catalogue.format`) what the format is, for the
    documentation. `description` is for the error message if no format matches. `name_patterns` and
    `is_file` are a quick filter: `detect` is called only for folders with a name that matches a
    pattern, and for files if `is_file`. `detector` is a smaller module with `detect`, for a format
    that many folders may have.
    """

    contents: Mapping[str, str]
    module: str
    description: str
    name_patterns: tuple[str, ...] = ()
    is_file: bool = False
    writable: bool = True
    detector: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The formats that share the module."""
        return tuple(self.contents)

    def may_match(self, names: Sequence[str] | None) -> bool:
        """Whether a folder with these names, or a file (None), may have this format."""
        if names is None:
            return self.is_file
        return any(fnmatchcase(n, p) for p in self.name_patterns for n in names)

    def detect(self, path: Path) -> bool:
        """Whether the path looks like this format; reads a few bytes at most."""
        module = importlib.import_module(self.detector or self.module)
        return cast(FormatModule, module).detect(path)

    def load(self) -> FormatModule:
        """The module that reads (and writes) the format; imported at first use."""
        return cast(FormatModule, importlib.import_module(self.module))


RANK_SHARDED_FORMATS = ("torch_dist", "dcp", "torch_checkpointing", "megatron")
"""Formats whose files hold the shards of ranks; the others hold whole tensors."""

STATE_DICT_FORMATS = ("dcp", "torch_checkpointing")
"""Formats that hold any nested state dict, values that are not tensors among them."""

ARRAY_FORMATS = ("zarr", "tensorstore", "ocdbt")
"""Formats with one array per tensor, in folders or in one database."""

HF_SUBFOLDER_FORMATS = (*RANK_SHARDED_FORMATS, *ARRAY_FORMATS)
"""Formats that store the small files of Hugging Face in a subfolder `hf/`."""

FORMATS: tuple[CheckpointFormat, ...] = (
    CheckpointFormat(
        contents={
            "zarr": "one array per tensor: zarr v2 and v3 (sharded, compressed), and Megatron's "
            "old zarr backend; written as zarr v3, uncompressed or with `--compress`",
            "tensorstore": "the same arrays, with bfloat16 and FP8 as tensorstore names them",
            "ocdbt": "the same arrays in one OCDBT database, as tensorstore and Orbax write it",
        },
        module="megtool.formats.zarr.reader",
        detector="megtool.formats.zarr.folder",
        description="a folder of zarr arrays",
        name_patterns=(
            "zarr.json",
            ".zgroup",
            ".zarray",
            ".zmetadata",
            "manifest.ocdbt",
            "metadata.json",
            "common.pt",
            "iter_*",
            "release",
            "weights",
            "model_weights",
        ),
    ),
    CheckpointFormat(
        contents={
            "torch_dist": "Megatron-Core's distributed checkpoint: before and after core 0.19, "
            "stacked or per-layer keys, NeMo 2 folders (`weights/` and `context/`), NeMo 1's "
            "(`model_weights/` and `model_config.yaml`), "
            "Megatron-Bridge's `run_config.yaml`",
            "dcp": "plain `torch.distributed.checkpoint`, as FSDP2 and Megatron-FSDP "
            "(`fsdp_dtensor`) write it",
        },
        module="megtool.formats.torch_dist.reader",
        description="a Megatron save folder or a folder with .metadata",
        name_patterns=(
            *(".metadata", "metadata.json", "*.distcp", "iter_*", "release"),
            *("weights", "model_weights"),
        ),
    ),
    CheckpointFormat(
        contents={
            "megatron": "Megatron's legacy `torch` format: `mp_rank_TT[_PPP][_EEE]/"
            "model_optim_rng.pt` and `distrib_optim.pt`, also of Megatron before its core; a "
            "tensor that no Megatron module has is whole in every rank's file only with "
            "`--replicate GLOB`; formats with global shapes carry it with a warning",
        },
        module="megtool.formats.megatron_legacy.reader",
        description="a folder with mp_rank_* folders",
        name_patterns=("mp_rank_*", "iter_*", "release"),
    ),
    CheckpointFormat(
        contents={
            "gguf": "one GGUF file or a split one, decoded to bfloat16 unless `--dtype` is given",
        },
        module="megtool.formats.gguf.reader",
        description="a .gguf file",
        is_file=True,
        writable=False,
    ),
    CheckpointFormat(
        contents={
            "deepspeed": "DeepSpeed's ZeRO and universal checkpoints: weights and moments",
        },
        module="megtool.formats.deepspeed.reader",
        description="a DeepSpeed folder global_step*",
        name_patterns=("global_step*", "*_model_states.pt", "zero"),
        writable=False,
    ),
    CheckpointFormat(
        contents={
            "torch_checkpointing": "PyTorch's `torch_checkpointing`: a file `ITEM_RANK.pt` for "
            "each item and rank (safetensors and JSON are read, too), and `metadata.pkl`, which "
            "is not run; without it, DTensors in the files say where they lie, as in verl's "
            "`model_world_size_N_rank_R.pt`",
        },
        module="megtool.formats.torch_checkpointing.reader",
        description="a folder with metadata.pkl or model_0.pt",
        name_patterns=("metadata.pkl", "*_0.pt"),
    ),
    CheckpointFormat(
        contents={
            "hf": "Hugging Face folder: safetensors or `pytorch_model.bin`, one or shards with an "
            "index, config, tokenizer and other small files; optimizer state in "
            "`optimizer.safetensors` is read; quantized folders (FP8 blocks, MXFP4, "
            "compressed-tensors, ModelOpt, GPTQ, AWQ, auto-round, bitsandbytes, MLX) are decoded",
            "safetensors": "one `.safetensors` file",
        },
        module="megtool.formats.safetensors.reader",
        description="a folder with config.json, *.safetensors or pytorch_model.bin, or one "
        ".safetensors file",
        name_patterns=("config.json", "*.safetensors*", "pytorch_model*.bin*", "gptq_model*.bin"),
        is_file=True,
    ),
    CheckpointFormat(
        contents={
            "torch_file": "one file of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`; also from "
            "before torch 1.6) with a state dict, under any keys; no code of it runs, and "
            "`--like FOLDER` says which model it is",
        },
        module="megtool.formats.torch_file.reader",
        description="a file of torch.save",
        is_file=True,
        writable=False,
    ),
)


def open_checkpoint(path: str | Path, *, iteration: int | str | None = None) -> Catalogue:
    """Open the checkpoint at `path`, of any format; `iteration` chooses one of a save folder.

    Raises:
        FormatError: there is no checkpoint in a known format, or it is damaged.
    """
    path = location(path)
    from megtool.staging.publication import refuse_unpublished

    refuse_unpublished(path)
    checkpoint_format = detect_format(path)
    if iteration is not None and "iter_*" in checkpoint_format.name_patterns:
        # Iterations of one save folder may be of different formats.
        from megtool.formats.save_folder import find_iteration

        path = find_iteration(path, iteration) or path
        checkpoint_format = detect_format(path)
    return checkpoint_format.load().open_checkpoint(path, iteration=iteration)


def detect_format(path: Path) -> CheckpointFormat:
    """The first of `FORMATS` that recognizes `path`.

    Raises:
        FormatError: none does, or the path does not exist.
    """
    Files().load_tree(path)
    status = Files().stat(path)
    if status is None:
        is_web = str(path).startswith(("http://", "https://"))
        raise FormatError(
            "the path does not exist",
            file=path,
            hint="name a file if the server lists no folders" if is_web else "check the path",
            error_id="source-not-found",
        )
    names = Files().names(path) if stat.S_ISDIR(status.st_mode) else None
    if names is not None and {"config.json", "data", "db"} <= set(names):  # not one of a model
        raise FormatError(
            "it is not a checkpoint: config.json, data/ and db/ are those of Retro's training data",
            file=path,
            hint="RetroProject of megtool.data.retro.project reads it, from Python",
            error_id="not-a-checkpoint",
        )
    if names is None and path.suffix == ".nemo":
        raise FormatError(
            "it is an archive of NeMo 1, and archives are not read",
            file=path,
            hint=f"unpack it and give the folder: mkdir {path.stem} && tar -xf {path.name} "
            f"-C {path.stem}",
            error_id="not-a-checkpoint",
        )
    for checkpoint_format in FORMATS:
        if checkpoint_format.may_match(names) and checkpoint_format.detect(path):
            return checkpoint_format
    files = [n for n in names or () if n.endswith(".gguf")]
    raise FormatError(
        "it is not a checkpoint: megtool looked for " + "; ".join(f.description for f in FORMATS),
        file=path,
        hint=f"name the file: {path / files[0]}" if files else "give the folder that holds it",
        error_id="not-a-checkpoint",
    )


def find_format(name: str) -> CheckpointFormat:
    """The format called `name`.

    Raises:
        UsageError: there is none.
    """
    for checkpoint_format in FORMATS:
        if name in checkpoint_format.names:
            return checkpoint_format
    writable = ", ".join(n for f in FORMATS for n in f.names if f.writable)
    raise UsageError(f"there is no format {name!r}", hint=f"writable: {writable}")
