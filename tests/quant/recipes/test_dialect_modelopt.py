"""ModelOpt's own presets and recipe files, and its own matching on a real model."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import load_recipe, parse_recipe
from megtool.quant.recipes.match import match_rules
from megtool.quant.recipes.modelopt_quantizers import ALGOS
from megtool.quant.recipes.modelopt_settings import classify_quantizer
from megtool.quant.recipes.rules import RecipeProblems
from tests.support.models import tiny_models
from tests.support.quant.recipe_texts import from_plain

pytestmark = [pytest.mark.peers, pytest.mark.slow]
OURS = {"MXFP6_DEFAULT_CFG", "MXINT8_DEFAULT_CFG"}  # no engine has such formats
NOT_OURS = {
    "FP8_AFFINE_KV_CFG": "bias",
    "NVFP4_AFFINE_KV_CFG": "bias",
    "NVFP4_KV_ROTATE_CFG": "rotate",
}
"""Presets that ask for what no engine format of ours has, and by what word they are refused."""
SPLIT = {"NVFP4_FP8_MHA_CONFIG", "NVFP4_KV_ROTATE_CFG"}  # attention of other kinds, compared below


def plain(value: Any) -> Any:
    """Settings as data, without what was left at its default."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(exclude_unset=True))
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def presets() -> dict[str, dict[str, Any]]:
    """All presets as data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
    return {name: plain(getattr(mtq, name)) for name in sorted(mtq.config.choices)}


def theirs(model: Any, quantizers: type, path: str, parts: tuple[str, str]) -> tuple[str, ...]:
    """What ModelOpt has set at a module: the words of both quantizers, the first one's group."""
    out = []
    groups: list[int] = []
    for part in parts:
        quantizer = getattr(model.get_submodule(path), part, None)
        held = list(quantizer) if type(quantizer).__name__ == "SequentialQuantizer" else [quantizer]
        on = quantizer is not None and all(q.is_enabled for q in held)
        cfg = [
            {
                "num_bits": q.num_bits,
                "axis": q.axis,
                "block_sizes": dict(q.block_sizes or {}),
                "type": "dynamic" if q._dynamic else "static",
            }
            for q in held
            if q is not None
        ]
        word = (
            classify_quantizer(cfg if len(cfg) > 1 else cfg[0], groups if not out else [])[0]
            if on
            else ""
        )
        out.append(word)
    return (*out, str(groups[0] if groups else 0))


def test_every_preset_matches_as_modelopt_does(llama: Path) -> None:
    pytest.importorskip("modelopt")
    transformers = pytest.importorskip("transformers")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg

    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mtq.replace_quant_module(model)
    modules = tiny_models.modules(llama)
    compared = 0
    for name, preset in presets().items():
        entries = [{"quantizer_name": "*", "enable": False}, *preset["quant_cfg"]]
        set_quantizer_by_cfg(model, entries)
        data = {"quant_cfg": entries, "algorithm": preset.get("algorithm")}
        problems = RecipeProblems(name)
        recipe = parse_recipe(from_plain(data), name=name, file=name, problems=problems)
        found = match_rules(recipe, modules, problems)
        if name in OURS:
            with pytest.raises(RecipeError, match="no engine format"):
                problems.raise_all()
            continue
        if name in NOT_OURS:
            with pytest.raises(RecipeError, match=f"has {NOT_OURS[name]}.*no engine format"):
                problems.raise_all()
            continue
        if name not in SPLIT:
            problems.raise_all()
        for d in found.decisions:
            if d.module.kind == "linear":
                (path,) = d.module.names["hf"]
                first, second, group = theirs(
                    model, mtq, path, ("weight_quantizer", "input_quantizer")
                )
                wanted = ALGOS.get((first, second), "keep")
                if name.startswith("NVFP4_SVDQUANT") and wanted == "NVFP4":
                    wanted = "NVFP4_SVD"  # by the algorithm, not by the settings
                assert d.label == wanted, (name, path)
                if d.format is not None and d.format.group_size:
                    assert str(d.format.group_size) == group, (name, path)
                compared += 1
            elif d.module.kind == "kv_cache":
                (path,) = d.module.names["hf"]
                k, v, _ = theirs(model, mtq, path, ("k_bmm_quantizer", "v_bmm_quantizer"))
                assert d.label == (f"KV {k.upper()}" if k and k == v else "keep"), (name, path)
                compared += 1
    assert compared > 30 * 30


def test_every_general_recipe_file_is_read(llama: Path, moe: Path) -> None:
    found = importlib.util.find_spec("modelopt_recipes")
    if found is None:
        pytest.skip("modelopt_recipes is not installed")
    (root,) = map(Path, found.submodule_search_locations or ())
    files = sorted([*root.glob("general/ptq/*.yaml"), *root.glob("general/auto_quantize/*.yaml")])
    assert len(files) > 20
    for path in files:
        recipe = load_recipe(path)
        for model in (llama, moe):
            problems = RecipeProblems(str(path))
            decisions = match_rules(recipe, tiny_models.modules(model), problems).decisions
            problems.raise_all()
            if "experts" not in path.name or model == moe:
                assert {d.label for d in decisions if d.module.kind == "linear"} != {"keep"}, path
            assert {d.label for d in decisions if d.module.kind == "embedding"} == {"keep"}
