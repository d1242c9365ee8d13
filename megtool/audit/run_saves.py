"""The saves of a run: folders of steps in a save folder, and the tracker that names the last."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from megtool.errors import FormatError
from megtool.formats import detect_format
from megtool.formats.save_folder import RELEASE, TRACKER
from megtool.pickles.small_files import PICKLE_SUFFIXES
from megtool.storage.files import Files

MEGATRON_STEP = re.compile(r"iter_(\d+)")
_STEPS = (
    MEGATRON_STEP,
    re.compile(r"step[-_]?(\d+)"),  # NeMo-RL, torchtitan
    re.compile(r"checkpoint-(\d+)"),  # transformers
    re.compile(r"global_step_?(\d+)"),  # DeepSpeed, verl
    re.compile(r".*\bstep=(\d+).*"),  # NeMo 2: model--val_loss=2.1-step=99-consumed_samples=800
    re.compile(r"(\d+)"),  # Orbax
)
_INSIDE = ("policy/weights", "weights", "model")
"""Where frameworks keep the weights of a step in its folder."""

_WEIGHTS = re.compile(r"model|weights|actor|policy|params", re.IGNORECASE)
_NO_WEIGHTS = re.compile(r"optim|sched|loader|dataset|rng|random|critic|^ref", re.IGNORECASE)
_MAX_FOLDERS = 64

_TRACKERS = (TRACKER, "latest")
_MAX_TRACKER_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSave:
    """One save of a run: its step, and the folder of the checkpoint.

    `folder` is its name in the run's. `unread` are checkpoints and pickles beside the weights, such
    as the optimizer's, that an audit does not read.
    """

    step: int
    folder: str
    path: Path
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run's folder has: saves by step, and the step that the tracker names.

    `tracked` is None without a tracker; `tracker_fault` says what is wrong with its text.
    """

    path: Path
    saves: tuple[RunSave, ...]
    tracker: str | None = None
    tracked: int | None = None
    tracker_fault: str | None = None


def read_run(path: Path) -> RunFolder:
    """List the saves of a run, by ascending steps; a few bytes of each tell where its weights are.

    Raises:
        FormatError: it is no folder, or has no saves.
    """
    files = Files()
    files.load_tree(path)
    status = files.stat(path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise FormatError(
            "the path does not exist" if status is None else "this is a file",
            file=path,
            hint="audit reads the save folder of a run, which has a folder for every saved step",
            error_id="source-not-found" if status is None else None,
        )
    saves: dict[int, RunSave] = {}
    for name in files.names(path):
        step = _step_of(name)
        folder = path / name
        if step is None or not _is_folder(files, folder):
            continue
        if step not in saves:
            path_of_weights = _weights_of(files, folder)
            saves[step] = RunSave(
                step=step,
                folder=name,
                path=path_of_weights,
                unread=_unread(files, folder, path_of_weights),
            )
    if not saves:
        raise FormatError(
            "there are no saves in it",
            file=path,
            hint="audit reads the save folder of a run: iter_0000100, step_100, checkpoint-100, "
            "global_step100; `megtool inspect` shows a single checkpoint",
            error_id="not-a-checkpoint",
        )
    tracker, tracked, fault = _read_tracker(files, path)
    return RunFolder(
        path=path,
        saves=tuple(saves[step] for step in sorted(saves)),
        tracker=tracker,
        tracked=tracked,
        tracker_fault=fault,
    )


def _step_of(name: str) -> int | None:
    for pattern in _STEPS:
        if match := pattern.fullmatch(name):
            return int(match[1])
    return None


def _is_folder(files: Files, path: Path) -> bool:
    status = files.stat(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _weights_of(files: Files, folder: Path) -> Path:
    """The checkpoint inside the folder of a step, which may hold the rest of a trainer, too."""
    for inner in _INSIDE:
        path = folder / inner
        if not _is_folder(files, path):
            continue
        nested = sorted(n for n in files.names(path) if _STEPS[0].fullmatch(n))
        return path / nested[-1] if nested else path
    if _is_checkpoint(folder):
        return folder
    inner_folders = [folder / n for n in files.names(folder)[:_MAX_FOLDERS]]
    inner_folders = [p for p in inner_folders if _is_folder(files, p)]
    detected = [p for p in inner_folders if _is_checkpoint(p)] or [
        p / n
        for p in inner_folders
        for n in files.names(p)[:_MAX_FOLDERS]
        if _is_folder(files, p / n) and _is_checkpoint(p / n)
    ]
    return min(detected, key=lambda p: (_rank(p.name), p.name), default=folder)


def _rank(name: str) -> int:
    """Order folders of a step: weights first, then what may be them, then other state."""
    return 0 if _WEIGHTS.search(name) else 2 if _NO_WEIGHTS.search(name) else 1


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a format recognizes a folder; a config.json alone may be a trainer's own."""
    try:
        detected = detect_format(folder)
    except FormatError:
        return False
    if "hf" not in detected.names:
        return True
    return any(".safetensors" in name for name in Files().names(folder))


def _unread(files: Files, folder: Path, weights: Path) -> tuple[str, ...]:
    """Return what lies beside the weights of a step and has state of its own."""
    if weights == folder or weights.parent != folder:
        return ()
    return tuple(
        name
        for name in files.names(folder)
        if name != weights.name
        and (
            name.endswith(PICKLE_SUFFIXES)
            if not _is_folder(files, folder / name)
            else _is_checkpoint(folder / name) or _NO_WEIGHTS.search(name)
        )
    )


def _read_tracker(files: Files, path: Path) -> tuple[str | None, int | None, str | None]:
    """The name of the tracker, the step in it, and what is wrong with it."""
    for name in _TRACKERS:
        status = files.stat(path / name)
        if status is None or not stat.S_ISREG(status.st_mode):
            continue
        data = files.read_whole(path / name) if status.st_size <= _MAX_TRACKER_BYTES else b""
        text = (data or b"").decode("ascii", "replace").strip()
        if text == RELEASE:
            return name, None, None
        step = int(text) if text.isascii() and text.isdecimal() else _step_of(text)
        text = f"{text[:40]!r} is no step" if text else "it is empty"
        return name, step, text if step is None else None
    return None, None, None
