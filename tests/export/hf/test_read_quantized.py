"""Quantized folders as stored: what is found, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.export.hf.read_quantized import read_quantized_modules
from megtool.export.repack import WeightSlice, plan_repack
from megtool.export.small_tensors import SmallTensorReader, fits, reciprocal
from megtool.number_formats.decode import DIVISOR, SCALE_2, ZEROS
from megtool.quant.recipes.formats import FORMATS
from tests.support.checkpoints.module_folders import (
    ModuleSpec,
    Tensors,
    decoded,
    make_modelopt,
    modelopt_held,
    tensors_in,
    to_modelopt,
)
from tests.support.checkpoints.quantized_weights import MAKERS, Quantized, write
from tests.support.errors import raises

MODULE = "model.layers.0.mlp.up_proj"


def rewritten(folder: Path, work: Callable[[Tensors], Any]) -> Path:
    """The folder after `work` changed its tensors."""
    tensors = tensors_in(folder)
    work(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def edited(folder: Path, work: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder after `work` changed what hf_quant_config.json says."""
    file = folder / "hf_quant_config.json"
    value = json.loads(file.read_text())
    work(value["quantization"])
    file.write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("algo", [a for a in FORMATS if not FORMATS[a].has_branch])
@pytest.mark.parametrize("shape", [(128, 256), (128, 128), (2, 32)])
def test_every_format_of_modelopt(tmp_path: Path, algo: str, shape: tuple[int, int]) -> None:
    small = shape == (2, 32)
    group = 32 if small and len(FORMATS[algo].groups) > 2 else 0
    smooth = FORMATS[algo].smooths
    wanted = ModuleSpec(name=MODULE, shape=shape, algo=algo, group=group, smoothed=smooth)
    folder = read_quantized_modules(make_modelopt(tmp_path / "a", [wanted]))
    (coded,) = folder.modules
    assert (folder.form, coded.name, coded.shape) == ("modelopt", MODULE, shape)
    assert (coded.algo, coded.group_size) == (algo, wanted.format.group_size)
    assert coded.packing == modelopt_held(coded)[0]
    assert bool(coded.input_scale) == FORMATS[algo].calibrates
    assert coded.is_smoothed == smooth
    assert (coded.part(SCALE_2) is not None) == ("NVFP4" in algo or algo == "W4A8_AWQ")
    assert not coded.input_divides
    stored = {n for _, n in coded.parts} | ({coded.input_scale} - {""})
    assert stored == {t.name for t in folder.catalogue.tensors} - {"model.norm.weight"}
    assert decoded(tmp_path / "a")[f"{MODULE}.weight"].shape == shape


def test_a_mixture_with_caches_and_what_is_kept(tmp_path: Path) -> None:
    wanted = [
        ModuleSpec(name="model.layers.0.mlp.up_proj", shape=(32, 64), algo="NVFP4"),
        ModuleSpec(name="model.layers.0.mlp.down_proj", shape=(32, 64), algo="FP8"),
        ModuleSpec(name="model.layers.0.mlp.gate_proj", shape=(32, 64), algo="W4A16_AWQ", group=32),
    ]
    folder = make_modelopt(tmp_path / "a", wanted)

    def add(tensors: Tensors) -> None:
        for last in "kv":
            name = f"model.layers.0.self_attn.{last}_proj.{last}_scale"
            tensors[name] = torch.tensor(0.5)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
        tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
        tensors["lm_head.weight"] = torch.zeros(4, 4)

    def caches(said: dict[str, Any]) -> None:
        said["kv_cache_quant_algo"] = "FP8"

    found = read_quantized_modules(edited(rewritten(folder, add), caches))
    assert {c.name.rpartition(".")[2]: c.algo for c in found.modules} == {
        "up_proj": "NVFP4",
        "down_proj": "FP8",
        "gate_proj": "W4A16_AWQ",
    }
    attention = "model.layers.0.self_attn"
    names = f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"
    assert found.kv_cache_scales == {attention: names}
    assert found.kv_algo == "FP8"
    assert set(found.unquantized) == {"lm_head", f"{attention}.q_proj"}


