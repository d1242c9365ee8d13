"""Plain models: every weight back from the ranks, in every layout, from any source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import reshard
from tests.support.checkpoints.trtllm_joined import config_of, joined, ranks_of
from tests.support.folders import stored_tensors
from tests.support.models import gguf_models, trtllm_models
from tests.support.runs.exports import export_trtllm_legacy

LAYOUTS = ((1, 1), (2, 1), (1, 2), (4, 2))


def check(folder: Path, source: Path) -> None:
    """A legacy folder holds what a Hugging Face folder does."""
    found, want = joined(folder), trtllm_models.weights(source)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_llama(tmp_path: Path, tp: int, pp: int) -> None:
    source = trtllm_models.llama(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    report = export_trtllm_legacy(source, tmp_path / "out", tp=tp, pp=pp, fsync=False)
    check(tmp_path / "out", source)
    c = config_of(tmp_path / "out")
    assert c["mapping"] == {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}
    assert c["vocab_size"] == 101
    assert c["attn_bias"]
    assert c["bias"]
    assert c["mlp_bias"]
    assert c["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    ranks = ranks_of(tmp_path / "out")
    for number, rank in enumerate(ranks):
        stage = number // tp
        assert ("transformer.vocab_embedding.weight" in rank) is (stage == 0)
        assert (
            ("lm_head.weight" in rank) is ("transformer.ln_f.weight" in rank) is (stage + 1 == pp)
        )
        layers = {int(n.split(".")[2]) for n in rank if ".layers." in n}
        assert layers == set(range(4 // pp))
    assert report.tensors == sum(map(len, ranks))
    assert report.files == tuple(sorted(p.name for p in (tmp_path / "out").iterdir()))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 2)])
def test_mixtral(tmp_path: Path, tp: int, pp: int) -> None:
    """ModelOpt 0.47 cannot export it with transformers 5: by the documented format."""
    source = trtllm_models.mixtral(tmp_path / "hf")
    export_trtllm_legacy(source, tmp_path / "out", tp=tp, pp=pp, fsync=False)
    check(tmp_path / "out", source)
    rank = ranks_of(tmp_path / "out")[0]
    assert rank["transformer.layers.0.mlp.fc.weight"].shape == (4, 256 // tp, 64)
    assert rank["transformer.layers.0.mlp.proj.weight"].shape == (4, 64, 128 // tp)
    c = config_of(tmp_path / "out")
    assert c["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}
    assert c["mapping"]["moe_tp_size"] == tp
    assert c["mapping"]["moe_ep_size"] == 1
    assert (c["hidden_act"], c["rotary_base"]) == ("swiglu", 1e6)


def test_rotary_embedding_is_said(tmp_path: Path) -> None:
    """Where new config.json files have it too, in which ModelOpt 0.47 does not look."""
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for name, said in {
        "old": {"rope_theta": 500000.0, "rope_scaling": scaling},
        "new": {"rope_theta": None, "rope_parameters": {**scaling, "rope_theta": 500000.0}},
    }.items():
        source = trtllm_models.llama(tmp_path / name, **said)
        export_trtllm_legacy(source, tmp_path / f"{name}.out", fsync=False)
        c = config_of(tmp_path / f"{name}.out")
        assert c["rotary_base"] == 500000.0
        assert c["rotary_scaling"] == {"type": "llama3", **scaling}


def test_from_megatron_ranks(tmp_path: Path) -> None:
    """Tensor-parallel shards, stages and a padded vocabulary: the same files in every byte."""
    source = trtllm_models.llama(tmp_path / "hf")
    export_trtllm_legacy(source, tmp_path / "a", tp=2, pp=2, fsync=False)
    for to, layout in (("torch_dist", {"tp": 2, "pp": 2}), ("megatron", {"tp": 2, "pp": 4})):
        reshard(source, tmp_path / to, to=to, **layout, fsync=False)
        export_trtllm_legacy(tmp_path / to, tmp_path / f"{to}.out", tp=2, pp=2, fsync=False)
        assert tensors_of(tmp_path / f"{to}.out") == tensors_of(tmp_path / "a")
        assert config_of(tmp_path / f"{to}.out") == config_of(tmp_path / "a")


def tensors_of(folder: Path) -> dict[str, Any]:
    """The tensors of all files."""
    return {p.name: stored_tensors(p) for p in sorted(folder.glob("*.safetensors"))}


def test_tied_embeddings(tmp_path: Path) -> None:
    """The head is written though it is the embedding: engines of Llama look for it."""
    source = trtllm_models.llama(tmp_path / "hf", tie_word_embeddings=True)
    export_trtllm_legacy(source, tmp_path / "out", tp=2, pp=2, dtype="fp16", fsync=False)
    found = joined(tmp_path / "out")
    assert found["embed_tokens.weight"].dtype == torch.float16
    assert torch.equal(found["lm_head.weight"], found["embed_tokens.weight"].float())
    c = config_of(tmp_path / "out")
    assert (c["dtype"], c["share_embedding_table"]) == ("float16", False)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_gammas_are_rounded_once(tmp_path: Path, kind: str) -> None:
    """Gemma's, of float32: one is added before they are rounded, not after."""
    source = gguf_models.save(tmp_path / "hf", "gemma")
    export_trtllm_legacy(source, tmp_path / "out", dtype=kind, fsync=False)
    found, want = ranks_of(tmp_path / "out")[0], load_file(source / "model.safetensors")
    stored = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
    names = {"transformer.ln_f": "model.norm"}
    for layer in range(2):
        names |= {
            f"transformer.layers.{layer}.{a}": f"model.layers.{layer}.{b}"
            for a, b in stored.items()
        }
    for name, own in names.items():
        gamma = want[f"{own}.weight"]
        assert torch.equal(found[f"{name}.weight"], (gamma + 1).to(getattr(torch, kind))), name


def test_no_larger_than_it_was(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=100)
    report = export_trtllm_legacy(source, tmp_path / "out", dry_run=True)
    assert report.is_dry
    assert report.num_bytes == report.source_bytes
    assert not (tmp_path / "out").exists()
    assert json.dumps(report.to_json())


@pytest.mark.slow
def test_multi_token_prediction_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Of a Llama that was trained with it in Megatron; the rest is written as without it."""
    source = trtllm_models.llama(tmp_path / "hf")
    reshard(source, tmp_path / "ranks", to="megatron", fsync=False)
    shutil.rmtree(next((tmp_path / "ranks").rglob("hf")))
    next((tmp_path / "ranks").rglob("megtool.json")).unlink()
    export_trtllm_legacy(tmp_path / "ranks", tmp_path / "without", family="llama", fsync=False)
    (file,) = (tmp_path / "ranks").rglob("*.pt")
    state = torch.load(file, weights_only=False)
    model, size = state["model"], 128
    last, layer = "decoder.layers.3.", "mtp.layers.0."
    for name in [n for n in model if n.startswith(last)]:
        model[name.replace(last, layer + "transformer_layer.")] = model[name]
    for name in ("enorm", "hnorm", "final_layernorm"):
        model[f"{layer}{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    model[layer + "eh_proj.weight"] = torch.ones(size, 2 * size, dtype=torch.bfloat16)
    state["args"].mtp_num_layers = 1
    torch.save(state, file)
    report = export_trtllm_legacy(
        tmp_path / "ranks", tmp_path / "with", family="llama", fsync=False
    )
    assert any("multi-token prediction is left out (1 layer, " in n for n in report.notes)
    for name in ("rank0.safetensors", "config.json"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
