"""Settings of a Megatron model: transformers computes them as written, or they are refused.

The truth of a Megatron checkpoint is megtool's own forward pass, which tests/fidelity compares with
megatron-core's; what was written is run by transformers.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

import megtool
from megtool.access.checkpoint import open_checkpoint
from megtool.convert.families.detection import family
from megtool.digests.crc32c import SIDECAR
from megtool.errors import CoverageError, MappingError
from megtool.export.gguf import metadata_keys
from megtool.export.gguf.write_file import export_gguf
from megtool.export.trtllm_legacy import write_checkpoint
from megtool.export.trtllm_legacy.write_checkpoint import export_trtllm_legacy
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.options.execution import ExecutionOptions
from megtool.options.gguf import GgufForm
from megtool.options.groups import AdaptedSource, SourceOptions
from megtool.options.layout import ParallelConfig
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.reshard.run import reshard_checkpoint
from megtool.source.open import open_source

transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, HEADS, GROUPS, SIZE, WIDTH, WORDS, EXPERTS = 2, 32, 4, 2, 8, 48, 64, 4
ARGS: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "group_query_attention": True,
    "kv_channels": SIZE,
    "ffn_hidden_size": WIDTH,
    "padded_vocab_size": WORDS,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "iteration": 1,
}
MOE = {
    "num_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": WIDTH,
    "moe_grouped_gemm": False,
}
UNGATED = {"swiglu": False}
TOKENS = torch.arange(3, 51)[None] % WORDS
LAYER = "decoder.layers."


def save(folder: Path, changed: Mapping[str, Any]) -> Path:
    """Save a tiny model as torch_dist, as Megatron names its tensors."""
    args = ARGS | changed
    made = torch.Generator().manual_seed(1)

    def noise(*shape: int, by: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=made) * by

    rows = (HEADS + 2 * GROUPS) * SIZE
    gated = 2 if args["swiglu"] or args.get("gated_linear_unit") or args.get("quick_geglu") else 1
    tensors = {
        "embedding.word_embeddings.weight": noise(WORDS, HIDDEN, by=1.0),
        "output_layer.weight": noise(WORDS, HIDDEN),
        "decoder.final_layernorm.weight": 1 + noise(HIDDEN),
        f"{LAYER}self_attention.linear_qkv.weight": noise(LAYERS, rows, HIDDEN),
        f"{LAYER}self_attention.linear_qkv.layer_norm_weight": 1 + noise(LAYERS, HIDDEN),
        f"{LAYER}self_attention.linear_proj.weight": noise(LAYERS, HIDDEN, HEADS * SIZE),
    }
    norm = 1 + noise(LAYERS, HIDDEN)
    if args.get("num_experts"):
        fc1 = noise(LAYERS, EXPERTS, gated * WIDTH, HIDDEN)
        fc2 = noise(LAYERS, EXPERTS, HIDDEN, WIDTH)
        tensors |= {
            f"{LAYER}pre_mlp_layernorm.weight": norm,
            f"{LAYER}mlp.router.weight": noise(LAYERS, EXPERTS, HIDDEN),
            f"{LAYER}mlp.experts.experts.linear_fc1.weight": fc1,
            f"{LAYER}mlp.experts.experts.linear_fc2.weight": fc2,
        }
    else:
        tensors |= {
            f"{LAYER}mlp.linear_fc1.layer_norm_weight": norm,
            f"{LAYER}mlp.linear_fc1.weight": noise(LAYERS, gated * WIDTH, HIDDEN),
            f"{LAYER}mlp.linear_fc2.weight": noise(LAYERS, HIDDEN, WIDTH),
        }
    if args.get("qk_layernorm"):
        for name in ("q", "k"):
            name = f"{LAYER}self_attention.{name}_layernorm.weight"
            tensors[name] = 1 + noise(LAYERS, SIZE)
    if args.get("add_qkv_bias"):
        tensors[f"{LAYER}self_attention.linear_qkv.bias"] = noise(LAYERS, rows)
    folder.mkdir()
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)
    common = {"args": argparse.Namespace(**args), "iteration": 1, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    kinds = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(kinds | versions))
    return folder


def reshard(source: Path, destination: Path, name: str, drop: tuple[str, ...] = ()) -> None:
    reading = AdaptedSource(family=name, drop_setting=drop)
    target = TargetOptions(to="hf", destination=destination)
    reshard_checkpoint(source, SourceSelection(reading=reading), target, ExecutionOptions())


def truth(source: Path, name: str) -> Tensor:
    decoder = load(open_source(source, SourceOptions(family=name)), dtype="float32")
    with torch.no_grad():
        logits: Tensor = decoder(Batch(tokens_BS=TOKENS))
    return logits


def computed(folder: Path) -> Tensor:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


def words(value: object) -> str:
    return value if isinstance(value, str) else ""


HALVES = {"rotary_interleaved": True}
ONE_P = {"apply_layernorm_1p": True}
GATED = {"swiglu": False, "gated_linear_unit": True}
EVERY_OTHER = {"window_size": (7, 0), "window_attn_skip_freq": 2}
QUICK = {"swiglu": False, "quick_geglu": True}
PRE_SOFTMAX = {"moe_router_pre_softmax": True}
BIASES, NORMS_OF_HEADS = {"add_qkv_bias": True}, {"qk_layernorm": True}
CARRIED: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "llama", {}),
    ("zero-centred norms", "llama", ONE_P),
    ("rotary pairs side by side", "llama", HALVES),
    ("both, with norms of heads", "qwen3", HALVES | ONE_P | NORMS_OF_HEADS),
    ("pairs, with biases", "qwen2", HALVES | BIASES),
    ("pairs of halves", "ernie4_5", {}),
    ("gated squared ReLU", "llama", GATED | {"squared_relu": True}),
    ("quick GELU", "llama", QUICK),
    ("windows", "llama", {"window_size": (7, 0)}),
    ("no windows, norms around one", "vaultgemma", GATED),
    ("windows in every other layer", "qwen2", EVERY_OTHER | BIASES),
    ("Llama 3's scaling", "llama", {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
    ("layers without rotary embedding", "smollm3", {"no_rope_freq": 2}),
    ("half of heads turns", "phi3", {"rotary_percent": 0.5}),
    ("experts", "mixtral", MOE),
    ("experts, zero-centred norms", "mixtral", MOE | ONE_P),
    ("shares over all", "qwen3_moe", MOE | NORMS_OF_HEADS | PRE_SOFTMAX),
]


@pytest.mark.parametrize(("what", "name", "changed"), CARRIED, ids=words)
def test_transformers_computes_what_was_written(
    what: str, name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    source = save(tmp_path / "megatron", changed)
    reshard(source, tmp_path / "hf", name)
    want, got = truth(source, name), computed(tmp_path / "hf")
    scale = float(want.abs().max())
    assert float((want - got).abs().max()) < 1e-4 * scale, what


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("position_embedding", "llama", {"position_embedding_type": "none"}, ""),
    ("qk_l2_norm", "llama", {"qk_l2_norm": True}, ""),
    ("activation_limit", "llama", {"activation_func_clamp_value": 0.5}, ""),
    ("glu_offset", "llama", {"glu_linear_offset": 1.0}, ""),
    ("no_rope_layers", "llama", {"no_rope_freq": 2}, "smollm3"),
    ("window_skip_freq", "llama", EVERY_OTHER, "ministral"),
    ("gated", "llama", UNGATED | {"squared_relu": True}, "arcee"),
    ("qkv_bias", "qwen2", {}, "llama"),
    ("qk_norm", "qwen3", {}, "llama"),
    ("router_score", "mixtral", MOE | {"moe_router_score_function": "sigmoid"}, ""),
    ("router_pre_softmax", "mixtral", MOE | {"moe_router_pre_softmax": True}, ""),
    ("router_scaling", "mixtral", MOE | {"moe_router_topk_scaling_factor": 2.5}, ""),
]


@pytest.mark.parametrize(("field", "name", "changed", "holder"), REFUSED, ids=words)
def test_what_the_class_cannot_hold_is_refused_by_name(
    field: str, name: str, changed: dict[str, Any], holder: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "megatron", changed)
    with pytest.raises(MappingError) as caught:
        reshard(source, tmp_path / "hf", name)
    assert caught.value.id in ("setting-lost", "unsupported-setting", "unsupported-model")
    if caught.value.id == "setting-lost":
        assert field in caught.value.message
        assert f"--drop-setting {field}" in str(caught.value.hint)
        assert holder in str(caught.value.hint)
    assert not (tmp_path / "hf").exists()


def test_a_dropped_setting_is_recorded(tmp_path: Path) -> None:
    source = save(tmp_path / "megatron", {"qk_l2_norm": True})
    reshard(source, tmp_path / "hf", "llama", drop=("qk_l2_norm",))
    plain = save(tmp_path / "plain", {})
    assert torch.allclose(computed(tmp_path / "hf"), truth(plain, "llama"), atol=1e-4)
    record = json.loads((tmp_path / "hf" / SIDECAR).read_text())
    assert record["dropped_settings"] == {"qk_l2_norm": True}


FORGOTTEN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "rms_norm_eps", "norm_eps", {}),
    ("llama", "rope_theta", "rope_base", {"rotary_base": 500000}),
    ("qwen2", "hidden_act", "activation", QUICK | BIASES),
    ("qwen2", "sliding_window", "window_size", EVERY_OTHER | BIASES),
    ("qwen3", "rope_theta", "rope_scaling", NORMS_OF_HEADS | {"use_rope_scaling": True}),
    ("smollm3", "no_rope_layers", "no_rope_layers", {"no_rope_freq": 2}),
    ("phi3", "rope_theta", "rotary_percent", {"rotary_percent": 0.5}),
    ("mixtral", "num_experts_per_tok", "num_experts_per_token", MOE | {"moe_router_topk": 3}),
    ("qwen3_moe", "norm_topk_prob", "router_pre_softmax", MOE | NORMS_OF_HEADS | PRE_SOFTMAX),
    ("ministral", "rms_norm_eps", "norm_eps", {}),
]


@pytest.mark.parametrize(("name", "key", "field", "changed"), FORGOTTEN, ids=words)
def test_a_key_that_a_familys_table_forgets_is_noticed(
    name: str,
    key: str,
    field: str,
    changed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = family(name)
    kept = tuple(s for s in whole.config if getattr(s, "key", None) != key)
    assert len(kept) < len(whole.config)
    careless = replace(whole, config=kept)
    monkeypatch.setattr(importlib.import_module(f"megtool.converters.{name}"), "FAMILY", careless)
    source = save(tmp_path / "megatron", {"norm_epsilon": 1e-3} | changed)
    with pytest.raises(MappingError, match=field) as caught:
        reshard(source, tmp_path / "hf", name)
    assert caught.value.id == "setting-lost"


@pytest.mark.parametrize("to", ["dcp", "torch_checkpointing", "zarr", "torch_dist", "megatron"])
def test_every_format_with_a_config_json_is_read_back(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = family("llama")
    kept = tuple(s for s in whole.config if getattr(s, "key", None) != "rms_norm_eps")
    careless = replace(whole, config=kept)
    source = save(tmp_path / "megatron", {"norm_epsilon": 1e-3})
    megtool.reshard(source, tmp_path / "whole", to=to, family="llama", fsync=False)
    config = next((tmp_path / "whole").rglob("hf/config.json"))
    assert json.loads(config.read_text())["rms_norm_eps"] == 1e-3
    monkeypatch.setattr(importlib.import_module("megtool.converters.llama"), "FAMILY", careless)
    with pytest.raises(MappingError, match="norm_eps") as caught:
        megtool.reshard(source, tmp_path / "out", to=to, family="llama", fsync=False)
    assert caught.value.id == "setting-lost"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["dcp", "torch_checkpointing", "safetensors"])
def test_formats_without_args_say_so(to: str, tmp_path: Path) -> None:
    """Without a family there is no config.json that could hold what the args say."""
    source = save(tmp_path / "megatron", {"qk_l2_norm": True})
    out = tmp_path / ("out.safetensors" if to == "safetensors" else "out")
    report = megtool.reshard(source, out, to=to, fsync=False)
    (dropped,) = [d for d in report.dropped if d.name == "common state: args"]
    assert dropped.is_lost == (to != "safetensors")
    if to != "safetensors":
        assert "--family" in dropped.reason
        with pytest.raises(CoverageError):
            megtool.reshard(source, tmp_path / "strict", to=to, strict=True, fsync=False)


def test_a_setting_that_a_tensorrt_llm_writer_forgets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = write_checkpoint.build_config_json

    def careless(*args: Any, **more: Any) -> Any:
        config = json.loads(build(*args, **more))
        return json.dumps({k: v for k, v in config.items() if k != "rotary_base"}).encode()

    source = save(tmp_path / "megatron", {"rotary_base": 500000})
    model, how = SourceOptions(family="llama"), ExecutionOptions()
    layout = ParallelConfig()
    export_trtllm_legacy(source, tmp_path / "whole", layout=layout, model=model, execution=how)
    written = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert written["rotary_base"] == 500000
    monkeypatch.setattr(write_checkpoint, "build_config_json", careless)
    with pytest.raises(MappingError, match="rope_base") as caught:
        export_trtllm_legacy(source, tmp_path / "out", layout=layout, model=model, execution=how)
    assert caught.value.id == "setting-lost"


def test_metadata_that_a_gguf_writer_forgets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = metadata_keys.build_model_keys

    def careless(*args: Any, **more: Any) -> dict[str, Any]:
        return {k: v for k, v in build(*args, **more).items() if "freq_base" not in k}

    monkeypatch.setattr("megtool.export.gguf.write_file.build_model_keys", careless)
    source = save(tmp_path / "megatron", {"rotary_base": 500000})
    options = SourceOptions(family="llama")
    with pytest.raises(MappingError, match="rope_base") as caught:
        export_gguf(
            source,
            tmp_path / "model.gguf",
            GgufForm(),
            model=options,
            execution=ExecutionOptions(),
        )
    assert caught.value.id == "setting-lost"


def test_what_a_gguf_file_cannot_say_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "megatron", QUICK)
    model, out, how = SourceOptions(family="llama"), tmp_path / "out.gguf", ExecutionOptions()
    with pytest.raises(MappingError, match="activation") as caught:
        export_gguf(source, out, GgufForm(), model=model, execution=how)
    assert caught.value.id == "setting-lost"


def test_what_tensorrt_llm_cannot_compute_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "megatron", EVERY_OTHER | BIASES)
    model, out, how = SourceOptions(family="qwen2"), tmp_path / "out", ExecutionOptions()
    with pytest.raises(MappingError, match="window_size") as caught:
        export_trtllm_legacy(source, out, layout=ParallelConfig(), model=model, execution=how)
    assert caught.value.id == "setting-lost"


@pytest.mark.parametrize("to", ["torch_dist", "megatron"])
def test_args_without_a_dropped_setting(to: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"qk_l2_norm": True, "window_size": (7, 0)})
    common = torch.load(source / "common.pt", weights_only=False)
    del common["checkpoint_version"]
    torch.save(common, source / "common.pt")
    reading = AdaptedSource(family="llama", drop_setting=("qk_l2_norm", "window_size"))
    target = TargetOptions(to=to, destination=tmp_path / "out")
    reshard_checkpoint(source, SourceSelection(reading=reading), target, ExecutionOptions())
    pattern = "*/common.pt" if to == "torch_dist" else "*/mp_rank_00/model_optim_rng.pt"
    written = torch.load(next((tmp_path / "out").glob(pattern)), weights_only=False)
    assert written["checkpoint_version"] == 3.0  # rows of torch_dist are of this version
    assert not written["args"].qk_l2_norm
    assert written["args"].window_size is None
    assert written["args"].rotary_base == 10000


def test_tensors_without_a_place_name_the_families_that_have_one(tmp_path: Path) -> None:
    source = save(tmp_path / "megatron", NORMS_OF_HEADS)
    with pytest.raises(MappingError, match="have no place") as caught:
        reshard(source, tmp_path / "hf", "llama")
    assert "did you mean --family qwen3" in str(caught.value.hint)


def test_names_of_a_class_without_its_form_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path / "megatron", ONE_P), family="llama")
    with pytest.raises(MappingError, match="zero_centered_norm") as caught:
        source.as_("hf")
    assert "reshard --to hf" in str(caught.value.hint)
    assert len(source.as_("megatron", rank=0)) > 0


def test_a_quantized_folder_has_the_form_of_its_class(tmp_path: Path) -> None:
    source = save(tmp_path / "megatron", HALVES | ONE_P)
    reshard(source, tmp_path / "hf", "llama")
    for path in (source, tmp_path / "hf"):
        to = tmp_path / f"{path.name}-int8"
        megtool.quantize(path, to, recipe="int8_weight_only", family="llama")
    direct, by_folder = (
        load_file(tmp_path / f"{name}-int8" / "model.safetensors") for name in ("megatron", "hf")
    )
    assert direct.keys() == by_folder.keys()
    assert all(torch.equal(direct[name], by_folder[name]) for name in direct)
