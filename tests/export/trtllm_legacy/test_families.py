"""Falcon, StarCoder2, Nemotron and DeepSeek: every tensor of every rank, plain and quantized."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megtool import quantize, reshard
from megtool.dtypes import dtype as named_dtype
from megtool.errors import LayoutError, MappingError
from megtool.number_formats.small_floats import single
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints.quantized_folder import make_quantized
from tests.support.checkpoints.trtllm_joined import config_of, decoded, ranks_of
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_text, trtllm_families
from tests.support.models.trtllm_families import CASES, YARN, expected_rank, settings
from tests.support.quant.quantize_sizes import SMALL
from tests.support.runs.exports import export_trtllm_legacy

pytest.importorskip("transformers")

LATENT = tuple(c for c in CASES if c.startswith("deepseek"))
DENSE = tuple(c for c in CASES if c not in LATENT)
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 2, 1))
SHARED = ((2, 1, 2), (2, 2, 2), (4, 1, 2), (4, 1, 4))
PLAIN = {f"attn.{n}": "" for n in ("q", "q_down", "q_up", "kv_down", "kv_up")}
"""What latent attention keeps plain."""


def check(out: Path, source: Path, tp: int, pp: int, ep: int = 1) -> None:
    """All ranks hold what they should, bit for bit, in the types that engines expect."""
    weights = load_file(source / "model.safetensors")
    for rank, found in enumerate(ranks_of(out)):
        want = expected_rank(weights, settings(source), rank, tp=tp, pp=pp, ep=ep)
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found[name], tensor), (rank, name)


@pytest.mark.parametrize("case", DENSE)
def test_dense(tmp_path: Path, case: str) -> None:
    source = trtllm_families.save(tmp_path / "hf", case)
    for tp, pp, _ in LAYOUTS:
        out = tmp_path / f"{tp}{pp}"
        export_trtllm_legacy(source, out, tp=tp, pp=pp, fsync=False)
        check(out, source, tp, pp)
        assert config_of(out)["mapping"] == {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}


@pytest.mark.parametrize("case", LATENT)
def test_latent_attention_and_experts(tmp_path: Path, case: str) -> None:
    """Experts by tensor parallelism, by expert parallelism, and by both."""
    source = trtllm_families.save(tmp_path / "hf", case)
    for tp, pp, ep in LAYOUTS + SHARED:
        out = tmp_path / f"{tp}{pp}{ep}"
        report = export_trtllm_legacy(source, out, tp=tp, pp=pp, ep=ep, fsync=False)
        check(out, source, tp, pp, ep)
        mapping = config_of(out)["mapping"]
        assert (mapping["moe_tp_size"], mapping["moe_ep_size"]) == (tp // ep, ep)
        assert any("branch `deepseek`" in n for n in report.notes) is (case == "deepseek_v3")
        note = next(n for n in report.notes if "trtllm-build" in n)
        assert shlex.split(note.partition(": ")[2])[:3] == [
            "trtllm-build",
            "--checkpoint_dir",
            str(out),
        ]


CONFIGS: dict[str, dict[str, Any]] = {
    "falcon-7b": {
        "architecture": "FalconForCausalLM",
        "num_key_value_heads": 1,
        "hidden_act": "gelu",
        "bias": False,
        "parallel_attention": True,
        "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
        "intermediate_size": 128,
    },
    "falcon-40b": {
        "num_key_value_heads": 2,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2,
    },
    "falcon-sequential": {"bias": True, "parallel_attention": False},
    "starcoder2": {
        "architecture": "Starcoder2ForCausalLM",
        "gpt_variant": "starcoder2",
        "hidden_act": "gelu",
        "bias": True,
        "rotary_pct": 1.0,
        "q_scaling": 1,
        "share_embedding_table": False,
    },
    "nemotron": {
        "architecture": "NemotronForCausalLM",
        "gpt_variant": "nemotron",
        "hidden_act": "squared-relu",
        "bias": False,
        "rotary_pct": 0.5,
        "norm_epsilon": 1e-5,
    },
    "deepseek_v2": {
        "architecture": "DeepseekV2ForCausalLM",
        "hidden_act": "swiglu",
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "moe_inter_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rotary_base": 10000.0,
        "rotary_scaling": {k: v for k, v in YARN.items() if k[:4] != "rope"} | {"type": "yarn"},
        "moe": {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "top_k": 2,
            "normalization_mode": 3,
            "sparse_mixer_epsilon": 0.01,
            "tp_mode": 0,
            "device_limited_n_group": 2,
            "device_limited_topk_group": 1,
            "device_limited_routed_scaling_factor": 16.0,
        },
    },
    "deepseek_v2-lite": {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {
        "architecture": "DeepseekV3ForCausalLM",
        "num_key_value_heads": 1,
        "head_size": 40,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 2,
    },
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(tmp_path: Path, case: str) -> None:
    """What TensorRT-LLM's `from_hugging_face` makes of the same config.json."""
    source = trtllm_families.save(tmp_path / "hf", case)
    export_trtllm_legacy(source, tmp_path / "out", fsync=False)
    found = config_of(tmp_path / "out")
    assert {k: found[k] for k in CONFIGS[case]} == CONFIGS[case]
    if case == "deepseek_v2":
        assert "head_size" not in found
        assert "topk_method" not in found["moe"]  # releases know no such key
    if case == "deepseek_v3":
        assert (found["moe"]["normalization_mode"], found["moe"]["topk_method"]) == (3, 2)


