"""Options of `quantize` that would have no effect, in one table.

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
from megtool.quant.pipeline.request import QuantizeRequest

_LOG = logging.getLogger(__name__)

_DATA = ("data", "field", "split", "samples", "length", "seed", "synthetic")
_RUNNING = ("device", "dtype", "kernels", "resident")
_LAYOUT = ("tp", "pp", "ep", "etp")
_NAMES = {"unseen": "--unseen-experts", "page": "--report", "fsync": "--no-fsync"}
"""How options are called, where that is not how `quantize` calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedOptionRule:
    """Options that have no effect `when` a job is so; `unmeasured` are those that have none either
    unless it measures (`--evaluate`).

    `why` goes on from their names, `{it}` and `{is}` in it being theirs, and `{recipe}` the
    recipe's. Without a `hint` it is said, not refused.
    """

    applies: Callable[[QuantizeRequest], bool]
    options: tuple[str, ...]
    unmeasured: tuple[str, ...] = ()
    reason: str
    hint: str = ""


def _is_given(job: QuantizeRequest) -> bool:
    return bool(job.calibration.files)


def _reads(job: QuantizeRequest) -> bool:
    """The model is shown data."""
    return job.asks_data and not _is_given(job)


def _has_experts(job: QuantizeRequest) -> bool:
    return any("expert" in d.module.roles for d in job.decisions)


def _data_is(job: QuantizeRequest, *endings: str) -> bool:
    data = job.calibration.data_options.data
    return data is not None and Path(data).suffix in endings


def _is_one_file(job: QuantizeRequest) -> bool:
    data = job.calibration.data_options.data
    return data is not None and Path(data).is_file()


def _is_plain(job: QuantizeRequest) -> bool:
    from megtool.data.documents import has_fields

    return _is_one_file(job) and not has_fields(str(job.calibration.data_options.data))


TABLE = (
    UnusedOptionRule(
        applies=lambda job: not job.chooses,
        options=("bits",),
        reason="and recipe {recipe} chooses no format",
        hint="a recipe with `choose` does, such as auto_nvfp4_fp8",
    ),
    UnusedOptionRule(
        applies=lambda job: not job.asks_data,
        options=("calibrate_only", "save_calibration"),
        reason="and recipe {recipe} needs no data",
        hint="leave {it} out: the weights say all, and there is no calibration to keep",
    ),
    UnusedOptionRule(
        applies=lambda job: job.calibration.backend == "modelopt",
        options=(
            *("calibration", "save_calibration", "calibrate_only"),
            *("route_all", "unseen", "spill", "work"),
        ),
        unmeasured=("kernels", "resident"),
        reason="with --backend modelopt, which would not heed {it}",
        hint="--backend megtool has {names}; with modelopt leave {it} out",
    ),
    UnusedOptionRule(
        applies=lambda job: job.calibration.only,
        options=("evaluate", "evaluate_tokens", "page", "max_shard_size", "memory", "fsync"),
        reason="with --calibrate-only, which quantizes nothing",
        hint="leave out --calibrate-only, or give {names} to the run that uses the calibration",
    ),
    UnusedOptionRule(
        applies=_is_given,
        options=(*_DATA, "calibrate_only", "spill", "work", *_LAYOUT),
        unmeasured=("tokenizer", *_RUNNING),
        reason="with --calibration, by which no data is run",
        hint="a calibration file stands for the data it has seen: leave out one or the other; "
        "--save-calibration keeps several files as one",
    ),
    UnusedOptionRule(
        applies=lambda job: job.calibration.data_options.synthetic,
        options=("data", "field", "split"),
        unmeasured=("tokenizer",),
        reason="with --synthetic, which makes tokens up",
        hint="leave out one or the other",
    ),
    UnusedOptionRule(
        applies=lambda job: job.calibration.data_options.data is None,
        options=("field", "split"),
        reason="without --data",
        hint="the text that comes with megtool has no fields and no splits: --data FILE",
    ),
    UnusedOptionRule(
        applies=lambda job: _data_is(job, ".bin", ".idx"),
        options=("field", "split"),
        reason="with a data set of Megatron's, which holds tokens alone",
        hint="leave {it} out",
    ),
    UnusedOptionRule(
        applies=_is_one_file,
        options=("split",),
        reason="with one file of --data, which has no splits",
        hint="leave it out, or name a folder or a data set",
    ),
    UnusedOptionRule(
        applies=_is_plain,
        options=("field",),
        reason="with a text in --data, which has no fields",
        hint="leave it out, or give JSON lines or parquet",
    ),
    UnusedOptionRule(
        applies=lambda job: job.output.evaluate is None,
        options=("evaluate_tokens",),
        reason="without --evaluate",
        hint="--evaluate FILE is the text that is measured on",
    ),
    UnusedOptionRule(
        applies=lambda job: not job.asks_data,
        options=(*_DATA, "calibration", "unseen", "route_all", "spill", "work"),
        unmeasured=("tokenizer", *_RUNNING),
        reason="recipe {recipe} needs no data; {names} {is} not used",
    ),
    UnusedOptionRule(
        applies=lambda job: not job.asks_data,
        options=("backend",),
        reason="recipe {recipe} needs no data; ModelOpt is not run",
    ),
    UnusedOptionRule(
        applies=lambda job: job.asks_data and not _has_experts(job),
        options=("unseen", "route_all", "ep", "etp"),
        reason="the model has no experts; {names} {is} not used",
    ),
)


def options_of(values: Mapping[str, Any], function: Callable[..., Any]) -> frozenset[str]:
    """The options of a function that were given something else than what they are without."""
    usual = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    return frozenset(
        n for n, v in values.items() if n in usual and v not in (usual[n], None, (), [])
    )


def check_options(job: QuantizeRequest, options: Collection[str]) -> None:
    """Refuse options that could have no effect beside the others, and say which have none here.

    Raises:
        UsageError: they could not; or there are several processes, and nothing that they share out.
    """
    for row in TABLE:
        idle = row.options if job.output.evaluate is not None else row.options + row.unmeasured
        flags = [_NAMES.get(o, "--" + o.replace("_", "-")) for o in idle if o in options]
        if not flags or not row.applies(job):
            continue
        reasons = {
            "recipe": job.resolved.recipe.name,
            "names": _listed(flags),
            "it": "it" if len(flags) == 1 else "them",
            "is": "is" if len(flags) == 1 else "are",
        }
        if not row.hint:
            _LOG.warning("%s", row.reason.format_map(reasons))
            continue
        raise UsageError(
            f"{reasons['names']} {row.reason.format_map(reasons)}",
            hint=row.hint.format_map(reasons),
        )
    _check_processes(job)


def _check_processes(job: QuantizeRequest) -> None:
    world = max(job.runtime.layout.world_size, int(os.environ.get("WORLD_SIZE", "1")))
    if world > 1 and not _reads(job):
        reason = "--calibration stands for data" if _is_given(job) else "the recipe needs no data"
        raise UsageError(
            f"{world} processes, and {reason}: they would all do the same",
            hint="run it in one: no torchrun, no --tp, --pp and --ep",
        )


def _listed(names: Collection[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