@pytest.mark.parametrize(("tied", "head"), [(True, "lm_head"), (False, "embed_out")])
def test_the_head_is_kept_beside_others(tmp_path: Path, tied: bool, head: str) -> None:
    wanted = [ModuleSpec(name="model.layers.0.mlp.up_proj", shape=(32, 64), algo="FP8")]
    folder = make_modelopt(tmp_path / "a", wanted)

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 4)
        tensors["model.embed_in.weight"] = torch.zeros(4, 4)
        if not tied:
            tensors[f"{head}.weight"] = torch.zeros(4, 4)

    config = json.loads((rewritten(folder, add) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    assert set(read_quantized_modules(folder).unquantized) == {head, "model.layers.0.mlp.gate"}


def _without(last: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{MODULE}.{last}")


@pytest.mark.parametrize(
    ("algo", "last", "said"),
    [
        ("FP8", "weight_scale", "its scale '[a-z0-9_.]*up_proj.weight_scale' is missing"),
        ("FP8", "input_scale", "its input_scale .* is missing, and FP8 needs it"),
        ("W8A8_SQ_PER_CHANNEL", "input_scale", "is missing"),
        ("W4A8_AWQ", "weight_scale_2", "its weight_scale_2 .* is missing"),
        ("W4A16_AWQ", "weight_scale", "its scale .* is missing"),
        ("NVFP4", "weight_scale_2", "second scale .* is missing"),
        ("NVFP4", "weight", "belongs to a quantized weight that is missing"),
    ],
)
def test_missing_tensors(tmp_path: Path, algo: str, last: str, said: str) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name=MODULE, shape=(128, 128), algo=algo)])
    with raises(FormatError, match=said, hint=True) as caught:
        read_quantized_modules(rewritten(folder, _without(last)))
    assert caught.value.tensor is not None
    assert caught.value.tensor.startswith(MODULE)
    assert str(caught.value.file).endswith("model.safetensors")


@pytest.mark.parametrize(
    ("algo", "work", "said"),
    [
        ("FP8", {"quant_algo": "W8A16"}, "says it is W8A16, and it is stored as fp8"),
        ("FP8", {"quant_algo": "FP9"}, "FP9, which is not known"),
        ("FP8", {"exclude_modules": ["model.layers.0*"]}, "by hf_quant_config.json it is not"),
        ("W4A16_AWQ", {"group_size": 64}, "for 128 columns each, .* declares 64"),
        ("FP8", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "one scale for 256 x 256 of"),
        (
            "FP8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "FP8"}}},
            "by hf_quant_config.json it is not",
        ),
    ],
)
def test_what_is_said_is_not_what_is_stored(
    tmp_path: Path, algo: str, work: dict[str, Any], said: str
) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name=MODULE, shape=(256, 256), algo=algo)])
    with pytest.raises(FormatError, match=said):
        read_quantized_modules(edited(folder, lambda q: q.update(work)))


def test_a_listed_module_is_plain(tmp_path: Path) -> None:
    wanted = [ModuleSpec(name=n, shape=(32, 64), algo=a) for n, a in (("a", "FP8"), ("b", "NVFP4"))]
    folder = make_modelopt(tmp_path / "a", wanted)

    def work(tensors: Tensors) -> None:
        for last in ("weight_scale", "input_scale"):
            del tensors[f"a.{last}"]
        tensors["a.weight"] = torch.zeros(32, 64)

    with pytest.raises(FormatError, match="stored as float32 without scales"):
        read_quantized_modules(rewritten(folder, work))


def test_half_a_cache(tmp_path: Path) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name=MODULE, shape=(32, 64), algo="FP8")])
    one = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}
    with pytest.raises(FormatError, match="a scale of k and none of v"):
        read_quantized_modules(rewritten(folder, lambda t: t.update(one)))


def test_a_folder_that_is_not_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="is not quantized"):
        read_quantized_modules(tmp_path)


@pytest.mark.parametrize(
    ("name", "algo", "packing"),
    [
        ("fp8 tensor", "FP8_PER_CHANNEL_PER_TOKEN", "fp8:tensor"),
        ("fp8 channel", "FP8_PER_CHANNEL_PER_TOKEN", "fp8:channel"),
        ("int8 channel", "W8A16", "int8:channel"),
        ("int8 tensor", "W8A16", "int8:tensor"),
        ("int4 group", "W4A16_AWQ", "int4:32"),
        ("int4 channel", "W4A16_AWQ", "int4:128"),
        ("nvfp4", "W4A16_NVFP4", "nvfp4:16"),
        ("mxfp4", "MXFP4", "mxfp4:32"),
        ("mxfp8", "MXFP8", "mxfp8:32"),
        ("deepseek", "FP8_PB_WO", "fp8:128x128"),
    ],
)
def test_what_others_write_becomes_modelopts(
    tmp_path: Path, name: str, algo: str, packing: str
) -> None:
    """The peer's own decoding is what the folder in the other form decodes to."""
    torch.manual_seed(0)
    weight = torch.randn(128, 128).to(torch.bfloat16)
    made = MAKERS[name](weight)
    if name in INPUTS:
        made.config["config_groups"]["group_0"]["input_activations"] = INPUTS[name]
    folder = written(tmp_path / "a", made)
    found = read_quantized_modules(folder)
    (coded,) = found.modules
    assert (coded.algo, coded.packing) == (algo, packing)
    assert not found.notes
    assert (coded.part(DIVISOR) is not None) == (name == "nvfp4")
    out = to_modelopt(found, tmp_path / "b")
    before, after = decoded(folder), decoded(out)
    atol = 0.0
    if name == "nvfp4":  # a reciprocal is rounded
        atol = 1e-5
    after_values = after[f"{MODULE}.weight"]
    raw = before[f"{MODULE}.weight"]
    kept = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_allclose(
        torch.from_numpy(after_values).to(torch.bfloat16).float().numpy(), kept, atol=atol
    )
    peers = made.decoded.float().numpy()
    np.testing.assert_allclose(after_values, peers, rtol=2**-7, atol=1e-6)
    read_quantized_modules(out)


