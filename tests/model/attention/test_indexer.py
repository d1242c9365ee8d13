"""Sparse attention: what indexers choose; their configurations, names, and quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import lint, quantize, reshard, verify
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.convert.megatron.hybrid_pattern import parse_pattern
from megtool.errors import LayoutError, MappingError
from megtool.model.attention.indexer import highest
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder, StageLayers
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import moe_cases, moe_models
from tests.support.worlds.moe_layouts import config_of, whole_model

SPARSE = config_of("sparse")


def changed(**keys: Any) -> ModelConfig:
    return SPARSE.with_fields(**keys)


def test_of_equal_scores_the_first_ones_are_chosen() -> None:
    """Otherwise the number of keys would decide, which differs between ranks."""
    scores = torch.tensor([[[5.0, 0, 0, 0, 0, 7], [1, 1, 1, 1, 1, 1]]])
    for keys in (5, 6):
        chosen = highest(scores[:, :, :keys], None, 3)[0].sort().values.tolist()
        assert chosen == [[0, 1, 5] if keys == 6 else [0, 1, 2], [0, 1, 2]]
    allowed = torch.tensor([[[False, True, False, False, False, True]]]).expand(1, 2, 6)
    assert highest(scores, allowed, 3)[0].sort().values.tolist() == [[-1, 1, 5]] * 2


def test_few_tokens_are_all_chosen() -> None:
    tokens = torch.arange(14).view(2, 7) % 61
    sparse = whole_model("sparse")
    wide = Decoder(changed(index_topk=7), device="cpu", vocab_multiple=64)
    wide.load_state_dict(sparse.state_dict())
    dense = Decoder(
        changed(index_num_heads=0, shared_index_layers=None), device="cpu", vocab_multiple=64
    )
    renamed = {
        n.replace("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight").replace(
            "kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"
        ): t
        for n, t in sparse.state_dict().items()
        if ".indexer." not in n
    }
    dense.load_state_dict(renamed, strict=True)
    batch = Batch(tokens_BS=tokens)
    with torch.no_grad():
        assert torch.equal(wide(batch), dense(batch))
        assert not torch.allclose(sparse(batch)[:, 4:], dense(batch)[:, 4:])
        torch.testing.assert_close(sparse(batch)[:, :3], dense(batch)[:, :3])


def test_a_stage_without_the_layer_that_chooses_is_refused() -> None:
    with raises(LayoutError, 1, 0, hint="--pipeline-layout"):
        Decoder(SPARSE, stage=StageLayers(layers=(1,), embedding=False))
    Decoder(SPARSE, stage=StageLayers(layers=(0, 1), embedding=False))


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_head_dim": 3}, "index_head_dim"),
        ({"shared_index_layers": (1, 0)}, "shared_index_layers"),
        ({"shared_index_layers": (0, 1, 1)}, "shared_index_layers"),
    ],
)
def test_what_no_indexer_can_be(keys: dict[str, Any], name: str) -> None:
    with raises(MappingError, name):
        changed(**keys)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((0, 0, 0, 0, 0, 0), (1, 0)),
        ((0, 0, 1, 1, 0, 1), (3, 2)),
        ((0, 1, 0, 1, 0, 1), (2, 1)),
        ((0, 1, 1, 1, 1, 1), (6, 1)),
        ((0, 1, 1, 0, 1, 0), None),
    ],
)
def test_layers_that_share_are_megatrons_steps(
    flags: tuple[int, ...], steps: tuple[int, int] | None
) -> None:
    config = changed(num_layers=6, moe_layer_freq=1, shared_index_layers=flags)
    args = args_from_config(config)
    told = any("indexer" in limit for limit in megatron_limits(config))
    assert told == (steps is None)
    if steps is not None:
        assert (args["dsa_indexer_topk_freq"], args["dsa_indexer_skip_topk_offset"]) == steps
        assert config_from_args(args).indexer.shared_index_layers == (flags if any(flags) else None)


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, None),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 1, 0, 1)),
        ({"index_topk_freq": 4}, (0, 0, 1, 1)),
        ({"index_topk_pattern": "FSSF"}, (0, 1, 1, 0)),
        ({"index_topk_pattern": "FSSF", "indexer_types": ["full"] * 4}, None),
    ],
)
def test_notations_of_glm(keys: dict[str, Any], shared: tuple[int, ...] | None) -> None:
    case = moe_cases.FIRST["glm_moe_dsa"]
    known, theirs = family("glm_moe_dsa"), moe_cases.case_config(case).to_dict()
    del theirs["indexer_types"]
    config = known.read_config(theirs | keys)
    assert config.indexer.shared_index_layers == shared
    assert known.read_config(known.write_config(config)) == config


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v3"])
def test_hybrid_models_call_it_d_and_latent_attention_plus(name: str, tmp_path: Path) -> None:
    moe_cases.save(moe_cases.FIRST[name], tmp_path / "hf")
    how: dict[str, Any] = {"to": "torch_dist", "model_class": "hybrid", "fsync": False}
    reshard(tmp_path / "hf", tmp_path / "meg", pp=2, **how)
    args = open_source(tmp_path / "meg").catalogue.metadata["args"]
    symbol = "D" if name == "deepseek_v32" else "+"
    assert args["hybrid_layer_pattern"] == f"{symbol}-{symbol}E|{symbol}E{symbol}E"
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored_tensors(tmp_path / "back") == stored_tensors(tmp_path / "hf")


@pytest.mark.parametrize("text", ["D-*-", "*-+E"])
def test_attention_is_latent_in_all_layers_or_in_none(text: str) -> None:
    with raises(MappingError, id="unsupported-model"):
        parse_pattern(text)


def test_indexers_stay_unquantized(tmp_path: Path) -> None:
    """As routers do; in the list that engines read they are named."""
    moe_cases.save(moe_cases.FIRST["glm_moe_dsa"], tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    quantize(tmp_path / "hf", tmp_path / "fp8", recipe="fp8_block128", fsync=False)
    names = open_source(tmp_path / "fp8").catalogue
    assert names["model.layers.1.self_attn.indexer.wk.weight"].packing is None
    assert names["model.layers.1.self_attn.q_b_proj.weight"].packing is not None
    assert verify(tmp_path / "hf", tmp_path / "fp8").verdict == "close"
    assert lint(tmp_path / "fp8", target="trtllm").exit_status == 0


def test_args_say_it(tmp_path: Path) -> None:
    config = moe_models.config_of("deepseek_v32", moe_models.transformers_model("deepseek_v32"))
    args = args_from_config(config, ParallelConfig(tp=2))
    assert args["experimental_attention_variant"] == "dsa"
    assert args["dsa_indexer_k_norm_epsilon"] == 1e-6
    with raises(MappingError, "dsa_indexer_topk", hint="--like"):
        config_from_args(args | {"dsa_indexer_topk": None})
