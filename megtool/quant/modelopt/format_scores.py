"""Scores of formats by ModelOpt's own `mtq.auto_quantize`, of the matrices inside our decoder.

ModelOpt runs a whole model, forward and for `gradient` backward, so all layers are in the memory of
one process: it cannot score a layer at a time. Its budget and its solver are left out: formats are
chosen as by our own sensitivities.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import CalibrationError, RecipeError, UsageError
from megtool.inference.windows import IGNORED
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.plan.memory import free_memory
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.micro_batches import (
    MicroBatch,
    move_to_device,
    next_tokens,
    num_valid,
)
from megtool.quant.calibration.sensitivities import SensitivityMethod
from megtool.quant.fake_quant.weight_views import WeightViews, list_indices
from megtool.quant.modelopt.load import import_modelopt, silence_output
from megtool.quant.modelopt.quantizer_config import build_format_config
from megtool.quant.modelopt.unit_modules import UnitModules, WholeLinear
from megtool.quant.recipes.decision_units import DecisionUnit, key_of
from megtool.quant.recipes.recipe import Recipe

_LAYERS = ColumnLinear | RowLinear | DownLinear


class ScoredModel(UnitModules):
    """The matrices of decision units by ModelOpt's names, and the decoder that computes with them.

    `modules` are canonical names with ModelOpt's. They replace the products of the decoder's layers
    while it runs; the rest of a fused layer is computed by the decoder's own weight.
    """

    def __init__(
        self, decoder: Decoder, modules: Mapping[str, str], weights: CanonicalWeights
    ) -> None:
        super().__init__()
        self.__dict__["decoder"] = decoder
        self._names = dict(modules)
        self.called: set[str] = set()
        device = decoder.groups.device
        for module, name in modules.items():
            weight = weights(module).to(device, decoder.dtype)
            self.put(name, WholeLinear(weight, multiplies=True))
        views = WeightViews(decoder, modules)
        self._views = views
        layers: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            layers[views.parts[module].parameter.removesuffix(".weight")].append(module)
        self._layers = {n: tuple(m) for n, m in layers.items()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the decoder compute with these matrices."""
        decoder: Decoder = self.__dict__["decoder"]
        layers = [(decoder.get_submodule(n), m) for n, m in self._layers.items()]
        try:
            for layer, modules in layers:
                if isinstance(layer, ExpertLinear):
                    layer.product = self._expert_product(modules)
                elif isinstance(layer, _LAYERS):
                    layer.product = self._product(modules)
            yield
        finally:
            for layer, _ in layers:
                if isinstance(layer, ExpertLinear | _LAYERS):
                    layer.product = None

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """The logits `[T, vocabulary]` of all tokens."""
        decoder: Decoder = self.__dict__["decoder"]
        batch = move_to_device(micro_batch, decoder.groups.device).batch
        frame = decoder.frame(batch)
        try:
            x_TH = decoder.embed(batch, frame).detach()
            if torch.is_grad_enabled():
                x_TH.requires_grad_()
            return decoder.logits(decoder.finish(decoder.run(x_TH, frame)))
        finally:
            decoder.rotary.forget()

    def _linear(self, module: str) -> nn.Module:
        self.called.add(module)
        return self.get_submodule(self._names[module])

    def _product(self, modules: Sequence[str]) -> Any:
        order: list[Tensor] = []

        def product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
            outputs = [self._linear(m)(x_TI) for m in modules]
            if not order:
                order.extend(self._order(modules, len(weight_OI)))
            inverse, rest = order
            if len(rest):
                outputs.append(F.linear(x_TI, weight_OI[rest.to(x_TI.device)]))
            return torch.cat(outputs, -1).index_select(-1, inverse.to(x_TI.device))

        return product

    def _expert_product(self, modules: Sequence[str]) -> Any:
        by_expert: dict[int, list[str]] = defaultdict(list)
        for module in modules:
            by_expert[self._views.parts[module].boxes[0][0].base[0]].append(module)

        def product(
            rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, bias_EO: Tensor | None
        ) -> Tensor:
            outputs = []
            for e, rows in enumerate(torch.split(rows_RI, counts_E.tolist())):
                inverse, rest = self._order(by_expert[e], weight_EOI.shape[1])
                self.called.update(by_expert[e])
                if not len(rows) or not by_expert[e]:
                    outputs.append(F.linear(rows, weight_EOI[e]))
                    continue
                parts = [self._linear(m)(rows) for m in by_expert[e]]
                parts.append(F.linear(rows, weight_EOI[e, rest.to(rows.device)]))
                y = torch.cat(parts, -1).index_select(-1, inverse.to(rows.device))
                outputs.append(y)
            y_RO = torch.cat(outputs)
            if bias_EO is not None:
                y_RO = y_RO + bias_EO.repeat_interleave(counts_E, 0, output_size=len(y_RO))
            return y_RO

        return product

    def _order(self, modules: Sequence[str], rows: int) -> tuple[Tensor, Tensor]:
        """Where each row of a parameter is among the outputs of modules, which those of the `rest`
        follow; and the rest."""
        out, first = torch.full((rows,), -1), 0
        for module in modules:
            part = self._views.parts[module]
            for local, whole in part.boxes:
                local_rows, whole_rows = list_indices(local, whole, 0)
                out[local_rows] = first + whole_rows
            first += part.shape[0]
        rest = (out < 0).nonzero().flatten()
        out[rest] = first + torch.arange(len(rest))
        return out, rest


