"""Typer commands made from options dataclasses."""

from __future__ import annotations

import inspect
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from megtool.commands.verbs import Verb
from megtool.options.field import LAYOUT, OptionField, option, option_fields
from megtool.options.groups import DANGEROUS, INPUT, OUTPUT, RUNNING, ReportOutput

FULL_WIDTH = 180
"""Columns of a terminal from which tables hold the longest option names of Megatron."""

_LAST_PANELS = (LAYOUT, RUNNING, OUTPUT, DANGEROUS)

CONFIG = OptionField(
    name="config",
    hint=Path,
    is_optional=True,
    default=None,
    spec=option(
        INPUT, "A YAML file of options; those given here override it.", metavar="YAML"
    ).metadata["option"],
)


class VerbCommand(TyperCommand):
    """The command of a verb. What depends on the verb's options is made when it is first used, so
    that a list of verbs imports none of them."""

    verb: ClassVar[Verb]
    run_verb: ClassVar[Callable[[Verb, dict[str, Any]], int]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self.params, self.callback, self.help

    @cached_property
    def params(self) -> Any:  # type: ignore[override]
        """The parameters: the verb's options."""
        return self._complete.params

    @cached_property
    def callback(self) -> Any:  # type: ignore[override]
        """Runs the verb."""
        return self._complete.callback

    @cached_property
    def help(self) -> Any:  # type: ignore[override]
        """The docstring of the verb's options."""
        return self._complete.help

    @cached_property
    def _complete(self) -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        app.command(self.name)(make_command(self.verb, type(self).run_verb))
        return typer.main.get_command(app)


def command_class(
    verb: Verb,
    run_verb: Callable[[Verb, dict[str, Any]], int],
    base: type[VerbCommand] = VerbCommand,
) -> type[VerbCommand]:
    """The class of a verb's command."""
    return type(base.__name__, (base,), {"verb": verb, "run_verb": staticmethod(run_verb)})


class GroupedHelpCommand(VerbCommand):
    """A command with so many options that its help is plain text on a narrow terminal, in the
    sections that a wide one frames: tables would cut the names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        if shutil.get_terminal_size().columns < FULL_WIDTH:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters, section by section."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            default_title = f"{parameter.param_type_name.capitalize()}s"
            if record := parameter.get_help_record(ctx):
                title = getattr(parameter, "rich_help_panel", None) or default_title
                sections[title].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def make_command(verb: Verb, run_verb: Callable[[Verb, dict[str, Any]], int]) -> Callable[..., int]:
    """The function that Typer turns into the command: its parameters are the verb's options.

    Every option may be left out, so that a YAML file can give it; `run_verb` gets all values, None
    for those that are not given.
    """

    def command(**values: Any) -> int:
        return run_verb(verb, values)

    parameters = [_parameter(entry, verb) for entry in shown_fields(verb)]
    command.__name__ = verb.api
    command.__doc__ = verb.options.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def shown_fields(verb: Verb) -> list[OptionField]:
    """All options of a command in the order of its help: the report's own among the output's."""
    entries = list(option_fields(verb.options))
    if verb.has_config:
        first = next(n for n, e in enumerate(entries) if not e.spec.is_argument)
        entries.insert(first, CONFIG)
    entries += option_fields(ReportOutput)
    return sorted(entries, key=_panel_order)


def _panel_order(entry: OptionField) -> int:
    if entry.spec.is_argument:
        return -2
    if entry.spec.panel == INPUT:
        return -1
    return _LAST_PANELS.index(entry.spec.panel) + 1 if entry.spec.panel in _LAST_PANELS else 0


def _parameter(entry: OptionField, verb: Verb) -> inspect.Parameter:
    kind: Any = list[str] if entry.is_repeatable else str if entry.hint is Path else entry.hint
    has_to_be_given = entry.is_required and (entry.spec.is_argument or not verb.has_config)
    if entry.spec.is_argument:
        info: Any = typer.Argument(
            help=entry.spec.help, metavar=entry.spec.metavar, show_default=False
        )
    else:
        limits: dict[str, Any] = {}
        if kind in (int, float) and entry.spec.minimum is not None:
            limits["min"] = kind(entry.spec.minimum)
        info = typer.Option(
            *entry.flags,
            help=help_text(entry),
            metavar=entry.spec.metavar or {int: "N", float: "X"}.get(kind),
            rich_help_panel=entry.spec.panel,
            show_default=False,
            **limits,
        )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind if has_to_be_given else kind | None, info],
        default=inspect.Parameter.empty if has_to_be_given else None,
    )


def help_text(entry: OptionField) -> str:
    """The help of an option, with its default if it has one that the help does not say."""
    text, default = entry.spec.help, entry.default
    if entry.is_required or default in (None, False, ()) or "default" in text:
        return text
    shown = "yes" if default is True else f"{default:g}" if entry.hint is float else default
    return f"{text.removesuffix('.')}; default: {shown}."