def test_weights_of_float32_are_rounded_once(tmp_path: Path) -> None:
    """Products too: of the numbers as they are, not of rounded ones."""
    source = trtllm_families.save(tmp_path / "hf", "deepseek_v2", dtype="float32")
    export_trtllm_legacy(source, tmp_path / "out", tp=2, dtype="bfloat16", fsync=False)
    weights = load_file(source / "model.safetensors")
    for rank, found in enumerate(ranks_of(tmp_path / "out")):
        want = expected_rank(weights, settings(source), rank, tp=2, pp=1)
        for name, tensor in want.items():
            rounded = tensor if "router" in name else tensor.bfloat16()
            assert torch.equal(found[name], rounded), name


@pytest.mark.parametrize("case", ["falcon-40b", "nemotron", "deepseek_v3"])
def test_from_megatron_ranks(tmp_path: Path, case: str) -> None:
    """Shards of another layout give the same files in every byte."""
    source = trtllm_families.save(tmp_path / "hf", case)
    options = {"tp": 2, "pp": 2} | ({"ep": 2} if case in LATENT else {})
    export_trtllm_legacy(source, tmp_path / "a", **options, fsync=False)
    reshard(source, tmp_path / "megatron", to="torch_dist", tp=4, pp=2, fsync=False)
    export_trtllm_legacy(tmp_path / "megatron", tmp_path / "b", **options, fsync=False)
    a, b = (contents(tmp_path / n) or {} for n in "ab")
    same = [n for n in a if n != "megtool.json"]
    assert {n: a[n] for n in same} == {n: b[n] for n in same}


def test_threads_make_no_difference(tmp_path: Path) -> None:
    source = trtllm_families.save(tmp_path / "hf", "deepseek_v2")
    for threads in (1, 3):
        out = tmp_path / str(threads)
        export_trtllm_legacy(source, out, tp=2, threads=threads, memory="4MiB", fsync=False)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def dequantized(folder: Path) -> dict[str, Tensor]:
    """The weights of a quantized folder as megtool reads them, in float32."""
    opened, out = open_source(folder), {}
    with CheckpointReader(opened.catalogue, Files()) as reader:
        for t in opened.catalogue.tensors:
            tensor = reader.open_stored(t.name)
            tensor.dtype = named_dtype("float32")
            out[t.name] = torch.from_numpy(np.array(single(tensor.read(), "float32")))
    return out


def check_quantized(out: Path, source: Path, tp: int, pp: int, ep: int, step: float) -> None:
    """Numbers are the source's; those that got a shared scale within half a step of e4m3."""
    weights = dequantized(source)
    for rank, found in enumerate(ranks_of(out)):
        want = expected_rank(weights, settings(source), rank, tp=tp, pp=pp, ep=ep)
        scales = {n for n in found if "_scaling_factor" in n}
        assert found.keys() - scales == want.keys()
        for name, tensor in want.items():
            module, _, last = name.rpartition(".")
            plain = f"{module}.weights_scaling_factor" not in found or last != "weight"
            got = found[name].float() if plain else decoded(found, module)
            if plain:
                assert torch.equal(got, tensor.to(found[name].dtype).float()), name
            else:
                off = (got - tensor).abs()
                assert (off <= tensor.abs() * step + tensor.abs().max() * 2.0**-9).all(), name


@pytest.mark.parametrize("case", ["starcoder2", "nemotron"])
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_quantized(tmp_path: Path, case: str, algo: str) -> None:
    source = trtllm_families.save(tmp_path / "hf", case)
    made = make_quantized(source, tmp_path / "q", algos=algo)
    for tp, pp in ((1, 1), (2, 2)):
        out = tmp_path / f"{tp}{pp}"
        report = export_trtllm_legacy(made.path, out, tp=tp, pp=pp, fsync=False)
        check_quantized(out, made.path, tp, pp, 1, 1 / 16 + 1e-6 if algo == "FP8" else 1e-6)
        assert (report.algo, report.kv_algo) == (algo, "FP8")


