"""`megtool.open`: lazy tensors are slices of what the checkpoint holds, under any names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megtool
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.options.layout import ParallelConfig
from megtool.storage.files import Files
from tests.support.checkpoints import trained
from tests.support.errors import raises

Q = "model.layers.1.self_attn.q_proj.weight"


def equal(array: Any, tensor: torch.Tensor) -> bool:
    other = tensor.float().numpy()
    return array.shape == other.shape and bool((np.asarray(array, np.float32) == other).all())


def test_all_formats_hold_the_same_tensors(
    anywhere: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    for name, path in anywhere.items():
        view = megtool.open(path, like=anywhere["hf"]).as_("hf")
        assert set(view) == set(tensors), name
        values = view.read()
        assert all(equal(values[n], t) for n, t in tensors.items()), name


def test_what_is_stored_has_its_own_names(anywhere: dict[str, Path]) -> None:
    opened = megtool.open(anywhere["torch_dist"])
    assert opened.format == "torch_dist"
    assert opened.family == "llama"
    assert opened.config is not None
    assert opened.config.num_layers == 4
    qkv = opened.tensors["decoder.layers.self_attention.linear_qkv.weight"]
    assert (qkv.shape, qkv.dtype, qkv.ndim, len(qkv)) == ((4, 64, 32), "bfloat16", 3, 4)
    assert qkv.num_bytes == 4 * 64 * 32 * 2
    one = opened.as_("megatron")["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert (one[...] == qkv[2]).all()


INDEX = st.one_of(
    st.integers(-32, 31),
    st.slices(32),
)


@settings(max_examples=30)
@given(
    index=st.one_of(
        INDEX,
        st.just(...),
        st.tuples(INDEX, INDEX),
        st.tuples(st.just(...), INDEX),
        st.tuples(INDEX, st.just(...)),
    ),
    framework=st.sampled_from(["numpy", "torch"]),
)
def test_indices_mean_what_numpy_means(
    index: Any, framework: str, anywhere: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    expected = tensors[Q].float().numpy()[index]
    for name in ("hf", "torch_dist"):
        part = megtool.open(anywhere[name], framework=framework).as_("hf")[Q][index]
        if framework == "torch":
            part = part.float().numpy()
        assert np.shape(part) == expected.shape
        assert (np.asarray(part, np.float32) == expected).all()


@pytest.mark.parametrize("index", [32, -33, (0, 0, 0), [1, 2], "q", (..., ...), 1.5, True])
def test_an_index_that_is_none_is_refused(index: Any, llama: Path) -> None:
    with pytest.raises(IndexError):
        megtool.open(llama).as_("hf")[Q][index]


def test_a_slice_reads_its_own_bytes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a stored tensor are read, and not the tensor."""
    num_bytes = 0
    system = Files.system

    def count(self: Files, function: Callable[..., Any], /, *args: Any) -> Any:
        nonlocal num_bytes
        result = system(self, function, *args)
        if function is os.preadv:
            num_bytes += result
        return result

    tensor = megtool.open(llama).as_("hf")["model.embed_tokens.weight"]
    monkeypatch.setattr(Files, "system", count)
    assert tensor[10:12].shape == (2, 32)
    assert num_bytes == 2 * 32 * 2


def test_types_of_torch_name_a_cast(llama: Path) -> None:
    view = megtool.open(llama).as_("hf", dtype=torch.float16)
    assert view[Q].dtype == "float16"
    with raises(UsageError, "int8"):
        megtool.open(llama).as_("hf", dtype="int8")


def test_dlpack_and_numpy_take_a_tensor(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    lazy = megtool.open(llama).as_("hf", dtype="float32")[Q]
    assert torch.from_dlpack(lazy).equal(tensors[Q].float())
    assert np.from_dlpack(lazy).shape == (32, 32)
    assert np.asarray(lazy).dtype == np.float32
    assert torch.from_dlpack(megtool.open(llama).as_("hf")[Q]).equal(tensors[Q])
    assert lazy.torch().dtype == torch.float32


def test_quantized_weights_are_decoded(
    llama: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    megtool.quantize(llama, tmp_path / "fp8", "fp8_per_channel")
    opened = megtool.open(tmp_path / "fp8", framework="torch")
    decoded = opened.as_("hf", dtype="float32")[Q][...]
    assert decoded.dtype == torch.float32
    assert 0 < (decoded - tensors[Q].float()).abs().max() < 0.03
    assert opened.as_("hf", dtype="float32")[Q][3:9, 5:7].equal(decoded[3:9, 5:7])


def test_optimizer_state_has_names_too(
    tmp_path: Path, llama: Path, materialize: Callable[..., None]
) -> None:
    moment = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    source = megtool.open(llama)
    assert not [n for n in source.as_("megatron") if n.startswith("optimizer.")]
    trained.write(tmp_path / "run", trained.config(), ParallelConfig(tp=2), materialize)
    opened = megtool.open(tmp_path / "run")
    assert moment in opened.as_("megatron")
    assert moment not in megtool.open(tmp_path / "run", optimizer=False).as_("megatron")


def test_what_is_not_there_is_said(llama: Path, tmp_path: Path) -> None:
    opened = megtool.open(llama)
    with pytest.raises(KeyError):
        opened.as_("hf")["nothing"]
    with raises(MappingError, "nothing", id="missing-tensors"):
        opened.as_("hf").read(["nothing"])
    with raises(UsageError, "gguf", hint="hf"):
        opened.as_("gguf")
    with raises(UsageError, "jax", hint="numpy"):
        opened.as_("hf", framework="jax")
    with raises(LayoutError, "tp=2", hint="rank=1"):
        opened.as_("hf", tp=2)
    with raises(LayoutError, "2", hint="0 to 1"):
        opened.as_("hf", tp=2, rank=2)
    with raises(LayoutError, "3"):
        opened.as_("hf", tp=3, rank=0)
    bare = tmp_path / "model.safetensors"
    bare.write_bytes(next(llama.glob("*.safetensors")).read_bytes())
    alone = megtool.open(bare)
    assert alone.config is None
    assert alone.family is None
    assert alone.as_("hf").keys() == alone.tensors.keys()  # they are such names already
    with raises(MappingError, hint="--family"):
        alone.as_("megatron")
    with raises(UsageError, hint="--like"):
        alone.as_("hf", tp=2, rank=0)


@pytest.mark.parametrize("place", ["", "  ", None, 5, b"ckpt", ["ckpt"]], ids=repr)
def test_what_is_no_location_is_refused(place: Any) -> None:
    """An empty text, which a variable without a value gives, is not the folder one is in."""
    with raises(UsageError, repr(place), hint="s3://"):
        megtool.open(place)


def test_opening_and_reading_imports_no_torch(llama: Path) -> None:
    code = (
        f"import megtool, sys; x = megtool.open({str(llama)!r}).as_('hf', tp=2, rank=1)\n"
        f"assert x[{Q!r}][3].shape == (32,)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
