"""A loaded decoder that temporarily computes with fake-quantized weights, inputs and caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megtool.errors import UsageError
from megtool.inference.layer_streaming import find_streamer, replaced, restored
from megtool.model.decoder import Decoder
from megtool.model.hook_locations import HookLocation, places
from megtool.parallel.collectives import all_max
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.fake_quant.fake_quantize import (
    fake_cache,
    fake_weight,
    input_scale,
    needs_scale,
    rounded_input,
    run_weight,
    tensor_amax,
)
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import INPUT_PACKINGS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRounding:
    """The rounding of one input: its kind (of `formats.INPUT_PACKINGS`), scale and smoothing
    scales.
    """

    kind: str
    scale: float
    columns: Tensor | None

    def equals(self, other: InputRounding | None) -> bool:
        """Whether another rounding is the same."""
        if other is None or (self.kind, self.scale) != (other.kind, other.scale):
            return False
        if self.columns is None or other.columns is None:
            return self.columns is other.columns
        return torch.equal(self.columns, other.columns)


class FakeQuantModel:
    """A decoder with fake-quantized weights, inputs and caches; in `with`, or by `start`.

    With `weights`, for a decoder of the unquantized model, weights are rounded too, and inputs are
    divided by all smoothing scales. Without, it is for a decoder loaded from the quantized
    checkpoint: its weights are already rounded and its norms have the folded smoothing scales, so
    inputs are only divided by stored ones; the only change of weights is W4A8_AWQ's second step
    (`fake_quantize.run_weight`).

    Streamed weights are rounded whenever their layer is loaded. `dtype` is the dtype in which they
    are stored (see `fake_quantize.fake_weight`). Every rank makes the same calls.

    FP8 modules that a Hugging Face folder stores in one tensor share its scale. Not covered:
    engines that give fused FP8 modules the larger of their scales.

    Raises:
        UsageError: modules with the same input would round it in different ways.
        CalibrationError: the scale of an input is unknown.
        MappingError: a site is not in this decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        sites: Iterable[ActivationSite],
        qparams: QParams,
        *,
        weights: bool,
        dtype: str = "float32",
    ) -> None:
        self._decoder, self._qparams, self._dtype = decoder, qparams, dtype
        self._folded = not weights
        stage = decoder.stage
        local_sites = [
            p for p in sites if (p.layer in stage.layers if p.layer is not None else stage.head)
        ]
        self._site_hooks: list[tuple[HookLocation, Callable[..., Any]]] = []
        self._original_hooks: list[tuple[HookLocation, Any]] = []
        self._hooks: list[RemovableHandle] = []
        self._replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._before_head: Callable[[], None] | None = None
        self._modules: dict[int | None, list[str]] = defaultdict(list)
        self._stored_groups = [(p.layer, names) for p in local_sites for names in p.stored_groups]
        self._install_hooks(local_sites)
        named = {
            m: p.layer
            for p in local_sites
            for m in p.modules
            if (t := qparams.weights.get(m)) is not None
            and (weights or t.format.algo == "W4A8_AWQ")
        }
        if named:
            self._views = WeightViews(decoder, named)
            for module, layer in named.items():
                if module in self._views.parts:
                    self._modules[layer].append(module)

    def start(self) -> FakeQuantModel:
        """Compute like the engine from now on."""
        decoder = self._decoder
        try:
            if find_streamer(decoder) is None:
                for layer in self._modules:
                    self._round_weights(layer)
            else:
                self._hook()
        except BaseException:
            self.stop()
            raise
        for place, tap in self._site_hooks:
            self._original_hooks.append((place, getattr(place.module, place.attribute)))
            place.set(tap)
        return self

    def stop(self) -> None:
        """Compute with the decoder's own weights again."""
        for place, tap in reversed(self._original_hooks):
            place.set(tap)
        for hook in self._hooks:
            hook.remove()
        if self._before_head is not None:
            self._decoder.before_head = self._before_head
        for name, (parameter, original) in self._replaced.items():
            if self._decoder.get_parameter(name) is parameter:
                restored(self._decoder, name, original)
        self._original_hooks, self._hooks, self._before_head = [], [], None
        self._replaced.clear()

    def __enter__(self) -> FakeQuantModel:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _hook(self) -> None:
        """Quantize the weights of a layer after they are loaded by an earlier hook."""
        layers = self._decoder.decoder.layers
        for layer in self._modules:
            if layer is not None:
                hook = layers[str(layer)].register_forward_pre_hook(
                    lambda *_, layer=layer: self._round_weights(layer)
                )
                self._hooks.append(hook)
        read = self._decoder.before_head
        if None in self._modules and read is not None:

            def ask() -> None:
                read()
                self._round_weights(None)

            self._before_head = read
            self._decoder.before_head = ask

    @torch.no_grad()
    def _round_weights(self, layer: int | None) -> None:
        """Replace a layer's weights by fake-quantized ones, unless that is done."""
        decoder, modules = self._decoder, self._modules[layer]
        names = self._views.parameters(modules)
        if all(
            n in self._replaced and decoder.get_parameter(n) is self._replaced[n][0] for n in names
        ):
            return
        for name in [
            n for n in self._replaced if decoder.get_parameter(n) is not self._replaced[n][0]
        ]:
            del self._replaced[name]  # replaced when the layer was loaded again
        originals = {name: decoder.get_parameter(name) for name in names}
        rounded = self.fake_quantize_layer(layer)
        for name in names:
            replaced(decoder, name, rounded[name])
            self._replaced[name] = decoder.get_parameter(name), originals[name]

    @property
    def hooks(self) -> Sequence[tuple[HookLocation, Callable[..., Any]]]:
        """The hooks that round inputs and caches, and their locations."""
        return self._site_hooks

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The layers whose weights are rounded; None is the head."""
        return tuple(self._modules)

    @torch.no_grad()
    def fake_quantize_layer(self, layer: int | None) -> dict[str, Tensor]:
        """The parameters of a layer with fake-quantized weights; the decoder must have its own."""
        modules = self._modules[layer]
        weight_qparams = self._qparams.weights | self._share_stored_scales(layer)
        out = {
            name: self._decoder.get_parameter(name).detach().clone()
            for name in self._views.parameters(modules)
        }
        for module in modules:
            stored_weight, params = self._views.read(module), weight_qparams[module]
            if self._folded:
                weight = run_weight(stored_weight, params)
            else:
                weight = fake_weight(stored_weight, params, dtype=self._dtype, as_run=True)
            self._views.write(module, weight, out)
        return out

    def _share_stored_scales(self, layer: int | None) -> dict[str, WeightQParams]:
        """The parameters of a layer's modules that are stored in one tensor with one scale: the
        largest."""
        if self._folded:
            return {}
        out: dict[str, WeightQParams] = {}
        for site, names in self._stored_groups:
            members = [
                t
                for m in names
                if site == layer and m in self._views.parts
                if (t := self._qparams.weights[m]).format.algo == "FP8"
            ]
            if len(members) > 1:
                amaxes = [tensor_amax(self._views.read(t.module), t) for t in members]
                shared = np.asarray(max(amaxes), np.float32)
                out |= {t.module: replace(t, amax=shared) for t in members}
        return out

    def weight(self, module: str) -> Tensor | None:
        """A module's full weight in the decoder; None if it is on another rank."""
        has = hasattr(self, "_views") and module in self._views.parts
        return self._views.read(module) if has else None

    def _install_hooks(self, sites: Sequence[ActivationSite]) -> None:
        inputs: dict[tuple[int, str], list[tuple[HookLocation, InputRounding]]] = defaultdict(list)
        for site in sites:
            if site.kind == "kv_cache":
                for cache in (self._qparams.kv_caches.get(m) for m in site.modules):
                    if cache is not None:
                        self._site_hooks += [(p, _cache_hook(cache)) for p in self._places(site)]
                continue
            if site.name.endswith(".shared.router"):  # a gate, which no engine quantizes
                continue
            rounding = self._rounding(site)
            if rounding is None:
                continue
            for place in self._places(site):
                if place.is_here:
                    inputs[id(place.module), place.attribute].append((place, rounding))
        for roundings in inputs.values():
            place, rounding = roundings[0]
            if place.expert is not None:
                num_experts = place.module.get_parameter("weight").shape[0]
                by_expert = {
                    p.expert: self._local_rounding(r, p)
                    for p, r in roundings
                    if p.expert is not None
                }
                tap: Callable[..., Any] = _expert_hook(
                    by_expert, num_experts, place, self._decoder.groups.device
                )
            else:
                tap = _input_hook(self._local_rounding(rounding, place), place)
            self._site_hooks.append((place, tap))

    def _places(self, site: ActivationSite) -> tuple[HookLocation, ...]:
        return places(self._decoder, site.name)

    def _rounding(self, site: ActivationSite) -> InputRounding | None:
        """The rounding of an activation site's input; None if it is not rounded."""
        roundings = {m: self._rounding_for(m) for m in site.modules}
        first_name, first = next(iter(roundings.items()))
        for name, rounding in roundings.items():
            is_equal = rounding is None if first is None else first.equals(rounding)
            if not is_equal:
                raise UsageError(
                    f"{first_name} and {name} multiply the same input, which is rounded in "
                    "different ways",
                    hint="engines run them as one: let one rule of the recipe decide about both",
                )
        return first

    def _rounding_for(self, module: str) -> InputRounding | None:
        params = self._qparams.weights.get(module)
        kind = None if params is None else INPUT_PACKINGS.get(params.format.algo)
        if params is None or kind is None:
            return None
        return InputRounding(
            kind=kind,
            scale=float(input_scale(params)) if needs_scale(params) else 0.0,
            columns=self._smoothing_scale(params),
        )

    def _smoothing_scale(self, params: WeightQParams) -> Tensor | None:
        if params.smoothing_scale is None or (self._folded and not params.stores_pre_quant_scale):
            return None
        return torch.from_numpy(np.array(params.smoothing_scale, np.float32))

    def _local_rounding(self, rounding: InputRounding, place: HookLocation) -> InputRounding:
        """The rounding for this rank's columns, on its device."""
        columns, group = rounding.columns, place.columns
        if columns is not None:
            width = len(columns) // group.size
            columns = columns[group.rank * width :][:width].to(self._decoder.groups.device)
        return InputRounding(kind=rounding.kind, scale=rounding.scale, columns=columns)


