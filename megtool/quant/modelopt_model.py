"""ModelOpt model: what ModelOpt has quantizers for in a model, seen without any weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool.errors import UsageError
from megtool.quant.backend_modelopt import held_module
from megtool.quant.calibration.activation_sites import Point
from megtool.quant.modelopt_import import no_bars, packages, quiet
from megtool.quant.recipes.match import Decision


def check_quantizers(
    hf_config: bytes,
    config: Mapping[str, Any],
    decisions: Sequence[Decision],
    points: Sequence[Point],
) -> None:
    """Refuse modules that ModelOpt could not quantize one by one, such as experts that transformers
    has fused.

    The model of `hf_config`, a config.json, is built on torch's meta device, and ModelOpt puts
    quantizers into it by `config` (`backend_modelopt.modelopt_config`), as into the real one.

    Raises:
        MissingPackageError: ModelOpt or transformers is not installed.
        RecipeError: a module has no quantizer; says which.
        UsageError: transformers builds no such model.
    """
    mtq, transformers = packages()
    import torch

    with tempfile.TemporaryDirectory(prefix="megtool-") as folder, quiet(), no_bars(transformers):
        (Path(folder) / "config.json").write_bytes(hf_config)
        try:
            model_config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as e:
            first = next(iter(str(e).splitlines()), type(e).__name__)
            raise UsageError(
                f"--backend modelopt runs transformers' model, and that is none: {first}",
                hint="--backend megtool runs megtool's own",
            ) from e
        entries = list(config["quant_cfg"])  # a copy: it changes what it is given
        model = mtq.quantize(model, {**config, "quant_cfg": entries, "algorithm": None}, None)
    modules = dict(model.named_modules())
    by_name = {d.module.name: d for d in decisions if d.format is not None}
    for site in points:
        for module in site.modules:
            if module in by_name:
                quantizer = "k_bmm" if site.what == "kv_cache" else "weight"
                held_module(modules, by_name[module], quantizer)
