"""The precision of every module in training: the run's FP8 recipe, or that of a file of rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from megtool.errors import RecipeError, UsageError
from megtool.optim.fp8.config import Format, Fp8Config, Recipe
from megtool.quant.recipes.dialects import parse_recipe, read_recipe_text
from megtool.quant.recipes.located_yaml import read_documents
from megtool.quant.recipes.match import match_rules
from megtool.quant.recipes.modules import list_modules
from megtool.quant.recipes.rules import RecipeProblems
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.location.path import location
from megtool.train.options.config import TrainConfig

BF16 = "16 bits"
_RECIPES: Mapping[str, Recipe] = {
    "FP8": "tensorwise",
    "FP8_PB_WO": "blockwise",
    "MXFP8": "mxfp8",
}
_ONE_SCALE: tuple[Recipe, ...] = ("delayed", "tensorwise")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_EXPERTS = ".experts.experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePrecisions:
    """The FP8 recipe of each linear layer; None stands for the model's own dtype.

    `default` is that of layers `first` to `last - 1`. `chosen` are others, by names of Megatron's
    modules with the number of the layer in the whole model (`decoder.layers.3.mlp.linear_fc1`;
    experts are together, `decoder.layers.3.mlp.experts.linear_fc1`).
    """

    default: Fp8Config | None
    layers: range
    chosen: Mapping[str, Fp8Config | None] = field(default_factory=dict)

    def of(self, name: str) -> Fp8Config | None:
        """The recipe of a module."""
        plain = name.replace(_EXPERTS, ".experts.")
        if plain in self.chosen:
            return self.chosen[plain]
        match = _LAYER.fullmatch(name)
        return self.default if match is not None and int(match[1]) in self.layers else None

    @property
    def recipes(self) -> tuple[Fp8Config, ...]:
        """The recipes that occur."""
        default = [self.default] if self.layers else []
        return tuple(dict.fromkeys(c for c in (*default, *self.chosen.values()) if c is not None))


def make_fp8_config(settings: TrainConfig) -> Fp8Config | None:
    """Return the FP8 recipe of modules unless rules choose theirs; None if options ask for none."""
    if settings.fp8.fp8_recipe is None:
        return None
    return replace(settings.fp8, te_precision_config_file=None, fp8_param_gather=False)


def select_fp8_layers(settings: Fp8Config, num_layers: int) -> range:
    """The layers of a model that are computed in FP8.

    Raises:
        UsageError: there are none.
    """
    first, last = settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16
    layers = range(first, num_layers - last)
    if not layers:
        raise UsageError(
            f"{first} first and {last} last layers without FP8, and the model has {num_layers}",
            hint="lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16",
        )
    return layers


def uniform_precisions(settings: Fp8Config, num_layers: int) -> ModulePrecisions:
    """One recipe for all linear layers but those of the first and last layers.

    Raises:
        UsageError: no layer is left.
    """
    return ModulePrecisions(default=settings, layers=select_fp8_layers(settings, num_layers))


def choose_precisions(
    settings: TrainConfig, source: CheckpointSource | None
) -> ModulePrecisions | None:
    """The precisions that options ask for; None if nothing is in FP8.

    Raises:
        RecipeError: the file of rules is not valid, or asks for what is not trained.
        UsageError: a value is out of its range, or no layer is left.
    """
    default = make_fp8_config(settings)
    file = settings.fp8.te_precision_config_file
    if file is None or source is None:
        if default is None:
            return None
        return uniform_precisions(default, _num_layers(source, settings))
    num_layers = source.config.num_layers
    layers = range(0) if default is None else select_fp8_layers(default, num_layers)
    base = ModulePrecisions(default=default, layers=layers)
    precisions = replace(base, chosen=_read_choices(file, source, base))
    if not precisions.recipes:
        raise UsageError(
            f"--te-precision-config-file {file}: no module is in FP8",
            hint="--fp8-recipe gives it to all modules that no rule matches; Megatron's configs "
            "need override_nonquantized_autocast: true without it",
        )
    return precisions


def _num_layers(source: CheckpointSource | None, settings: TrainConfig) -> int:
    if source is None:
        raise UsageError("the number of layers is unknown without a checkpoint")
    return source.config.num_layers


def _read_choices(
    file: Path, source: CheckpointSource, base: ModulePrecisions
) -> dict[str, Fp8Config | None]:
    """The recipe of every module that a rule of the file matches."""
    name, text = read_recipe_text(file)
    documents = read_documents(text, file=name)
    if len(documents) != 1:
        raise RecipeError(f"there are {len(documents)} YAML documents, not one", file=name)
    problems = RecipeProblems(name)
    recipe = parse_recipe(documents[0], name=location(file).stem, file=name, problems=problems)
    for format in recipe.formats.values():
        if format.algo and format.algo not in _RECIPES:
            problems.add(
                format.line,
                f"{format.name!r} is {format.algo}, which is not trained",
                f"formats that are: {', '.join(_RECIPES)}, and keep",
            )
    modules = list_modules(source.view).modules
    matched = match_rules(recipe, modules, problems, cuts_groups=True)
    problems.raise_all()
    configs: dict[str, Any] = {}
    if recipe.dialect == "megatron":
        configs = (documents[0].get("configs") or documents[0]).plain()
    chosen: dict[str, Fp8Config | None] = {}
    deciders: dict[str, str] = {}
    for decision in matched.decisions:
        names = decision.module.names_in("megatron")
        if decision.module.kind != "linear" or not decision.rules or not names:
            continue
        label = recipe.rules[decision.rules[0]].format
        megatron = names[0]
        precision = base.of(megatron)
        if recipe.dialect == "megatron":
            key = _config_key(documents[0].plain(), recipe.rules[decision.rules[0]].label)
            precision = _megatron_precision(configs.get(key) or {}, precision)
        elif decision.format is None:
            precision = None
        else:
            precision = _own_precision(decision.format.algo, precision, base.default)
        if megatron in chosen and chosen[megatron] != precision:
            raise RecipeError(
                f"{megatron} is computed as one product, and {deciders[megatron]} and "
                f"{decision.module.name} of it are given different precisions",
                file=file,
                hint="let one rule decide about both",
            )
        chosen[megatron] = precision
        deciders[megatron] = f"{decision.module.name} ({label})"
    return chosen


def _config_key(document: Mapping[str, Any], matcher: str) -> str:
    return str(document["matchers"][matcher]["config"])


def _megatron_precision(config: Mapping[str, Any], base: Fp8Config | None) -> Fp8Config | None:
    """What a config of Megatron's (`TEQuantizationParams`) makes of a module.

    Source: `TEQuantizationRecipe` in megatron-core 0.16, `extensions/transformer_engine.py`:
    modules inside the run's FP8 follow it unless `override_quantized_autocast` is false, those
    outside only if `override_nonquantized_autocast` is true.
    """
    training = config.get("training_recipe") or {}
    if base is None and not training.get("override_nonquantized_autocast", False):
        return None
    if base is not None and not training.get("override_quantized_autocast", True):
        return base
    recipe = training.get("fp8_quantization_recipe")
    if recipe is None:
        return None
    kind = training.get("fp8_format") or "e4m3"
    return Fp8Config(fp8_recipe=cast("Recipe", recipe), fp8_format=cast("Format", kind))


def _own_precision(algo: str, precision: Fp8Config | None, default: Fp8Config | None) -> Fp8Config:
    """What a format of `quantize`'s recipes makes of a module."""
    recipe, base = _RECIPES[algo], precision or default
    if recipe == "tensorwise" and base is not None and base.fp8_recipe in _ONE_SCALE:
        return base
    return Fp8Config(
        fp8_recipe=recipe, fp8_format=base.fp8_format if base is not None else "hybrid"
    )


def summarize_precisions(
    names: Iterable[str], precisions: ModulePrecisions
) -> list[tuple[str, str]]:
    """Modules of all layers and their precision, a row for modules and layers that have one."""
    layers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None:
            config = precisions.of(name)
            label = BF16 if config is None else f"FP8 {config.fp8_recipe}, {config.fp8_format}"
            layers[match[2].replace("experts.experts.", "experts."), label].append(int(match[1]))
    return [
        (f"layers {layer_ranges(numbers)}: {module}", label)
        for (module, label), numbers in layers.items()
    ]


def layer_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
