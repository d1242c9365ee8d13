"""Tensors of GGUF files that are cut, sorted or changed: latent attention, mixers, multipliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard
from megtool.errors import MappingError
from tests.support.models import byte_level, gguf_models, mtp_models, nested_cases
from tests.support.runs.exports import export_gguf

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TURNING = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_FAST = ("qwen3_5",)
_NAMES = [
    pytest.param(n, marks=[] if n in _FAST else [pytest.mark.slow]) for n in gguf_models.COMPUTED
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def _read(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def _field(path: Path, key: str) -> Any:
    return gguf.GGUFReader(path).get_field(key).contents()


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}


def _is(tensor: Any, values: torch.Tensor) -> bool:
    """Whether a tensor of a file holds these numbers, in this shape."""
    return np.array_equal(np.asarray(tensor.data), values.numpy())


@pytest.mark.parametrize("name", _NAMES)
def test_bytes_are_the_librarys(name: str, tmp_path: Path) -> None:
    """Q8_0 and BF16 as the gguf library encodes the tensors of the whole F32 file."""
    source = gguf_models.save(tmp_path / "hf", name, dtype="bfloat16")
    export_gguf(source, tmp_path / "f32.gguf", outtype="f32")
    want = _read(tmp_path / "f32.gguf")
    for kind in ("q8_0", "bf16"):
        export_gguf(source, tmp_path / f"{kind}.gguf", outtype=kind)
        found = _read(tmp_path / f"{kind}.gguf")
        assert found.keys() == want.keys()
        assert kind.upper() in {t.tensor_type.name for t in found.values()}
        for stored, tensor in found.items():
            made = np.asarray(want[stored].data)
            if tensor.tensor_type.name != "I32":  # a table of integers, the same in every file
                made = gguf.quants.quantize(made, tensor.tensor_type)
            assert made.tobytes() == np.asarray(tensor.data).tobytes(), stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("apertus", {"tp": 2, "pp": 2}),
        ("cwm", {"tp": 2}),
        ("deepseek_v3", {"tp": 2, "ep": 2}),
        ("openelm", {"pp": 2}),
        ("glm_moe_dsa", {"tp": 2}),
        ("granitemoehybrid-experts", {"pp": 2}),
        ("nemotron_h-experts", {"tp": 2, "pp": 2}),
        ("qwen3_next", {"tp": 2, "pp": 2}),
        ("qwen3_5-moe", {"tp": 2, "pp": 2}),
    ],
)
def test_ranks_give_the_same_file(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", name, dtype="bfloat16")
    reshard(source, tmp_path / "ranks", to="torch_dist", **layout)
    for folder in ("hf", "ranks"):
        export_gguf(tmp_path / folder, tmp_path / f"{folder}-out" / "m.gguf", outtype="q8_0")
    one, two = (tmp_path / f"{f}-out" / "m.gguf" for f in ("hf", "ranks"))
    assert one.read_bytes() == two.read_bytes()


def test_latent_projections_are_two(tmp_path: Path) -> None:
    """Keys, head by head and transposed, and values."""
    source = gguf_models.save(tmp_path / "hf", "deepseek_v3")
    report = export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    assert not report.notes
    held = _read(tmp_path / "m.gguf")
    whole = _stored(source)["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 64, 64)
    assert _is(held["blk.1.attn_k_b.weight"], whole[:, :32].transpose(1, 2))
    assert _is(held["blk.1.attn_v_b.weight"], whole[:, 32:])
    counts = [_field(tmp_path / "m.gguf", f"deepseek2.attention.{k}") for k in ("head_count_kv",)]
    assert counts == [1]


@pytest.mark.slow
def test_codes_of_blocks_are_decoded(tmp_path: Path) -> None:
    """A DeepSeek-V3 as it is published, in FP8 blocks, gives what its decoded weights give."""
    from megtool import quantize

    source = gguf_models.save(tmp_path / "hf", "deepseek_v3", dtype="bfloat16")
    quantize(source, tmp_path / "fp8", recipe="fp8_block128")
    reshard(tmp_path / "fp8", tmp_path / "bf16", to="hf", dtype="bfloat16")
    for name in ("fp8", "bf16"):
        report = export_gguf(tmp_path / name, tmp_path / f"{name}-out" / "m.gguf", outtype="bf16")
        assert bool(report.decoded) == (name == "fp8")
    one, two = (tmp_path / f"{n}-out" / "m.gguf" for n in ("fp8", "bf16"))
    assert one.read_bytes() == two.read_bytes()


def test_gated_delta_nets(tmp_path: Path) -> None:
    """Value heads in turn over key heads; norms less that of the net plus one; decays computed."""
    source = gguf_models.save(tmp_path / "hf", "qwen3_5")
    export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    held, want = _read(tmp_path / "m.gguf"), _stored(source)
    stem, stored = "model.language_model.layers.0.", "blk.0."
    if stem + "input_layernorm.weight" not in want:
        stem = "model.layers.0."
    net = stem + "linear_attn."

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        grid = rows.reshape(2, 2, -1, *rows.shape[1:])
        return grid.transpose(0, 1).reshape(rows.shape)

    qkv, conv = want[net + "in_proj_qkv.weight"], want[net + "conv1d.weight"][:, 0]
    assert _is(held[stored + "attn_qkv.weight"], torch.cat([qkv[:128], tiled(qkv[128:])]))
    assert _is(held[stored + "ssm_conv1d.weight"], torch.cat([conv[:128], tiled(conv[128:])]))
    assert _is(held[stored + "attn_gate.weight"], tiled(want[net + "in_proj_z.weight"]))
    assert _is(held[stored + "ssm_alpha.weight"], tiled(want[net + "in_proj_a.weight"]))
    assert _is(held[stored + "ssm_out.weight"], tiled(want[net + "out_proj.weight"].T).T)
    assert _is(held[stored + "ssm_dt.bias"], tiled(want[net + "dt_bias"]))
    assert _is(held[stored + "ssm_norm.weight"], want[net + "norm.weight"])
    assert _is(held[stored + "attn_norm.weight"], want[stem + "input_layernorm.weight"] + 1)
    decay = np.asarray(held[stored + "ssm_a"].data)
    assert np.allclose(decay, tiled(-want[net + "A_log"].exp()).numpy(), rtol=1e-6)
    assert _field(tmp_path / "m.gguf", "qwen35.full_attention_interval") == 4


def test_multipliers_are_part_of_the_weights(tmp_path: Path) -> None:
    """Falcon-H1's, of each part of a mixer's projection another."""
    more = {
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.25,
        "attention_in_multiplier": 3.0,
        "attention_out_multiplier": 0.75,
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.625,
        "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0],
        "mlp_multipliers": [0.5, 0.25],
    }
    source = gguf_models.save(tmp_path / "hf", "falcon_h1", **more)
    export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    held, want = _read(tmp_path / "m.gguf"), _stored(source)
    layer = "model.layers.0."
    scales = torch.repeat_interleave(
        torch.tensor(more["ssm_multipliers"]) * 1.5, torch.tensor([128, 128, 32, 32, 4])
    )
    for name, expected in (
        ("token_embd.weight", want["model.embed_tokens.weight"] * 2),
        ("output.weight", want["lm_head.weight"] * 0.5),
        ("blk.0.attn_q.weight", want[layer + "self_attn.q_proj.weight"] * 3),
        ("blk.0.attn_k.weight", want[layer + "self_attn.k_proj.weight"] * 0.75),
        ("blk.0.attn_output.weight", want[layer + "self_attn.o_proj.weight"] * 0.75),
        ("blk.0.ffn_gate.weight", want[layer + "feed_forward.gate_proj.weight"] * 0.5),
        ("blk.0.ffn_down.weight", want[layer + "feed_forward.down_proj.weight"] * 0.25),
        ("blk.0.ssm_in.weight", want[layer + "mamba.in_proj.weight"] * scales[:, None]),
        ("blk.0.ssm_out.weight", want[layer + "mamba.out_proj.weight"] * 0.625),
        ("blk.0.ssm_d", want[layer + "mamba.D"][:, None]),
    ):
        found = np.asarray(held[name].data)
        assert np.allclose(found, expected.numpy(), rtol=1e-6, atol=0), name
    gguf_models.save(tmp_path / "tied", "falcon_h1", **more, tie_word_embeddings=True)
    with pytest.raises(MappingError, match="have two"):
        export_gguf(tmp_path / "tied", tmp_path / "tied.gguf")


def test_numbers_of_layers_are_metadata(tmp_path: Path) -> None:
    """Those of xIELU, as they are trained."""
    source = gguf_models.save(tmp_path / "hf", "apertus", dtype="bfloat16")
    report = export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    assert not report.notes
    want = _stored(source)
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        stored = [want[f"model.layers.{i}.mlp.act_fn.{name}"].item() for i in range(2)]
        assert _field(tmp_path / "m.gguf", f"xielu.{name}") == stored
    assert not any("xielu" in n or "act_fn" in n for n in _read(tmp_path / "m.gguf"))


def test_windows_of_some_layers_are_granites(tmp_path: Path) -> None:
    """CWM's: sinks do nothing and multipliers are one; without windows it is a Llama."""
    source = gguf_models.save(tmp_path / "hf", "cwm")
    export_gguf(source, tmp_path / "m.gguf")
    assert _field(tmp_path / "m.gguf", "general.architecture") == "granite_swa"
    pattern = _field(tmp_path / "m.gguf", "granite_swa.attention.sliding_window_pattern")
    assert pattern == [False, True, True, True]
    held = _read(tmp_path / "m.gguf")
    assert all((held[f"blk.{i}.attn_sinks.weight"].data == np.float32(-1e30)).all() for i in (0, 3))
    assert _field(tmp_path / "m.gguf", "granite_swa.logit_scale") == 1
    full = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    gguf_models.save(tmp_path / "full", "ministral", **full)
    export_gguf(tmp_path / "full", tmp_path / "full.gguf")
    assert _field(tmp_path / "full.gguf", "general.architecture") == "llama"


