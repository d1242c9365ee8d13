"""Run seeded histories: `python -m tests.support.simulation --seeds 0:1000 [--kind staging]`.

A seed that fails prints what happened and the command that replays it. With `--hours` seeds go on
until the time is up; `--processes` runs them in several processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice

from tests.support.simulation.environment import Violation
from tests.support.simulation.kinds import KINDS, History, find_plant, make_history

_BATCH = 100


def run_seed(seed: int, kind: str, plant: str) -> tuple[History, BaseException | None]:
    """The history of a seed, and what is wrong with it."""
    history = make_history(seed, kind)
    try:
        with find_plant(plant)():
            history.run()
    except Exception as e:
        return history, e
    return history, None


def _run_batch(job: tuple[int, int, str, str]) -> tuple[int, str]:
    """Run seeds `first` to `last`: how many ran, and the first failure as text."""
    first, last, kind, plant = job
    for seed in range(first, last):
        history, error = run_seed(seed, kind, plant)
        if error is not None:
            return seed - first + 1, describe_failure(seed, kind, plant, history, error)
    return last - first, ""


def describe_failure(
    seed: int, kind: str, plant: str, history: History, error: BaseException
) -> str:
    """What happened, and how to see it again."""
    lines = [f"seed {seed} ({history.kind}): {error}", *(f"  {e}" for e in history.events)]
    if not isinstance(error, Violation) or error.__cause__ is not None:
        lines += traceback.format_exception(error.__cause__ or error)
    more = f" --kind {kind}" * bool(kind) + f" --plant {plant}" * bool(plant)
    command = f"python -m tests.support.simulation --seeds {seed}:{seed + 1}{more}"
    return "\n".join([*lines, f"replay: {command}"])


def _batches(options: argparse.Namespace, end: float) -> Iterator[tuple[int, int, str, str]]:
    first, last = (int(text) for text in options.seeds.split(":"))
    while first < last or options.hours:
        if options.hours and time.monotonic() > end:
            return
        step = _BATCH if options.hours else min(_BATCH, last - first)
        yield first, first + step, options.kind, options.plant
        first += step


def main() -> int:
    """Run and report; the exit status is 1 if a seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0:1000", metavar="A:B")
    parser.add_argument("--hours", type=float, default=0.0, help="go on from A until then")
    parser.add_argument("--kind", default="", choices=["", *KINDS])
    parser.add_argument("--plant", default="", help="a bug to plant: it must be found")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    jobs = _batches(options, began + options.hours * 3600)
    done = failed = 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) if options.processes > 1 else nullcontext() as pool:
        while chunk := list(islice(jobs, 4 * options.processes)):
            results = map(_run_batch, chunk) if pool is None else pool.imap(_run_batch, chunk)
            for count, text in results:
                done += count
                if text:
                    failed += 1
                    print(text, flush=True)
    seconds = time.monotonic() - began
    print(f"{done:,} seeds in {seconds:,.1f} s: {done / seconds:,.1f} seeds/s; {failed} failed")
    return int(failed > 0)
