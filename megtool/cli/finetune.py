"""The verb `finetune`: its options are the fields of `TrainSettings`; it calls its function."""

from __future__ import annotations

import inspect
import shutil
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from typer.core import TyperCommand

from megtool.cli.model import of_rank
from megtool.cli.options import DryRun, Json, Quiet, Source, Verbose, option, place, source_option
from megtool.cli.runner import Report, run
from megtool.console import Progress
from megtool.train.config import TrainSettings
from megtool.train.config_checks import flag

Destination = Annotated[Path, place("Megatron's save folder to write; a run in it goes on.", "DST")]
Config = Annotated[
    Path | None,
    source_option("A YAML file of options; those given here win.", "--config", metavar="YAML"),
]


WIDE = 140
"""Columns of a terminal from which tables hold the longest of Megatron's option names."""


class Sections(TyperCommand):
    """A command of so many options that its help is plain text on a narrow terminal, in the
    sections that a wide one frames: tables would cut the names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write all of it."""
        if shutil.get_terminal_size().columns < WIDE:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters, section by section."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            usual = f"{parameter.param_type_name.capitalize()}s"
            if record := parameter.get_help_record(ctx):
                sections[getattr(parameter, "rich_help_panel", None) or usual].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _finetune(**given: Any) -> int:
    """Train a model from any checkpoint on some text, and write a Megatron checkpoint.

    Options have Megatron's names. Killed, the same command goes on with the identical loss curve.
    Several processes are started by torchrun.

    Example: megtool finetune ./SmolLM2-135M-Instruct ./tuned --data chats.jsonl --train-iters 100
    """
    manners = {k: given.pop(k) for k in ("as_json", "quiet", "verbose")}
    asked = {k: v for k, v in given.items() if v is not None and v != []}

    def work(progress: Progress) -> Report:
        from megtool.commands.finetune import finetune

        return finetune(**asked, progress=progress)

    return run(work, resumes=True, **of_rank(manners))


def _parameters() -> list[inspect.Parameter]:
    """What the command takes: SRC, DST, a YAML, each setting as an option that may be left out."""
    ends = {"source": Source, "destination": Destination}
    rest = {"dry_run": DryRun, "as_json": Json, "quiet": Quiet, "verbose": Verbose}
    hints = get_type_hints(TrainSettings)
    settings = {f.name: _option(f, hints[f.name]) for f in fields(TrainSettings)}
    named = {**ends, "config": Config, **settings, **rest}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=kind,
            default=inspect.Parameter.empty if name in ends else False if name in rest else None,
        )
        for name, kind in named.items()
    ]


def _option(setting: Any, hint: Any) -> Any:
    """A setting as an option: None where it is not given, so that a YAML may say it."""
    told = setting.metadata
    kind = _plain(hint)
    flags = [flag(setting.name)]
    if kind is bool:
        flags[0] += f"/--no-{flags[0][2:]}"
    if told["also"]:
        flags.append(told["also"])
    extra: dict[str, Any] = {}
    if kind in (int, float) and told["min"] is not None:
        extra["min"] = told["min"]
    what, default = told["help"], setting.default
    if default not in (None, False, ()) and "default" not in what:
        shown = "yes" if default is True else f"{default:g}" if kind is float else default
        what = f"{what.removesuffix('.')}; default: {shown}."
    metavar = told["metavar"] or {int: "N", float: "X"}.get(kind)
    many = get_origin(hint) is tuple
    typed = list[str] if many else kind
    return Annotated[typed | None, option(told["panel"], what, *flags, metavar=metavar, **extra)]


def _plain(hint: Any) -> Any:
    """A setting's type without None."""
    if get_origin(hint) in (Union, UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


_finetune.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
_finetune.__annotations__ = {p.name: p.annotation for p in _parameters()}
