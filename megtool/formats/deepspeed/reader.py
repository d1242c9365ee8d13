"""DeepSpeed checkpoints, ZeRO of any stage and universal (`deepspeed`; read only).

A save folder holds `global_step100/` and a file `latest`. Of ZeRO, each data-parallel rank's
`*_optim_states.pt` holds flat parts of master weights and moments, which `*_model_states.pt` gives
names and shapes to; a universal checkpoint (`global_step100_universal/zero/NAME/fp32.pt`) keeps
each parameter in a file. Source: deepspeed/utils/zero_to_fp32.py, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from megtool.errors import FormatError
from megtool.formats.auxiliary_files import find_auxiliary_files
from megtool.formats.deepspeed.files import (
    DeepSpeedTensor,
    ModelStates,
    OptimizerStates,
    read_model_states,
    read_optimizer_states,
    read_parameter,
)
from megtool.formats.deepspeed.partitions import (
    FlatRun,
    Shape,
    ZeroTensors,
    check_slices,
    split_group,
    split_parameters,
)
from megtool.formats.header_reader import (
    check_inside,
    list_names,
    parse_json,
    read_exact,
)
from megtool.process.threads import map_in_threads
from megtool.storage.files import is_regular_file, read_file
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue, StoredObject

__all__ = ["NAMES", "detect", "open_checkpoint"]

NAMES = ("deepspeed",)

_STEP = re.compile(r"global_step(\d+)(_universal)?")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)\w*_optim_states\.pt")
_TRACKERS = ("latest", "latest_universal")
_UNIVERSAL = {"fp32.pt": "param", "exp_avg.pt": "exp_avg", "exp_avg_sq.pt": "exp_avg_sq"}
_MAX_CONFIG_BYTES = 64 << 20
_THREADS = 8
_TO_UNIVERSAL = (
    "make it universal first: python -m deepspeed.checkpoint.ds_to_universal "
    "--input_folder FOLDER --output_folder FOLDER_universal"
)


def detect(path: Path) -> bool:
    """Whether `path` is such a checkpoint, or a save folder of them without safetensors."""
    if not path.is_dir():
        return False
    if _is_checkpoint(path):
        return True
    return not any(path.glob("*.safetensors")) and any(map(_is_checkpoint, _steps(path).values()))


def _is_checkpoint(path: Path) -> bool:
    if any(_MODEL.fullmatch(p.name) for p in path.glob("*_model_states.pt")):
        return True
    return (path / "zero").is_dir() and any((path / "zero").glob("*/fp32.pt"))


def _steps(path: Path) -> dict[str, Path]:
    return {p.name: p for p in sorted(path.glob("global_step*")) if _STEP.fullmatch(p.name)}


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of one step; `path` is its folder, or the save folder around it.

    Weights have the model's names. Optimizer state is named `optimizer.state.STATE.NAME`, where
    `param` are the master weights; a weight that no file stores separately is its master weight.
    `metadata` gets `iteration`, `args` (Megatron-DeepSpeed's) and `config` (the `config.json`
    next to the checkpoint, as the Trainer of transformers writes it), each if present.

    Raises:
        FormatError: files are missing, damaged, or of a layout that is not supported.
    """
    folder = _choose_step(path, iteration)
    gathered = ZeroTensors()
    states = _read_all_model_states(folder)
    optimizers: list[OptimizerStates] = []
    warnings: list[str] = []
    if (folder / "zero").is_dir():
        _gather_universal(folder, states, gathered)
    else:
        optimizers = _gather_zero(folder, states, gathered, warnings)
    out = gathered.catalogue(folder)
    out.check()  # checked before weights share the bytes of master weights
    masters = {n.removeprefix(_MASTER): n for n in gathered.tensors if n.startswith(_MASTER)}
    gathered.share({w: n for w, n in masters.items() if w not in gathered.tensors})
    out = gathered.catalogue(folder)
    out.warnings = warnings
    _add_metadata(out, folder, states, optimizers)
    return out


_STATE = "optimizer.state."
_MASTER = _STATE + "param."


def _choose_step(path: Path, iteration: int | str | None) -> Path:
    if iteration is None and _is_checkpoint(path):
        return path
    steps = _steps(path)
    if iteration is not None:
        candidates = [n for n in steps if n.split("_universal")[0] == f"global_step{iteration}"]
    else:
        tracked = [_read_tracker(path / t) for t in _TRACKERS if is_regular_file(path / t)]
        candidates = [t for t in tracked if t in steps] or sorted(steps, key=_step_number)[-1:]
    if not candidates or not _is_checkpoint(steps[candidates[0]]):
        raise FormatError(
            f"there is no checkpoint of step {iteration}"
            if iteration is not None
            else "there is no checkpoint",
            file=path,
            hint=f"there are {', '.join(steps)}" if steps else "give the folder that holds it",
            error_id="iteration-not-found",
        )
    return steps[candidates[0]]


