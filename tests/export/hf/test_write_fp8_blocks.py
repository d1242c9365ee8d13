"""Folders in FP8 blocks as DeepSeek publishes them: read, decoded, written, verified, linted."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint, quantize, reshard, verify
from megtool.errors import FormatError, MappingError, UsageError
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import read_config, stored_tensors
from tests.support.models import block_models

Tensors = dict[str, torch.Tensor]
MTP = "model.layers.2."
GATE = f"{MTP}mlp.experts.1.gate_proj.weight"
SCALE = f"{GATE}_scale_inv"
KV = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
COPIES = {
    f"model.layers.{layer}.{copy}.weight"
    for layer in (2, 3)
    for copy in ("embed_tokens", "shared_head.head")
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`blocks`, and the same decoded: `plain`."""
    at = tmp_path_factory.mktemp("blocks")
    block_models.save(at / "plain", at / "blocks")
    return at


def tensors(folder: Path) -> Tensors:
    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def are_equal(a: Tensors, b: Tensors) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(
        (t.dtype, t.shape) == (b[n].dtype, b[n].shape) and torch.equal(raw(t), raw(b[n]))
        for n, t in a.items()
    )


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "etp": 1, "ep": 4}])
def test_weights_and_their_next_layers_are_decoded_for_any_layout(
    made: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Cuts fall inside of blocks: 144 rows of latents, 128 rows of four heads over four ranks."""
    reshard(made / "blocks", tmp_path / "meg", to="torch_dist", fsync=False, **layout)
    reshard(tmp_path / "meg", tmp_path / "hf", to="hf", fsync=False)
    before = stored_tensors(made / "plain")
    assert stored_tensors(tmp_path / "hf") == {n: t for n, t in before.items() if n not in COPIES}
    assert "quantization_config" not in read_config(tmp_path / "hf")
    assert read_config(tmp_path / "hf")["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("between", ["fp8-blocks", "unified", "compressed-tensors"])
def test_codes_are_carried_from_form_to_form(made: Path, tmp_path: Path, between: str) -> None:
    export(made / "blocks", tmp_path / "a", to=between, fsync=False)
    report = export(tmp_path / "a", tmp_path / "b", to="fp8-blocks", fsync=False)
    before = tensors(made / "blocks")
    assert before[f"{KV}_scale_inv"].shape == (2, 1)  # of 144 rows
    assert are_equal(before, tensors(tmp_path / "b"))
    assert (report.requantized, report.decoded) == (0, 0)
    declared = read_config(tmp_path / "b")["quantization_config"]
    assert declared == read_config(made / "blocks")["quantization_config"]
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()
    assert verify(made / "blocks", tmp_path / "b").verdict == "equal"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_engines_load_it(made: Path, engine: str) -> None:
    """What no engine quantizes (eh_proj, and the head of the next layer) is no finding."""
    assert lint(made / "blocks", target=engine).findings == ()


def test_verify_compares_codes_with_weights(made: Path, tmp_path: Path) -> None:
    assert verify(made / "plain", made / "blocks").verdict == "equal"
    folder = shutil.copytree(made / "blocks", tmp_path / "damaged")
    stored = tensors(folder)
    stored[f"{KV}_scale_inv"][1, 0] *= 4
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    report = verify(made / "plain", folder)
    assert [d.tensor for d in report.differences] == ["layers.0.attn.kv_down.weight"]


def test_a_quantized_model_is_written_so(made: Path, tmp_path: Path) -> None:
    """megtool's own recipe, which leaves the layers of multi-token prediction as they are."""
    quantize(made / "plain", tmp_path / "own", recipe="fp8_block128", fsync=False)
    export(tmp_path / "own", tmp_path / "out", to="fp8-blocks", fsync=False)
    declared = read_config(tmp_path / "out")["quantization_config"]
    assert f"{MTP}self_attn.q_a_proj" in declared["modules_to_not_convert"]
    assert f"{MTP}eh_proj" not in declared["modules_to_not_convert"]
    assert verify(made / "plain", tmp_path / "out").verdict == "equal"  # plain was decoded codes
    for engine in ("vllm", "sglang"):
        assert lint(tmp_path / "out", target=engine).exit_status == 0


@pytest.mark.parametrize("recipe", ["int8_weight_only", "fp8_per_channel"])
def test_other_formats_have_no_place_in_it(made: Path, tmp_path: Path, recipe: str) -> None:
    quantize(made / "plain", tmp_path / "own", recipe=recipe, fsync=False)
    with raises(MappingError, id="unsupported-by-engine", hint="fp8_block128"):
        export(tmp_path / "own", tmp_path / "out", to="fp8-blocks")


def test_plain_folders_are_to_be_quantized_first(made: Path, tmp_path: Path) -> None:
    with raises(UsageError, hint="megtool quantize"):
        export(made / "plain", tmp_path / "out", to="fp8-blocks")


Change = Callable[[Tensors], Tensors]
WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "no scale": (lambda t: {n: x for n, x in t.items() if n != SCALE}, FormatError, GATE),
    "scale of fewer rows": (lambda t: t | {SCALE: torch.ones(1, 2)}, FormatError, GATE),
    "no weight": (lambda t: {n: x for n, x in t.items() if n != GATE}, FormatError, SCALE),
    "a part of a layer": (
        lambda t: {n: x for n, x in t.items() if n != f"{MTP}eh_proj.weight"},
        MappingError,
        "mtp.0.proj.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_incomplete_layers_of_multi_token_prediction(made: Path, tmp_path: Path, name: str) -> None:
    change, kind, tensor = WRONG[name]
    folder = shutil.copytree(made / "blocks", tmp_path / "hf")
    save_file(change(tensors(folder)), folder / "model.safetensors", metadata={"format": "pt"})
    for verb, options in ((reshard, {"to": "torch_dist"}), (export, {"to": "fp8-blocks"})):
        with pytest.raises(kind) as caught:
            verb(folder, tmp_path / "out", **options)
        assert caught.value.tensor == tensor  # type: ignore[attr-defined]
        assert not (tmp_path / "out").exists()


def test_layers_that_only_the_config_has_are_told(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(made / "plain", tmp_path / "hf")
    stored = {
        n: t for n, t in tensors(folder).items() if not n.startswith((MTP, "model.layers.3."))
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        reshard(folder, tmp_path / "out", to="torch_dist", fsync=False)
    assert "2 layers of multi-token prediction" in caplog.text
    assert not open_checkpoint(tmp_path / "out").metadata["args"]["mtp_num_layers"]
