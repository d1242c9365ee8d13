"""GGUF files against the gguf library, transformers' reader of GGUF files, and our own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import inspect, reshard
from megtool.errors import (
    DestinationError,
    FormatError,
    MappingError,
    MegtoolError,
    MissingPackageError,
    UsageError,
)
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.models import byte_level, gguf_models, mtp_models
from tests.support.runs.exports import export_gguf

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

UNKNOWN_TO_TRANSFORMERS = ("llama-biases", "mixtral", "gemma")
TOKENIZERS_UNKNOWN = ("olmo2", "seed_oss", "ernie4_5", "cohere")
WRITTEN_ONLY = ("glm4", "exaone4", "cohere2", "granite", "granitemoe", "olmoe", "smollm3")
WRITTEN_ONLY += ("arcee", "dots1", "glm4-moe", "ernie4_5-moe")
WRITTEN_ONLY += ("starcoder2", "minimax_m2", "gpt-oss", "nemotron", "gpt2")
UNKNOWN_TO_TRANSFORMERS += (*TOKENIZERS_UNKNOWN, *WRITTEN_ONLY[:11], "gpt-oss", "gpt2")
"""Its reader takes these for Llama without biases or experts, or knows no such architecture."""

_ARCHITECTURES = {
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "mistral": "llama",
    "mixtral": "llama",
    "cohere": "command-r",
    "glm4-moe": "glm4moe",
    "ernie4_5-moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "gpt-oss": "gpt-oss",
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def _logits(folder: Path, **more: Any) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    with torch.no_grad():
        return found(torch.arange(1, 33)[None]).logits


def _read(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def _stored(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


_SLOW = ("llama-tied", "mistral", "qwen2", "gemma3", "qwen2-moe", "bf16", "q4_1", "q5_0", "q5_1")
_SLOW += ("tq1_0", "tq2_0", "seed_oss", "cohere", "olmoe", "arcee", "dots1", "smollm3", "gpt2")


def _cases(*names: str) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in _SLOW else []) for n in names]


@pytest.mark.parametrize("name", _cases(*gguf_models.MODELS))
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Names by the gguf library's own map; the same logits out of transformers' reader and ours."""
    source, path = gguf_models.save(tmp_path / "hf", name), tmp_path / "model.gguf"
    report = export_gguf(source, path, outtype="f32")
    held = _read(path)
    assert report.tensors == len(held)
    assert not report.notes
    assert report.num_bytes == sum(t.n_bytes for t in held.values())
    arch = _ARCHITECTURES.get(name, name.split("-")[0])
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(number, 6)
    allowed = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[number]}
    for stored in _stored(source):
        if ".experts." in stored or "block_sparse_moe." in stored:
            continue  # one by one here, stacked there
        stem, _, last = stored.rpartition(".")
        if last == "e_score_correction_bias":
            assert f"blk.{stored.split('.')[2]}.exp_probs_b.bias" in held
            continue
        if last == "sinks":
            assert f"blk.{stored.split('.')[2]}.attn_sinks.weight" in held
            continue
        known = f"{names.get_name(stem)}.{last}"
        assert known in held, stored
        assert ".".join(p if not p.isdigit() else "{bid}" for p in known.split(".")[:-1]) in allowed
    want = _logits(source)
    if name not in UNKNOWN_TO_TRANSFORMERS:
        assert torch.equal(_logits(tmp_path, gguf_file=path.name), want)
    if name in TOKENIZERS_UNKNOWN:  # what the file alone says of the model
        said, original = (open_source(p).view.config for p in (path, source))
        assert said is not None
        assert said.with_fields(extra={}) == original.with_fields(extra={})
    if name in WRITTEN_ONLY:
        with pytest.raises(MappingError):
            reshard(path, tmp_path / "back", to="hf")
        return
    if not name.startswith("gemma"):
        like = source if name in TOKENIZERS_UNKNOWN else None
        reshard(path, tmp_path / "back", to="hf", like=like)
        assert torch.equal(_logits(tmp_path / "back"), want)
        return
    norm = held["blk.0.attn_norm.weight"].data
    assert (norm == _stored(source)["model.layers.0.input_layernorm.weight"] + 1).all()
    with pytest.raises(MappingError, match="no table for 'gguf'"):
        reshard(path, tmp_path / "back", to="hf")


