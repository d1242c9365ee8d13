"""The table of verbs: what each is called on the command line and in Python, and where it is.

Modules are named as text and imported when a verb is used, so that `megtool --help` and
`import megtool` import neither numpy nor torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megtool.errors import StorageError
from megtool.process.gc_pause import paused_collection

_OPTIONS = "megtool.commands.options"
_PAGES = "megtool.commands.pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One command.

    `command` is its name on the command line, `api` in Python. `summary` is the first sentence of
    its options' docstring, for lists of verbs. `options_path` and `function_path`
    are `module:name`. An interrupted run `resumes` when it is started again, whenever it was
    interrupted. A verb that
    `runs_on_ranks` may be started by torchrun: only rank 0 reports. With `has_config` options may
    come from a YAML file. `page_path` names what makes a page of its report, for --report.
    """

    command: str
    api: str
    summary: str
    options_path: str
    function_path: str
    resumes: bool = False
    runs_on_ranks: bool = False
    has_config: bool = False
    page_path: str = ""

    @property
    def options(self) -> type[Any]:
        """The class of its options."""
        options: type[Any] = load(self.options_path)
        return options

    @property
    def function(self) -> Callable[..., Any]:
        """What does the work: takes the options, and callbacks by keyword."""
        function: Callable[..., Any] = load(self.function_path)
        return function

    def call(self, options: Any, callbacks: Mapping[str, Any]) -> Any:
        """Do the work; `progress` is passed on if the function takes it.

        Before anything is read, places where nothing can be written are refused.

        Raises:
            DestinationError: a location that is to be written has no place, or is only read; or
                --report names what is no file.
            MissingPackageError: a package is missing that --report needs.
            StorageError: a system call failed that no other error describes.
        """
        from megtool.options.field import find_option

        function = self.function
        accepted = inspect.signature(function).parameters
        keywords = {k: v for k, v in callbacks.items() if k != "progress" or k in accepted}
        try:
            _check_places(options)
            page = find_option(options, "report")
            if page is not None:
                load("megtool.report.html:check_page_packages")()
                load("megtool.staging.destination.check:check_file")(page, page.parent)
            report = _with_adapters(function(options, **keywords), options)
            return report if page is None else self._write_page(page, report)
        except BrokenPipeError:  # nobody reads what a callback prints
            raise
        except OSError as e:
            raise _to_storage_error(e) from e

    def _write_page(self, path: Path, report: Any) -> Any:
        """Write the page of a report; of several processes, the one that has all of it does."""
        if not report.is_whole or not (is_first_rank() or not self.runs_on_ranks):
            return report
        load("megtool.report.html:write_page")(path, load(self.page_path)(report))
        return replace(report, page=str(path))


def is_first_rank() -> bool:
    """This process is alone, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _check_places(options: Any) -> None:
    from megtool.options.field import read_locations, written_locations

    if locations := written_locations(options):
        from megtool.staging.destination.check import check_not_read, check_place

        inputs = read_locations(options)
        for path in locations:
            check_place(path)
            check_not_read(path, inputs)


def _with_adapters(report: Any, options: Any) -> Any:
    """The report, with a note of the adapters in the weights if it does not say so itself."""
    from megtool.options.field import find_option

    adapters = find_option(options, "adapter")
    if not adapters or hasattr(report, "merges") or hasattr(report, "adapters"):
        return report
    note = f"merged into the weights: {', '.join(map(str, adapters))}"
    return replace(report, notes=(*report.notes, note))


def _to_storage_error(error: OSError) -> StorageError:
    """The error for a system call that nothing nearer to it has explained."""
    from megtool.storage.objects.transfer import HINTS

    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_folder():
        return StorageError(
            "the current folder does not exist any more",
            hint="run the command from another folder, or with absolute paths",
        )
    verb = "open" if error.filename else "complete a system call"
    message = f"cannot {verb}: {error.strerror or error}"
    file = error.filename if isinstance(error.filename, str | Path) else None
    return StorageError(message, file=file, hint=HINTS.get(error.errno or 0))


def _has_folder() -> bool:
    """Whether the current folder exists; another process may remove it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@paused_collection()