def _cache_hook(cache: KVCacheQParams) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda key, value: fake_cache(key, value, cache)


def _input_hook(rounding: InputRounding, place: HookLocation) -> Callable[[Tensor], Tensor]:
    group = place.columns

    def tap(x_TI: Tensor) -> Tensor:
        return rounded_input(
            x_TI,
            rounding.kind,
            scale=rounding.scale,
            smoothing_scale=rounding.columns,
            largest=lambda top: all_max(top, group),
        )

    return tap


def _expert_hook(
    by_expert: Mapping[int, InputRounding],
    num_experts: int,
    place: HookLocation,
    device: torch.device,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A hook that rounds rows sorted by expert with the parameters of their expert, without a loop.

    Scales and smoothing scales are selected by row; those of experts without rounding are ones. If
    kinds differ between experts, each kind is computed for all rows.
    """
    kinds: dict[str, list[int]] = defaultdict(list)
    for expert, rounding in by_expert.items():
        kinds[rounding.kind].append(expert)
        tables = []
    for kind, experts in kinds.items():
        scales_E = torch.ones(num_experts, device=device)
        scales_E[experts] = torch.tensor([by_expert[e].scale for e in experts], device=device)
        columns_EI = None
        smoothed = [e for e in experts if by_expert[e].columns is not None]
        if smoothed:
            width = len(by_expert[smoothed[0]].columns)  # type: ignore[arg-type]
            columns_EI = torch.ones(num_experts, width, device=device)
            for e in smoothed:
                columns_EI[e] = by_expert[e].columns  # type: ignore[assignment]
        here_E = torch.zeros(num_experts, dtype=torch.bool, device=device)
        here_E[experts] = True
        tables.append((kind, scales_E, columns_EI, here_E))

    def tap(rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        ids_R = torch.arange(num_experts, device=rows_RI.device).repeat_interleave(
            counts_E, output_size=len(rows_RI)
        )
        out = rows_RI
        for kind, scales_E, columns_EI, here_E in tables:
            scale = scales_E[ids_R].unsqueeze(1)
            columns = None if columns_EI is None else columns_EI[ids_R]
            rounded = rounded_input(
                rows_RI,
                kind,
                scale=scale,
                smoothing_scale=columns,
                largest=lambda top: all_max(top, place.columns),
            )
            if len(by_expert) == num_experts and len(tables) == 1:
                return rounded
            out = torch.where(here_E[ids_R].unsqueeze(1), rounded, out)
        return out

    return tap
