"""Learns the rounding of a layer's weights from the layer's own output error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megtool.inference.layer_streaming import replaced, restored
from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.hook_locations import tapped
from megtool.quant.algorithms.algorithm_config import AlgorithmConfig
from megtool.quant.algorithms.learned_rounding import LearnedRounding
from megtool.quant.algorithms.weight_grid import Grid, make_grid
from megtool.quant.calibration.activations import Activations
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.layer_runner import LayerRunner
from megtool.quant.calibration.micro_batches import slice_rows
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.fake_quant.straight_through import straight_through
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.statistics.activation_sites import ActivationSite

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class BlockRounding:
    """Learns the rounding of one layer on one process, beginning with solved parameters.

    The layer gets the outputs of the quantized layers before it, and its error is the squared
    difference to what the unquantized model has behind it, with inputs and caches rounded as
    engines do. Each step takes random rows, one micro-batch after the other; what is learned is
    kept only if the error over all rows is smaller than with the parameters at the beginning.

    Args:
        layers: runs the layer.
        layer: its number.
        inputs: its inputs in the quantized model.
        targets: its outputs in the unquantized model.
        sites: the activation sites of the layer.
        qparams: their parameters, from which learning begins.
        configs: of the modules whose rounding is learned.
        read_weight: reads the weight of a module.
    """

    layers: LayerRunner
    layer: int
    inputs: Activations
    targets: Activations
    sites: Sequence[ActivationSite]
    qparams: QParams
    configs: Mapping[str, AlgorithmConfig]
    read_weight: CanonicalWeights
    _frames: dict[tuple[int, int], ForwardContext] = field(default_factory=dict)

    def run(self) -> QParams:
        """The parameters of the layer with amaxes and codes as learned."""
        self.layers.load(self.layer)
        decoder = self.layers.decoder
        learned = {m: self._begin(m) for m in self.configs}
        views = WeightViews(decoder, learned)
        steps = max(c.steps for c in self.configs.values())
        first_rate = max(c.learning_rate for c in self.configs.values()) or 1 / steps
        draw = torch.Generator().manual_seed(self.layer)
        with self._quantized() as names:
            before = self._error()
            for step in range(steps):
                for name in names:
                    decoder.get_parameter(name).grad = None
                for number, rows_R in self._draw_rows(draw):
                    error = self._row_error(number, rows_R)
                    error.backward()  # type: ignore[no-untyped-call]
                gradients = {
                    n: g for n in names if (g := decoder.get_parameter(n).grad) is not None
                }
                for module, rounding in learned.items():
                    if views.parts[module].parameter in gradients:
                        gradient_OI = views.read(module, gradients).float()
                        columns = self._columns(module)
                        if columns is not None:
                            gradient_OI /= columns
                        rounding.step(gradient_OI, (1 - step / steps) * first_rate)
                        self._write(views, module, rounding)
            after = self._error()
        _LOG.info("layer %d: output error %.4g, %.4g learned", self.layer, before, after)
        if not after < before:
            return self.qparams
        return replace(
            self.qparams,
            weights=self.qparams.weights | {m: self._solve(m, r) for m, r in learned.items()},
        )

    def _begin(self, module: str) -> LearnedRounding:
        params = self.qparams.weights[module]
        grid, columns = make_grid(params.format), self._columns(module)
        weight_OI = self.read_weight(module)
        if columns is not None:
            weight_OI = weight_OI * columns
        amax = grid.amax(weight_OI)
        if params.amax is not None:
            amax = torch.from_numpy(params.amax).reshape(amax.shape)
        global_amax = params.global_amax or None
        if grid.has_global_scale and global_amax is None:
            global_amax = float(weight_OI.abs().max())
        return LearnedRounding(
            weight_OI=weight_OI,
            grid=grid,
            amax=amax,
            global_amax=global_amax,
            codes_OI=_code_values(params, grid),
        )

    def _columns(self, module: str) -> Tensor | None:
        scale = self.qparams.weights[module].smoothing_scale
        return None if scale is None else torch.from_numpy(scale)

    def _write(self, views: WeightViews, module: str, rounding: LearnedRounding) -> None:
        values_OI, columns = rounding.values(), self._columns(module)
        views.write(module, values_OI if columns is None else values_OI.div_(columns))

    def _solve(self, module: str, rounding: LearnedRounding) -> WeightQParams:
        amax, codes = rounding.solve()
        return replace(
            self.qparams.weights[module],
            amax=amax.numpy(),
            codes=codes.numpy(),
            global_amax=rounding.global_amax or 0.0,
        )

    @contextlib.contextmanager
    def _quantized(self) -> Iterator[list[str]]:
        """Have the layer compute as engines do with parameters that get gradients; their names."""
        decoder = self.layers.decoder
        model = FakeQuantModel(decoder, self.sites, self.qparams)
        rounded = model.fake_quantize_layer(self.layer)
        originals = {n: decoder.get_parameter(n) for n in rounded}
        try:
            for name, values in rounded.items():
                replaced(decoder, name, values)
                decoder.get_parameter(name).requires_grad_(True)
            with tapped(straight_through(model.hooks)):
                yield list(rounded)
        finally:
            for name, parameter in originals.items():
                restored(decoder, name, parameter)

    # ---- errors

    def _error(self) -> float:
        errors, count = 0.0, 0
        for number, micro_batch in enumerate(self.layers.micro_batches):
            y_TH = self.layers.run(self.layer, number, self.inputs.get(number))
            errors_T = self._token_errors(y_TH, self.targets.get(number), micro_batch.valid_T)
            errors, count = errors + float(errors_T.double().sum()), count + len(errors_T)
        return errors / max(count, 1)

    def _row_error(self, number: int, rows_R: Tensor) -> Tensor:
        """The error of some rows of a micro-batch, summed over tokens, differentiable."""
        micro_batch = self.layers.micro_batches[number]
        total, tokens = micro_batch.batch.shape
        x_TH, target_TH = (
            a.get(number).view(total, tokens, -1)[rows_R].flatten(0, 1)
            for a in (self.inputs, self.targets)
        )
        batch = slice_rows(micro_batch.batch, rows_R)
        decoder, is_shared = self.layers.decoder, self.layers.shares_frame(micro_batch)
        frame = self._frames.get(batch.shape) if is_shared else None
        if frame is None:
            frame = decoder.frame(batch)
            if is_shared:
                self._frames[batch.shape] = frame
        with torch.enable_grad():
            y_TH = decoder.decoder.layers[str(self.layer)](x_TH, frame)
            valid_T = None if batch.valid_BS is None else batch.valid_BS.flatten()
            return self._token_errors(y_TH, target_TH, valid_T).sum()

    def _token_errors(self, y_TH: Tensor, target_TH: Tensor, valid_T: Tensor | None) -> Tensor:
        """The mean square of each token's error; if tokens are normalized, as a share of the
        target's."""
        errors_T = (y_TH - target_TH).float().square().mean(dim=1)
        if any(c.normalize_tokens for c in self.configs.values()):
            size_T = target_TH.float().square().mean(dim=1)
            errors_T = errors_T / size_T.clamp_min(torch.finfo(torch.float32).tiny)
        return errors_T if valid_T is None else errors_T[valid_T]

    def _draw_rows(self, draw: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """The rows of a step, drawn from all, by micro-batch."""
        counts = [p.batch.shape[0] for p in self.layers.micro_batches]
        most = max(c.batch_size for c in self.configs.values())
        drawn_R = torch.zeros(sum(counts), dtype=torch.bool)
        drawn_R[torch.randperm(len(drawn_R), generator=draw)[:most]] = True
        for number, is_drawn_R in enumerate(torch.split(drawn_R, counts)):
            if bool(is_drawn_R.any()):
                yield number, is_drawn_R.nonzero().flatten()


def _code_values(params: WeightQParams, grid: Grid) -> Tensor | None:
    """The values of the codes of a weight; None if they are the nearest ones."""
    return None if params.codes is None else grid.code_values(torch.from_numpy(params.codes))