def load(path: str) -> Any:
    """The attribute `name` of the module in `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


VERBS = (
    Verb(
        command="inspect",
        api="inspect",
        summary="Show what a checkpoint holds, from its headers alone.",
        options_path=f"{_OPTIONS}.checkpoints:InspectOptions",
        function_path="megtool.commands.inspect:inspect",
        page_path=f"{_PAGES}.inspect:inspect_page",
    ),
    Verb(
        command="reshard",
        api="reshard",
        summary="Copy a checkpoint into another format, parallel layout or dtype.",
        options_path=f"{_OPTIONS}.reshard:ReshardOptions",
        function_path="megtool.commands.reshard:reshard",
        page_path=f"{_PAGES}.reshard:reshard_page",
        resumes=True,
        has_config=True,
    ),
    Verb(
        command="verify",
        api="verify",
        summary="Check one checkpoint against its digests, or two against each other.",
        options_path=f"{_OPTIONS}.checkpoints:VerifyOptions",
        function_path="megtool.commands.verify:verify",
        page_path=f"{_PAGES}.verify:verify_page",
    ),
    Verb(
        command="audit",
        api="audit",
        summary="Find out which save of a run went wrong: every one of them, each byte read once.",
        options_path=f"{_OPTIONS}.checkpoints:AuditOptions",
        function_path="megtool.commands.audit:audit",
        page_path=f"{_PAGES}.audit:audit_page",
    ),
    Verb(
        command="quantize",
        api="quantize",
        summary="Quantize a checkpoint in any format for an engine, and check the result.",
        options_path=f"{_OPTIONS}.quantize:QuantizeOptions",
        function_path="megtool.commands.quantize:quantize",
        page_path=f"{_PAGES}.quantize:quantize_page",
        resumes=True,
        runs_on_ranks=True,
        has_config=True,
    ),
    Verb(
        command="export",
        api="export",
        summary="Write a checkpoint as the files that an engine loads, quantized or not.",
        options_path=f"{_OPTIONS}.export:ExportOptions",
        function_path="megtool.commands.export:export",
        resumes=True,
    ),
    Verb(
        command="lint",
        api="lint",
        summary="Check an exported folder against the rules of engines' loaders.",
        options_path=f"{_OPTIONS}.export:LintOptions",
        function_path="megtool.commands.lint:lint",
        page_path=f"{_PAGES}.lint:lint_page",
    ),
    Verb(
        command="finetune",
        api="finetune",
        summary="Train a model from any checkpoint on some text, and write a Megatron checkpoint.",
        options_path=f"{_OPTIONS}.finetune:FinetuneOptions",
        function_path="megtool.commands.finetune:finetune",
        page_path=f"{_PAGES}.finetune:finetune_page",
        runs_on_ranks=True,
        has_config=True,
    ),
    Verb(
        command="generate",
        api="generate",
        summary="Continue prompts with a model in any format, or answer them with --chat.",
        options_path=f"{_OPTIONS}.models:GenerateOptions",
        function_path="megtool.commands.generate:generate",
        runs_on_ranks=True,
    ),
    Verb(
        command="evaluate",
        api="evaluate",
        summary="Measure how well a model predicts a text, and how far it is from another model.",
        options_path=f"{_OPTIONS}.models:EvaluateOptions",
        function_path="megtool.commands.evaluate:evaluate",
        page_path=f"{_PAGES}.evaluate:evaluate_page",
        runs_on_ranks=True,
    ),
    Verb(
        command="tokenize",
        api="tokenize",
        summary="Turn text into tokens for training: Megatron's .bin and .idx, one "
        "sequence per document.",
        options_path=f"{_OPTIONS}.models:TokenizeOptions",
        function_path="megtool.commands.tokenize:tokenize",
    ),
    Verb(
        command="demo",
        api="demo",
        summary="Take a real model through every format and layout, and back to the same bytes.",
        options_path=f"{_OPTIONS}.checkpoints:DemoOptions",
        function_path="megtool.commands.demo:demo",
    ),
    Verb(
        command="clean",
        api="clean",
        summary="List what interrupted runs have left for a destination, or inside a folder or "
        "bucket.",
        options_path=f"{_OPTIONS}.checkpoints:CleanOptions",
        function_path="megtool.commands.clean:clean",
    ),
    Verb(
        command="doctor",
        api="doctor",
        summary="Show what this machine has, and what of megtool works with it.",
        options_path=f"{_OPTIONS}.checkpoints:DoctorOptions",
        function_path="megtool.commands.doctor:doctor",
    ),
    Verb(
        command="adapter inspect",
        api="inspect_adapter",
        summary="Show which weights an adapter changes, with rank and scale, from its headers "
        "alone.",
        options_path=f"{_OPTIONS}.adapter:InspectAdapterOptions",
        function_path="megtool.commands.adapter:inspect_adapter",
    ),
    Verb(
        command="adapter convert",
        api="convert_adapter",
        summary="Write an adapter in another program's format: the same function of the same base "
        "model.",
        options_path=f"{_OPTIONS}.adapter:ConvertAdapterOptions",
        function_path="megtool.commands.adapter:convert_adapter",
    ),
    Verb(
        command="recipe list",
        api="list_recipes",
        summary="List the shipped recipes.",
        options_path=f"{_OPTIONS}.quantize:ListRecipesOptions",
        function_path="megtool.commands.recipe:list_recipes",
    ),
    Verb(
        command="recipe show",
        api="show_recipe",
        summary="Print a recipe with every line explained: a start for your own.",
        options_path=f"{_OPTIONS}.quantize:ShowRecipeOptions",
        function_path="megtool.commands.recipe:show_recipe",
    ),
    Verb(
        command="recipe explain",
        api="explain_recipe",
        summary="Show which rule applies to each module of a checkpoint, and how large "
        "the result will be.",
        options_path=f"{_OPTIONS}.quantize:ExplainRecipeOptions",
        function_path="megtool.commands.recipe:explain_recipe",
    ),
    Verb(
        command="amax inspect",
        api="inspect_amax",
        summary="Show every module's FP8 scaling, and what is wrong with it.",
        options_path=f"{_OPTIONS}.amax:InspectAmaxOptions",
        function_path="megtool.commands.amax:inspect_amax",
    ),
    Verb(
        command="amax fix",
        api="fix_amax",
        summary="Rebuild FP8 scaling that contradicts the weights, and copy everything else.",
        options_path=f"{_OPTIONS}.amax:FixAmaxOptions",
        function_path="megtool.commands.amax:fix_amax",
        resumes=True,
    ),
    Verb(
        command="amax strip",
        api="strip_amax",
        summary="Leave out extra states that hold nothing, if Megatron loads without them.",
        options_path=f"{_OPTIONS}.amax:StripAmaxOptions",
        function_path="megtool.commands.amax:strip_amax",
        resumes=True,
    ),
    Verb(
        command="amax derive",
        api="derive_amax",
        summary="Make a calibration file from FP8 training's amax histories: no data, "
        "no model run.",
        options_path=f"{_OPTIONS}.amax:DeriveAmaxOptions",
        function_path="megtool.commands.amax:derive_amax",
    ),
)
BY_API = {verb.api: verb for verb in VERBS}

GROUPS = {
    "adapter": "Adapters (LoRA) of PEFT, Megatron-Bridge and ModelOpt: inspect and convert them.",
    "recipe": "Read quantization recipes: the shipped ones, and what one would make of a model.",
    "amax": "FP8 scaling in a checkpoint: inspect it, fix it, derive static scales from it.",
}
"""Commands that have subcommands, and their help."""