def test_a_fixed_stretch_of_rotation_is_a_larger_base(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "hunyuan_v1_dense")
    export_gguf(source, tmp_path / "m.gguf")
    base = _field(tmp_path / "m.gguf", "hunyuan-dense.rope.freq_base")
    assert base == pytest.approx(10000 * 3 ** (16 / 14))


def test_pairs_that_sections_leave_over_get_a_note(tmp_path: Path) -> None:
    """Qwen3-VL's two slowest, which llama.cpp does not turn."""
    sections = gguf_models.INTERLEAVED | {"mrope_section": [3, 2, 2]}
    gguf_models.save_with_tower(tmp_path / "hf", "qwen3_vl", rope_parameters=sections)
    notes = export_gguf(tmp_path / "hf", tmp_path / "m.gguf").notes
    assert any("mrope_section leaves over" in n for n in notes)


def test_multi_token_prediction_is_left_out_with_a_note(tmp_path: Path) -> None:
    """DeepSeek-V3's, which llama.cpp does not read; the rest of the file is the same."""
    source = gguf_models.save(tmp_path / "hf", "deepseek_v3")
    export_gguf(source, tmp_path / "without" / "m.gguf", outtype="f32")
    layer = mtp_models.DEEPSEEK
    mtp_models.add_layers(source, "model.layers.2.", "model.layers.{}.", 3, layer)
    report = export_gguf(source, tmp_path / "with" / "m.gguf", outtype="f32")
    (note,) = report.notes
    assert "multi-token prediction is left out (2 layers, " in note
    assert "'deepseek2'" in note
    one, two = (tmp_path / f / "m.gguf" for f in ("without", "with"))
    assert one.read_bytes() == two.read_bytes()


