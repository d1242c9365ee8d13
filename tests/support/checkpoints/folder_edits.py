"""Changes to an exported Hugging Face folder: to its config files, and to its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[Path], None]


def edited(name: str, work: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        work(value)
        (folder / name).write_text(json.dumps(value))

    return change


def config(work: Callable[[dict[str, Any]], Any]) -> Change:
    return edited("config.json", work)


def inline(work: Callable[[dict[str, Any]], Any]) -> Change:
    return config(lambda value: work(value["quantization_config"]))


def beside(work: Callable[[dict[str, Any]], Any]) -> Change:
    return edited("hf_quant_config.json", lambda value: work(value["quantization"]))


def said(new: dict[str, Any]) -> Change:
    """The same in both files, under the name each has for it."""

    def change(folder: Path) -> None:
        lists = {"ignore": new["exclude_modules"]} if "exclude_modules" in new else {}
        inline(lambda s: s.update(new | lists))(folder)
        beside(lambda s: s.update(new))(folder)

    return change


def tensors(work: Callable[[Tensors], Any]) -> Change:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        work(held)
        kept = {n: t.contiguous() for n, t in held.items()}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return change


def put(name: str, tensor: torch.Tensor) -> Change:
    return tensors(lambda t: t.update({name: tensor}))


def drop(*names: str) -> Change:
    return tensors(lambda t: [t.pop(n) for n in names])


def plain(module: str, shape: tuple[int, int]) -> Change:
    """A module that is quantized becomes a plain weight."""

    def work(t: Tensors) -> None:
        for name in [n for n in t if n.startswith(module + ".")]:
            del t[name]
        t[f"{module}.weight"] = torch.ones(shape, dtype=torch.bfloat16)

    return tensors(work)


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def only_inline(folder: Path) -> None:
    (folder / "hf_quant_config.json").unlink()


def only_beside(folder: Path) -> None:
    config(lambda c: c.pop("quantization_config"))(folder)


def group(**changes: Any) -> Change:
    def work(s: dict[str, Any]) -> None:
        weights = s["config_groups"]["group_0"]["weights"]
        weights.update(changes)

    return inline(work)


def changed(name: str, work: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda t: t.update({name: work(t[name])}))


def without(module: str) -> Change:
    """A module is nowhere, with all that lies beside it."""
    return tensors(lambda t: [t.pop(n) for n in [*t] if n.startswith(module + ".")])


def written(name: str, value: dict[str, Any]) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(value)) and None


def listed(module: str) -> Change:
    """One more module that is said to be quantized, in both files."""

    def work(s: dict[str, Any]) -> None:
        s["quantized_layers"][module] = {"quant_algo": "NVFP4", "group_size": 16}

    return both(inline(work), beside(work))
