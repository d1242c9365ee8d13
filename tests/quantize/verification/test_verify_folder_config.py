"""What config files say beside formats, and the files that go with the tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool.options.target import TargetOptions
from megtool.quant.packed_tensors.hf_config import inline
from megtool.quantize.verification.verify_folder import FolderVerification, verify_folder
from megtool.reshard.target import make_target
from tests.support.checkpoints.quantized_folder import QuantizedFolder, make_quantized, randomize
from tests.support.models import tiny_models

Edit = Callable[[dict[str, Any]], None]
BESIDE, INLINE = "hf_quant_config.json", "config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizedFolder]:
    at = tmp_path_factory.mktemp("said")
    dense = randomize(tiny_models.llama(at / "llama", num_hidden_layers=2))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (dense / name).write_text("{}")
    out = {
        "fp8": make_quantized(dense, at / "fp8", algos="FP8"),
        "awq": make_quantized(dense, at / "awq", algos="W4A16_AWQ", group=64, smooth=True),
        "nvfp4": make_quantized(dense, at / "nvfp4", algos="NVFP4"),
        "nvfp4 awq": make_quantized(dense, at / "nvfp4_awq", algos="NVFP4", smooth=True),
    }
    for name in ("fp8", "nvfp4"):  # with groups, as they are written
        beside: dict[str, Any] = {}
        out[name].edit(BESIDE, lambda file, to=beside: to.update(file["quantization"]))  # type: ignore[misc]
        out[name].edit(
            INLINE,
            lambda file, said=beside: file.update(quantization_config=inline(said)),  # type: ignore[misc]
        )
    return out


def proof(one: QuantizedFolder) -> FolderVerification:
    small = make_target(
        one.source, TargetOptions(destination=Path(), to="hf")
    ).destination.small_files
    return verify_folder(
        one.source, one.path, one.decisions, one.settlement, auxiliary_files=small, threads=1
    )


def put(key: str, value: Any) -> Edit:
    return lambda said: said.update({key: value})


def drop(key: str) -> Edit:
    return lambda said: said.pop(key)


def other_bits(said: dict[str, Any]) -> None:
    said["config_groups"]["group_0"]["weights"]["num_bits"] = 4


def other_group(said: dict[str, Any]) -> None:
    said["config_groups"]["group_0"]["weights"]["group_size"] = 128


def no_inputs(said: dict[str, Any]) -> None:
    del said["config_groups"]["group_0"]["input_activations"]


BOTH = (BESIDE, INLINE)
CASES: dict[str, tuple[str, tuple[str, ...], Edit, str]] = {
    "smoothed under the plain name": ("nvfp4 awq", BOTH, put("quant_algo", "NVFP4"), "algo"),
    "plain under the smoothed name": ("nvfp4", BOTH, put("quant_algo", "NVFP4_AWQ"), "algo"),
    "zero points": ("nvfp4", BOTH, put("has_zero_point", True), "config"),
    "groups of other bits": ("fp8", (INLINE,), other_bits, "config-groups"),
    "groups of another size": ("nvfp4", (INLINE,), other_group, "config-groups"),
    "groups without inputs": ("fp8", (INLINE,), no_inputs, "config-groups"),
    "no scheme of the cache": ("fp8", (INLINE,), drop("kv_cache_scheme"), "kv"),
    "group size in one file": ("awq", (BESIDE,), drop("group_size"), "group-size"),
    "group size in the other": ("awq", (INLINE,), drop("group_size"), "group-size"),
    "factors in one file": ("awq", (BESIDE,), drop("pre_quant_scale"), "pre-quant-scale"),
}


@pytest.mark.parametrize("which", ["fp8", "awq", "nvfp4", "nvfp4 awq"])
def test_what_is_right_gives_no_finding(which: str, made: dict[str, QuantizedFolder]) -> None:
    assert not proof(made[which]).findings


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_wrongly_is_found(
    case: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    which, files, work, check = CASES[case]
    one = made[which].copied(tmp_path / "broken")
    for file in files:
        key = "quantization" if file == BESIDE else "quantization_config"
        one.edit(file, lambda value, key=key: work(value[key]))  # type: ignore[misc]
    found = proof(one)
    assert check in {f.id for f in found.findings if f.severity == "error"}, found.findings


def test_engines_know_the_file_by_its_producer(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    one.edit(BESIDE, drop("producer"))
    assert [(f.id, f.module) for f in proof(one).findings] == [("config", BESIDE)]


@pytest.mark.parametrize(
    "change", [put("rms_norm_eps", 1e-2), put("rope_theta", 5e5), drop("max_position_embeddings")]
)
def test_the_model_is_the_sources(
    change: Edit, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    one.edit(INLINE, change)
    found = {(f.severity, f.id, f.module) for f in proof(one).findings}
    assert ("error", "config", INLINE) in found


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("gone", [True, False])
def test_files_beside_are_the_sources(
    name: str, gone: bool, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    (one.path / name).unlink()
    if not gone:
        (one.path / name).write_bytes(b"{")
    found = {(f.id, f.module) for f in proof(one).findings}
    assert ("file", name) in found
