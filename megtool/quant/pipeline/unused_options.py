"""Unheeded: options of `quantize` that could have no effect, in one table.

What the other options leave no use for is refused before any work: whoever gave both means
something else than what would happen. What a recipe or a model has no use for is said, and the run
goes on, so that one command line serves several of them.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import UsageError
from megtool.quant.pipeline.request import Job

_LOG = logging.getLogger(__name__)

_DATA = ("data", "field", "split", "samples", "length", "seed", "synthetic")
_RUNNING = ("device", "dtype", "kernels", "resident")
_LAYOUT = ("tp", "pp", "ep", "etp")
_NAMES = {"unseen": "--unseen-experts", "page": "--report", "fsync": "--no-fsync"}
"""How options are called, where that is not how `quantize` calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Options that have no effect `when` a job is so; `unmeasured` are those that have none either
    unless it measures (`--evaluate`).

    `why` goes on from their names, `{it}` and `{is}` in it being theirs, and `{recipe}` the
    recipe's. Without a `hint` it is said, not refused.
    """

    when: Callable[[Job], bool]
    options: tuple[str, ...]
    unmeasured: tuple[str, ...] = ()
    why: str
    hint: str = ""


def _is_given(job: Job) -> bool:
    return bool(job.calibrating.given)


def _reads(job: Job) -> bool:
    """The model is shown data."""
    return job.asks_data and not _is_given(job)


def _has_experts(job: Job) -> bool:
    return any("expert" in d.module.roles for d in job.decisions)


def _data_is(job: Job, *endings: str) -> bool:
    data = job.calibrating.wanted.data
    return data is not None and Path(data).suffix in endings


def _is_one_file(job: Job) -> bool:
    data = job.calibrating.wanted.data
    return data is not None and Path(data).is_file()


def _is_plain(job: Job) -> bool:
    from megtool.data.documents import has_fields

    return _is_one_file(job) and not has_fields(str(job.calibrating.wanted.data))


TABLE = (
    Row(
        when=lambda job: not job.chooses,
        options=("bits",),
        why="and recipe {recipe} chooses no format",
        hint="a recipe with `choose` does, such as auto_nvfp4_fp8",
    ),
    Row(
        when=lambda job: not job.asks_data,
        options=("calibrate_only", "save_calibration"),
        why="and recipe {recipe} needs no data",
        hint="leave {it} out: the weights say all, and there is no calibration to keep",
    ),
    Row(
        when=lambda job: job.calibrating.backend == "modelopt",
        options=(
            *("calibration", "save_calibration", "calibrate_only"),
            *("route_all", "unseen", "spill", "work"),
        ),
        unmeasured=("kernels", "resident"),
        why="with --backend modelopt, which would not heed {it}",
        hint="--backend megtool has {names}; with modelopt leave {it} out",
    ),
    Row(
        when=lambda job: job.calibrating.only,
        options=("evaluate", "evaluate_tokens", "page", "max_shard_size", "memory", "fsync"),
        why="with --calibrate-only, which quantizes nothing",
        hint="leave out --calibrate-only, or give {names} to the run that uses the calibration",
    ),
    Row(
        when=_is_given,
        options=(*_DATA, "calibrate_only", "spill", "work", *_LAYOUT),
        unmeasured=("tokenizer", *_RUNNING),
        why="with --calibration, by which no data is run",
        hint="a calibration file stands for the data it has seen: leave out one or the other; "
        "--save-calibration keeps several files as one",
    ),
    Row(
        when=lambda job: job.calibrating.wanted.synthetic,
        options=("data", "field", "split"),
        unmeasured=("tokenizer",),
        why="with --synthetic, which makes tokens up",
        hint="leave out one or the other",
    ),
    Row(
        when=lambda job: job.calibrating.wanted.data is None,
        options=("field", "split"),
        why="without --data",
        hint="the text that comes with megtool has no fields and no splits: --data FILE",
    ),
    Row(
        when=lambda job: _data_is(job, ".bin", ".idx"),
        options=("field", "split"),
        why="with a data set of Megatron's, which holds tokens alone",
        hint="leave {it} out",
    ),
    Row(
        when=_is_one_file,
        options=("split",),
        why="with one file of --data, which has no splits",
        hint="leave it out, or name a folder or a data set",
    ),
    Row(
        when=_is_plain,
        options=("field",),
        why="with a text in --data, which has no fields",
        hint="leave it out, or give JSON lines or parquet",
    ),
    Row(
        when=lambda job: job.writing.evaluate is None,
        options=("evaluate_tokens",),
        why="without --evaluate",
        hint="--evaluate FILE is the text that is measured on",
    ),
    Row(
        when=lambda job: not job.asks_data,
        options=(*_DATA, "calibration", "unseen", "route_all", "spill", "work"),
        unmeasured=("tokenizer", *_RUNNING),
        why="recipe {recipe} needs no data; {names} {is} not used",
    ),
    Row(
        when=lambda job: not job.asks_data,
        options=("backend",),
        why="recipe {recipe} needs no data; ModelOpt is not run",
    ),
    Row(
        when=lambda job: job.asks_data and not _has_experts(job),
        options=("unseen", "route_all", "ep", "etp"),
        why="the model has no experts; {names} {is} not used",
    ),
)


def options_of(given: Mapping[str, Any], function: Callable[..., Any]) -> frozenset[str]:
    """The options of a function that were given something else than what they are without."""
    usual = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    return frozenset(
        n for n, v in given.items() if n in usual and v not in (usual[n], None, (), [])
    )


def check_options(job: Job, options: Collection[str]) -> None:
    """Refuse options that could have no effect beside the others, and say which have none here.

    Raises:
        UsageError: they could not; or there are several processes, and nothing that they share out.
    """
    for row in TABLE:
        idle = row.options if job.writing.evaluate is not None else row.options + row.unmeasured
        found = [_NAMES.get(o, "--" + o.replace("_", "-")) for o in idle if o in options]
        if not found or not row.when(job):
            continue
        told = {
            "recipe": job.decided.recipe.name,
            "names": _listed(found),
            "it": "it" if len(found) == 1 else "them",
            "is": "is" if len(found) == 1 else "are",
        }
        if not row.hint:
            _LOG.warning("%s", row.why.format_map(told))
            continue
        raise UsageError(
            f"{told['names']} {row.why.format_map(told)}", hint=row.hint.format_map(told)
        )
    _check_processes(job)


def _check_processes(job: Job) -> None:
    world = max(job.manner.layout.world_size, int(os.environ.get("WORLD_SIZE", "1")))
    if world > 1 and not _reads(job):
        why = "--calibration stands for data" if _is_given(job) else "the recipe needs no data"
        raise UsageError(
            f"{world} processes, and {why}: they would all do the same",
            hint="run it in one: no torchrun, no --tp, --pp and --ep",
        )


def _listed(names: Collection[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
