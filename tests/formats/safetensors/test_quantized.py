"""Quantized folders read as plain tensors: equal to what the projects that wrote them decode."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import FormatError, MegtoolError
from megtool.formats import open_checkpoint
from megtool.storage.files import Files
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints.quantized_weights import MAKERS, gpt_oss, write
from tests.support.errors import raises


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def weight(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, cols), generator=generator).mul(0.1).to(torch.bfloat16)


_KEYS = st.sampled_from(
    [
        "group_size",
        "num_bits",
        "weight_block_size",
        "block_structure",
        "weights",
        "config_groups",
        "format",
        "sparsity_config",
        "transform_config",
        "quant_algo",
    ]
)
SHAPES = {"deepseek": (300, 200), "fp8 block": (200, 100)}


def _marked(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.peers if "modelopt" in kind else ())


@pytest.mark.parametrize("kind", [_marked(k) for k in MAKERS])
def test_the_peers_own_numbers(kind: str, tmp_path: Path) -> None:
    made = MAKERS[kind](weight(*SHAPES.get(kind, (256, 384))))
    stored = {f"layer.{name}": t for name, t in made.stored.items()}
    stored["norm.weight"] = torch.ones(7)
    folder = write(tmp_path / "hf", stored, made.config, parts=3)
    catalogue = open_checkpoint(folder)
    assert sorted(t.name for t in catalogue.tensors) == ["layer.weight", "norm.weight"]
    assert catalogue["layer.weight"].shape == tuple(made.decoded.shape)
    assert catalogue["layer.weight"].dtype.name == "bfloat16"
    assert catalogue["layer.weight"].packing is not None
    assert catalogue["norm.weight"].dtype.name == "float32"
    with CheckpointReader(catalogue, Files()) as reader:
        view = reader.open_stored("layer.weight")
        if kind == "modelopt nvfp4":  # modelopt reads minus zero as zero
            zero = (bits(made.decoded) == 0) & (view.read() == 0x8000)
            made.decoded[torch.from_numpy(zero)] = -0.0
        np.testing.assert_array_equal(view.read(), bits(made.decoded))
        small = [tile.copy() for _, tile in view.tiles(5000)]
        np.testing.assert_array_equal(np.concatenate(small), bits(made.decoded).reshape(-1))


@pytest.mark.parametrize(
    "kind",
    [
        _marked(k)
        for k in (
            *("deepseek", "int4 uneven", "nvfp4", "modelopt int4", "fp8 channel"),
            "modelopt svdquant",
        )
    ],
)
def test_any_view(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = MAKERS[kind](weight(256, 384))
    stored = {f"x.{name}": t for name, t in made.stored.items()}
    folder = write(tmp_path_factory.mktemp("view") / "hf", stored, made.config)
    catalogue = open_checkpoint(folder)
    whole = bits(made.decoded)

    @given(st.data())
    def check(data: st.DataObject) -> None:
        lo = [data.draw(st.integers(0, n - 1)) for n in whole.shape]
        by = [data.draw(st.sampled_from([1, 2, 3])) for _ in whole.shape]
        size = [
            data.draw(st.integers(1, -(-(n - a) // m)))
            for n, a, m in zip(whole.shape, lo, by, strict=True)
        ]
        index = tuple(
            slice(a, a + (n - 1) * m + 1, m) for a, n, m in zip(lo, size, by, strict=True)
        )
        want = whole[index]
        dims = data.draw(st.permutations([0, 1]))
        place = Placement(
            canonical="part",
            stored="x.weight",
            shape=tuple(size[d] for d in dims),
            dims=tuple(dims),
            mults=tuple(by[d] for d in dims),
            base=tuple(lo),
        )
        with CheckpointReader(catalogue, Files()) as reader:
            tiles = reader.open_canonical(place).tiles(
                data.draw(st.sampled_from([64, 2000, 1 << 20]))
            )
            found = np.concatenate([tile.copy() for _, tile in tiles])
        np.testing.assert_array_equal(found, want.transpose(dims).reshape(-1))

    check()


def test_what_transformers_reads_as_fp8(tmp_path: Path) -> None:
    """Dense weights, experts in one tensor, FP4 codes among them, and scales that are powers."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(3)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    def powers(*shape: int) -> torch.Tensor:
        return torch.randint(120, 130, shape, generator=generator, dtype=torch.uint8)

    pairs = torch.randint(-128, 128, (64, 48), generator=generator, dtype=torch.int8)
    weights = {
        "dense.weight": (codes(256, 384), torch.rand(2, 3, generator=generator)),
        "experts.gate_up_proj": (codes(3, 256, 128), torch.rand(3, 2, 1, generator=generator)),
        "powers.weight": (codes(128, 256), powers(1, 2).view(torch.float8_e8m0fnu)),
        "four.weight": (pairs, powers(64, 3).view(torch.float8_e8m0fnu)),
    }
    stored = {name: made for name, (made, _) in weights.items()}
    stored |= {f"{name}_scale_inv": by for name, (_, by) in weights.items()}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    catalogue = open_checkpoint(write(tmp_path / "hf", stored, config, parts=2))
    peer = fp8.Fp8Dequantize(None)
    with CheckpointReader(catalogue, Files()) as reader:
        for name, (made, by) in weights.items():
            want = peer._dequantize_one(made, by, torch.bfloat16)
            assert reader.open_stored(name).shape == tuple(want.shape)
            np.testing.assert_array_equal(reader.open_stored(name).read(), bits(want))
    assert catalogue["four.weight"].packing == "mxfp4:32"