def check_memory(units: Sequence[DecisionUnit], sizes: Mapping[str, int], num_bytes: int) -> None:
    """Refuse a model that does not fit into memory with a second copy of its matrices.

    `sizes` are elements by module, of `num_bytes` each.

    Raises:
        UsageError: so it is.
    """
    needed = 2 * num_bytes * sum(sizes[m] for u in units for m in u.modules)
    free = free_memory()
    if free is not None and needed > free:
        raise UsageError(
            f"ModelOpt scores the whole model in memory: {needed / 2**30:.1f} GiB of weights, and "
            f"{free / 2**30:.1f} GiB are free",
            hint="without `modelopt: true`, kl_div measures it layer by layer",
        )


def score_formats(
    decoder: Decoder,
    units: Sequence[DecisionUnit],
    recipe: Recipe,
    names: Mapping[str, str],
    weights: CanonicalWeights,
    micro_batches: Sequence[MicroBatch],
    method: SensitivityMethod,
) -> dict[tuple[str, str], float]:
    """ModelOpt's scores of each unit in each of its formats, in nats per token.

    `gradient` is half the sum of `(dL/dy * (quantized y - y))^2` over outputs y, as our own; for
    `kl_div` it is the KL divergence of the logits. In both ModelOpt gives a format of more bits at
    most the score of one of fewer.

    Args:
        decoder: the whole model in one process.
        units: decision units and their formats.
        recipe: the recipe, for the algorithms of formats.
        names: the modules' names for ModelOpt (`name_modules`). By gradient, experts have their
            canonical ones: ModelOpt scores experts of transformers' names at the output of their
            layer, which is none of these modules.
        weights: the weights.
        micro_batches: the data, for calibration and for scores.
        method: `modelopt_gradient` or `modelopt_kl_div`.

    Raises:
        MissingPackageError: ModelOpt is not installed.
        RecipeError: an algorithm of a format changes weights; or ModelOpt decides about several
            units together.
        UsageError: a matrix is not a layer of its own in the decoder.
        CalibrationError: a score is NaN or Inf.
    """
    mtq = import_modelopt()
    is_gradient = method == "modelopt_gradient"
    if is_gradient:
        names = {m: m if ".experts." in m else n for m, n in names.items()}
    from modelopt.torch.quantization.algorithms import QuantRecipe

    device = decoder.groups.device.type
    formats = {key_of(f, recipe): f for u in units for f in u.formats}
    configs = {k: build_format_config(recipe, f, device=device) for k, f in formats.items()}
    with silence_output():
        recipes = {k: QuantRecipe(c, name=k) for k, c in configs.items()}
    model = ScoredModel(decoder, {m: names[m] for u in units for m in u.modules}, weights)
    spaces = [
        {
            "module_name_patterns": [names[m] for m in u.modules],
            "quantization_formats": [configs[key_of(f, recipe)] for f in u.formats],
        }
        for u in units
        if u.formats
    ]
    bars = contextlib.redirect_stderr(io.StringIO())
    with model.running(), silence_output(), bars:
        _register(mtq)
        _, state = mtq.auto_quantize(
            model,
            constraints={"effective_bits": 16.0},
            quantization_formats=list(configs.values()),
            data_loader=list(micro_batches),
            forward_step=_all_logits if is_gradient else _valid_logits,
            loss_func=_loss if is_gradient else None,
            num_calib_steps=len(micro_batches),
            num_score_steps=len(micro_batches),
            method="gradient" if is_gradient else "kl_div",
            module_search_spaces=spaces,
            disabled_layers=[names[m] for u in units if not u.formats for m in u.modules],
        )
    for unit in units:
        for module in unit.modules:
            if module not in model.called:
                raise UsageError(
                    f"{module} is no layer of its own in the decoder, and ModelOpt cannot score it",
                    hint="exclude it with a rule, or leave out `modelopt: true`",
                )
    factor = (0.5 if is_gradient else 1.0) / num_valid(micro_batches)
    return _read_scores(state["candidate_stats"], units, recipe, names, recipes, factor)


