"""Foreign recipes: what they say is carried out, or changes nothing, or is told with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import parse_recipe
from megtool.quant.recipes.located_yaml import read_documents
from megtool.quant.recipes.match import MatchResult, match_rules
from megtool.quant.recipes.rules import RecipeProblems
from tests.support.models import tiny_models

OFF = {"quantizer_name": "*", "enable": False}
FP8 = {"num_bits": "e4m3", "axis": None}
HEADROOM: dict[str, Any] = {"method": "nvfp4_act_headroom"}
MX = {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}
MXFP6, MXINT8 = {"num_bits": "e3m2", "block_sizes": MX}, {"num_bits": 8, "block_sizes": MX}
LSQ: dict[str, Any] = {"method": "lsq"}
NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}


def read(data: dict[str, Any], path: Path) -> MatchResult:
    """A recipe written down, read and matched."""
    problems = RecipeProblems("x")
    (node,) = read_documents(yaml.safe_dump(data).encode(), file="x")
    recipe = parse_recipe(node, name="x", file="x", problems=problems)
    found = match_rules(recipe, tiny_models.modules(path), problems)
    problems.raise_all()
    return found


def refused(data: dict[str, Any], path: Path) -> str:
    """All that is told of a recipe, every problem with its line."""
    with pytest.raises(RecipeError) as caught:
        read(data, path)
    told, hint = caught.value.message, caught.value.hint
    assert "line " in told
    return f"{told} ({hint})" if hint else told


def modelopt(
    weights: dict[str, Any], inputs: dict[str, Any] | None, algorithm: Any = "max", *more: Any
) -> dict[str, Any]:
    """A recipe of ModelOpt's for all projections."""
    entries = [OFF, {"quantizer_name": "*proj.weight_quantizer", "cfg": weights}]
    if inputs is not None:
        entries.append({"quantizer_name": "*proj.input_quantizer", "cfg": inputs})
    return {"quant_cfg": [*entries, *more], "algorithm": algorithm}


def blocks(**more: Any) -> dict[str, Any]:
    """NVFP4 with other blocks."""
    return NVFP4 | {"block_sizes": NVFP4["block_sizes"] | more}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (modelopt(FP8 | {"rotate": True}, FP8), "writes weights without the rotation"),
        (modelopt(FP8, FP8 | {"bias": {-2: None, "type": "static"}}), "writes it as `k_bias`"),
        (modelopt(MXFP6, MXFP6), "export refuses it (MXFP8 or MXFP4"),
        (modelopt(MXINT8, MXINT8), "export fails at it (MXFP8"),
        (modelopt({"num_bits": 8, "axis": 0, "unsigned": True}, None), "unsigned true"),
        (modelopt({"num_bits": 8, "axis": 0, "narrow_range": True}, None), "narrow_range true"),
        (modelopt(FP8 | {"num_bitz": 4}, FP8), "unknown attribute 'num_bitz' of a quantizer (did"),
        (modelopt(FP8, FP8 | {"type": "dynamic"}), "type dynamic"),
        (modelopt(FP8, FP8 | {"type": "dynamite"}), "type is 'dynamite'"),
        (modelopt(blocks(four_over_six=True), NVFP4), "four_over_six true"),
        (modelopt(blocks(scale_bit=3), NVFP4), "unknown key 'scale_bit' of block_sizes (did you"),
        (modelopt(NVFP4, NVFP4 | {"block_sizes": blocks()["block_sizes"] | {-1: 32}}), "nvfp4"),
        (modelopt(NVFP4, blocks(type="static")), "static block scales of inputs"),
        (modelopt(FP8 | {"constant_amax": 3}, FP8), "constant_amax 3 of a weight"),
        (
            modelopt(FP8, FP8, "max", {"quantizer_name": "*o_proj.output_quantizer", "cfg": FP8}),
            "quantizer like *o_proj.output_quantizer quantizes outputs",
        ),
        (modelopt(NVFP4, blocks(four_over_six=True)), "four_over_six true"),
        (modelopt(NVFP4, NVFP4, LSQ | {"learnable_amax": ["pre", "past"]}), "is ['pre', 'past']"),
        (modelopt(NVFP4, NVFP4, LSQ | {"learnable_amax": None}), "learnable_amax is None"),
        (modelopt(NVFP4, NVFP4, LSQ | {"tied_amax": True}), "one of pre and post alone"),
        (modelopt(NVFP4, NVFP4, LSQ | {"quantize_pre_scale": 1}), "quantize_pre_scale is 1"),
        (modelopt(NVFP4, NVFP4, LSQ | {"scale_algorithm": "gptq"}), "is 'gptq' (a mapping"),
        (modelopt(NVFP4, NVFP4, LSQ | {"scale_algorithm": {"method": "mse", "a": 1}}), "'a' of"),
        (modelopt(NVFP4, NVFP4, HEADROOM | {"rho": 30000}), "rho is 30000"),
        (modelopt(NVFP4, NVFP4, HEADROOM | {"upper_percentile": 0}), "upper_percentile is 0"),
        (modelopt(NVFP4, NVFP4, HEADROOM | {"weight_scale_algorithm": "gptq"}), "is 'gptq' (a map"),
        (
            modelopt(
                NVFP4, NVFP4, HEADROOM | {"weight_scale_algorithm": {"method": "mse", "a": 1}}
            ),
            "unknown option 'a' of mse",
        ),
        (modelopt(FP8, FP8, "maxx"), "algorithm 'maxx' is not supported (did you mean 'max'?)"),
        (
            modelopt(FP8, FP8, {"method": "svdquant", "lowrank": 8}),
            "svdquant is for NVFP4 weights with inputs, and",
        ),
        (modelopt(NVFP4, NVFP4, {"method": "svdquant", "lowrank": 0}), "lowrank is 0"),
        (
            modelopt(NVFP4, NVFP4, {"method": "svdquant", "skip_layers": "*q_proj"}),
            "skip_layers is '*q_proj'",
        ),
        (modelopt(NVFP4, NVFP4, ["awq_lite", "gptq"]), "a list of algorithms is not supported"),
        (
            modelopt(NVFP4, NVFP4, {"method": "awq_lite", "alpha_stepp": 1}),
            "unknown option 'alpha_stepp' of awq_lite (did you mean 'alpha_step'?)",
        ),
        (modelopt(NVFP4, NVFP4, {"method": "awq_lite", "alpha_step": 9}), "alpha_step is 9"),
        (modelopt(NVFP4, NVFP4, {"method": "gptq", "percdamp": 1}), "(did you mean 'perc_damp'?)"),
        (
            modelopt(FP8, FP8, {"method": "max", "distributed_sync": False}),
            "distributed_sync false",
        ),
        (
            modelopt(
                FP8, FP8, {"method": "max", "layerwise": {"get_qdq_activations_from_prev_layer": 1}}
            ),
            "with max it is never so",
        ),
        ({"quantize": modelopt(FP8, FP8) | {"algorithmm": "max"}}, "did you mean 'algorithm'?"),
    ],
)
def test_modelopt(data: dict[str, Any], told: str, llama: Path) -> None:
    assert told in refused(data, llama)