@pytest.mark.parametrize("shape", [(2, 96, 5), (3, 64, 3), (1, 32, 40)])
def test_experts_of_gpt_oss(shape: tuple[int, int, int], tmp_path: Path) -> None:
    experts, rows, groups = shape
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, shape, generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3)}
    catalogue = open_checkpoint(write(tmp_path / "hf", stored, {"quant_method": "mxfp4"}, parts=2))
    assert {t.name: t.packing for t in catalogue.tensors} == {
        name: "mxfp4:32",
        f"{name}_bias": None,
    }
    want = bits(gpt_oss(blocks, scales))
    assert want.shape == (experts, groups * 32, rows)
    with CheckpointReader(catalogue, Files()) as reader:
        np.testing.assert_array_equal(reader.open_stored(name).read(), want)
        tiles = [t.copy() for _, t in reader.open_stored(name).tiles(3000)]
    np.testing.assert_array_equal(np.concatenate(tiles), want.reshape(-1))


def test_scales_of_activations_are_set_aside(tmp_path: Path) -> None:
    made = MAKERS["deepseek"](weight(64, 64))
    stored = {f"a.q_proj.{name}": t for name, t in made.stored.items()}
    asides = ["a.q_proj.input_scale", "a.k_proj.k_scale", "a.v_scale", "a.v_proj.v_bias"]
    stored |= {name: torch.ones(1) for name in asides}
    stored |= {"a.k_proj.bias": torch.ones(3), "logit_scale": torch.ones(1)}
    catalogue = open_checkpoint(write(tmp_path / "hf", stored, made.config))
    assert sorted(s.name for s in catalogue.ignored) == sorted(asides)
    assert all("not needed for decoded weights" in s.reason for s in catalogue.ignored)
    names = sorted(t.name for t in catalogue.tensors)
    assert names == ["a.k_proj.bias", "a.q_proj.weight", "logit_scale"]
    picked = catalogue.select(lambda name: name == "a.q_proj.weight")
    with CheckpointReader(picked, Files()) as reader:
        np.testing.assert_array_equal(
            reader.open_stored("a.q_proj.weight").read(), bits(made.decoded)
        )


def test_the_config_s_dtype_and_where_it_stands(tmp_path: Path) -> None:
    made = MAKERS["deepseek"](weight(64, 64))
    stored = {f"x.{name}": t for name, t in made.stored.items()}
    inner = {"text_config": {"dtype": "float16", "quantization_config": made.config}}
    folder = write(tmp_path / "hf", stored, None, torch_dtype=None, **inner)
    assert open_checkpoint(folder)["x.weight"].dtype.name == "float16"


