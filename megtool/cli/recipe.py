"""The verb `recipe`: options and help only; each command calls its function in `commands`."""

from __future__ import annotations

from typing import Annotated

import typer

from megtool.cli.options import (
    Family,
    GroupSize,
    Iteration,
    Json,
    Like,
    Quiet,
    Source,
    Verbose,
    engine_option,
    option,
    place,
)
from megtool.cli.runner import Report, run
from megtool.console import Progress

recipe_app = typer.Typer(
    name="recipe",
    help="Read quantization recipes: which there are, and what one would make of a model.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@recipe_app.command("list")
def _list(as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> int:
    """List the recipes that are shipped.

    Example: megtool recipe list
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.recipe import list_recipes

        return list_recipes()

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@recipe_app.command("show")
def _show(
    recipe: Annotated[str, place("A shipped recipe's name, or a file in any dialect.", "NAME")],
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Print a recipe, each line explained: a start for one of your own.

    Example: megtool recipe show int4_awq > mine.yaml
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.recipe import show_recipe

        return show_recipe(recipe)

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@recipe_app.command("explain")
def _explain(
    source: Source,
    recipe: Annotated[
        str,
        option(
            "Recipe",
            "A shipped recipe, or a file of ours, Megatron's, ModelOpt's or compressed-tensors'.",
            "--recipe",
            metavar="R",
        ),
    ],
    target: Annotated[str | None, engine_option("Recipe")] = None,
    group_size: GroupSize = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Show which rule decides about each module of a checkpoint, and what it will weigh.

    Reads headers alone.

    Example: megtool recipe explain ./SmolLM2-135M-Instruct --recipe fp8 --target vllm
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.recipe import explain_recipe

        return explain_recipe(
            source,
            recipe,
            target=target,
            group_size=group_size,
            iteration=iteration,
            family=family,
            like=like,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)
