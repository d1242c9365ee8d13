"""Megatron's legacy `torch` format (`megatron`): a folder per rank, with files of torch.save.

The catalogue does not know the layout of the model: every tensor of every file is a tensor of its
own, in one shard. Opening reads the end, the directory and the pickle of each file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, UsageError
from megtool.formats.auxiliary_files import find_megatron_auxiliary_files
from megtool.formats.header_reader import check_inside, list_names, short_repr
from megtool.formats.megatron_legacy.rank_file import (
    MODEL_FILE,
    MODEL_KEY,
    OPTIMIZER_FILE,
    LegacyRankFile,
    read_rank_file,
    remove_tensors,
)
from megtool.formats.megatron_legacy.ranks import (
    RankId,
    check_agreement,
    check_iterations,
    identify_ranks,
    parse_rank_folder,
    parse_rank_sizes,
)
from megtool.formats.save_folder import (
    RELEASE,
    TRACKER,
    find_iteration,
    folder_name,
    is_distributed,
    is_ranked,
)
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import Inert, string_items
from megtool.pickles.torch_file import StorageBudget, plan_torch_file
from megtool.process.threads import map_in_threads
from megtool.storage.files import is_regular_file
from megtool.tensors.catalogue import Catalogue, Destination, Extents, ShardOffsets, StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, widest

__all__ = ["NAMES", "detect", "open_checkpoint", "plan_megatron_legacy_layout"]

NAMES = ("megatron",)

_MAX_SMALL_BYTES = 1 << 30
_THREADS = 8
_RANDOM_STATE_KEYS = frozenset(
    {
        "rng_state",
        "random_rng_state",
        "np_rng_state",
        "torch_rng_state",
        "cuda_rng_state",
        "rng_tracker_states",
    }
)
_UNKNOWN_WRITER_HINT = "not written by Megatron: load the file with torch and correct it"


def detect(path: Path) -> bool:
    """Whether `path` is such a folder, or a save folder whose selected iteration is one."""
    if not path.is_dir() or is_distributed(path):
        return False
    folder = path if is_ranked(path) else find_iteration(path, None)
    return folder is not None and is_ranked(folder) and not is_distributed(folder)


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of one iteration; `path` is its folder or the save folder around it.

    Tensors are called `mp_rank_00/model_optim_rng/model/...` by their path in the file's tree.
    `metadata` gets:

    - `iteration` (a release has none), `args` (a dict, if present), `checkpoint_version`
      (0 if absent);
    - `ranks`: each folder's `(tp, pp, ep)` ranks, None for an axis the checkpoint is not split by;
    - `common`: the first rank's tree without tensors, models and random state;
    - `rank_trees`: each folder's tree without tensors, inert, with the bytes of small storages,
    ready
      to be written again;
    - `trees`: each file's whole tree, by path, with `GlobalTensor` leaves, the input of
      `plan_megatron_legacy_layout`;
    - `globals`: the dotted names of the classes and functions that each file names, by path;
    - `aliases`: the stored name of each tensor that has several names.

    Raises:
        FormatError: ranks or files are missing, do not belong together, or are damaged.
    """
    is_iteration = is_ranked(path) and iteration is None
    folder = path if is_iteration else find_iteration(path, iteration)
    if folder is None or not is_ranked(folder):
        raise FormatError(
            "there are no mp_rank_* folders here", file=path, error_id="not-a-checkpoint"
        )
    folders, warnings = _find_rank_folders(folder)
    _check_files(folder, folders, warnings)
    budget = StorageBudget(_MAX_SMALL_BYTES)
    jobs = [
        (f"{name}/{file}", budget)
        for name in folders
        for file in (MODEL_FILE, OPTIMIZER_FILE)
        if is_regular_file(folder / name / file)
    ]
    read = _in_threads(lambda job: read_rank_file(folder, *job), jobs)
    catalogue = _build_catalogue(folder, read, warnings)
    _add_metadata(catalogue, folders, {r.stored.path: r for r in read})
    return catalogue


