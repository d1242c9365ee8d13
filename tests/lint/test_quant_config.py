"""What config files say against tensors: contradictions are found, and none where none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool.lint.folder_view import open_folder
from megtool.lint.quant_config import parse_hf_quant_config, parse_quantization_config
from megtool.quantize.verification.verify_folder import verify_folder
from tests.support.checkpoints.quantized_folder import QuantizedFolder, make_quantized, randomize
from tests.support.models import tiny_models

Edit = Callable[[dict[str, Any]], None]

UP = "model.layers.2.mlp.up_proj"
BESIDE, INLINE = "hf_quant_config.json", "config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizedFolder]:
    at = tmp_path_factory.mktemp("metadata")
    dense = randomize(tiny_models.llama(at / "llama"))
    mixed = {f".{name}": "FP8" for name in "qkvo"} | {"": "NVFP4"}
    return {
        "fp8": make_quantized(dense, at / "fp8", algos="FP8"),
        "awq": make_quantized(dense, at / "awq", algos="W4A16_AWQ", group=64, smooth=True),
        "nvfp4": make_quantized(dense, at / "nvfp4", algos="NVFP4"),
        "mixed": make_quantized(dense, at / "mixed", algos=mixed),
        "plain kv": make_quantized(dense, at / "plain", algos="FP8", cache=False),
    }


def quantization(work: Edit) -> Edit:
    return lambda value: work(value["quantization"])


def inline(work: Edit) -> Edit:
    return lambda value: work(value["quantization_config"])


def put(key: str, value: Any) -> Edit:
    return lambda said: said.update({key: value})


def excluding(*names: str) -> Edit:
    return lambda said: said.update(exclude_modules=list(names), ignore=list(names))


def drop(key: str) -> Edit:
    def work(said: dict[str, Any]) -> None:
        del said[key]

    return work


def unlisted(said: dict[str, Any]) -> None:
    del said["quantized_layers"][UP]


def listed(said: dict[str, Any]) -> None:
    said["quantized_layers"]["model.layers.9.mlp.up_proj"] = {"quant_algo": "FP8"}


def relisted(said: dict[str, Any]) -> None:
    said["quantized_layers"][UP]["group_size"] = 32


BOTH = (BESIDE, INLINE)
CASES: dict[str, tuple[str, tuple[str, ...], Edit, str]] = {
    "algo of one file": ("fp8", (BESIDE,), put("quant_algo", "NVFP4"), "config-differ"),
    "algo of both files": ("fp8", BOTH, put("quant_algo", "W8A16"), "algo"),
    "group size of one": ("awq", (INLINE,), put("group_size", 128), "group-size"),
    "group sizes differ": ("awq", (BESIDE,), put("group_size", 128), "config-differ"),
    "group size of both": ("awq", BOTH, put("group_size", 32), "group-size"),
    "group size of none": ("awq", BOTH, drop("group_size"), "group-size"),
    "group size of a layer": ("mixed", BOTH, relisted, "group-size"),
    "smoothing not said": ("awq", BOTH, put("pre_quant_scale", False), "pre-quant-scale"),
    "smoothing said and not there": (
        "nvfp4",
        BOTH,
        put("pre_quant_scale", True),
        "pre-quant-scale",
    ),
    "quantized modules excluded": ("fp8", BOTH, excluding("*"), "excluded"),
    "a layer excluded by name": (
        "fp8",
        BOTH,
        excluding("lm_head", "model.layers.2"),
        "excluded",
    ),
    "the head not excluded": ("fp8", BOTH, excluding(), "not-excluded"),
    "layer not listed": ("mixed", BOTH, unlisted, "layers"),
    "layer listed that is not there": ("mixed", BOTH, listed, "layers"),
    "no list of layers": ("mixed", BOTH, drop("quantized_layers"), "layers"),
    "KV cache not said": ("fp8", BOTH, put("kv_cache_quant_algo", "NVFP4"), "kv"),
    "KV cache said": ("plain kv", BOTH, put("kv_cache_quant_algo", "FP8"), "kv"),
    "method of another project": ("fp8", (INLINE,), put("quant_method", "fp8"), "config"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_config_is_found(
    case: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    which, files, work, check = CASES[case]
    one = made[which].copied(tmp_path / "broken")
    for file in files:
        one.edit(file, quantization(work) if file == BESIDE else inline(work))
    found = verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1)
    assert check in {f.id for f in found.findings if f.severity == "error"}, found.findings
    assert found.exit_status == 7


@pytest.mark.parametrize("which", ["fp8", "awq", "nvfp4", "mixed", "plain kv"])
def test_a_right_config_gives_no_finding(which: str, made: dict[str, QuantizedFolder]) -> None:
    one = made[which]
    assert not verify_folder(
        one.source, one.path, one.decisions, one.settlement, threads=1
    ).findings


def test_the_tokenizer_goes_with_the_model(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    (one.path / "tokenizer.json").unlink()
    found = verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1)
    assert [(f.severity, f.id) for f in found.findings] == [("error", "tokenizer")]


def test_files_that_are_no_json_or_not_there_are_findings(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    for number, (name, content) in enumerate(
        [(BESIDE, b"{"), (BESIDE, b"[]"), (BESIDE, None), (INLINE, b"{"), (INLINE, None)]
    ):
        one = made["fp8"].copied(tmp_path / str(number))
        (one.path / name).unlink()
        if content is not None:
            (one.path / name).write_bytes(content)
        found = verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1)
        assert ("config", name) in {(f.id, f.module) for f in found.findings}


def test_an_index_that_names_other_files_is_a_finding(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    (one.path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}'
    )
    found = verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1)
    assert "model.safetensors.index.json" in {f.module for f in found.findings if f.id == "config"}


def test_both_files_are_read_to_the_same(made: dict[str, QuantizedFolder]) -> None:
    for one in made.values():
        with open_folder(one.path) as folder:
            beside, said = (
                parse_hf_quant_config(folder.hf_quant_config),
                parse_quantization_config(folder.quantization),
            )
        assert beside is not None
        assert said is not None
        assert (beside.algo, beside.kv_algo, beside.excluded) == (
            said.algo,
            said.kv_algo,
            said.excluded,
        )
        assert beside.layers == said.layers


def test_excluded_names_are_matched_as_engines_do(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    one.edit(
        BESIDE, quantization(put("exclude_modules", ["lm_head", "model.layers.1*", "*.k_proj"]))
    )
    with open_folder(one.path) as folder:
        said = parse_hf_quant_config(folder.hf_quant_config)
    assert said is not None
    assert said.excludes("lm_head")
    assert said.excludes("model.layers.1.mlp.up_proj")
    assert said.excludes("model.layers.3.self_attn.k_proj")
    assert not said.excludes("model.layers.3.self_attn.q_proj")
    assert said.algo_of("model.layers.3.self_attn.q_proj") == "FP8"


def test_what_modelopt_itself_wrote_is_understood(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "llama")
    (folder / BESIDE).write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "fp8_pb_wo", '
        '"kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]}}'
    )
    with open_folder(folder) as opened:
        said = parse_hf_quant_config(opened.hf_quant_config)
        assert parse_quantization_config(opened.quantization) is None
    assert said is not None
    assert (said.algo, said.kv_algo, said.group_size) == ("FP8_PB_WO", "", None)