EIGHT = {"num_bits": 8, "type": "float", "dynamic": True}
FOUR = {"num_bits": 4, "type": "float", "dynamic": True, "strategy": "group", "group_size": 32}
INPUTS = {
    "fp8 tensor": EIGHT | {"strategy": "token"},
    "fp8 channel": EIGHT | {"strategy": "token"},
    "mxfp8": EIGHT | {"strategy": "group", "group_size": 32},
    "mxfp4": FOUR,
}
INTEGERS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("fp8 tensor", None),
        ("fp8 channel", None),
        ("fp8 channel", INTEGERS),
        ("mxfp8", None),
        ("mxfp4", None),
        ("mxfp4", INTEGERS),
        ("int8 channel", INTEGERS),
        ("int4 group", EIGHT),
        ("nvfp4", EIGHT),
    ],
)
def test_inputs_that_no_format_of_ours_has(
    tmp_path: Path, name: str, inputs: dict[str, Any] | None
) -> None:
    """Weights with other inputs than any format has them are not taken for the nearest one."""
    torch.manual_seed(0)
    made = MAKERS[name](torch.randn(128, 128).to(torch.bfloat16))
    made.config["config_groups"]["group_0"]["input_activations"] = inputs
    with raises(
        FormatError,
        match="no format but of compressed-tensors; there is",
        hint="--to compressed-tensors, which keeps it",
    ):
        read_quantized_modules(written(tmp_path / "a", made))


@pytest.mark.parametrize("value", [0, -102])
def test_zero_points_of_inputs(tmp_path: Path, value: int) -> None:
    """They are left out where they are zero, and nowhere else."""
    torch.manual_seed(0)
    made = MAKERS["int8 channel"](torch.randn(128, 128).to(torch.bfloat16))
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    made.config["config_groups"]["group_0"]["input_activations"] = inputs
    made.stored["input_scale"] = torch.tensor([0.04])
    with pytest.raises(FormatError, match="there is no input_zero_point"):
        read_quantized_modules(written(tmp_path / "a", made))
    made.stored["input_zero_point"] = torch.tensor([value], dtype=torch.int8)
    folder = written(tmp_path / "b", made)
    if not value:
        assert read_quantized_modules(folder).modules[0].algo == "W8A8_SQ_PER_CHANNEL"
        return
    with pytest.raises(FormatError, match=r"about a zero point .*input_zero_point"):
        read_quantized_modules(folder)


@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, "type": "int"},
        {"num_bits": 8},  # integers, where nothing says otherwise
        {"num_bits": 8, "type": "float", "symmetric": False},
        {"num_bits": 8, "type": "float", "strategy": "attn_head"},
        {"num_bits": 8, "type": "float", "dynamic": True},
    ],
)
def test_caches_that_others_have_not(tmp_path: Path, scheme: dict[str, Any]) -> None:
    tensors, config = compressed(dynamic=True)
    config["kv_cache_scheme"] = scheme
    with pytest.raises(FormatError, match=r"its KV cache .* is that of compressed-tensors alone"):
        read_quantized_modules(write(tmp_path / "a", tensors, config))