@pytest.mark.parametrize("case", ["falcon-7b", "falcon-40b"])
def test_quantized_groups_of_heads(tmp_path: Path, case: str) -> None:
    """Falcon's codes lie group by group: a rank's queries are many runs of rows of one module."""
    source = trtllm_families.save(tmp_path / "hf", case, vocab_size=tiny_text.VOCABULARY)
    tiny_text.save_tokenizer(source)
    quantize(source, tmp_path / "q", recipe="fp8", **SMALL)
    for tp, pp in ((1, 1), (2, 2)):
        out = tmp_path / f"{tp}{pp}"
        report = export_trtllm_legacy(tmp_path / "q", out, tp=tp, pp=pp, fsync=False)
        check_quantized(out, tmp_path / "q", tp, pp, 1, 1e-6)
        assert report.algo == "FP8"
        assert report.requantized == 0
        assert report.exact == 4 * 6


@pytest.mark.parametrize("case", LATENT)
def test_quantized_experts(tmp_path: Path, case: str) -> None:
    """Latent attention is plain, and said to be; experts share scales as everywhere."""
    source = trtllm_families.save(tmp_path / "hf", case)
    made = make_quantized(source, tmp_path / "q", algos=PLAIN | {"": "FP8"}, cache=False)
    for tp, pp, ep in ((1, 1, 1), (2, 1, 2), (2, 2, 1)):
        out = tmp_path / f"{tp}{pp}{ep}"
        report = export_trtllm_legacy(made.path, out, tp=tp, pp=pp, ep=ep, fsync=False)
        check_quantized(out, made.path, tp, pp, ep, 1 / 16 + 1e-6)
        assert report.algo == "FP8"
        said = config_of(out)["quantization"]
        assert "transformer.layers.0.attention.fused_a" in said["exclude_modules"]
        rank = ranks_of(out)[-1]
        at = f"transformer.layers.{4 // pp - 1}.mlp"
        assert rank[f"{at}.fc.weights_scaling_factor"].shape == (4 // ep, 1)
        assert rank[f"{at}.shared_expert.fc.weights_scaling_factor"].shape == (1,)


def test_what_latent_attention_needs_plain(tmp_path: Path) -> None:
    source = trtllm_families.save(tmp_path / "hf", "deepseek_v2")
    made = make_quantized(source, tmp_path / "q", algos="FP8", cache=False)
    with raises(MappingError, "layers.0.attn.q_down", "fused_a", "keeps"):
        export_trtllm_legacy(made.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change(**keys: Any) -> Callable[[Path], None]:
    """An edit of config.json."""

    def work(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return work


@pytest.mark.parametrize(
    ("case", "edit", "words"),
    [
        ("deepseek_v2", change(rope_parameters={"rope_theta": 1e4}), ("YaRN", "--to trtllm")),
        ("deepseek_v2-lite", change(routed_scaling_factor=2.0), ("multiplied by 2",)),
        ("starcoder2", change(rope_parameters=YARN), ("'yarn'", "StarCoder2")),
        (
            "falcon-7b",
            change(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            ("'linear'", "Falcon"),
        ),
    ],
)
def test_what_no_engine_computes(
    tmp_path: Path, case: str, edit: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    source = trtllm_families.save(tmp_path / "hf", case)
    edit(source)
    with raises(MappingError, *words):
        export_trtllm_legacy(source, tmp_path / "out")


def test_dense_layers(tmp_path: Path) -> None:
    """Releases have one dense layer before the mixtures; the branch has any number."""
    source = trtllm_families.save(tmp_path / "hf", "deepseek_v2", first_k_dense_replace=2)
    with raises(MappingError, "layers 2, 3", "only the first layer is dense"):
        export_trtllm_legacy(source, tmp_path / "out")


def test_one_flag_for_biases(tmp_path: Path) -> None:
    source = trtllm_families.save(tmp_path / "hf", "nemotron", mlp_bias=True)
    with raises(MappingError, "biases", "all have one or none"):
        export_trtllm_legacy(source, tmp_path / "out")


def test_groups_of_experts(tmp_path: Path) -> None:
    dense = trtllm_families.save(tmp_path / "dense", "nemotron")
    with raises(LayoutError, "ep=2", "no experts"):
        export_trtllm_legacy(dense, tmp_path / "out", tp=2, ep=2)
    source = trtllm_families.save(tmp_path / "hf", "deepseek_v2")
    with raises(LayoutError, "ep=2 does not divide tp=1", "ep may be 1"):
        export_trtllm_legacy(source, tmp_path / "out", ep=2)
    with raises(LayoutError, "tp may be 1, 2, 4"):
        export_trtllm_legacy(source, tmp_path / "out", tp=3)