@pytest.mark.parametrize("kind", _cases("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"))
def test_bytes_are_the_librarys(kind: str, tmp_path: Path) -> None:
    """Every tensor as the gguf library encodes the whole of it; norms in float32."""
    source = gguf_models.save(tmp_path / "hf", "llama", intermediate_size=80)
    export_gguf(source, tmp_path / "whole.gguf", outtype="f32")
    report = export_gguf(source, tmp_path / "small.gguf", outtype=kind)
    want, found = _read(tmp_path / "whole.gguf"), _read(tmp_path / "small.gguf")
    types = {n: t.tensor_type.name for n, t in found.items()}
    for name, tensor in found.items():
        made = gguf.quants.quantize(np.asarray(want[name].data), tensor.tensor_type)
        assert made.tobytes() == np.asarray(tensor.data).tobytes(), name
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.1.attn_q.weight"] == types["token_embd.weight"] == kind.upper()
    finer = kind[:2] in ("q4", "q5")
    assert types["output.weight"] == ("Q8_0" if finer else kind.upper())
    blocks = kind.startswith("q")
    assert types["blk.0.ffn_down.weight"] == ("F16" if blocks else kind.upper())
    assert any("no whole blocks" in n and "ffn_down" in n for n in report.notes) == blocks
    said = gguf.GGUFReader(tmp_path / "small.gguf").get_field("general.file_type").contents()
    assert said == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]


