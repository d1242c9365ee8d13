"""A loaded decoder that temporarily computes with fake-quantized weights, inputs and caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megtool.errors import UsageError
from megtool.inference.layer_streaming import find_streamer, replaced, restored
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import HookLocation, places
from megtool.quant.fake_quant.fake_quantize import (
    fake_weight,
    rescaled_weight,
    run_weight,
    tensor_amax,
)
from megtool.quant.fake_quant.input_rounding import (
    CacheRounding,
    InputRounding,
    expert_hook,
    input_hook,
    rounding_of,
)
from megtool.quant.fake_quant.rounding_torch import E4M3_LARGEST
from megtool.quant.fake_quant.side_branch import SideBranch, fold_columns, make_side_branch
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import LowRankBranch, QParams, WeightQParams
from megtool.quant.statistics.activation_sites import ActivationSite


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """What a quantized folder stores for running it, by canonical names of modules.

    `fp8_scales` are the scales of FP8 weights that have one each; `int4_scales` are W4A8_AWQ's
    `weight_scale_2` (0: by the weight's own amax). `branches` are SVDQuant's, of smoothed inputs.
    """

    inputs: Mapping[str, InputRounding] = field(default_factory=dict)
    caches: Mapping[str, CacheRounding] = field(default_factory=dict)
    fp8_scales: Mapping[str, float] = field(default_factory=dict)
    int4_scales: Mapping[str, float] = field(default_factory=dict)
    branches: Mapping[str, LowRankBranch] = field(default_factory=dict)

    @classmethod
    def of(cls, qparams: QParams, fp8_scales: Mapping[str, float]) -> StoredQuantization:
        """What is stored of quantization parameters.

        Raises:
            CalibrationError: the scale of an input or a cache is unknown.
        """
        weights = qparams.weights
        return cls(
            inputs=_roundings(weights, folded=True),
            caches={m: CacheRounding.of(c) for m, c in qparams.kv_caches.items()},
            fp8_scales={m: s for m, s in fp8_scales.items() if m in weights},
            int4_scales={
                m: float(np.float32(t.global_amax) / np.float32(E4M3_LARGEST))
                for m, t in weights.items()
                if t.format.algo == "W4A8_AWQ"
            },
            branches=_branches(weights),
        )


class FakeQuantModel:
    """A decoder with fake-quantized weights, inputs and caches; in `with`, or by `start`.

    With `QParams`, for a decoder of the unquantized model, weights are rounded too, and inputs are
    divided by all smoothing scales. With `StoredQuantization` it is for a decoder loaded from the
    quantized checkpoint: its weights are already rounded and its norms have the folded smoothing
    scales, so inputs are only divided by stored ones, and the only changes of weights are those
    that engines make: W4A8_AWQ's second step (`fake_quantize.run_weight`), and one scale for FP8
    modules that run as one layer (`fake_quantize.rescaled_weight`).

    Streamed weights are rounded whenever their layer is loaded. `dtype` is the dtype in which they
    are stored (see `fake_quantize.fake_weight`). Every rank makes the same calls.

    FP8 modules that a Hugging Face folder stores in one tensor share its scale.

    Raises:
        UsageError: modules with the same input would round it in different ways.
        CalibrationError: the scale of an input is unknown.
        MappingError: a site is not in this decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        sites: Iterable[ActivationSite],
        quantization: QParams | StoredQuantization,
        *,
        dtype: str = "float32",
    ) -> None:
        self._decoder, self._dtype = decoder, dtype
        if isinstance(quantization, StoredQuantization):
            self._weights: Mapping[str, WeightQParams] = {}
            self._stored = quantization
        else:
            self._weights = quantization.weights
            self._stored = StoredQuantization(
                inputs=_roundings(quantization.weights, folded=False),
                caches={m: CacheRounding.of(c) for m, c in quantization.kv_caches.items()},
                branches=_branches(quantization.weights),
            )
        stage = decoder.stage
        local_sites = [
            p for p in sites if (p.layer in stage.layers if p.layer is not None else stage.head)
        ]
        self._site_hooks: list[tuple[HookLocation, Callable[..., Any]]] = []
        self._original_hooks: list[tuple[HookLocation, Any]] = []
        self._side_branches: list[SideBranch] = []
        self._hooks: list[RemovableHandle] = []
        self._replaced: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._before_head: Callable[[], None] | None = None
        self._modules: dict[int | None, list[str]] = defaultdict(list)
        self._stored_groups = [(p.layer, names) for p in local_sites for names in p.stored_groups]
        self._fused_groups = [(p.layer, names) for p in local_sites if (names := _fused_fp8(p))]
        self._fused = {m for p, _ in self._fused_groups for m in self._fused_scales(p, {})}
        self._install_hooks(local_sites)
        named = {m: p.layer for p in local_sites for m in p.modules if self._is_changed(m)}
        if named:
            self._views = WeightViews(decoder, named)
            for module, layer in named.items():
                if module in self._views.parts:
                    self._modules[layer].append(module)

    def _is_changed(self, module: str) -> bool:
        """Whether the weight of a module is not run as the decoder has it."""
        return (
            module in self._weights or module in self._stored.int4_scales or module in self._fused
        )

    def start(self) -> FakeQuantModel:
        """Compute like the engine from now on, also once nothing refers to this object."""
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
        for branch in self._side_branches:
            branch.attach(branch)
        return self

    def stop(self) -> None:
        """Compute with the decoder's own weights again."""
        for place, tap in reversed(self._original_hooks):
            place.set(tap)
        for branch in self._side_branches:
            branch.attach(None)
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
        weight_qparams = dict(self._weights) | self._share_scales(layer)
        fused_scales = self._fused_scales(layer, weight_qparams)
        out = {
            name: self._decoder.get_parameter(name).detach().clone()
            for name in self._views.parameters(modules)
        }
        for module in modules:
            stored_weight, params = self._views.read(module), weight_qparams.get(module)
            if params is not None:
                weight = fake_weight(stored_weight, params, dtype=self._dtype, as_run=True)
            elif (scale := self._stored.int4_scales.get(module)) is not None:
                columns = self._stored.inputs[module].columns
                weight = run_weight(stored_weight, scale, smoothing_scale=columns)
            else:
                weight = stored_weight
            if module in fused_scales:
                weight = rescaled_weight(weight, fused_scales[module])
            self._views.write(module, weight, out)
        return out

    def _fused_scales(
        self, layer: int | None, weight_qparams: Mapping[str, WeightQParams]
    ) -> dict[str, float]:
        """The scales that engines give FP8 modules of a layer in place of smaller ones."""
        out: dict[str, float] = {}
        for site, names in self._fused_groups:
            if site != layer:
                continue
            scales = {m: s for m in names if (s := self._fp8_scale(m, weight_qparams))}
            largest = max(scales.values(), default=0.0)
            out |= {m: largest for m, s in scales.items() if s != largest}
        return out

    def _fp8_scale(self, module: str, weight_qparams: Mapping[str, WeightQParams]) -> float | None:
        """The scale of an FP8 weight of this rank; None if it is no such weight."""
        if (scale := self._stored.fp8_scales.get(module)) is not None:
            return scale
        params = weight_qparams.get(module)
        if params is None or params.format.algo != "FP8" or module not in self._views.parts:
            return None
        amax = np.float32(tensor_amax(self._views.read(module), params))
        return float(amax / np.float32(E4M3_LARGEST))

    def _share_scales(self, layer: int | None) -> dict[str, WeightQParams]:
        """The parameters of a layer's FP8 modules that get the largest of their scales when they
        are written: those stored in one tensor, and those that run as one layer and have the amax
        of their weights."""
        out: dict[str, WeightQParams] = {}
        for groups, shares_given in ((self._stored_groups, True), (self._fused_groups, False)):
            for site, names in groups:
                members = [
                    out.get(m, t)
                    for m in names
                    if site == layer and m in self._views.parts
                    if (t := self._weights.get(m)) is not None and t.format.algo == "FP8"
                    if shares_given or t.amax is None
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
                for cache in (self._stored.caches.get(m) for m in site.modules):
                    if cache is not None:
                        self._site_hooks += [(p, cache.hook) for p in self._places(site)]
                continue
            if site.name.endswith(".shared.router"):  # a gate, which no engine quantizes
                continue
            rounding = self._rounding(site)
            if rounding is None:
                continue
            for place in self._places(site):
                if place.is_here:
                    inputs[id(place.module), place.attribute].append((place, rounding))
        device = self._decoder.groups.device
        branches = self._find_branches(sites)
        views = WeightViews(self._decoder, [m for names in branches.values() for m in names])
        for key, roundings in inputs.items():
            place, rounding = roundings[0]
            if place.expert is not None:
                num_experts = place.module.get_parameter("weight").shape[0]
                by_expert = {
                    p.expert: r.local(p, device) for p, r in roundings if p.expert is not None
                }
                tap: Callable[..., Any] = expert_hook(by_expert, num_experts, place, device)
            else:
                tap = input_hook(rounding.local(place, device), place)
            if key in branches and (
                branch := make_side_branch(self._decoder, views, place, branches[key], tap)
            ):
                self._side_branches.append(branch)
                tap = branch.tap
            self._site_hooks.append((place, tap))

    def _find_branches(
        self, sites: Sequence[ActivationSite]
    ) -> dict[tuple[int, str], dict[str, LowRankBranch]]:
        """SVDQuant's branches of inputs that are not divided, by where their inputs are."""
        out: dict[tuple[int, str], dict[str, LowRankBranch]] = defaultdict(dict)
        for site in sites if self._stored.branches else ():
            branches = {m: b for m in site.modules if (b := self._stored.branches.get(m))}
            for place in self._places(site) if branches else ():
                for module, branch in branches.items():
                    columns = self._stored.inputs[module].columns
                    scale = None if columns is None else columns.numpy()
                    out[id(place.module), place.attribute][module] = fold_columns(branch, scale)
        return out

    def _places(self, site: ActivationSite) -> tuple[HookLocation, ...]:
        return places(self._decoder, site.name)

    def _rounding(self, site: ActivationSite) -> InputRounding | None:
        """The rounding of an activation site's input; None if it is not rounded."""
        roundings = {m: self._stored.inputs.get(m) for m in site.modules}
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


def _roundings(weights: Mapping[str, WeightQParams], *, folded: bool) -> dict[str, InputRounding]:
    roundings = {m: rounding_of(t, folded=folded) for m, t in weights.items()}
    return {m: r for m, r in roundings.items() if r is not None}


def _branches(weights: Mapping[str, WeightQParams]) -> dict[str, LowRankBranch]:
    return {m: t.branch for m, t in weights.items() if t.branch is not None}


def _fused_fp8(site: ActivationSite) -> tuple[str, ...]:
    """The modules of a site that engines run as one layer; empty if there is only one.

    Queries without a projection down are read by another layer than latents (`attn.down`).
    """
    names = [m for m in site.modules if not m.endswith((".router", ".shared.router"))]
    if site.name.endswith(".attn.down"):
        names = [m for m in names if not m.endswith(".q")]
    return tuple(names) if site.kind == "input" and len(names) > 1 else ()
