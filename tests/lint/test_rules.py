"""Every rule of lint: a folder that breaks it, and the unbroken one that engines load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megtool import lint
from megtool.errors import FormatError, UsageError
from megtool.lint.rules import CHECKS, load_rules
from tests.support.checkpoints.compressed_folder import compress, deepseek
from tests.support.checkpoints.folder_edits import (
    Change,
    Tensors,
    beside,
    both,
    changed,
    config,
    drop,
    group,
    inline,
    listed,
    only_beside,
    only_inline,
    plain,
    put,
    said,
    tensors,
    without,
    written,
)
from tests.support.checkpoints.quantized_folder import make_quantized, randomize
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import family_models, tiny_models
from tests.support.quant.write_runs import write_quantized

Q = "model.layers.1.self_attn.q_proj"
UP = "model.layers.2.mlp.up_proj"
DOWN = "model.layers.2.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts"
ALL = ("vllm", "sglang", "trtllm")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    at = tmp_path_factory.mktemp("lint")
    dense = randomize(tiny_models.llama(at / "llama"))
    moe = randomize(tiny_models.moe(at / "moe"))
    (moe / "tokenizer.json").write_text("{}")
    make_quantized(dense, at / "fp8", algos="FP8")
    make_quantized(dense, at / "plain kv", algos="FP8", cache=False)
    make_quantized(dense, at / "nvfp4", algos="NVFP4")
    make_quantized(dense, at / "awq", algos="W4A16_AWQ", group=64, smooth=True)
    make_quantized(dense, at / "mxfp8", algos="MXFP8")
    make_quantized(dense, at / "pb", algos="FP8_PB_WO")
    spelled(at / "pb", "fp8_pb_wo")
    mixed = {f".{name}": "FP8" for name in "qkvo"} | {"": "NVFP4"}
    make_quantized(dense, at / "mixed", algos=mixed)
    make_quantized(moe, at / "experts", algos="NVFP4")
    odd = randomize(tiny_models.llama(at / "odd", hidden_size=192, intermediate_size=208))
    make_quantized(odd, at / "odd sizes", algos="NVFP4")
    for kind in ("fp8", "int4", "nvfp4"):
        compress(dense, at / f"ct {kind}", kind)
    deepseek(dense, at / "deepseek")
    blocks(at / "gpt-oss", at / "blocks")
    return at


def blocks(plain: Path, folder: Path) -> None:
    """gpt-oss, its experts in MXFP4."""
    family_models.save("gpt_oss", plain)
    write_quantized(plain, folder, "mxfp4_experts", max_shard_size="1GiB")


def spelled(folder: Path, algo: str) -> None:
    said({"quant_algo": algo})(folder)


AS_V4 = config(lambda c: c.update(model_type="deepseek_v4"))
NAN = torch.tensor(float("nan"))
ATTENTION = "model.layers.1.self_attn"
FP9 = "modelopt_fp9"
QUANT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
DEEPSEEK = config(lambda c: c.update(architectures=["DeepseekV3ForCausalLM"]))
UNHEARD_OF = config(lambda c: c.update(architectures=["FooLM"], model_type="foo"))
KEPT = ["lm_head", "model.layers.1.self_attn*"]
FP8 = torch.float8_e4m3fn


def two_groups(s: dict[str, Any]) -> None:
    first = s["config_groups"]["group_0"]
    s["config_groups"]["group_1"] = {**first, "targets": [r"re:.*mlp.*"]}


def rotated(*locations: str) -> Change:
    """A folder that says of rotations at these locations."""
    applied = [{"targets": ["Linear"], "location": where} for where in locations]
    scheme = {"type": "hadamard", "apply": applied}
    return inline(lambda s: s.update(transform_config={"config_groups": {"R1": scheme}}))


def split(s: dict[str, Any]) -> None:
    s["quantized_layers"][UP]["quant_algo"] = "FP8"


def in_fp8(module: str, rows: int, columns: int) -> Tensors:
    codes = torch.zeros(rows, columns).to(FP8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": torch.tensor(1.0)}


def named(architecture: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(architectures=[architecture])


BREAKS: list[tuple[str, str, str, Change, tuple[str, ...]]] = [
    (
        "files",
        "missing index entry",
        "fp8",
        lambda f: (
            (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
            and None
        ),
        ALL,
    ),
    ("architectures", "none", "fp8", config(lambda c: c.update(architectures=None)), ALL),
    ("blocks", "no scales", "blocks", drop(f"{EXPERTS}.down_proj_scales"), ALL),
    ("blocks", "plain", "blocks", put(f"{EXPERTS}.gate_up_proj", torch.ones(4, 8, 8)), ALL),
    ("blocks", "floats", "blocks", changed(f"{EXPERTS}.down_proj_scales", torch.Tensor.float), ALL),
    ("blocks", "cut", "blocks", changed(f"{EXPERTS}.down_proj_blocks", lambda t: t[:, :9]), ALL),
    ("blocks", "attention", "blocks", put(f"{Q}.weight", torch.ones(8, 8).to(FP8)), ALL),
    ("llama4-rotary", "blocks", "pb", config(named("Llama4ForCausalLM")), ("vllm", "sglang")),
    ("llama4-rotary", "rows", "nvfp4", config(named("Llama4ForCausalLM")), ("sglang",)),
    ("llama4-rotary", "old", "awq", config(named("Llama4ForCausalLM")), ("vllm@0.15.0",)),
    ("method", "codes unsaid", "fp8", both(only_inline, only_beside), ALL),
    ("config-agree", "two algorithms", "fp8", beside(lambda s: s.update(quant_algo="NVFP4")), ALL),
    ("config-agree", "two lists", "fp8", beside(lambda s: s.update(exclude_modules=[])), ALL),
    ("quant-file", "inline alone", "fp8", only_inline, ("trtllm@1.0.0",)),
    (
        "keys",
        "no group",
        "nvfp4",
        both(only_beside, beside(lambda s: s.pop("group_size"))),
        ("vllm", "sglang"),
    ),
    ("keys", "no list", "nvfp4", inline(lambda s: s.pop("ignore")), ("sglang",)),
    ("algorithm", "not vLLM's", "awq", lambda f: None, ("vllm", "sglang")),
    ("algorithm", "not yet", "mxfp8", lambda f: None, ("vllm@0.15.0", "trtllm", "sglang")),
    ("algorithm", "unheard of", "fp8", said({"quant_algo": "FP7"}), ALL),
    (
        "algorithm",
        "experts",
        "experts",
        said({"quant_algo": "MXFP8", "group_size": 32}),
        ("vllm@0.16.0",),
    ),
    ("spelling", "capitals", "pb", said({"quant_algo": "FP8_PB_WO"}), ("trtllm",)),
    ("spelling", "small letters", "fp8", said({"quant_algo": "fp8"}), ("sglang", "trtllm")),
    ("mixed", "not of SGLang", "mixed", lambda f: None, ("sglang",)),
    ("mixed", "before it could", "mixed", lambda f: None, ("vllm@0.16.0", "trtllm@1.0.0")),
    ("mixed", "lists nothing", "mixed", said({"quantized_layers": {}}), ALL),
    (
        "mixed-names",
        "a stranger",
        "mixed",
        listed("model.layers.9.mlp.up_proj"),
        ("vllm", "trtllm"),
    ),
    ("method", "ModelOpt's, unheard of", "fp8", inline(lambda s: s.update(quant_method=FP9)), ALL),
    (
        "config-agree",
        "of another form",
        "ct fp8",
        written("hf_quant_config.json", QUANT),
        ("trtllm",),
    ),
    ("kv-scales-half", "no key's", "fp8", drop(f"{ATTENTION}.k_proj.k_scale"), ("vllm",)),
    ("kv-scale-shape", "two", "fp8", put(f"{ATTENTION}.k_proj.k_scale", torch.ones(2)), ALL),
    ("kv-bias", "affine", "fp8", put(f"{ATTENTION}.v_proj.v_bias", torch.ones(128)), ALL),
    ("tensors-missing", "a norm", "fp8", drop("model.norm.weight"), ALL),
    ("tensors-missing", "a part of a fused one", "nvfp4", without(f"{ATTENTION}.v_proj"), ALL),
    ("tensors-missing", "a layer", "fp8", config(lambda c: c.update(num_hidden_layers=5)), ALL),
    ("tensors-missing", "of compressed ones", "ct nvfp4", without(DOWN), ALL),
    ("tensors-missing", "of the plain", "llama", drop("lm_head.weight"), ALL),
    ("sizes-said", "heads", "fp8", config(lambda c: c.update(num_key_value_heads=1)), ALL),
    ("sizes-said", "vocabulary", "fp8", config(lambda c: c.update(vocab_size=200)), ALL),
    ("sizes-said", "a layer too many", "fp8", config(lambda c: c.update(num_hidden_layers=3)), ALL),
    ("layout", "type", "ct nvfp4", changed(f"{DOWN}.weight_scale", lambda t: t.float()), ALL),
    ("layout", "shape", "ct nvfp4", changed(f"{DOWN}.weight_scale", lambda t: t[:, :8]), ALL),
    ("layout", "strategy", "ct fp8", group(strategy="tensor"), ALL),
    ("layout", "bits", "ct nvfp4", group(num_bits=8), ALL),
    ("layout", "groups", "ct int4", group(group_size=32), ALL),
    ("layout", "two numbers", "ct nvfp4", put(f"{DOWN}.weight_global_scale", torch.ones(2)), ALL),
    ("kv-cache", "unknown", "fp8", beside(lambda s: s.update(kv_cache_quant_algo="INT8")), ALL),
    (
        "kv-cache",
        "before it could",
        "fp8",
        beside(lambda s: s.update(kv_cache_quant_algo="NVFP4")),
        ("trtllm@1.0.0", "sglang"),
    ),
    (
        "kv-cache",
        "scheme",
        "ct fp8",
        inline(lambda s: s.update(kv_cache_scheme={"num_bits": 8, "type": "int"})),
        ALL,
    ),
    ("exclude", "not listed", "fp8", said({"exclude_modules": []}), ALL),
    ("exclude", "listed, with codes", "fp8", said({"exclude_modules": KEPT}), ALL),
    (
        "exclude",
        "some of a fused one",
        "fp8",
        said({"exclude_modules": ["lm_head", Q]}),
        ("vllm", "sglang", "trtllm"),
    ),
    (
        "exclude",
        "a substring",
        "fp8",
        said({"exclude_modules": ["lm_head", "layers.1."]}),
        ("vllm", "sglang@0.5"),
    ),
    ("exclude", "compressed", "ct fp8", inline(lambda s: s.update(ignore=["re:.*mlp.*"])), ALL),
    (
        "exclude",
        "DeepSeek",
        "deepseek",
        inline(lambda s: s.update(modules_to_not_convert=[DOWN])),
        ALL,
    ),
    ("fused", "one is plain", "fp8", plain(UP, (256, 128)), ALL),
    ("fused", "two formats", "mixed", said({"quantized_layers": {}}), ()),
    ("format", "codes are others", "fp8", said({"quant_algo": "NVFP4", "group_size": 16}), ALL),
    ("group-size", "said wrongly", "nvfp4", said({"group_size": 32}), ALL),
    (
        "embedding",
        "codes",
        "fp8",
        put("model.embed_tokens.weight", torch.ones(128, 128).to(torch.float8_e4m3fn)),
        ALL,
    ),
    ("experts", "one lacks a scale", "experts", drop(f"{EXPERTS}.2.up_proj.weight_scale_2"), ALL),
    ("experts", "one is not there", "experts", config(lambda c: c.update(num_experts=5)), ALL),
    (
        "stacked-experts",
        "in one tensor",
        "experts",
        put(f"{EXPERTS}.gate_up_proj", torch.ones(4, 8, 8, dtype=torch.uint8)),
        ("vllm", "sglang"),
    ),
    ("scale-missing", "input", "fp8", drop(f"{UP}.input_scale"), ALL),
    ("scale-missing", "second", "nvfp4", drop(f"{DOWN}.weight_scale_2"), ALL),
    (
        "scale-extra",
        "second",
        "fp8",
        put(f"{UP}.weight_scale_2", torch.tensor(1.0)),
        ("vllm", "sglang"),
    ),
    (
        "scale-extra",
        "of the head",
        "fp8",
        put("lm_head.weight_scale", torch.tensor(1.0)),
        ("vllm", "sglang"),
    ),
    *(
        (
            "scale-extra",
            f"another form's {last}",
            "nvfp4",
            put(f"{DOWN}.{last}", torch.tensor(1.0)),
            ("vllm", "sglang"),
        )
        for last in ("weight_scale_inv", "weight_global_scale")
    ),
    (
        "scale-extra",
        "columns",
        "fp8",
        put(f"{DOWN}.pre_quant_scale", torch.ones(256)),
        ("vllm", "sglang"),
    ),
    ("siblings", "FP8, inverted", "fp8", changed(f"{UP}.weight_scale", lambda t: 1 / t), ALL),
    (
        "type",
        "bytes for FP8",
        "nvfp4",
        tensors(lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(128, 16)})),
        ALL,
    ),
    ("shape", "a scale of two", "fp8", put(f"{UP}.input_scale", torch.ones(2)), ALL),
    (
        "shape",
        "a row less",
        "nvfp4",
        tensors(lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][1:]})),
        ALL,
    ),
    ("scale-value", "NaN", "fp8", put(f"{UP}.weight_scale", NAN), ALL),
    ("scale-value", "zero", "fp8", put(f"{UP}.input_scale", torch.tensor(0.0)), ALL),
    (
        "pre-quant-scale",
        "unknown to vLLM",
        "nvfp4",
        put(f"{DOWN}.pre_quant_scale", torch.ones(256)),
        ALL,
    ),
    (
        "pre-quant-scale",
        "of another width",
        "awq",
        put(f"{DOWN}.pre_quant_scale", torch.ones(7)),
        ("trtllm",),
    ),
    ("pre-quant-scale-missing", "said", "fp8", said({"pre_quant_scale": True}), ("trtllm",)),
    ("siblings", "second scale", "nvfp4", put(f"{Q}.weight_scale_2", torch.tensor(0.5)), ALL),
    ("siblings", "divisor", "ct nvfp4", put(f"{Q}.weight_global_scale", torch.tensor([9.0])), ALL),
    ("input-siblings", "of scales", "nvfp4", put(f"{Q}.input_scale", torch.tensor(0.5)), ALL),
    (
        "plain-modules",
        "a router",
        "experts",
        both(DEEPSEEK, tensors(lambda t: t.update(in_fp8("model.layers.1.mlp.gate", 4, 256)))),
        ALL,
    ),
    (
        "plain-modules",
        "a projection before multi-token prediction",
        "ct fp8",
        tensors(lambda t: t.update(in_fp8("model.layers.4.eh_proj", 64, 128))),
        ALL,
    ),
    (
        "w1-w3",
        "second scale",
        "experts",
        put(f"{EXPERTS}.1.up_proj.weight_scale_2", torch.tensor(0.5)),
        ALL,
    ),
    ("scheme", "bits", "ct int4", group(num_bits=3), ALL),
    ("scheme", "not TensorRT-LLM's", "ct int4", lambda f: None, ("trtllm",)),
    ("scheme", "group", "ct nvfp4", group(group_size=32), ALL),
    ("scheme", "not yet", "ct fp8", group(strategy="block"), ("vllm@0.9.0",)),
    ("scheme", "no groups", "ct fp8", inline(lambda s: s.update(config_groups={})), ALL),
    ("transforms", "inputs", "ct fp8", rotated("input"), ("vllm@0.9.0", "sglang", "trtllm")),
    ("transforms", "the cache", "ct fp8", rotated("weight_input", "k_cache"), ALL),
    ("transforms", "in ModelOpt's form", "fp8", rotated("input"), ALL),
    ("transforms", "no groups", "ct fp8", inline(lambda s: s.update(transform_config=[1])), ALL),
    ("targets", "a class among several", "ct fp8", inline(two_groups), ("trtllm",)),
    ("packed", "another name", "ct fp8", inline(lambda s: s.update(format="pack-quantized")), ALL),
    ("parts", "no scale", "ct nvfp4", drop(f"{DOWN}.input_global_scale"), ALL),
    (
        "fp8-config",
        "inputs",
        "deepseek",
        inline(lambda s: s.update(activation_scheme="static")),
        ("vllm", "sglang"),
    ),
    (
        "fp8-config",
        "blocks",
        "deepseek",
        inline(lambda s: s.update(weight_block_size=[64, 64])),
        ("trtllm",),
    ),
    ("fp8-scales", "none", "deepseek", drop(f"{DOWN}.weight_scale_inv"), ALL),
    ("fp8-scales", "shape", "deepseek", put(f"{DOWN}.weight_scale_inv", torch.ones(1, 1)), ALL),
    ("expert-dtype", "scales", "deepseek", AS_V4, ("vllm", "sglang")),
]
"""Rule, what is done, to which folder, and for which engines it must be told."""

LOADED_BY = {
    "fp8": ALL,
    "odd sizes": ALL,
    "plain kv": ALL,
    "nvfp4": ALL,
    "awq": ("trtllm",),
    "mxfp8": ("vllm",),
    "pb": ("vllm", "trtllm"),
    "mixed": ("vllm", "trtllm"),
    "experts": ALL,
    "ct fp8": ALL,
    "ct int4": ("vllm", "sglang"),
    "ct nvfp4": ALL,
    "deepseek": ALL,
    "llama": ALL,
    "moe": ALL,
}


@pytest.mark.parametrize("name", LOADED_BY)
def test_nothing_against_what_loads(made: Path, name: str) -> None:
    for engine in LOADED_BY[name]:
        assert lint(made / name, target=engine).findings == ()


@pytest.mark.parametrize(
    ("rule", "base", "change", "engines"),
    [pytest.param(r, b, c, e, id=f"{r}: {w}") for r, w, b, c, e in BREAKS if e],
)
def test_every_rule_is_told(
    made: Path, tmp_path: Path, rule: str, base: str, change: Change, engines: tuple[str, ...]
) -> None:
    shutil.copytree(made / base, tmp_path / "broken")
    change(tmp_path / "broken")
    report = lint(tmp_path / "broken", target=engines)
    for engine in report.targets:
        told = [f for f in report.of(engine) if f.id == rule and f.severity == "error"]
        assert told, (engine, report.of(engine))
        assert all(f.source.startswith("https://") and f.hint and f.message for f in told)
    assert report.exit_status == 7


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "hqq"])
def test_a_method_without_rules_is_not_checked(made: Path, tmp_path: Path, method: str) -> None:
    shutil.copytree(made / "ct fp8", tmp_path / "other")
    inline(lambda s: s.update(quant_method=method))(tmp_path / "other")
    report = lint(tmp_path / "other", target=ALL)
    for engine in report.targets:
        (finding,) = report.of(engine)
        assert (finding.id, finding.severity) == ("method", "warning")
        assert method in finding.message
        assert "stops" not in finding.effect


SOFT: list[tuple[str, str, Change, tuple[str, ...]]] = [
    ("architectures", "fp8", config(lambda c: c.update(architectures=["FooLM"])), ("trtllm",)),
    ("tokenizer", "fp8", lambda f: (f / "tokenizer.json").unlink(), ALL),
    ("keys", "nvfp4", said({"exclude_modules": []}), ("sglang",)),
    (
        "kv-cache",
        "fp8",
        both(said({"kv_cache_quant_algo": "NVFP4"}), inline(lambda s: s.pop("kv_cache_scheme"))),
        ("vllm",),
    ),
    (
        "kv-scales-half",
        "fp8",
        tensors(lambda t: [t.pop(n) for n in [*t] if n.endswith("v_scale")]),
        ALL,
    ),
    (
        "kv-scales-half",
        "fp8",
        drop(f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"),
        ALL,
    ),
    (
        "kv-scales",
        "fp8",
        tensors(lambda t: [t.pop(n) for n in [*t] if n[-7:] in ("k_scale", "v_scale")]),
        ALL,
    ),
    ("method", "fp8", inline(lambda s: s.update(quant_method="modelopt_fp8")), ("vllm", "trtllm")),
    ("method", "fp8", inline(lambda s: s.update(quant_method="modelopt_fp4")), ("trtllm",)),
    ("config-agree", "ct fp8", written("hf_quant_config.json", QUANT), ("vllm", "sglang")),
    ("tensors-unknown", "fp8", put("model.layers.0.mlp.odd.weight", torch.ones(3)), ALL),
    ("tensors-missing", "fp8", both(UNHEARD_OF, without(f"{ATTENTION}.v_proj")), ALL),
    (
        "tensors-missing",
        "fp8",
        both(UNHEARD_OF, config(lambda c: c.update(num_hidden_layers=5))),
        ALL,
    ),
    ("scale-range", "fp8", changed(f"{DOWN}.input_scale", lambda t: t * 1e6), ALL),
    ("scale-range", "fp8", put(f"{DOWN}.weight_scale", torch.tensor(1e-30)), ALL),
    ("scale-range", "nvfp4", changed(f"{DOWN}.weight_scale_2", lambda t: 1 / t), ALL),
    ("scale-range", "ct nvfp4", changed(f"{DOWN}.weight_global_scale", lambda t: 1 / t), ALL),
    ("scale-range", "ct nvfp4", changed(f"{DOWN}.input_global_scale", lambda t: 1 / t), ALL),
    ("scale-outlier", "fp8", changed(f"{DOWN}.input_scale", lambda t: t / 5000), ALL),
    ("padding", "odd sizes", lambda f: None, ("sglang@0.5",)),
    ("kv-scales", "plain kv", put(f"{Q[:-6]}k_proj.k_scale", torch.tensor(0.1)), ALL),
    ("input-siblings", "fp8", put(f"{Q}.input_scale", torch.tensor(0.5)), ALL),
    ("deepseek-v4-form", "pb", AS_V4, ("vllm", "sglang")),
]


@pytest.mark.parametrize(("rule", "base", "change", "engines"), SOFT)
def test_warnings(
    made: Path, tmp_path: Path, rule: str, base: str, change: Change, engines: tuple[str, ...]
) -> None:
    shutil.copytree(made / base, tmp_path / "odd")
    change(tmp_path / "odd")
    for engine in engines:
        found = lint(tmp_path / "odd", target=engine).findings
        assert ("warning", rule) in {(f.severity, f.id) for f in found}, found


@pytest.mark.parametrize(
    ("base", "tp", "engines", "rule"),
    [
        ("nvfp4", 2, ALL, ""),
        ("nvfp4", 32, ALL, "tensor-parallel"),
        ("fp8", 2, ALL, ""),
        ("pb", 4, ("vllm", "trtllm"), "divides"),
        ("deepseek", 4, ALL, "divides"),
        ("awq", 8, ("trtllm",), "divides"),
        ("ct int4", 8, ("vllm", "sglang"), "divides"),
    ],
)
def test_ranks(made: Path, base: str, tp: int, engines: tuple[str, ...], rule: str) -> None:
    for engine in engines:
        told = {f.id for f in lint(made / base, target=engine, tp=tp).findings}
        assert rule in told if rule else not told & {"divides"}


def test_all_rules_are_tested() -> None:
    told = {r for r, *_ in BREAKS} | {r for r, *_ in SOFT}
    told |= {"divides", "tensor-parallel"}  # test_ranks
    told |= {"mtp-copies"}  # test_model_rules.py
    assert told == {rule.id for rule in load_rules()} == CHECKS.keys()


def test_releases_that_are_not_known(made: Path) -> None:
    report = lint(made / "fp8", target=["vllm@0.99.1", "vllm@0.16.0", "sglang"])
    assert [(f.id, f.severity, f.target) for f in report.findings] == [
        ("version", "warning", "vllm 0.99.1")
    ]
    assert "newer than 0.16.0, the last known release" in report.findings[0].message
    assert report.exit_status == 0
    for text in ("vllm@banana", "vllm@0.16.0xyz", "vllm@", "vllm@0.1", "vllm@99", "nothing@1"):
        with pytest.raises(UsageError):
            lint(made / "fp8", target=text)


def test_scales_where_vllm_has_them_are_whole(made: Path, tmp_path: Path) -> None:
    def move(t: Tensors) -> None:
        t[f"{ATTENTION}.attn.k_scale"] = t.pop(f"{ATTENTION}.k_proj.k_scale")

    shutil.copytree(made / "fp8", tmp_path / "moved")
    tensors(move)(tmp_path / "moved")
    assert lint(tmp_path / "moved", target="vllm").findings == ()


def test_codes_of_four_bits_in_a_byte_each(made: Path, tmp_path: Path) -> None:
    """compressed-tensors' `int-quantized` with fewer bits than a byte has (W4A8)."""

    def unpack(t: Tensors) -> None:
        for name in [n for n in t if n.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            rows, columns = t.pop(f"{module}.weight_shape").tolist()
            t.pop(name)
            t[f"{module}.weight"] = torch.zeros(rows, columns, dtype=torch.int8)

    shutil.copytree(made / "ct int4", tmp_path / "x")
    both(tensors(unpack), inline(lambda s: s.update(format="int-quantized")))(tmp_path / "x")
    assert "layout" not in {f.id for f in lint(tmp_path / "x").findings}


def test_what_is_no_folder_is_told_as_by_other_commands(tmp_path: Path) -> None:
    with raises(FormatError, "the path does not exist", id="source-not-found", file=tmp_path / "x"):
        lint(tmp_path / "x")
    (tmp_path / "file").touch()
    with raises(FormatError, "this is a file", hint="exported Hugging Face folders"):
        lint(tmp_path / "file")


@pytest.mark.parametrize("algo", ["FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W8A16", "W4A16_AWQ"])
def test_what_an_engine_loads_in_another_form_is_a_hint(
    made: Path, tmp_path: Path, algo: str
) -> None:
    """Each is unsupported by some engine in ModelOpt's form, and loaded from compressed-tensors."""
    shutil.copytree(made / "fp8", tmp_path / "other")
    spelled(tmp_path / "other", algo)
    report = lint(tmp_path / "other", target=ALL)
    told = {e: [f for f in report.of(e) if f.id == "algorithm"] for e in report.targets}
    print({e: [(f.message, f.hint) for f in fs] for e, fs in told.items()})
    hints = [f.hint for fs in told.values() for f in fs]
    assert any(f"loads {algo} from what megtool export --to compressed" in h for h in hints)


@pytest.mark.parametrize(
    ("ignored", "engines"),
    [("re:vision.*", {"vllm", "sglang"}), ("re:.*visual.*", set())],
    ids=["missed", "matched"],
)
def test_a_tower_that_engines_build_quantized(
    made: Path, tmp_path: Path, ignored: str, engines: set[str]
) -> None:
    """A vision tower in 16 bits, which `ignore` of compressed-tensors names or not."""
    folder = tmp_path / "vl"
    shutil.copytree(made / "ct fp8", folder)
    inline(lambda s: s.update(ignore=["lm_head", ignored]))(folder)
    tower = {
        f"visual.blocks.{n}.attn.proj.weight": torch.zeros(16, 16, dtype=torch.bfloat16)
        for n in range(2)
    }
    save_file(tower | {"visual.pos_embed.weight": torch.zeros(4, 16)}, folder / "tower.safetensors")
    index = {"weight_map": dict.fromkeys((*tower, "visual.pos_embed.weight"), "tower.safetensors")}
    index["weight_map"] |= dict.fromkeys(torch_tensors(made / "ct fp8"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = [
        (e, f)
        for e in ("vllm", "sglang", "trtllm")
        for f in lint(folder, target=[e]).findings
        if f.id == "exclude" and f.module.startswith("visual.")
    ]
    assert {e for e, _ in found} == engines
    assert all("1 other layers of 'visual'" in f.message for _, f in found)


def test_a_router_that_an_engine_builds_quantized(made: Path, tmp_path: Path) -> None:
    """vLLM and SGLang give the routers of Qwen3's models the method of the others."""
    shutil.copytree(made / "experts", tmp_path / "x")
    tensors(lambda t: t.update(in_fp8("model.layers.1.mlp.gate", 4, 256)))(tmp_path / "x")
    config(lambda c: c.update(architectures=["Qwen3MoeForCausalLM"]))(tmp_path / "x")
    report = lint(tmp_path / "x", target=ALL)
    found = {e for e in report.targets for f in report.of(e) if f.id == "plain-modules"}
    assert found == {"trtllm"}
