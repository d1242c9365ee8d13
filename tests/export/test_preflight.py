"""An export says the same numbers, or is refused before anything is staged."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint
from megtool.cli.app import main
from megtool.errors import FormatError, MegtoolError, UsageError
from megtool.lint.engines import EngineTarget
from megtool.lint.rules import apply_rules, load_rules
from megtool.quant.recipes.engine_support import parse_engine
from tests.support.checkpoints.compressed_folder import compress
from tests.support.checkpoints.quantized_folder import make_quantized, randomize
from tests.support.errors import raises
from tests.support.models import tiny_models

Tensors = dict[str, torch.Tensor]
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
UP = "model.layers.1.mlp.up_proj"
EIGHT = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    at = tmp_path_factory.mktemp("exact")
    dense, moe = (
        randomize(tiny_models.llama(at / "llama")),
        randomize(tiny_models.moe(at / "moe")),
    )
    make_quantized(dense, at / "fp8", algos="FP8")
    make_quantized(dense, at / "nvfp4", algos="NVFP4")
    make_quantized(dense, at / "awq", algos="NVFP4", smooth=True)
    make_quantized(moe, at / "experts", algos="W4A16_NVFP4", cache=False)
    first = dict.fromkeys([".q", ".k", ".v", ".o"], "FP8_PER_CHANNEL_PER_TOKEN")
    first |= dict.fromkeys(
        ["layers.0.mlp.gate", "layers.0.mlp.up", "layers.0.mlp.down"], "FP8_PER_CHANNEL_PER_TOKEN"
    )
    make_quantized(moe, at / "mixed", algos=first | {"": "W4A16_AWQ"}, group=64, cache=False)
    for kind in ("fp8", "int4", "nvfp4"):
        compress(dense, at / f"ct {kind}", kind)
    return at


def copied(made: Path, name: str, to: Path) -> Path:
    return Path(shutil.copytree(made / name, to))


def change(folder: Path, work: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    work(tensors)
    held = {n: t.contiguous() for n, t in tensors.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit(folder: Path, work: Callable[[dict[str, Any]], Any]) -> Path:
    value = json.loads((folder / "config.json").read_text())
    work(value)
    (folder / "config.json").write_text(json.dumps(value))
    return folder


def quiet(source: Path, destination: Path, **options: Any) -> Any:
    return export(source, destination, threads=1, fsync=False, **options)


def refused(source: Path, to: str, match: str, **options: Any) -> MegtoolError:
    """It is, dry or not, and nothing is left beside the source."""
    place = source.parent / "out"
    before = sorted(p.name for p in source.parent.iterdir())
    for dry in (True, False):
        with pytest.raises(MegtoolError, match=match) as found:
            quiet(source, place / "x", to=to, dry_run=dry, **options)
    assert sorted(p.name for p in source.parent.iterdir()) == before
    return found.value


# ---- compressed-tensors that stays so


def groups(**args: Any) -> Callable[[dict[str, Any]], Any]:
    def work(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"].update(args)

    return work


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
        None,
    ],
)
def test_groups_stay_what_they_are(
    made: Path, tmp_path: Path, inputs: dict[str, Any] | None
) -> None:
    """Inputs and caches that no format of ours has: all tensors and all of the config."""
    folder = edit(copied(made, "ct fp8", tmp_path / "a"), groups(input_activations=inputs))
    cache = {"num_bits": 8, "type": "int", "strategy": "attn_head", "symmetric": False}
    edit(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=cache))

    def add(tensors: Tensors) -> None:
        for layer in range(4):
            for last in "kv":
                at = f"model.layers.{layer}.self_attn.{last}"
                tensors[f"{at}_scale"] = torch.tensor([0.5, 0.25])
                tensors[f"{at}_zero_point"] = torch.tensor([3, 4], dtype=torch.int8)
        tensors[f"{Q}.input_zero_point"] = torch.tensor([7], dtype=torch.int8)

    change(folder, add)
    report = quiet(folder, tmp_path / "b", to="compressed-tensors")
    assert (report.exact, report.algo, report.kv_algo) == (28, "float-quantized", "INT8")
    want, got = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    assert sorted(want) == sorted(got)
    for name, t in want.items():
        assert torch.equal(t.reshape(-1).view(torch.uint8), got[name].reshape(-1).view(torch.uint8))
    said = [json.loads((tmp_path / n / "config.json").read_text()) for n in "ab"]
    assert said[0] == said[1]


# ---- what is wrong with the source


def scaled(name: str, factor: float) -> Callable[[Tensors], Any]:
    return lambda t: t[name].mul_(factor)


@pytest.mark.parametrize(
    ("name", "work", "said"),
    [
        (
            "nvfp4",
            scaled(f"{K}.weight_scale_2", 3.0),
            "weight_scale_2 differs|global_scale differs",
        ),
        ("nvfp4", scaled(f"{K}.input_scale", 3.0), "differs"),
        ("fp8", scaled(f"{UP}.weight_scale", float("nan")), "weight_scale is NaN"),
        ("fp8", scaled(f"{UP}.weight_scale", 0.0), "weight_scale is zero"),
        ("nvfp4", scaled(f"{UP}.weight_scale_2", 0.0), "is zero|is infinite|differs"),
        ("fp8", scaled(f"{UP}.input_scale", float("inf")), "input_scale is infinite"),
        ("fp8", scaled(f"{K}.k_scale", float("nan")), "k_scale is NaN"),
    ],
)
@pytest.mark.parametrize("to", ["unified", "compressed-tensors"])
def test_scales_are_wrong(
    made: Path, tmp_path: Path, name: str, work: Callable[[Tensors], Any], said: str, to: str
) -> None:
    folder = change(copied(made, name, tmp_path / "a"), work)
    refused(folder, to, said)


def test_wrong_scales_are_told_of_where_they_are_decoded(made: Path, tmp_path: Path) -> None:
    folder = change(copied(made, "fp8", tmp_path / "a"), scaled(f"{UP}.weight_scale", -1))
    report = quiet(folder, tmp_path / "b", to="hf")
    assert [w for w in report.warnings if "weight_scale is -" in w and UP in w]
    assert not quiet(made / "fp8", tmp_path / "c", to="hf").warnings
    change(folder, scaled(f"{UP}.weight_scale", float("nan")))
    with raises(FormatError, tensor=f"{UP}.weight", id="nan-scales"):
        quiet(folder, tmp_path / "d", to="hf")


@pytest.mark.parametrize(
    "gone",
    ["model.layers.0.input_layernorm.", "model.layers.1.mlp.up_proj.", "model.layers.1.mlp."],
)
@pytest.mark.parametrize("to", ["unified", "compressed-tensors", "vllm"])
def test_a_part_of_the_model_is_missing(made: Path, tmp_path: Path, gone: str, to: str) -> None:
    def work(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(gone)]:
            del tensors[name]

    refused(change(copied(made, "fp8", tmp_path / "a"), work), to, "missing")


def test_a_cache_with_biases(made: Path, tmp_path: Path) -> None:
    def work(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("k_proj.k_scale")]:
            tensors[name.replace("k_scale", "k_bias")] = torch.ones(1, 2, 1, 8)

    folder = change(copied(made, "fp8", tmp_path / "a"), work)
    refused(folder, "compressed-tensors", "no place for biases of keys and values")
    refused(folder, "vllm", "k_bias")
    assert "biases of keys" in str(quiet(folder, tmp_path / "b", to="unified").notes)


def test_a_cache_with_scales_of_heads(made: Path, tmp_path: Path) -> None:
    def work(tensors: Tensors) -> None:
        tensors[f"{K}.k_scale"] = torch.ones(2)

    folder = change(copied(made, "fp8", tmp_path / "a"), work)
    refused(folder, "unified", "2 scales of one KV cache")


@pytest.mark.parametrize("to", ["unified", "compressed-tensors"])
def test_a_head_apart_from_the_embedding(made: Path, tmp_path: Path, to: str) -> None:
    """A tied model whose output layer has codes of its own is tied no more."""

    def work(tensors: Tensors) -> None:
        weight = tensors["lm_head.weight"].float()
        scale = weight.abs().amax() / 448
        tensors["lm_head.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = scale.reshape(())
        tensors["lm_head.input_scale"] = torch.tensor(0.01)

    folder = change(copied(made, "fp8", tmp_path / "a"), work)
    edit(folder, lambda c: c.update(tie_word_embeddings=True))
    edit(folder, lambda c: c["quantization_config"].update(ignore=[]))
    file = folder / "hf_quant_config.json"
    said = json.loads(file.read_text())
    said["quantization"]["exclude_modules"] = []
    file.write_text(json.dumps(said))
    report = quiet(folder, tmp_path / "b", to=to)
    assert "tie_word_embeddings becomes false" in str(report.notes)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = quiet(tmp_path / "b", tmp_path / "c", to="compressed-tensors")
    assert "tie_word" not in str(again.notes)


# ---- engines


def test_an_engine_refuses_before_anything_is_staged(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(made, "awq", tmp_path / "a")
    refused(folder, "unified", "cannot load what would be made: .*pre_quant_scale", target="vllm")
    assert main(["export", str(folder), str(tmp_path / "b"), "--to", "vllm"]) == 5
    assert "resume" not in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["vllm", "hf"])
def test_rules_of_engines_for_plain_folders(made: Path, tmp_path: Path, to: str) -> None:
    folder = edit(copied(made, "llama", tmp_path / "a"), lambda c: c.pop("architectures"))
    target = None if to == "vllm" else "trtllm"
    refused(folder, to, "cannot load what would be made: config.json", target=target)


def test_versions_that_are_not_known(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing is known about vllm 9\.9"):
        quiet(made / "fp8", tmp_path / "out", to="vllm", target="vllm@9.9")
    report = quiet(made / "fp8", tmp_path / "out", to="vllm", target="vllm@0.99")
    assert "is newer than" in str(report.notes)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("fp8", "unified"),
        ("fp8", "compressed-tensors"),
        ("nvfp4", "unified"),
        ("nvfp4", "compressed-tensors"),
        ("ct fp8", "unified"),
        ("ct nvfp4", "compressed-tensors"),
        ("ct int4", "compressed-tensors"),
    ],
)
def test_what_is_planned_is_what_lint_finds(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: str
) -> None:
    """The rules say the same of the plan as of the folder that came of it."""
    from megtool.export import preflight as rules

    seen = set()

    def spied(rules: Any, context: Any, engine: EngineTarget) -> Any:
        sglang = EngineTarget(target=parse_engine("sglang@0.5"))
        seen.update(apply_rules(load_rules(), context, sglang))
        return apply_rules(rules, context, engine)

    monkeypatch.setattr(rules, "apply_rules", spied)
    folder = edit(copied(made, name, tmp_path / "a"), lambda c: c.pop("architectures"))
    far = next(
        n for n in load_file(folder / "model.safetensors") if n.endswith("o_proj.weight_scale")
    )
    change(folder, lambda t: t.update({far: t[far].float().mul(4000).to(t[far].dtype)}))
    quiet(folder, tmp_path / "out", to=to)
    assert seen == set(lint(tmp_path / "out", target="sglang@0.5").findings)
    assert "architectures" in {f.id for f in seen}


# ---- options


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"like": "/nonexistent"}, {"iteration": "77"}]
)
@pytest.mark.parametrize("to", ["unified", "compressed-tensors", "vllm"])
def test_options_that_mean_nothing(
    made: Path, tmp_path: Path, options: dict[str, str], to: str
) -> None:
    with pytest.raises(UsageError, match="no effect"):
        quiet(made / "fp8", tmp_path / "out", to=to, **options)


def test_the_family_is_held_against_it(made: Path, tmp_path: Path) -> None:
    with pytest.raises(MegtoolError, match="unknown model family"):
        quiet(made / "fp8", tmp_path / "out", to="unified", family="nosuch")
    quiet(made / "fp8", tmp_path / "out", to="unified", family="llama")


# ---- experts


def test_experts_have_expressions(made: Path, tmp_path: Path) -> None:
    quiet(made / "mixed", tmp_path / "ct", to="compressed-tensors")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    first, second = config["config_groups"].values()
    assert second["targets"] == [r"re:.*\.experts\.\d+\..+"]
    assert "model.layers.0.mlp.up_proj" in first["targets"]
    quiet(tmp_path / "ct", tmp_path / "back", to="unified")
    want, got = (load_file(p / "model.safetensors") for p in (made / "mixed", tmp_path / "back"))
    assert {n: t.shape for n, t in want.items()} == {n: t.shape for n, t in got.items()}


def test_transformers_loads_experts_of_another_format(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    quiet(made / "mixed", tmp_path / "ct", to="compressed-tensors")
    quiet(made / "mixed", tmp_path / "hf", to="hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ct",
            dtype=torch.bfloat16,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )
        want = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    held = got.state_dict()
    for name, t in want.state_dict().items():
        if t.dim() > 1:
            away = (held[name].float() - t.float()).norm() / t.float().norm()
            assert float(away) < 4e-3, name  # rounded to bfloat16 at other places


def test_scales_of_experts_that_transformers_leaves_out(made: Path, tmp_path: Path) -> None:
    report = quiet(made / "experts", tmp_path / "ct", to="compressed-tensors")
    assert "weight_global_scale of experts" in str(report.notes)