def test_modelopt_s_own_file_is_enough(tmp_path: Path) -> None:
    made = MAKERS["deepseek"](weight(64, 64))
    stored = {"x.weight": made.stored["weight"], "x.weight_scale": torch.tensor(0.5)}
    folder = write(tmp_path / "hf", stored, None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert open_checkpoint(folder)["x.weight"].packing == "fp8:tensor"


def test_one_file_is_read_as_it_is(tmp_path: Path) -> None:
    made = MAKERS["deepseek"](weight(64, 64))
    folder = write(tmp_path / "hf", dict(made.stored), made.config)
    catalogue = open_checkpoint(next(folder.glob("*.safetensors")))
    assert catalogue["weight"].dtype.name == "float8_e4m3fn"
    assert "weight_scale_inv" in catalogue


class Refused:
    """Folders that cannot be decoded, each with what the error has to say."""

    def no_scale(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["deepseek"](weight(64, 64))
        return {"x.weight": made.stored["weight"]}, made.config, "missing"

    def no_weight(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["deepseek"](weight(64, 64))
        scale = made.stored["weight_scale_inv"]
        return {"x.weight_scale_inv": scale}, made.config, "is missing"

    def other_shape(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["deepseek"](weight(300, 300))
        stored = {"x.weight": made.stored["weight"], "x.weight_scale_inv": torch.ones(3, 7)}
        return stored, made.config, "cannot scale"

    def fewer_rows(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["deepseek"](weight(256, 256))
        stored = {"x.weight": made.stored["weight"], "x.weight_scale_inv": torch.ones(1, 2)}
        return stored, made.config, "cannot scale"

    def other_blocks(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["deepseek"](weight(256, 256))
        stored = {"x.weight": made.stored["weight"], "x.weight_scale_inv": torch.ones(4, 4)}
        return stored, made.config, "in blocks of 128 x 128"

    def method(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        return {"x.qweight": torch.ones(3)}, {"quant_method": "aqlm", "bits": 4}, "aqlm"

    def three_bits(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["int4 group"](weight(32, 64))
        stored = {f"x.{name}": t for name, t in made.stored.items()}
        stored["x.weight_packed"] = torch.zeros(32, 6, dtype=torch.int32)
        config = {**made.config, "config_groups": {"a": {"weights": {"num_bits": 3}}}}
        return stored, config, "3 bits"

    def order(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["int4 group"](weight(32, 64))
        stored = {f"x.{name}": t for name, t in made.stored.items()}
        return {**stored, "x.weight_g_idx": torch.zeros(64)}, made.config, "activation order"

    def second_scale(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["nvfp4"](weight(32, 64))
        stored = {f"x.{n}": t for n, t in made.stored.items() if "global" not in n}
        return stored, made.config, "second scale"

    def half_a_branch(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["modelopt svdquant"](weight(32, 64))
        stored = {f"x.{n}": t for n, t in made.stored.items() if not n.endswith("lora_a")}
        return stored, made.config, "and no weight_quantizer._svdquant_lora_a"

    def other_branch(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["modelopt svdquant"](weight(32, 64))
        stored = {f"x.{n}": t for n, t in made.stored.items()}
        stored["x.weight_quantizer._svdquant_lora_b"] = torch.zeros(31, 5)
        return stored, made.config, "are no low-rank branch of a weight of"

    def blocks(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        stored = {
            "x_blocks": torch.zeros(2, 3, 4, 16, dtype=torch.uint8),
            "x_scales": torch.zeros(2, 3, 5, dtype=torch.uint8),
        }
        return stored, {"quant_method": "mxfp4"}, "do not match"

    def sparse(self) -> tuple[dict[str, torch.Tensor], dict[str, object], str]:
        made = MAKERS["int8 channel"](weight(32, 64))
        config = {**made.config, "sparsity_config": {"format": "sparse-24-bitmask"}}
        return {f"x.{n}": t for n, t in made.stored.items()}, config, "sparsity_config"


def transforms(*locations: str) -> dict[str, Any]:
    """A `transform_config` as compressed-tensors has it, with a group for each location."""
    return {
        "config_groups": {
            f"R{n}": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": where}]}
            for n, where in enumerate(locations, 1)
        }
    }


@pytest.mark.parametrize(
    ("rotations", "fact"),
    [
        (transforms("weight_input", "weight_output"), ""),
        ({}, ""),
        (transforms("weight_input", "input"), "R2: input"),
        (transforms("q_attn"), "R1: q_attn"),
        ({"config_groups": {"R1": {"type": "hadamard"}}}, "R1: None"),
        ({"config_groups": {"R1": 3}}, "R1: None"),
        ({"groups": []}, "no config_groups"),
        ([1], "no config_groups"),
    ],
)
def test_rotations_that_engines_compute_are_refused(
    rotations: Any, fact: str, tmp_path: Path
) -> None:
    made = MAKERS["fp8 channel"](weight(64, 64))
    stored = {f"x.{n}": t for n, t in made.stored.items()}
    folder = write(tmp_path / "hf", stored, {**made.config, "transform_config": rotations})
    if not fact:
        assert open_checkpoint(folder)["x.weight"].packing is not None
        return
    with raises(
        FormatError, fact, file=folder, hint="as they are stored", id="unsupported-quantization"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("case", [n for n in dir(Refused) if not n.startswith("_")])
def test_what_cannot_be_decoded_says_why(case: str, tmp_path: Path) -> None:
    stored, config, words = getattr(Refused(), case)()
    folder = write(tmp_path / "hf", stored, config)
    with raises(FormatError, match=words, hint="as they are stored") as caught:
        open_checkpoint(folder)
    assert case in ("method", "sparse") or (caught.value.tensor or "").startswith("x")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.sampled_from(["fp8", "group", "int"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=8,
)
_METHODS = ["fp8", "mxfp4", "compressed-tensors", "modelopt", 3]
_SUFFIXES = (
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "pre_quant_scale",
    "x_blocks",
    "x_scales",
    "input_scale",
    "bias",
)
_DTYPES = [torch.float32, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn]


@given(
    method=st.sampled_from(_METHODS),
    config=st.dictionaries(_KEYS, _VALUES, max_size=4),
    tensors=st.dictionaries(
        st.sampled_from(_SUFFIXES),
        st.tuples(
            st.sampled_from(_DTYPES),
            st.lists(st.sampled_from([0, 1, 2, 4, 16, 32, 64]), max_size=4),
        ),
        max_size=6,
    ),
)
def test_whatever_a_folder_holds_is_read_or_refused(
    method: Any, config: Any, tensors: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = {f"a.{n}": torch.ones(shape).to(kind) for n, (kind, shape) in tensors.items()}
    made["norm"] = torch.ones(3)
    folder = tmp_path_factory.mktemp("any") / "hf"
    write(folder, made, {**config, "quant_method": method})
    try:
        catalogue = open_checkpoint(folder)
    except MegtoolError:
        return
    with CheckpointReader(catalogue, Files()) as reader:
        for t in catalogue.tensors:
            assert reader.open_stored(t.name).read().shape == t.shape


def test_tiles_stay_small(tmp_path: Path) -> None:
    """A transposed tensor is decoded in bounded memory, whatever the view's order."""
    shape = (2, 256, 32)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
    stored = {"x_blocks": blocks, "x_scales": scales}
    catalogue = open_checkpoint(write(tmp_path / "hf", stored, {"quant_method": "mxfp4"}))
    with CheckpointReader(catalogue, Files()) as reader:
        view = reader.open_stored("x")
        sizes = [tile.nbytes for _, tile in view.tiles(1 << 14)]
        assert sum(sizes) == 2 * math.prod((2, 1024, 256))
        assert max(sizes) <= 16 << 14