def test_small_blocks_are_blocks(tmp_path: Path) -> None:
    """One scale of a matrix that is no larger than a block, by what the group says."""
    tensors, config = compressed(dynamic=True, strategy="group", group_size=128)
    weights = config["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "block", "block_structure": [128, 128]}
    tensors[f"{MODULE}.weight_scale"] = torch.tensor([[0.5]])
    (coded,) = read_quantized_modules(write(tmp_path / "a", tensors, config)).modules
    assert (coded.algo, coded.group_size, coded.packing) == ("FP8_PB_WO", 128, "fp8:128x128")


def test_two_files_that_differ(tmp_path: Path) -> None:
    folder = make_modelopt(tmp_path / "a", [ModuleSpec(name=MODULE, shape=(32, 64), algo="FP8")])
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    file.write_text(json.dumps(config))
    assert "kv_cache_quant_algo: nothing in hf_quant" in " ".join(
        read_quantized_modules(folder).notes
    )
    config["quantization_config"]["quant_algo"] = "NVFP4"
    file.write_text(json.dumps(config))
    with raises(FormatError, "quant_algo", "FP8", "NVFP4"):
        read_quantized_modules(folder)


def written(folder: Path, made: Quantized) -> Path:
    tensors = {f"{MODULE}.{last}": t for last, t in made.stored.items()}
    return write(folder, {n: t.contiguous() for n, t in tensors.items()}, made.config)


@pytest.mark.parametrize("name", ["int8 uneven", "int4 uneven"])
def test_zero_points_are_kept_or_refused(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    folder = read_quantized_modules(written(tmp_path / "a", MAKERS[name](torch.randn(128, 128))))
    (coded,) = folder.modules
    assert coded.part(ZEROS) is not None
    packing, held = modelopt_held(coded)
    with raises(FormatError, match="zero points", hint="--to hf"):
        plan_repack([WeightSlice.of_module(coded)], packing, held)


@pytest.mark.parametrize("name", ["fp8 block", "int8 words"])
def test_formats_that_no_other_form_has(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    made = MAKERS[name](torch.randn(128, 128))
    with raises(FormatError, match="no format of engines", hint="--to hf"):
        read_quantized_modules(written(tmp_path / "a", made))


def compressed(**inputs: Any) -> tuple[Tensors, dict[str, Any]]:
    """An FP8 module, of whose inputs something is said."""
    tensors = {
        f"{MODULE}.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        f"{MODULE}.weight_scale": torch.tensor([0.5]),
    }
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "input_activations": {"num_bits": 8, "type": "float", **inputs},
    }
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    return tensors, config


def test_inputs_of_compressed_tensors(tmp_path: Path) -> None:
    tensors, config = compressed(dynamic=False)
    with raises(FormatError, "input_scale"):
        read_quantized_modules(write(tmp_path / "a", tensors, config))
    tensors[f"{MODULE}.input_scale"] = torch.tensor([0.25])
    attention = "model.layers.0.self_attn"
    for last in "kv":
        tensors[f"{attention}.{last}_scale"] = torch.tensor([2.0], dtype=torch.bfloat16)
    found = read_quantized_modules(write(tmp_path / "b", tensors, config))
    assert found.modules[0].algo == "FP8"
    assert found.modules[0].input_scale == f"{MODULE}.input_scale"
    assert found.kv_algo == "FP8"
    assert found.kv_cache_scales == {attention: (f"{attention}.k_scale", f"{attention}.v_scale")}
    with SmallTensorReader(found.catalogue) as values:
        assert values.read_input_scale(found.modules[0]) == np.float32(0.25)
        assert values.read_single(found.modules[0], "scale") == np.float32(0.5)
        assert values.read(f"{attention}.k_scale") == np.float32(2)
    tensors, config = compressed(dynamic=True, strategy="token")
    found = read_quantized_modules(write(tmp_path / "c", tensors, config))
    assert found.modules[0].algo == "FP8_PER_CHANNEL_PER_TOKEN"
    assert found.notes == (
        "a KV cache in FP8 is said, and no scale of it is stored: engines take 1",
    )


def test_ignored_and_yet_quantized(tmp_path: Path) -> None:
    tensors, config = compressed(dynamic=True)
    config["ignore"] = ["re:.*up_proj"]
    with pytest.raises(FormatError, match="ignores it"):
        read_quantized_modules(write(tmp_path / "a", tensors, config))


def test_divisors_of_inputs(tmp_path: Path) -> None:
    made = MAKERS["nvfp4"](torch.randn(16, 32))
    made.stored["input_global_scale"] = torch.tensor([8.0])
    group = made.config["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local"}
    found = read_quantized_modules(written(tmp_path / "a", made))
    (coded,) = found.modules
    assert (coded.algo, coded.input_divides) == ("NVFP4", True)
    with SmallTensorReader(found.catalogue) as values:
        assert values.read_input_scale(coded) == np.float32(0.125)
        second = values.read_single(coded, SCALE_2)
        assert second is not None
        divisor = made.stored["weight_global_scale"].numpy()
        assert second == reciprocal(divisor)


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 128, 128).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.gate_up_proj_scale_inv": torch.ones(2, 1, 1),
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with raises(FormatError, match="stacked with others", hint="--to hf"):
        read_quantized_modules(write(tmp_path / "a", tensors, config))


def test_what_a_type_holds() -> None:
    assert fits(np.array([0.5, 3.0], np.float32), dtype("bfloat16"))
    assert not fits(np.array([0.1], np.float32), dtype("bfloat16"))
