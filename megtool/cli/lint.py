"""The verb `lint`: options and help only; it calls its function in `commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megtool.cli.options import Json, Quiet, Verbose, layout, option, place
from megtool.cli.runner import Report, run
from megtool.console import Progress

Exported = Annotated[Path, place("An exported Hugging Face folder.", "EXPORTED")]
Targets = Annotated[
    list[str] | None,
    option(
        "Input",
        "vllm, trtllm or sglang, or ENGINE@VERSION; repeatable; all three unless given.",
        "--target",
        metavar="ENGINE",
    ),
]
Ranks = Annotated[int | None, layout("Tensor-parallel ranks it is to run on.", "--tp")]


def _lint(
    exported: Exported,
    target: Targets = None,
    tp: Ranks = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Hold an exported folder against the rules of engines' loaders.

    Reads headers, config files and small scales. Exit status 7 when an engine would stop, or give
    wrong output.

    Example: megtool lint ./exported --target vllm --target trtllm@1.0.0 --tp 2
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.lint import lint

        return lint(exported, **({"target": target} if target else {}), tp=tp)

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)