def test_a_tower_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Kimi K2.5's; its text model is DeepSeek-V3's."""
    case = next(c for c in nested_cases.CASES if c.family == "kimi_k25")
    case.build(tmp_path / "hf", vocab_size=320)
    byte_level.save(tmp_path / "hf", 300)
    report = export_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    assert any("only the text model is written, without 35 tensors" in n for n in report.notes)
    assert _field(tmp_path / "m.gguf", "general.architecture") == "deepseek2"
    assert not any("vision" in n or "projector" in n for n in _read(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("deepseek_v3", {"q_lora_rank": None}, "26 and 27 layers"),
        (
            "deepseek_v3-yarn",
            {"rope_parameters": gguf_models.YARN | {"mscale": 1.0}},
            "temperature of its own",
        ),
        ("llama4", {"attention_chunk_size": 16}, "chunks of 8192"),
        ("qwen3_5", {"linear_value_head_dim": 16}, "size of key heads"),
        pytest.param(
            "bamba", {"rope_parameters": TURNING}, "pairs of neigh", marks=pytest.mark.slow
        ),
        pytest.param(
            "falcon_h1",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "after its gate",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refusals(name: str, edit: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", name, **edit)
    with pytest.raises(MappingError, match=match):
        export_gguf(source, tmp_path / "m.gguf")


@pytest.mark.slow
def test_steps_of_mamba_that_are_limited_get_a_note(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "nemotron_h", time_step_limit=[0.001, 0.1])
    (note,) = export_gguf(source, tmp_path / "m.gguf").notes
    assert "time_step_limit" in note