@pytest.mark.parametrize("kind", _cases("tq1_0", "tq2_0", "mxfp4"))
def test_special_types(kind: str, tmp_path: Path) -> None:
    """Ternary files keep both ends in F16; MXFP4 is for experts, the rest is Q8_0."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    source = gguf_models.save(tmp_path / "hf", "mixtral", **sizes)
    export_gguf(source, tmp_path / "whole.gguf", outtype="f32")
    export_gguf(source, tmp_path / "small.gguf", outtype=kind)
    want, found = _read(tmp_path / "whole.gguf"), _read(tmp_path / "small.gguf")
    for name, tensor in found.items():
        made = gguf.quants.quantize(np.asarray(want[name].data), tensor.tensor_type)
        assert made.tobytes() == np.asarray(tensor.data).tobytes(), name
    types = {n: t.tensor_type.name for n, t in found.items()}
    assert types["blk.0.ffn_up_exps.weight"] == kind.upper()
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    ends = {types["token_embd.weight"], types["output.weight"]}
    assert ends == ({"Q8_0"} if kind == "mxfp4" else {"F16"})


def test_multi_token_prediction_is_kept(tmp_path: Path) -> None:
    """GLM-4.5's further layers are layers behind the last, under llama.cpp's names."""
    from safetensors.torch import load_file

    gguf_models.save(tmp_path / "hf", "glm4-moe")
    names = mtp_models.DEEPSEEK
    mtp_models.add_layers(tmp_path / "hf", "model.layers.1.", "model.layers.{}.", 2, names)
    _edit(tmp_path / "hf", num_nextn_predict_layers=2)
    report = export_gguf(tmp_path / "hf", tmp_path / "m.gguf", outtype="f32")
    assert not any("multi-token" in n for n in report.notes)
    held, reader = _read(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    counts = [
        reader.get_field(f"glm4moe.{k}").contents() for k in ("block_count", "nextn_predict_layers")
    ]
    assert counts == [4, 2]
    want = load_file(tmp_path / "hf" / "model.safetensors")
    for ours, theirs in (
        ("nextn.eh_proj", "eh_proj"),
        ("nextn.enorm", "enorm"),
        ("nextn.hnorm", "hnorm"),
        ("nextn.shared_head_norm", "shared_head.norm"),
        ("attn_q", "self_attn.q_proj"),
    ):
        for layer in (2, 3):
            found = held[f"blk.{layer}.{ours}.weight"].data
            assert np.array_equal(
                found, want[f"model.layers.{layer}.{theirs}.weight"].float().numpy()
            )


def test_source_of_another_layout_gives_the_same_file(tmp_path: Path) -> None:
    """Two tensor-parallel ranks in two stages, whose rows of attention are in groups."""
    source = gguf_models.save(tmp_path / "hf", "llama", dtype="bfloat16")
    reshard(source, tmp_path / "ranks", to="torch_dist", tp=2, pp=2)
    for kind in ("bf16", "q8_0"):
        one, two = tmp_path / "one" / f"{kind}.gguf", tmp_path / "two" / f"{kind}.gguf"
        export_gguf(source, one, outtype=kind)
        report = export_gguf(tmp_path / "ranks", two, outtype=kind, threads=1)
        assert one.read_bytes() == two.read_bytes()
        assert report.files == (two.name,)
        assert report.decoded == 0
    assert inspect(two).num_tensors == 21


def test_quantized_source_is_decoded(tmp_path: Path) -> None:
    """A Q8_0 file to float32, its tokenizer as it was; and to Q8_0 again with the same codes."""
    source = gguf_models.save(tmp_path / "hf", "llama")
    export_gguf(source, tmp_path / "q8.gguf", outtype="q8_0")
    export_gguf(tmp_path / "q8.gguf", tmp_path / "f32.gguf", outtype="f32")
    small, large = _read(tmp_path / "q8.gguf"), _read(tmp_path / "f32.gguf")
    for name, tensor in small.items():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (values == large[name].data).all(), name
    for key in ("tokens", "merges", "token_type", "bos_token_id", "add_bos_token"):
        a, b = (
            gguf.GGUFReader(tmp_path / f).get_field(f"tokenizer.ggml.{key}").contents()
            for f in ("q8.gguf", "f32.gguf")
        )
        assert a == b


def test_tokenizer_encodes_the_same(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama")
    export_gguf(source, tmp_path / "m.gguf")
    want = transformers.AutoTokenizer.from_pretrained(source)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in (byte_level.WORDS, "Über 7<mark>bats</s>", "\n\n  x"):
        assert found.encode(text) == want.encode(text)
    assert found.eos_token == want.eos_token == "</s>"
    assert found.chat_template == want.chat_template
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    kinds = reader.get_field("tokenizer.ggml.token_type").contents()
    assert len(tokens) == len(kinds) == 320
    assert tokens[-1] == "[PAD319]"
    assert (kinds[0], kinds[5], kinds[tokens.index("<mark>")], kinds[-1]) == (3, 1, 4, 5)


def test_a_name_for_a_split_that_is_not_known(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama")
    byte_level.save(source, 300)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    cut = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, bytes_alone]}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises(MappingError, match="no name here", hint="--pre-tokenizer NAME"):
        export_gguf(source, tmp_path / "m.gguf")
    export_gguf(source, tmp_path / "m.gguf", pre_tokenizer="olmo")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("tokenizer.ggml.pre").contents() == "olmo"


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama")
    report = export_gguf(source, tmp_path / "m.gguf", outtype="q4_0", dry_run=True)
    assert report.is_dry
    assert report.algo == "Q4_0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert any("output.weight" in n for n in report.notes)


def test_killed_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf_models.save(tmp_path / "hf", "llama")
    export_gguf(source, tmp_path / "whole" / "m.gguf", outtype="q8_0")
    from megtool.export.gguf import block_encoder
    from megtool.plan import work_units

    monkeypatch.setattr(work_units, "UNIT_BYTES", 4096)
    real, calls = block_encoder.encode, []

    def fails(values: Any, kind: str, importance: Any) -> Any:
        calls.append(kind)
        if len(calls) == 8:  # of fifteen weights
            raise KeyboardInterrupt
        return real(values, kind, importance)

    path = tmp_path / "m.gguf"
    monkeypatch.setattr(block_encoder, "encode", fails)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(source, path, outtype="q8_0", threads=1)
    assert not path.exists()
    assert (tmp_path / ".m.gguf.megtool").exists()
    report = export_gguf(source, path, outtype="q8_0", threads=1)
    assert any("resuming" in w for w in report.warnings)
    assert path.read_bytes() == (tmp_path / "whole" / "m.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf", "whole"]
    with raises(DestinationError, id="destination-exists"):
        export_gguf(source, path)


def _edit(folder: Path, **more: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = gguf_models.save(tmp_path / "hf", "llama"), tmp_path / "m.gguf"

    def refused(error: type[MegtoolError], match: str, hint: str = "", **more: Any) -> None:
        with pytest.raises(error, match=match) as told:
            export_gguf(source, out, **more)
        assert hint in (told.value.hint or "")
        assert not out.exists()
        assert not (tmp_path / ".m.gguf.megtool").exists()

    refused(UsageError, "--outtype is 'q4_x'", "q4_0, q4_1", outtype="q4_x")
    refused(UsageError, "mxfp4", "q8_0", outtype="mxfp4")
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    _edit(source, rope_parameters=None, rope_theta=1e4, rope_scaling=scaling)
    refused(MappingError, "'dynamic'", "linear, yarn, llama3")
    _edit(source, rope_scaling=None)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").unlink()
    refused(FormatError, "no tokenizer.json", "--like")
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 320, "content": "<x>"})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(MappingError, "321 tokens, and the model's embedding 320 rows")
    source = gguf_models.save(tmp_path / "moe", "qwen3-moe", norm_topk_prob=False)
    refused(MappingError, "norm_topk_prob", "--to hf")
    source = gguf_models.save(tmp_path / "gemma", "gemma2", query_pre_attn_scalar=128)
    refused(MappingError, "query_pre_attn_scalar")
    source = gguf_models.save(tmp_path / "exact", "gemma2", hidden_activation="gelu")
    refused(MappingError, "GELU by tanh", "--to hf")
    source = gguf_models.save(tmp_path / "exact3", "gemma3", hidden_activation="gelu")
    refused(MappingError, "GELU by tanh", "--to hf")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        source = gguf_models.save(tmp_path / cap, "gemma2", **{cap: None})
        refused(MappingError, "caps scores at 50 and logits at 30", "--to hf")
    for name, words, more in (
        ("olmo2", "no biases", {"attention_bias": True}),
        ("olmo2", "output matrix beside", {"tie_word_embeddings": True}),
        ("seed_oss", "queries, keys and values alone", {"attention_out_bias": True}),
        ("ernie4_5", "queries, keys and values alone", {"use_bias": True}),
        ("cohere", "no output matrix", {"tie_word_embeddings": False}),
        ("cohere", "normalizes queries and keys", {"use_qk_norm": True}),
    ):
        source = gguf_models.save(tmp_path / f"{name}{len(more)}{words[:4]}", name, **more)
        refused(MappingError, words, "--to hf")
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    yarn |= {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    source = gguf_models.save(tmp_path / "yarn", "llama", rope_parameters=yarn)
    refused(MappingError, "'yarn' with a ramp that is not rounded", "linear, yarn")
    from megtool.number_formats import gguf as packing

    monkeypatch.setitem(sys.modules, "gguf", None)
    for cached in (packing.package, packing.encodings, packing._blocks):
        cached.cache_clear()
    refused(MissingPackageError, "gguf", "pip install 'megtool[gguf]'")


def test_a_family_without_a_name_is_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.NanoChatConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    model.save_pretrained(tmp_path / "hf")
    with raises(MappingError, match="family 'nanochat'", hint="llama, mixtral, qwen2"):
        export_gguf(tmp_path / "hf", tmp_path / "m.gguf")


def test_nan_is_refused_with_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = gguf_models.save(tmp_path / "hf", "llama")
    held = load_file(source / "model.safetensors")
    held["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    with raises(FormatError, id="nan-weights", tensor="layers.1.mlp.up.weight"):
        export_gguf(source, tmp_path / "m.gguf", outtype="q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_numbers_too_large_for_f16(tmp_path: Path) -> None:
    """Refused as f16 itself, and as what blocks fall back on; written as bf16."""
    from safetensors.torch import load_file, save_file

    source = gguf_models.save(tmp_path / "hf", "llama", intermediate_size=80)
    held = load_file(source / "model.safetensors")
    held["model.layers.1.mlp.down_proj.weight"][3, 5] = -1e5
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    for kind in ("f16", "q8_0"):
        with raises(
            FormatError,
            match=r"65504.*down_proj.weight \(1\)",
            tensor="model.layers.1.mlp.down_proj.weight",
            hint="--outtype bf16",
        ):
            export_gguf(source, tmp_path / "m.gguf", outtype=kind)
        assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    export_gguf(source, tmp_path / "m.gguf", outtype="bf16")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


def test_llama3_factors(tmp_path: Path) -> None:
    """Divided by the factors, frequencies are transformers'; our reader gets the scaling back."""
    source = gguf_models.save(tmp_path / "hf", "llama", rope_parameters=LLAMA3)
    export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    factors = _read(tmp_path / "m.gguf")["rope_freqs.weight"].data
    config = transformers.AutoConfig.from_pretrained(source)
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    plain = 1 / 10000.0 ** (np.arange(8) / 8)
    np.testing.assert_allclose(make(config, "cpu")[0].numpy(), plain / factors, rtol=1e-6)
    assert len(set(factors.tolist())) > 2
    reshard(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    assert torch.equal(_logits(tmp_path / "back"), _logits(source))


def _without_our_key(source: Path, to: Path, **replaced: np.ndarray) -> Path:
    """The file as llama.cpp's converter writes it: the factors alone say how rope is scaled."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        own = key.startswith("GGUF.") or key in ("general.architecture", "megtool.rope_scaling")
        if own:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for t in reader.tensors:
        data = replaced.get(t.name.replace(".", "_"), t.data)
        writer.add_tensor(t.name, data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_llama3_scaling_of_factors_alone(tmp_path: Path, name: str) -> None:
    """Files of llama.cpp's converter: the scaling is found by its factors, to every target."""
    source = gguf_models.save(tmp_path / "hf", name, rope_parameters=LLAMA3)
    export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    theirs = _without_our_key(tmp_path / "m.gguf", tmp_path / "theirs.gguf")
    export_gguf(theirs, tmp_path / "again.gguf", outtype="f32")
    want, found = (_read(tmp_path / f"{n}.gguf")["rope_freqs.weight"] for n in ("m", "again"))
    assert (want.data == found.data).all()
    reshard(theirs, tmp_path / "back", to="hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == LLAMA3
    odd = np.linspace(1, 3, 8, dtype=np.float32) ** 2
    wrong = _without_our_key(tmp_path / "m.gguf", tmp_path / "odd.gguf", rope_freqs_weight=odd)
    with raises(MappingError, match="no llama3 scaling", hint="--like"):
        export_gguf(wrong, tmp_path / "no.gguf")
    export_gguf(wrong, tmp_path / "like.gguf", outtype="f32", like=source)
    assert (_read(tmp_path / "like.gguf")["rope_freqs.weight"].data == want.data).all()


def test_longrope_of_factors_alone(tmp_path: Path) -> None:
    short, long = [1.0 + i / 10 for i in range(8)], [2.0 + i / 3 for i in range(8)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling |= {"original_max_position_embeddings": 32}
    source = gguf_models.save(tmp_path / "hf", "phi3")
    _edit(source, rope_parameters=None, rope_theta=1e4, original_max_position_embeddings=32)
    for more in ({}, {"attention_factor": 1.5}):
        _edit(source, rope_scaling=scaling | more)
        export_gguf(source, tmp_path / "m.gguf", outtype="f32", overwrite=True)
        _without_our_key(tmp_path / "m.gguf", tmp_path / "theirs.gguf")
        reshard(tmp_path / "theirs.gguf", tmp_path / "back", to="hf", overwrite=True)
        found = json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"]
        for key in ("short_factor", "long_factor"):
            np.testing.assert_allclose(found.pop(key), scaling[key], rtol=1e-6)
        rest = {"rope_type": "longrope", "original_max_position_embeddings": 32}
        assert found == rest | more
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
        assert theirs["original_max_position_embeddings"] == 32  # its class has 4096 for none


def test_longrope_factors(tmp_path: Path) -> None:
    """Phi-3's factors as tensors, its temperature as a key; our reader gets both back."""
    short, long = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    source = gguf_models.save(tmp_path / "hf", "phi3")
    _edit(
        source,
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling=scaling,
        original_max_position_embeddings=32,
    )
    export_gguf(source, tmp_path / "m.gguf", outtype="f32")
    held, reader = _read(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert held["rope_factors_short.weight"].data.tolist() == short
    assert held["rope_factors_long.weight"].data.tolist() == long
    temperature = reader.get_field("phi3.rope.scaling.attn_factor").contents()
    assert temperature == pytest.approx((1 + np.log(2) / np.log(32)) ** 0.5)
    assert reader.get_field("phi3.rope.scaling.original_context_length").contents() == 32
    reshard(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["rope_scaling"] == scaling | {"original_max_position_embeddings": 32}


@pytest.mark.slow
def test_real_model(tmp_path: Path) -> None:
    """SmolLM2 to bfloat16 and Q8_0: what transformers generates from the files."""
    from megtool import demo

    demo(tmp_path / "demo")
    source = tmp_path / "demo" / "hf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    texts = []
    export_gguf(source, tmp_path / "bf16.gguf")
    export_gguf(source, tmp_path / "q8_0.gguf", outtype="q8_0")
    for place, more in (
        (source, {}),
        (tmp_path, {"gguf_file": "bf16.gguf"}),
        (tmp_path, {"gguf_file": "q8_0.gguf"}),
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, **more
        )
        made = model.generate(ids, max_new_tokens=6, do_sample=False)
        texts.append(tokenizer.decode(made[0]))
    assert texts[0] == texts[1] == texts[2]
    assert "Paris" in texts[0]