def test_neutral_values_of_modelopt(llama: Path) -> None:
    neutral = {"enable": True, "fake_quant": True, "unsigned": False, "narrow_range": False}
    neutral |= {"rotate": {"enable": False}, "bias": None, "calibrator": "max", "backend": None}
    neutral |= {"pass_through_bwd": False, "trt_high_precision_dtype": "Half", "learn_amax": False}
    free = {"effective_bits": 4.5, "type": "static", "use_constant_amax": False}
    algorithm = {"method": "mse", "fp8_scale_sweep": True, "layerwise": {"enable": False}}
    found = read(modelopt(blocks(four_over_six=False) | neutral, NVFP4 | free, algorithm), llama)
    assert "NVFP4" in {d.label for d in found.decisions}
    assert any("--backend modelopt takes fp8_scale_sweep" in n for n in found.notes)
    told = read(modelopt(NVFP4, NVFP4, LSQ | {"scale_algorithm": None}), llama).notes
    assert "lsq has no effect on NVFP4 here; max is used" in told
    told = read(modelopt(FP8, FP8, [{"method": "gptq", "perc_damp": 0.1}]), llama).notes
    assert "gptq has no effect on FP8 here; max is used" in told


def test_an_entry_that_is_switched_off_is_not_told(llama: Path) -> None:
    off = {"quantizer_name": "*o_proj.output_quantizer", "cfg": FP8, "enable": False}
    rotated = {"quantizer_name": "*zz*weight_quantizer", "cfg": FP8 | {"rotate": True}}
    read(modelopt(FP8, FP8, "max", off, rotated), llama)


def test_a_constant_amax_of_inputs_is_carried_out(llama: Path) -> None:
    found = read(modelopt(NVFP4, NVFP4 | {"constant_amax": 2688.0}), llama)
    assert {d.format.input_amax for d in found.decisions if d.format} == {2688.0}


