"""Whole folders beside those that ModelOpt exports: the same files and keys, equal in every byte.

Known differences, in which ours is what loaders ask for: config.json also has `group_size` (and
`pre_quant_scale`, where false is true), algorithms are in capitals but for `fp8_pb_wo`,
only linear modules are excluded (no loader quantizes embeddings), the producer has one key more,
and the tokenizer travels.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool.options.execution import ExecutionOptions
from megtool.options.target import TargetOptions
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.resolve import resolve_recipe
from megtool.quantize.layout.write import write
from tests.support.folders import stored_tensors

pytestmark = pytest.mark.peers

PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_per_channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8_block128": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8_weight_only": "INT8_WEIGHT_ONLY_CFG",
    "int4_weight_only": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
    "w4a16_nvfp4": "W4A16_NVFP4_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "int8_sq": "INT8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
LARGEST = {"fp8": 448.0, "w4a8_awq": 448.0, "int8_sq": 127.0, "nvfp4": 6 * 448.0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with rows that are zero, tiny and large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"):
        weight = model.model.layers[0].get_submodule(name).weight.data
        weight[0] = 0
        weight[2] *= 2.0**-20
        weight[3, ::5] *= 64
    folder = tmp_path_factory.mktemp("exported") / "source"
    model.save_pretrained(folder)
    return folder


def export(source: Path, preset: str, out: Path) -> Path:
    """What ModelOpt makes of it."""
    pytest.importorskip("modelopt")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = copy.deepcopy(getattr(mtq, preset))
        if isinstance(config["algorithm"], dict) or config["algorithm"] not in (None, "max"):
            config["algorithm"] = "max"
        runs = not preset.startswith(("MX", "NVFP4", "W4A16"))
        tokens = torch.arange(16)[None]
        mtq.quantize(model, config, (lambda m: m(tokens)) if runs else None)
        if preset.startswith("NVFP4"):  # it cannot be run here: amax as if it had been
            for module in model.modules():
                quantizer = getattr(module, "input_quantizer", None)
                if quantizer is not None and quantizer.is_enabled:
                    quantizer.amax = torch.tensor(3.0)
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)
    return out


@pytest.mark.parametrize("recipe", PRESETS)
def test_equal_in_every_byte(source: Path, tmp_path: Path, recipe: str) -> None:
    theirs = export(source, PRESETS[recipe], tmp_path / "theirs")
    want = stored_tensors(theirs)
    decided = resolve_recipe(source, recipe)
    settlement = QParams()
    for d in decided.matched.decisions:
        if d.format is None or not d.format.algo:
            continue
        stored = want.get(f"{d.module.names_in('hf')[0]}.input_scale")
        scale = 0.0 if stored is None else float(np.frombuffer(stored[2], np.float32)[0])
        # ModelOpt divides bfloat16 in bfloat16, where FP8 has one scale.
        settlement.weights[d.module.name] = WeightQParams(
            module=d.module.name,
            format=replace(d.format, round_twice=recipe == "fp8"),
            input_amax=scale * LARGEST.get(recipe, 0),
        )
    ours = tmp_path / "ours"
    write(
        decided.source,
        decided.matched.decisions,
        settlement,
        TargetOptions(to="hf", destination=ours),
        ExecutionOptions(fsync=False),
    )
    found = stored_tensors(ours)
    assert found.keys() == want.keys()
    for name, (kind, shape, data) in want.items():
        assert found[name][:2] == (kind, shape), name
        if name.endswith("input_scale"):  # through amax and back
            a, b = np.frombuffer(found[name][2], "<f4"), np.frombuffer(data, "<f4")
            assert np.allclose(a, b, rtol=2.0**-22), name
        else:
            assert found[name][2] == data, name
    files = {p.name for p in ours.iterdir()}
    assert {p.name for p in theirs.iterdir()} <= files
    check_said(json.loads((theirs / "hf_quant_config.json").read_text()), ours, theirs, recipe)


def check_said(quant: dict[str, Any], ours: Path, theirs: Path, recipe: str) -> None:
    """Both config files say what ModelOpt's say."""
    mine = json.loads((ours / "hf_quant_config.json").read_text())["quantization"]
    other = quant["quantization"]
    assert mine["quant_algo"].upper() == other["quant_algo"].upper()
    if other.get("pre_quant_scale"):  # it says so of every INT4, and none is there
        assert mine["pre_quant_scale"] is False
    assert {*mine["exclude_modules"], "model.embed_tokens"} == set(other["exclude_modules"])
    alike = other.keys() - {"pre_quant_scale", "quant_algo", "exclude_modules"}
    assert {k: mine.get(k) for k in alike} == {k: other[k] for k in alike}
    inline = json.loads((ours / "config.json").read_text())["quantization_config"]
    beside = json.loads((theirs / "config.json").read_text())["quantization_config"]
    assert {k for k in beside if k not in inline} == set()
    assert inline["ignore"] == mine["exclude_modules"]
    assert inline.get("config_groups") == beside.get("config_groups")