def _read_tracker(path: Path) -> str:
    return read_file(path)[:256].decode(errors="replace").strip()


def _step_number(name: str) -> int:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else -1


T = TypeVar("T")


def _in_threads(work: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """Results in order; the first error stops all."""
    return map_in_threads(work, list(names), threads=_THREADS)


def _find_rank_files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
    """Files by `(model-parallel rank, data-parallel rank)`, in order."""
    files = {}
    for name in list_names(folder):
        if match := pattern.fullmatch(name):
            check_inside(folder, name)
            files[int(match[2]), int(match[1] or 0)] = name
    return dict(sorted(files.items()))


def _read_all_model_states(folder: Path) -> list[ModelStates]:
    names = _find_rank_files(folder, _MODEL)
    return _in_threads(lambda name: read_model_states(folder, name), names.values())


def _gather_universal(folder: Path, states: Sequence[ModelStates], out: ZeroTensors) -> None:
    """Add each parameter's files; those converted from stage 3 are flat, padded at the end."""
    shapes = {n: s for state in states for group in state.shapes for n, s in group.items()}
    root = folder / "zero"
    names = sorted(p.parent.name for p in root.glob("*/fp32.pt"))
    paths = [
        f"zero/{name}/{file}"
        for name in names
        for file in _UNIVERSAL
        if (root / name / file).is_file()
    ]
    for path in paths:
        check_inside(folder, path)
    for path, (_, tensor) in zip(
        paths, _in_threads(lambda p: read_parameter(folder, p), paths), strict=True
    ):
        _, name, file = path.split("/")
        stored, shape = f"{_STATE}{_UNIVERSAL[file]}.{name}", shapes.get(name, tensor.shape)
        if len(tensor.shape) == 1 and len(shape) != 1 and tensor.numel >= numel(shape) > 0:
            out.add_runs(stored, shape, [FlatRun(name, 0, numel(shape), tensor, 0)])
        else:
            out.add_whole(stored, tensor)
    if len(states) == 1:
        for name, tensor in states[0].weights.items():
            master = out.tensors.get(_MASTER + name)
            if master.shape == tensor.shape if master is not None else name not in shapes:
                out.add_whole(name, tensor)


def _gather_zero(
    folder: Path, states: list[ModelStates], out: ZeroTensors, warnings: list[str]
) -> list[OptimizerStates]:
    """Add weights as stored, then the optimizer's flat parts of each rank."""
    by_mp: dict[int, list[ModelStates]] = {}
    for (mp, _), state in zip(_find_rank_files(folder, _MODEL), states, strict=True):
        by_mp.setdefault(mp, []).append(state)
    names = _find_rank_files(folder, _OPTIMIZER)
    read = _in_threads(lambda name: read_optimizer_states(folder, name), names.values())
    parts: dict[int, list[OptimizerStates]] = {}
    for (mp, dp), optimizer in zip(names, read, strict=True):
        if dp != len(parts.setdefault(mp, [])):
            raise _missing_files_error(f"of data-parallel rank {len(parts[mp])}", folder)
        parts[mp].append(optimizer)
    for mp, models in by_mp.items():
        _add_weights(models[0], out)
        _add_frozen(models, out, folder)
        if mp in parts:
            _add_optimizer(models[0], parts[mp], out, folder)
    if not read:
        warnings.append("no *_optim_states.pt: the checkpoint has only weights")
    elif parts.keys() != by_mp.keys():
        raise _missing_files_error("of some model-parallel ranks", folder)
    return read


def _missing_files_error(description: str, folder: Path) -> FormatError:
    return FormatError(
        f"*_optim_states.pt {description} are missing",
        file=folder,
        hint="copy the whole folder",
        error_id="missing-shard",
    )


def _add_weights(model: ModelStates, out: ZeroTensors) -> None:
    """Add weights stored as tensors; stage 3 stores empty tensors instead."""
    shapes = {n: s for group in model.shapes for n, s in group.items()} | model.frozen_shapes
    for name, tensor in model.weights.items():
        if name in shapes and tensor.shape != shapes[name]:
            continue
        if name in out.tensors:
            raise FormatError(
                "two model-parallel ranks hold parts of it",
                file=tensor.stored.path,
                tensor=name,
                hint=_TO_UNIVERSAL,
            )
        out.add_whole(name, tensor)


def _add_frozen(models: Sequence[ModelStates], out: ZeroTensors, folder: Path) -> None:
    """Add frozen parameters of which every rank holds a part."""
    for name, shape in models[0].frozen_shapes.items():
        if name in out.tensors or not all(name in m.frozen for m in models):
            continue
        parts = [[m.frozen[name]] for m in models]
        out.add_runs(name, shape, list(split_parameters({name: shape}, parts, root=folder)))


def _add_optimizer(
    model: ModelStates, files: Sequence[OptimizerStates], out: ZeroTensors, folder: Path
) -> None:
    first = files[0]
    if any(n != len(files) for n in first.ranks):
        cause = (
            "some of them are missing"
            if len(files) < max(first.ranks)
            else "experts are stored separately"
        )
        raise FormatError(
            f"{len(files)} files of the optimizer, which was cut into {sorted(set(first.ranks))}: "
            f"{cause}",
            file=folder,
            hint="copy the whole folder" if "missing" in cause else _TO_UNIVERSAL,
        )
    if any(len(f.groups) != len(first.groups) for f in files):
        raise FormatError("ranks have different groups", file=folder, hint="copy the whole folder")
    if not first.is_stage_3 and len(first.groups) != len(model.shapes):
        raise FormatError(
            f"the optimizer has {len(first.groups)} groups, and the parameters have "
            f"{len(model.shapes)}",
            file=folder,
            hint="the files belong to different saves: copy the whole folder",
        )
    for state in dict.fromkeys(s for g in first.groups for s in g):
        if first.is_stage_3:
            shapes = {n: s for group in model.shapes for n, s in group.items()}
            parts = [_require_all([g.get(state) for g in f.groups], state, folder) for f in files]
            _add_runs(state, shapes, list(split_parameters(shapes, parts, root=folder)), out)
            continue
        for number, shapes in enumerate(model.shapes):
            if state not in first.groups[number]:
                continue
            flat = _require_all([f.groups[number].get(state) for f in files], state, folder)
            runs = list(split_group(shapes, flat, root=folder))
            if state == "param":
                check_slices(files, runs, number)
            _add_runs(state, shapes, runs, out)


def _require_all(
    tensors: Sequence[DeepSpeedTensor | None], state: str, folder: Path
) -> list[DeepSpeedTensor]:
    if None in tensors:
        raise FormatError(f"some groups or ranks lack {state!r}", file=folder)
    return [h for h in tensors if h is not None]


def _add_runs(
    state: str, shapes: dict[str, Shape], runs: Sequence[FlatRun], out: ZeroTensors
) -> None:
    by_name: dict[str, list[FlatRun]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    for name, shape in shapes.items():
        if not numel(shape):
            continue
        stored = f"{_STATE}{state}.{name}"
        if stored in out.tensors:
            raise FormatError(
                "two model-parallel ranks hold parts of it", tensor=name, hint=_TO_UNIVERSAL
            )
        out.add_runs(stored, shape, by_name[name])


_REPORTED_KEYS = (
    "checkpoint_parallel_dimensions",
    "dp_world_size",
    "ds_version",
    "global_steps",
    "mp_world_size",
    "sparse_tensor_module_names",
)


def _add_metadata(
    out: Catalogue,
    folder: Path,
    states: Sequence[ModelStates],
    optimizers: Sequence[OptimizerStates],
) -> None:
    match = _STEP.fullmatch(folder.name)
    steps = states[0].other_values.get("global_steps") if states else None
    if isinstance(steps, int):
        out.metadata["iteration"] = steps
    elif match:
        out.metadata["iteration"] = int(match[1])
    if states and states[0].args:
        out.metadata["args"] = states[0].args
    values = dict(states[0].other_values) if states else {}
    if optimizers and optimizers[0].param_groups is not None:
        values["optimizer.param_groups"] = optimizers[0].param_groups
    for name, value in values.items():
        if value not in (None, [], {}) and name not in _REPORTED_KEYS:
            out.objects[name] = StoredObject(name=name, kind="value", value=value)
    config_folders = [p for p in (folder, folder.parent) if (p / "config.json").is_file()]
    if config_folders:
        check_inside(config_folders[0], "config.json")
        size = (config_folders[0] / "config.json").stat().st_size
        data = read_exact(config_folders[0] / "config.json", 0, min(size, _MAX_CONFIG_BYTES))
        out.metadata["config"] = parse_json(data, config_folders[0] / "config.json")
        out.auxiliary_files = {
            name: path
            for name, path in find_auxiliary_files(config_folders[0], out.warnings).items()
            if name not in _TRACKERS and not name.endswith(".py")
        }