def _read_scores(
    stats: Mapping[str, Mapping[str, Any]],
    units: Sequence[DecisionUnit],
    recipe: Recipe,
    names: Mapping[str, str],
    recipes: Mapping[str, Any],
    factor: float,
) -> dict[tuple[str, str], float]:
    """The scores of units, of ModelOpt's groups of modules."""
    unit_of = {names[m]: u for u in units for m in u.modules}
    out = {(u.name, key_of(f, recipe)): 0.0 for u in units for f in u.formats}
    for group in stats.values():
        owners = {unit_of[n].name: unit_of[n] for n in group["module_names"]}
        if len(owners) > 1:
            raise RecipeError(
                f"ModelOpt decides about {' and '.join(owners)} together, and engines take a "
                "format for each",
                hint="leave out `modelopt: true`",
            )
        unit = next(iter(owners.values()))
        for number_format in unit.formats:
            key = key_of(number_format, recipe)
            score = float(group["scores"][group["formats"].index(recipes[key])]) * factor
            if not math.isfinite(score):
                raise CalibrationError(
                    f"ModelOpt's score of {unit.name} in {key} is {score}",
                    hint="remove the format from the choice, or exclude the module with a rule",
                )
            out[unit.name, key] += max(score, 0.0)
    return out


def _all_logits(model: ScoredModel, micro_batch: MicroBatch) -> Tensor:
    logits_TV: Tensor = model(micro_batch)
    return logits_TV


def _valid_logits(model: ScoredModel, micro_batch: MicroBatch) -> Tensor:
    """The logits of tokens that are no padding."""
    logits_TV: Tensor = model(micro_batch)
    valid_T = micro_batch.valid_T
    return logits_TV if valid_T is None else logits_TV[valid_T.to(logits_TV.device)]


def _loss(logits_TV: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The loss of the next tokens, summed."""
    labels_T = next_tokens(micro_batch.batch).flatten().to(logits_TV.device)
    return F.cross_entropy(logits_TV.float(), labels_T, ignore_index=IGNORED, reduction="sum")


def _register(mtq: Any) -> None:
    """Tell ModelOpt that only activations need gradients, which begin at the embedding."""
    searcher = mtq.algorithms.AutoQuantizeGradientSearcher
    if any(check is _is_scored for check, _, _ in searcher._custom_support):
        return
    searcher.register_custom_support(
        _is_scored, lambda model: contextlib.nullcontext(), lambda name, model: False
    )


def _is_scored(model: nn.Module) -> bool:
    return isinstance(model, ScoredModel)
