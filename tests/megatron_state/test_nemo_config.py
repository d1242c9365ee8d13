"""NeMo's and Megatron-Bridge's folders: their model is known, their files travel, and come back."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.convert.megatron.args import config_from_args
from megtool.errors import FormatError, MappingError
from megtool.formats import open_checkpoint
from megtool.formats.plain_yaml import read_yaml
from megtool.megatron_state.bridge_files import (
    edit_layout,
    make_bridge_files,
    make_run_config,
    make_train_state,
)
from megtool.megatron_state.nemo_config import args_from_nemo_1, args_from_section
from megtool.options.layout import ParallelConfig
from megtool.pickles.zip_writer import encode_object
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from tests.support.checkpoints.old_formats import Materialize, as_fragments, rename_tensors
from tests.support.checkpoints.trained import config, write
from tests.support.checkpoints.trained_models import MODELS as TRAINED
from tests.support.errors import raises

yaml = pytest.importorskip("yaml")

# What NeMo 2 wrote of a model like ours (shortened): every field of its dataclass, by its target.
NEMO = """
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.Llama2Config7B
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  bf16: true
  data_step_fn:
    _call_: false
    _target_: nemo.collections.llm.gpt.model.base.gpt_data_step
  ffn_hidden_size: 24
  gated_linear_unit: true
  hidden_size: 16
  init_method: !!python/object/apply:os.system ["touch {canary}"]
  kv_channels: null
  layernorm_epsilon: 1.0e-05
  make_vocab_size_divisible_by: 8
  normalization: RMSNorm
  num_attention_heads: 4
  num_layers: 4
  num_moe_experts: null
  num_query_groups: 2
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  position_embedding_type: rope
  rotary_base: 10000
  rotary_percent: 1.0
  seq_length: 32
  share_embeddings_and_output_weights: false
  vocab_size: null
optim: null
tokenizer:
  _target_: nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer
"""


@pytest.fixture
def nemo(tmp_path: Path, materialize: Materialize) -> Path:
    """A NeMo 2 folder with the optimizer state it had then."""
    # NeMo's file leaves the vocabulary to the tokenizer: only the padded size is known.
    write(tmp_path / "new", config(vocab_size=48), ParallelConfig(tp=2), materialize)
    rename_tensors(tmp_path / "new", tmp_path / "named", materialize, _wrapped)
    as_fragments(tmp_path / "named", tmp_path / "old", materialize)
    folder = tmp_path / "nemo"
    folder.mkdir()
    (tmp_path / "old" / "iter_0000007").rename(folder / "weights")
    common = {"global_step": 7, "epoch": 0, "pytorch-lightning_version": "2.4.0"}
    (folder / "weights" / "common.pt").write_bytes(encode_object(common))
    (folder / "context").mkdir()
    text = NEMO.replace("{canary}", str(tmp_path / "canary"))
    (folder / "context" / "model.yaml").write_text(text)
    (folder / "context" / "io.json").write_text("{}")
    return folder


def _wrapped(name: str) -> str:
    head, dot, key = name.rpartition("optimizer.state.")
    if not dot:
        return f"module.{name}"
    state, _, key = key.partition(".")
    return f"{head}{dot}{state}.module.{key}"


def test_a_nemo_folder_is_opened_with_its_model(nemo: Path, tmp_path: Path) -> None:
    for path in (nemo, nemo / "weights"):
        opened = open_source(path)
        assert opened.model is not None
        assert opened.model.config == config(vocab_size=48)
        assert opened.catalogue.metadata["iteration"] == 7
        assert opened.view.dialect == "megatron"
    assert not (tmp_path / "canary").exists()
    report = verify(tmp_path / "new", nemo)
    assert report.exit_status == 0, list(report.lines())


def test_a_nemo_folder_becomes_megatrons(nemo: Path, tmp_path: Path) -> None:
    reshard(
        nemo, tmp_path / "out", to="torch_dist", optimizer_format="fully_reshardable", tp=1, pp=2
    )
    # This NeMo folder has neither param groups nor counts of samples.
    report = verify(tmp_path / "new", tmp_path / "out")
    assert {(d.part, d.kind) for d in report.differences} == {("training state", "missing")}
    assert verify(tmp_path / "new", tmp_path / "out", parts="tensors,config").exit_status == 0
    found = open_checkpoint(tmp_path / "out")
    assert found.root.name == "iter_0000007"
    assert found.metadata["args"]["num_layers"] == 4
    assert found.metadata["args"]["pipeline_model_parallel_size"] == 2
    assert {"context/io.json", "context/model.yaml"} <= set(found.auxiliary_files)
    assert not any("module." in t.name for t in found.tensors)


def test_an_unfinished_nemo_folder(nemo: Path) -> None:
    marker = nemo.with_name("nemo-unfinished")
    marker.touch()
    with pytest.raises(FormatError, match="nemo-unfinished exists"):
        open_checkpoint(nemo)
    marker.unlink()
    (nemo / "weights" / "metadata.json").unlink()
    with raises(FormatError, id="unfinished-save"):
        open_checkpoint(nemo)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2", "YAML is invalid"),
        ("config: 7", "no section 'config'"),
        ("- 1", "no section 'config'"),
        ("config: " + "[" * 5000, "YAML is invalid"),
    ],
)
def test_a_nemo_model_that_is_none(nemo: Path, text: str, says: str) -> None:
    (nemo / "context" / "model.yaml").write_text(text)
    with pytest.raises(FormatError, match=says) as e:
        open_source(nemo)
    assert str(e.value.file).endswith("model.yaml")


@pytest.mark.parametrize("layers", ["", "num_layers: many, "])
def test_a_nemo_model_that_cannot_be(nemo: Path, layers: str) -> None:
    text = f"config: {{{layers}num_attention_heads: 4, hidden_size: 8}}"
    (nemo / "context" / "model.yaml").write_text(text)
    opened = open_source(nemo, optimizer=False)
    assert opened.model is None
    assert "cannot be used" in str(opened.reason)


MIXERS = TRAINED["mamba"] | {"mamba_norm_eps": 1e-5}  # as Megatron has it in every mixer
MODELS: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": True, "norm_eps": 1e-6, "rope_base": 5e5},
    {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8},
    {
        "norm": "layernorm",
        "gated": False,
        "activation": "gelu",
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    {"gated": False, "activation": "relu2", "position_embedding": "learned"},
    {"activation": "gelu_pytorch_tanh", "qk_norm": True, "zero_centered_norm": True},
    TRAINED["delta net"] | {"moe_layer_freq": (0, 1, 0, 1)},
    MIXERS | {"gated": False, "activation": "relu2"},
    MIXERS | {"num_mtp_layers": 2, "mtp_kind": "*E"},
]


@pytest.mark.parametrize("model", MODELS)
def test_run_config_says_the_model(model: dict[str, Any]) -> None:
    want = config(**model)
    text = make_run_config(want, ParallelConfig(tp=2, pp=2))
    said = yaml.safe_load(text)
    assert config_from_args(args_from_section(said["model"])) == want
    assert said["model"]["tensor_model_parallel_size"] == 2
    assert said["checkpoint"]["save_rng"] is False
    moved = yaml.safe_load(edit_layout(text, ParallelConfig(tp=4)))
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}
    cut = said["model"].get("hybrid_layer_pattern")
    pattern = {"hybrid_layer_pattern": cut.replace("|", "")} if cut else {}
    assert moved["model"] == said["model"] | sizes | {"expert_tensor_parallel_size": 4} | pattern


def test_run_config_is_made_of_fields_that_exist() -> None:
    transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")
    fields = {f.name for f in dataclasses.fields(transformer_config.MLATransformerConfig)}
    # Of Bridge's GPTModelProvider and HybridModelProvider themselves.
    fields |= {
        "hybrid_layer_pattern",
        "make_vocab_size_divisible_by",
        "position_embedding_type",
        "rope_scaling",
        "rope_scaling_factor",
        "rotary_base",
        "rotary_percent",
        "seq_length",
        "share_embeddings_and_output_weights",
        "should_pad_vocab",
        "vocab_size",
        "_target_",
    }
    latent = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "head_dim": 8,
        "num_kv_heads": 4,
    }
    for model in [*MODELS, latent]:
        said = yaml.safe_load(make_run_config(config(**model), ParallelConfig()))["model"]
        assert not said.keys() - fields


def test_run_config_of_a_hybrid_names_its_provider() -> None:
    """What a provider leaves out is what its dataclass has."""
    want = config(**MIXERS | {"num_mtp_layers": 1, "mtp_kind": "*E"})
    text = make_run_config(want, ParallelConfig(pp=2))
    said = yaml.safe_load(text)["model"]
    assert said["_target_"].endswith(".hybrid.hybrid_provider.HybridModelProvider")
    assert said["hybrid_layer_pattern"] == "ME|*-/*E"
    moved = yaml.safe_load(edit_layout(text, ParallelConfig(tp=2)))["model"]
    assert moved["hybrid_layer_pattern"] == "ME*-/*E"
    for name in ("position_embedding_type", "normalization", "share_embeddings_and_output_weights"):
        said.pop(name)
    assert config_from_args(args_from_section(said)) == want
    older = {k: v for k, v in said.items() if k not in ("hybrid_layer_pattern", "_target_")}
    older |= {"hybrid_override_pattern": "ME*-", "mtp_hybrid_override_pattern": "*E"}
    assert config_from_args(args_from_section(older)) == want


def test_a_bridge_checkpoint_of_a_hybrid_is_opened(
    tmp_path: Path, materialize: Materialize
) -> None:
    model = config(**MIXERS)
    write(tmp_path / "new", model, ParallelConfig(tp=2), materialize)
    folder = tmp_path / "new" / "iter_0000007"
    for name, data in make_bridge_files(model, ParallelConfig(tp=2), divisible_by=8).items():
        (folder / name).write_bytes(data)
    common = torch.load(folder / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, folder / "common.pt")
    assert open_source(tmp_path / "new").config == model
    reshard(tmp_path / "new", tmp_path / "out", tp=1, pp=2, fsync=False)
    said = yaml.safe_load((tmp_path / "out" / "iter_0000007" / "run_config.yaml").read_text())
    assert said["model"]["pipeline_model_parallel_size"] == 2
    assert verify(tmp_path / "new", tmp_path / "out").exit_status == 0


def test_train_state_is_what_bridge_loads() -> None:
    held = torch.load(io.BytesIO(make_train_state(1234)), weights_only=True)
    assert held["step"].item() == 1234
    assert {k: v.shape for k, v in held.items()} == dict.fromkeys(held, torch.Size([]))
    assert held["do_train"].dtype is torch.bool


def test_a_bridge_checkpoint_is_opened_and_moved(tmp_path: Path, materialize: Materialize) -> None:
    write(tmp_path / "new", config(), ParallelConfig(tp=2), materialize)
    folder = tmp_path / "new" / "iter_0000007"
    for name, data in make_bridge_files(config(), ParallelConfig(tp=2), divisible_by=8).items():
        (folder / name).write_bytes(data)
    common = torch.load(folder / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, folder / "common.pt")
    opened = open_source(tmp_path / "new")
    assert opened.model is not None
    assert opened.model.config == config()
    assert opened.catalogue.metadata["args"]["tensor_model_parallel_size"] == 2
    reshard(tmp_path / "new", tmp_path / "out", optimizer_format="dp_reshardable", tp=1, pp=2)
    said = yaml.safe_load((tmp_path / "out" / "iter_0000007" / "run_config.yaml").read_text())
    assert said["model"]["pipeline_model_parallel_size"] == 2
    state = (folder / "train_state.pt").read_bytes()
    assert (tmp_path / "out" / "iter_0000007" / "train_state.pt").read_bytes() == state
    assert (tmp_path / "out" / "latest_train_state.pt").read_bytes() == state
    assert verify(tmp_path / "new", tmp_path / "out").exit_status == 0


def test_tags_build_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: !!python/name:os.system\nb: !x [1, !y {c: 2}]\n")
    assert read_yaml(path) == {"a": "", "b": [1, {"c": 2}]}


def test_a_small_file_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    lines = ["a0: &a0 {x: 1}"]
    for i in range(40):
        many = ", ".join([f"*a{i}"] * 20)
        lines.append(f"a{i + 1}: &a{i + 1} {{<<: [{many}], y: [{many}]}}")
    path.write_text("\n".join(lines))
    with raises(FormatError, file=path):
        read_yaml(path)


def test_fields_of_another_generation() -> None:
    section = {
        "_builder_": "megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder",
        "transformer": {
            "num_layers": 4,
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
        },
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "seq_length": 32,
        "vocab_size": 37,
    }
    found: ModelConfig = config_from_args(args_from_section(section))
    assert found == config()


NEMO_1 = """
num_layers: 2
hidden_size: 64
num_attention_heads: 4
num_query_groups: 2
ffn_hidden_size: 96
encoder_seq_length: 64
max_position_embeddings: 64
normalization: rmsnorm
layernorm_epsilon: 1.0e-06
bias: false
activation: fast-swiglu
position_embedding_type: rope
rotary_percentage: 0.5
rotary_base: 5000
share_embeddings_and_output_weights: false
"""


def test_settings_of_nemo_1() -> None:
    model = config_from_args(args_from_nemo_1(yaml.safe_load(NEMO_1)) | {"padded_vocab_size": 128})
    assert (model.num_layers, model.attention.num_kv_heads, model.mlp.gated) == (2, 2, True)
    assert model.norms.norm_eps == 1e-6
    assert model.positions.rope_base == 5000
    assert not model.embedding.tied_embeddings
    with raises(MappingError, "fast-geglu", id="unsupported-model"):
        args_from_nemo_1(yaml.safe_load(NEMO_1) | {"activation": "fast-geglu"})


def test_an_archive_of_nemo_1_is_unpacked_first(tmp_path: Path) -> None:
    (tmp_path / "model.nemo").write_bytes(b"a tar")
    with raises(FormatError, hint="tar -xf model.nemo", id="not-a-checkpoint"):
        open_checkpoint(tmp_path / "model.nemo")
