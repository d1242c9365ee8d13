"""Megatron's save folder: iterations, and a tracker file that names the latest one.

`SAVE/latest_checkpointed_iteration.txt`, `SAVE/iter_0001000/`, `SAVE/release/`.
"""

from __future__ import annotations

import re
from pathlib import Path

from megtool.errors import FormatError
from megtool.storage.files import is_regular_file, read_file

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
LEARNED_SCALES = "learned_scales/state.safetensors"
"""The amaxes that a run has learned, in an iteration's folder. Its weights are rounded with them,
and the optimizer's main parameters are not."""
_ITERATION = re.compile(r"iter_(\d+)")


def folder_name(iteration: int | None) -> str:
    """The folder of an iteration, or of a release, which has none."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def is_iteration(path: Path) -> bool:
    """Whether this folder itself is a checkpoint that a save folder can hold, finished or not."""
    return is_distributed(path) or is_ranked(path)


def is_ranked(path: Path) -> bool:
    """Whether this folder holds one folder per rank, as Megatron's `torch` format has them."""
    return any(path.glob("mp_rank_*/model_optim_rng.pt"))


def is_distributed(path: Path) -> bool:
    """Whether this folder itself is a torch.distributed checkpoint, finished or not."""
    if (path / ".metadata").is_file() or any(path.glob("*.distcp")):
        return True
    return (path / "metadata.json").is_file() and (path / "common.pt").is_file()


def is_save_folder(path: Path) -> bool:
    """Whether this folder contains iterations."""
    return bool(_iterations(path))


def find_iteration(path: Path, iteration: int | str | None) -> Path | None:
    """The folder of one iteration of a save folder; None if `path` is not a save folder.

    Without `iteration`, the tracker decides; without a tracker, the highest number.

    Raises:
        FormatError: there is no such iteration, or the tracker is invalid.
    """
    iterations = _iterations(path)
    if iteration is None and not iterations:
        return None
    chosen = str(iteration) if iteration is not None else _tracked(path)
    if chosen is None:
        return iterations[max(iterations, key=lambda k: -1 if k == RELEASE else int(k))]
    chosen = str(int(chosen)) if chosen.isdecimal() else chosen
    if chosen not in iterations:
        if path.name in (folder_name(int(chosen)) if chosen.isdecimal() else RELEASE,):
            return path if is_iteration(path) else None
        origin = "requested" if iteration is not None else f"named by {TRACKER}"
        raise FormatError(
            f"iteration {chosen}, {origin}, does not exist",
            file=path,
            hint=f"there are: {', '.join(iterations) or 'none'}",
            error_id="iteration-not-found",
        )
    return iterations[chosen]


def describe_tracker_fault(path: Path) -> str | None:
    """What is wrong with the tracker of a save folder that megtool wrote, if anything is.

    Raises:
        FormatError: the tracker is invalid.
    """
    iterations, tracked = _iterations(path), _tracked(path)
    if tracked is None:
        return "is missing: Megatron finds no iteration"
    numbers = [int(name) for name in iterations if name != RELEASE]
    if tracked != RELEASE and int(tracked) < max(numbers, default=0):
        return f"names iteration {int(tracked)}, but there is iteration {max(numbers)}"
    return None


def _iterations(path: Path) -> dict[str, Path]:
    """Folders of checkpoints by iteration, ascending; the release last."""
    folders: list[tuple[int, str, Path]] = []
    for folder in path.iterdir() if path.is_dir() else ():
        match = _ITERATION.fullmatch(folder.name)
        if (match or folder.name == RELEASE) and folder.is_dir() and is_iteration(folder):
            number = int(match[1]) if match else 1 << 62
            folders.append((number, str(number) if match else RELEASE, folder))
    return {name: folder for _, name, folder in sorted(folders)}


def _tracked(path: Path) -> str | None:
    file = path / TRACKER
    if not is_regular_file(file):
        return None
    text = read_file(file)[:64].decode("ascii", "replace").removesuffix("\n").removesuffix("\r")
    if text != RELEASE and not (text.isascii() and text.isdecimal()):
        raise FormatError(
            f"{text!r} is not an iteration", file=file, hint="write a number, or name the iteration"
        )
    return text