def test_all_problems_of_a_recipe_at_once(llama: Path) -> None:
    data = modelopt(FP8 | {"rotate": True, "num_bitz": 3}, FP8 | {"type": "dynamic"}, "maxx")
    assert refused(data, llama).startswith("there are 4 problems")


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(
    weights: Any = WEIGHTS, inputs: Any = WEIGHTS, *, group: Any = None, **top: Any
) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group for all linear modules."""
    held = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"config_groups": {"g": held | (group or {})}, "ignore": ["lm_head"], **top}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config {"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config {"),
        (compressed(quant_method="gptq"), "quant_method gptq is not supported"),
        (compressed(group={"output_activations": WEIGHTS}), "output_activations {"),
        (compressed(inputs=WEIGHTS | {"symmetric": False}), "inputs float8 tensor asymmetric"),
        (compressed(inputs=WEIGHTS | {"dynamic": True}), "no engine format of ours"),
        (compressed(WEIGHTS | {"num_bitz": 4}), "unknown key 'num_bitz' of a weights section"),
        (compressed(WEIGHTS | {"actorder": "group"}), "actorder group of weights"),
        (compressed(WEIGHTS | {"observer": "imatrix"}), "observer imatrix of weights"),
        (compressed(WEIGHTS | {"observer_kwargs": {"maxshrink": 0.2}}), "observer_kwargs {"),
        (compressed(WEIGHTS | {"scale_dtype": "torch.int8"}), "scale_dtype torch.int8"),
        (compressed(inputs=WEIGHTS | {"observer": "mse"}), "observer mse of input_activations"),
        (compressed(kv_cache_scheme=WEIGHTS | {"strategy": "attn_head"}), "strategy attn_head of"),
        (compressed(kv_cache_scheme=WEIGHTS | {"dynamic": True}), "dynamic True of kv_cache"),
        (compressed(kv_cache_scheme=WEIGHTS | {"symmetric": False}), "symmetric False of kv_cache"),
        (compressed(kv_cache_scheme=WEIGHTS | {"bits": 8}), "unknown key 'bits' of a kv_cache"),
    ],
)
def test_compressed_tensors(data: dict[str, Any], told: str, llama: Path) -> None:
    assert told in refused(data, llama)


USUAL = {"group_size": None, "block_structure": None, "actorder": None, "observer_kwargs": {}}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "algo"),
    [
        (WEIGHTS | USUAL | {"observer": "minmax", "dynamic": False}, WEIGHTS | USUAL, "FP8"),
        (
            WEIGHTS | USUAL | {"strategy": "channel", "observer": "minmax"},
            TOKENS | USUAL | {"observer": "memoryless", "symmetric": True},
            "FP8_PER_CHANNEL_PER_TOKEN",
        ),
        (INT4 | {"actorder": "weight", "observer": "mse", "zp_dtype": None}, None, "W4A16_AWQ"),
        (
            FP4 | {"scale_dtype": "torch.float8_e4m3fn", "observer": "minmax"},
            FP4 | {"dynamic": "local", "observer": "static_minmax", "scale_dtype": None},
            "NVFP4",
        ),
        (
            FP4 | {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
            FP4 | {"group_size": 32, "strategy": "group", "dynamic": True},
            "MXFP4",
        ),
    ],
)
def test_usual_configurations(weights: Any, inputs: Any, algo: str, llama: Path) -> None:
    top = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    top |= {"format": "x", "global_compression_ratio": 1.5, "version": "0.10.2"}
    empty = {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}
    none = {"output_activations": None, "format": "float-quantized"}
    found = read(compressed(weights, inputs, group=none, **(top | empty)), llama)
    linear = {d.format for d in found.decisions if d.module.kind == "linear" and d.format}
    assert {f.algo for f in linear} == {algo}
    wanted = "mse" if weights.get("observer") == "mse" else ""
    assert {f.method for f in linear} == {wanted}


def megatron(training: Any, **more: Any) -> dict[str, Any]:
    """Megatron's recipe with one config for all."""
    config = {"transformer_engine_config_type": "TEQuantizationParams"}
    matcher = {"type": "glob", "pattern": "*", "config": "c", "enabled": True}
    configs = {"c": config | {"training_recipe": training} | more}
    return {"configs": configs, "matchers": {"m": matcher}}


MX = {"fp8_quantization_recipe": "mxfp8"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (megatron(MX, evaluation_recipe={}), "is trained in mxfp8 and evaluated in 16 bits"),
        (megatron({}, evaluation_recipe=MX), "is trained in 16 bits and evaluated in mxfp8"),
        (megatron(MX, evaluation_recipe={"fp8_recipe": "mxfp8"}), "unknown key 'fp8_recipe' of a"),
        (megatron(MX | {"custom_recipe_factory": "a.b"}), "custom_recipe_factory a.b"),
        (megatron(MX | {"fp8_format": "e5m2"}), "fp8_format e5m2"),
        (megatron(MX, transformer_engine_config_type="Other"), "is of type 'Other'"),
    ],
)
def test_megatron(data: dict[str, Any], told: str, llama: Path) -> None:
    assert told in refused(data, llama)


def test_neutral_values_of_megatron(llama: Path) -> None:
    more = {"override_quantized_autocast": True, "override_nonquantized_autocast": False}
    more |= {"tp_only_amax_red": True, "fp8_format": "e4m3", "custom_recipe_factory": None}
    found = read(megatron(MX | more, evaluation_recipe=MX), llama)
    assert {d.label for d in found.decisions if d.module.name == "layers.0.attn.q"} == {"MXFP8"}
    found = read(megatron(more, evaluation_recipe={}), llama)
    assert {d.label for d in found.decisions} == {"keep"}
