"""A recipe resolved against a checkpoint: the format of every module, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megtool.errors import MappingError
from megtool.megatron_state.extra_states.names import is_amax_buffer
from megtool.options.groups import SourceOptions
from megtool.quant.recipes.dialects import load_recipe
from megtool.quant.recipes.engine_models import UNLISTED, UNLISTED_HINT, is_unlisted
from megtool.quant.recipes.engine_support import (
    EngineVersion,
    adapt_to_engine,
    check_engine,
    parse_engine,
)
from megtool.quant.recipes.match import MatchResult, match_rules
from megtool.quant.recipes.modules import Modules, list_modules
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import RecipeProblems
from megtool.quant.rotation.rotate import rotate
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import TensorFilter, open_source
from megtool.storage.location.path import location


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A checkpoint, a recipe, and the decisions of the recipe about every module.

    `source` is rotated if the recipe says so, `original` is the checkpoint as it is.
    """

    source: CheckpointSource
    original: CheckpointSource
    recipe: Recipe
    modules: Modules
    matched: MatchResult
    target: EngineVersion | None

    @property
    def family(self) -> str | None:
        """The model family, if known."""
        return self.source.family_name

    @property
    def architecture(self) -> str:
        """The model class in config.json, or "" if unknown."""
        return find_model_class(self.source)

    @property
    def rotation(self) -> str:
        """The rotations in words, and what else they change; "" if there are none."""
        settings = self.recipe.rotation
        if settings is None:
            return ""
        was_tied = (
            self.original.config.embedding.tied_embeddings
            and not self.source.config.embedding.tied_embeddings
        )
        untied = "; embeddings and output layer are no longer tied" if was_tied else ""
        return settings.describe() + untied

    @property
    def doubt(self) -> str:
        """Why the target may not run the model even though it loads the formats, or ""."""
        name = self.architecture
        if self.target is None or not name or not is_unlisted(self.target.engine, [name]):
            return ""
        return f"{name} {UNLISTED} of {self.target.name}: {UNLISTED_HINT}"


def resolve_recipe(
    path: str | Path,
    recipe: str | Path,
    reading: SourceOptions = SourceOptions(),  # noqa: B008
    *,
    target: str | None = None,
    group_size: int | None = None,
    as_class: bool = False,
) -> ResolvedRecipe:
    """Open the checkpoint `path` and apply a recipe to every module of it.

    `target` is the engine, or `engine@version`, that will load the result. `group_size` overrides
    the group size of formats with several. With `as_class` a Megatron model is read in the form
    that its family's class has (see `class_form`).

    Raises:
        RecipeError: the recipe is invalid, or does not fit the model or the engine; lists all
            problems.
        UsageError: unknown engine.
        MappingError: the recipe has a rotation, and the model would compute something else.
        MegtoolError: the checkpoint cannot be read, or the model is unknown.
    """
    engine = parse_engine(target) if target else None
    problems = RecipeProblems(str(recipe))
    parsed = load_recipe(recipe, problems)
    if not all(format.algo for format in parsed.formats.values()):
        problems.raise_all()  # modules of such a format have no size
    source_ = open_source(
        location(path),
        reading,
        optimizer=False,
        tensors=TensorFilter(ignore=is_amax_buffer),
        as_class=as_class,
    )
    _check_stacks(source_)
    original = source_
    if parsed.rotation is not None:
        problems.raise_all()
        source_ = rotate(source_, parsed.rotation)
    modules = list_modules(source_.view)
    _check_cache(source_, parsed, problems)
    _check_names(parsed, modules, problems)
    matched = match_rules(parsed, modules.modules, problems, group_size=group_size or 0)
    if engine is not None:
        suited = adapt_to_engine(engine, parsed, matched.decisions)
        if suited is not parsed:
            parsed = suited
            matched = match_rules(parsed, modules.modules, problems, group_size=group_size or 0)
        architecture = find_model_class(source_)
        check_engine(engine, parsed, matched.decisions, problems, architecture=architecture)
    problems.raise_all()
    return ResolvedRecipe(
        source=source_,
        original=original,
        recipe=parsed,
        modules=modules,
        matched=matched,
        target=engine,
    )


def _check_stacks(source: CheckpointSource) -> None:
    """Refuse a model of an encoder and a decoder.

    Raises:
        MappingError: it is one.
    """
    config = source.known_config
    if config is not None and config.num_decoder_layers:
        raise MappingError(
            f"{source.family_name} is a model of an encoder and a decoder, which is not quantized",
            file=source.path,
            hint="recipes are for decoders; `megtool generate`, `evaluate` and `finetune` run it",
        )


def _check_cache(source: CheckpointSource, recipe: Recipe, problems: RecipeProblems) -> None:
    """Check that the model has a KV cache with scales, if the recipe has a format for it."""
    config = source.view.config
    formats = [f for f in recipe.formats.values() if f.kv_algo]
    if formats and config is not None and config.compression.is_compressed:
        problems.add(
            formats[0].line,
            "the cache of a model with compressed keys (DeepSeek-V4) has no scales to calibrate: "
            "engines round what they keep by the values themselves",
            "a recipe without a format of the KV cache",
        )


def find_model_class(source: CheckpointSource) -> str:
    """Find the first of `architectures` in the model's config.json; "" if nothing says it."""
    model = source.model
    if model is None:
        return ""
    for config in (model.hf_config or {}, model.config.extra):
        architectures = config.get("architectures")
        if isinstance(architectures, list) and architectures:
            return str(architectures[0])
    return model.family.architectures[0] if model.family else ""


def _check_names(recipe: Recipe, modules: Modules, problems: RecipeProblems) -> None:
    """Check that the model has names in the scheme that the patterns use."""
    if recipe.scheme not in modules.schemes:
        problems.add(
            0,
            f"this recipe uses {recipe.scheme!r} names, and this model has no such names",
            "--family NAME sets the model family",
        )
