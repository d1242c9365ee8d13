"""Tensors of ranks out of real checkpoints of every format, against slices of the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from megtool import reshard
from megtool.convert.rank_tensors import RankCoordinates
from megtool.dtypes import dtype
from megtool.inference.rank_weights import Weights
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from tests.support import folders
from tests.support.checkpoints.quantized_llama import write_quantized_llama
from tests.support.models import moe_cases, tiny_llama
from tests.support.runs.loading import Truth, bits, check, source_of

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}

FORMATS: dict[str, dict[str, Any]] = {
    "stacked": {"to": "torch_dist", "tp": 2, "pp": 2},
    "legacy": {"to": "megatron", "tp": 2, "pp": 2},
    "dcp": {"to": "dcp", "dp": 2},
    "zarr": {"to": "zarr"},
    "compressed": {"to": "zarr", "compress": "zstd"},
    "safetensors": {"to": "hf", "max_shard_size": "64KiB"},
}
SEATS = [
    (ParallelConfig(), RankCoordinates()),
    (ParallelConfig(tp=2, pp=4), RankCoordinates(stage=0, tp=1, etp=1)),
    (ParallelConfig(tp=4, pp=2), RankCoordinates(stage=1, tp=3, etp=3)),  # more ranks than KV heads
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("load") / "hf", parts=3)


@pytest.mark.parametrize("kind", ["hf", *FORMATS])
def test_every_format_gives_the_same_slices(
    kind: str, folder: Path, tmp_path: Path, carry: Callable[..., Any]
) -> None:
    path = folder
    if kind != "hf":
        path = tmp_path / "out"
        reshard(folder, path, fsync=False, **FORMATS[kind])
    source, truth = source_of(path), Truth(folder, carry)
    for parallel, seat in SEATS:
        weights = Weights(source, parallel=parallel, seat=seat, vocab_multiple=8)
        check(weights, truth.of(parallel, seat, 8))


MOE = [
    ("qwen3_moe", ParallelConfig(tp=2, ep=2, etp=1, pp=2), RankCoordinates(stage=1, tp=1, ep=1)),
    ("gpt_oss", ParallelConfig(tp=2, ep=4, etp=2), RankCoordinates(tp=0, ep=3, etp=1)),
    (
        "deepseek_v3",
        ParallelConfig(tp=4, ep=2, etp=2, pp=2),
        RankCoordinates(stage=0, tp=3, ep=1, etp=1),
    ),
    ("llama4", ParallelConfig(tp=2, ep=2), RankCoordinates(tp=1, ep=0, etp=1)),
]


@pytest.mark.parametrize(("name", "parallel", "seat"), MOE, ids=lambda x: str(x)[:12])
def test_mixtures_of_experts(
    name: str,
    parallel: ParallelConfig,
    seat: RankCoordinates,
    tmp_path: Path,
    carry: Callable[..., Any],
) -> None:
    case = next(c for c in moe_cases.CASES if c[0] == name)
    moe_cases.save(case, tmp_path / "hf")
    layout = {"tp": 2, "ep": 2, "etp": 1}
    reshard(tmp_path / "hf", tmp_path / "mcore", to="torch_dist", fsync=False, **layout)
    truth = Truth(tmp_path / "hf", carry).of(parallel, seat, 4)
    for path in (tmp_path / "hf", tmp_path / "mcore"):
        check(Weights(source_of(path), parallel=parallel, seat=seat, vocab_multiple=4), truth)


def save_gguf(path: Path, original: Path, quant: gguf.GGMLQuantizationType) -> None:
    """A Llama whose matrices are quantized."""
    c = tiny_llama.config(**WIDE)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c["num_hidden_layers"])
    for name, (_, shape, data) in folders.stored_tensors(original).items():
        array = np.frombuffer(data, np.float32).reshape(shape)
        name = names.get_name(name, (".weight",))
        if array.ndim == 2:
            packed = gguf.quants.quantize(array, quant)
            writer.add_tensor(name, packed, raw_dtype=quant)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0"])
def test_packed_rows_are_cut_where_ranks_cut_them(
    quant: str, tmp_path: Path, carry: Callable[..., Any]
) -> None:
    """A rank's columns begin inside blocks: these are read, decoded, and cut."""
    original = tiny_llama.save(tmp_path / "fp32", dtype="float32", **WIDE)
    path = tmp_path / "model.gguf"
    save_gguf(path, original, gguf.GGMLQuantizationType[quant])
    reshard(path, tmp_path / "hf", to="hf", dtype="bfloat16", fsync=False)
    source, truth = source_of(path), Truth(tmp_path / "hf", carry)
    for parallel, seat in SEATS:
        weights = Weights(source, parallel=parallel, seat=seat, vocab_multiple=8)
        assert weights.usual_dtype.name == "bfloat16"
        weights.become(dict.fromkeys(weights.tensors, dtype("bfloat16")))
        check(weights, truth.of(parallel, seat, 8))


@pytest.mark.parametrize("kind", ["deepseek", "int4 group"])
def test_quantized_folders_are_decoded(
    kind: str, tmp_path: Path, carry: Callable[..., Any]
) -> None:
    write_quantized_llama(tmp_path / "hf", kind)
    reshard(tmp_path / "hf", tmp_path / "decoded", to="hf", dtype="bfloat16", fsync=False)
    source, truth = source_of(tmp_path / "hf"), Truth(tmp_path / "decoded", carry)
    for parallel, seat in SEATS:
        weights = Weights(source, parallel=parallel, seat=seat, vocab_multiple=8)
        assert weights.usual_dtype.name == "bfloat16"
        weights.become(dict.fromkeys(weights.tensors, dtype("bfloat16")))
        check(weights, truth.of(parallel, seat, 8))


def test_a_part_is_loaded_alone_and_again(folder: Path, carry: Callable[..., Any]) -> None:
    weights = Weights(source_of(folder), vocab_multiple=8, threads=2)
    want = Truth(folder, carry).of(ParallelConfig(), RankCoordinates(), 8)
    names = [n for n in weights.tensors if n.startswith("decoder.layers.2.")]
    for _ in range(2):
        got = weights.load(names)
        assert list(got) == names
        assert all((bits(got[n]) == want[n]).all() for n in names)
    assert weights.num_bytes(names) == sum(t.nbytes for t in got.values())
    assert weights.load([]) == {}


def test_a_layer_that_is_chosen_twice_is_read_once(folder: Path) -> None:
    from megtool.source.subset.layers import keep_layers

    opened = keep_layers(open_source(folder), [0, 1, 1])
    assert opened.model is not None
    weights = Weights(opened)
    got = weights.load()
    at = "decoder.layers.{}.mlp.linear_fc1.weight"
    assert got[at.format(1)].equal(got[at.format(2)])
    assert not got[at.format(0)].equal(got[at.format(1)])