def _find_rank_folders(root: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Rank folders in ascending order, and warnings about similar names."""
    folders: list[tuple[tuple[int, ...], str]] = []
    warnings: list[str] = []
    for path in root.glob("mp_rank_*"):
        parts = parse_rank_folder(path.name)
        if parts is None or not path.is_dir():
            warnings.append(f"{path.name} is skipped: not the folder of a rank")
        else:
            folders.append((parts, path.name))
    return {name: parts for parts, name in sorted(folders)}, warnings


def _check_files(root: Path, folders: Iterable[str], warnings: list[str]) -> None:
    for name in folders:
        check_inside(root, name)
        names = list_names(root / name)
        if MODEL_FILE not in names or (root / name / MODEL_FILE).is_dir():
            raise FormatError(
                f"{MODEL_FILE} is missing, which every rank has",
                file=root / name,
                hint="copy the whole folder, or choose another iteration",
                error_id="missing-shard",
            )
        for file in names:
            if file in (MODEL_FILE, OPTIMIZER_FILE):
                check_inside(root, f"{name}/{file}")
            elif file.endswith(".pt"):
                warnings.append(f"{name}/{file} is skipped: neither model nor optimizer")


T = TypeVar("T")
R = TypeVar("R")


def _in_threads(work: Callable[[T], R], jobs: list[T]) -> list[R]:
    """Results in order; the first error stops all."""
    return map_in_threads(work, jobs, threads=_THREADS)


def _build_catalogue(root: Path, read: list[LegacyRankFile], warnings: list[str]) -> Catalogue:
    tensors = [t for r in read for t in r.tensors]
    count = [len(r.tensors) for r in read]
    file = np.repeat(np.arange(len(read), dtype=np.int32), count)
    first = np.cumsum([0, *count])
    strides = {
        int(first[k]) + row: steps for k, r in enumerate(read) for row, steps in r.strides.items()
    }
    extents = Extents(
        file=file,
        offset=np.array([x for r in read for x in r.offsets], np.int64),
        length=np.array([x for r in read for x in r.lengths], np.int64),
        contained=bool(strides),
    )
    rows = [
        (i, [0] * len(t.shape), t.shape, int(f))
        for i, (t, f) in enumerate(zip(tensors, file.tolist(), strict=True))
    ]
    catalogue = Catalogue(
        format="megatron",
        root=root,
        files=[r.stored for r in read],
        tensors=tensors,
        shards=Shards.build(rows, widest(tensors)),
        extents=extents,
        auxiliary_files=find_megatron_auxiliary_files(root, warnings),
        warnings=warnings,
    )
    catalogue.check()
    if strides:
        catalogue.locate_contained = _make_locator(extents, strides)
    return catalogue


def _make_locator(
    extents: Extents, strides: dict[int, tuple[int, ...]]
) -> Callable[[NDArray[np.int64]], ShardOffsets]:
    """A locator for shards of which some are not row-major."""

    def locate(shards: NDArray[np.int64]) -> ShardOffsets:
        rank_strides = {k: strides[row] for k, row in enumerate(shards.tolist()) if row in strides}
        return ShardOffsets(offset=extents.offset[shards], strides=rank_strides)

    return locate


def _add_metadata(
    catalogue: Catalogue, folders: dict[str, tuple[int, ...]], read: dict[str, LegacyRankFile]
) -> None:
    root, out = catalogue.root, catalogue.metadata
    models = {name: read[f"{name}/{MODEL_FILE}"] for name in folders}
    tops = {name: string_items(r.tree) for name, r in models.items()}
    args = {name: _read_args(top, root / name / MODEL_FILE) for name, top in tops.items()}
    check_agreement(args, root=root)
    first = next(iter(folders))
    sizes = parse_rank_sizes(args[first], file=root / first / MODEL_FILE)
    names = {
        name: [t.name.removeprefix(name) for t in r.tensors if _is_model(t.name)]
        for name, r in models.items()
    }
    out["ranks"] = ranks = identify_ranks(folders, sizes, names, root=root)
    _check_optimizers(root, ranks, sizes.writing_ranks() if sizes else None, read, names)
    iterations = {
        name: _read_iteration(top, root / name / MODEL_FILE) for name, top in tops.items()
    }
    _add_iteration(catalogue, check_iterations(iterations, root=root))
    if args[first]:
        out["args"] = pickle_reader.to_plain(args[first], file=root / first / MODEL_FILE)
    else:
        catalogue.warnings.append("no args: parallel sizes are inferred from the folder names")
    out["checkpoint_version"] = tops[first].get("checkpoint_version", 0)
    out["rank_trees"] = trees = {n: remove_tensors(r.tree) for n, r in models.items()}
    out["common"] = {
        k: v
        for k, v in string_items(trees[first]).items()
        if k not in _RANDOM_STATE_KEYS and not MODEL_KEY.fullmatch(k)
    }
    pickle_reader.check_expansion(out["common"], file=root / first / MODEL_FILE)
    out["trees"] = {path: r.tree for path, r in read.items()}
    out["globals"] = {path: frozenset(r.global_names) for path, r in read.items()}
    out["aliases"] = {a: b for r in read.values() for a, b in r.aliases.items()}
    is_separate = args[first].get("use_distributed_optimizer") and "optimizer" in tops[first]
    if is_separate and len(read) == len(models):
        catalogue.warnings.append(f"no {OPTIMIZER_FILE}: the optimizer's moments are missing")


def _read_args(top: dict[str, Any], file: Path) -> dict[str, Any]:
    """The attributes of a rank's args, inert; empty if it has none."""
    args = top.get("args")
    if isinstance(args, Inert) and args.name in ("argparse.Namespace", "types.SimpleNamespace"):
        args = args.state
    if args is not None and not isinstance(args, dict):
        raise FormatError(
            f"its args are {short_repr(args)}, not a namespace",
            file=file,
            hint=_UNKNOWN_WRITER_HINT,
        )
    return args or {}


def _read_iteration(top: dict[str, Any], file: Path) -> int | None:
    value = top.get("iteration", top.get("total_iters"))
    if value is not None and (type(value) is not int or value < 0):
        raise FormatError(
            f"its iteration is {short_repr(value)}", file=file, hint=_UNKNOWN_WRITER_HINT
        )
    return value


def _add_iteration(catalogue: Catalogue, iteration: int | None) -> None:
    name = catalogue.root.name
    if name == RELEASE:
        return  # its files have iteration 0, which means none
    number = name.removeprefix("iter_")
    folder_iteration = int(number) if name.startswith("iter_") and number.isdecimal() else None
    if None not in (folder_iteration, iteration) and folder_iteration != iteration:
        catalogue.warnings.append(f"the files in {name} are of iteration {iteration}")
    if (value := iteration if iteration is not None else folder_iteration) is not None:
        catalogue.metadata["iteration"] = value


def _is_model(name: str) -> bool:
    _, file, top, *_ = name.split("/")
    return f"{file}.pt" == MODEL_FILE and MODEL_KEY.fullmatch(top) is not None


def _check_optimizers(
    root: Path,
    ranks: dict[str, RankId],
    writers: dict[RankId, bool] | None,
    read: dict[str, LegacyRankFile],
    names: dict[str, list[str]],
) -> None:
    """Check that all ranks have an optimizer file, or none has.

    A rank that writes only experts has none if its layers have no experts.
    """
    has = {name for name in ranks if f"{name}/{OPTIMIZER_FILE}" in read}
    if not has:
        return
    lacking = [
        name
        for name, rank in ranks.items()
        if name not in has
        and (
            (writers[rank] if writers else not rank[2])
            or any(".experts." in n for n in names[name])
        )
    ]
    if lacking:
        some = ", ".join(lacking[:8]) + (", ..." if len(lacking) > 8 else "")
        raise FormatError(
            f"{len(lacking)} of {len(ranks)} ranks have no {OPTIMIZER_FILE}: {some}",
            file=root,
            hint="copy the whole folder, or remove the other ranks' files to continue without the "
            "optimizer",
            error_id="missing-shard",
        )


def plan_megatron_legacy_layout(
    files: Mapping[str, Any],
    *,
    iteration: int | None,
    small_files: Mapping[str, bytes] | None = None,
) -> Destination:
    """Plan `.pt` files, given by their path in the folder of the iteration and their trees.

    A tree holds plain values, inert nodes whose references have their bytes attached, and
    `GlobalTensor` leaves, one for each tensor to write. A leaf that occurs twice in a file is one
    tensor with two names. `iteration` names the folder inside the save folder, `release` when
    None. `small_files` are further files by their path in the folder of the
    iteration.

    Raises:
        UsageError: two tensors have one name, elements are packed, or a storage has no bytes.
        TypeError: a value in a tree cannot be pickled.
    """
    folder = f"{folder_name(iteration)}/"
    stored: list[StoredFile] = []
    tensors: list[GlobalTensor] = []
    offsets: list[int] = []
    owners: list[int] = []
    fragments: list[tuple[int, int, bytes]] = []
    names = set[str]()
    for number, (path, tree) in enumerate(files.items()):
        layout = plan_torch_file(tree)
        for tensor in layout.tensors:
            if tensor.name in names:
                raise UsageError("two files hold a tensor of this name", tensor=tensor.name)
            names.add(tensor.name)
        stored.append(StoredFile(path=folder + path, size=layout.size))
        tensors += layout.tensors
        offsets += layout.offsets
        owners += [number] * len(layout.tensors)
        fragments += [(number, offset, data) for offset, data in layout.fragments]
    rows = [
        (i, [0] * len(t.shape), t.shape, owner)
        for i, (t, owner) in enumerate(zip(tensors, owners, strict=True))
    ]
    catalogue = Catalogue(
        format="megatron",
        root=Path(),
        files=stored,
        tensors=tensors,
        shards=Shards.build(rows, widest(tensors)),
        extents=Extents(
            file=np.array(owners, np.int32),
            offset=np.array(offsets, np.int64),
            length=np.array([t.num_bytes for t in tensors], np.int64),
        ),
        metadata={"iteration": iteration},
    )
    return Destination(
        catalogue=catalogue,
        fragments=fragments,
        small_files={folder + name: data for name, data in (small_files or {}).items()},
        final_files={
            TRACKER: (folder_name(None) if iteration is None else str(iteration)).encode()
        },
    )
