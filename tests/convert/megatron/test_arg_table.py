"""Every arg of Megatron stands in one table: compared with the megatron-core that is installed."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megtool.convert.megatron.arg_table import NO_EFFECT, READ
from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.settings import UNSUPPORTED, find_unknown
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import CONFIG_FIELDS
from tests.support.checkpoints.canonical_views import config

CLASSES = {
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "transformer/heterogeneous/heterogeneous_config.py": ("HeterogeneousTransformerConfig",),
    "model_parallel_config.py": ("ModelParallelConfig",),
    "models/gpt/gpt_model.py": ("GPTModel",),
    "models/mamba/mamba_model.py": ("MambaModel",),
    "models/bert/bert_model.py": ("BertModel",),
    "models/T5/t5_model.py": ("T5Model",),
}


def installed_core() -> Path | None:
    """The folder of megatron-core, which is not imported."""
    spec = importlib.util.find_spec("megatron")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((p for place in places if (p := Path(place) / "core").is_dir()), None)


def names_of(file: Path, kind: str) -> set[str]:
    """The fields of a dataclass, or the arguments of a constructor."""
    (node,) = (
        n
        for n in ast.parse(file.read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == kind
    )
    fields = {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    taken = {a.arg for n in made for a in (*n.args.args, *n.args.kwonlyargs)} - {"self"}
    return fields | taken


@pytest.mark.parametrize("file", CLASSES)
def test_the_installed_release_has_no_other_settings(file: str) -> None:
    core = installed_core()
    if core is None or not (core / file).is_file():
        pytest.skip("megatron-core is not installed, or has no such model")
    names = set().union(*(names_of(core / file, kind) for kind in CLASSES[file]))
    assert names, file
    assert find_unknown(names) == []


def test_an_arg_stands_in_one_table() -> None:
    without = [name for names in NO_EFFECT.values() for name in names]
    assert len(without) == len(set(without))
    assert not set(without) & set(READ)
    assert not set(without) & {s.name for s in UNSUPPORTED}


def test_args_that_are_read_say_fields_there_are() -> None:
    assert {f for fields in READ.values() for f in fields} <= set(CONFIG_FIELDS)
    assert all(READ.values())
    stated = {facts.megatron for facts in CONFIG_FIELDS.values() if facts.megatron}
    assert stated <= set(READ)


def test_args_that_are_written_are_known() -> None:
    args = args_from_config(config(embedding_scale=2.0, num_experts=4), ParallelConfig())
    assert find_unknown(args) == []


def test_unknown_args_are_named() -> None:
    assert find_unknown({"num_layers": 2, "our_own_trick": 1, "_private": 0}) == ["our_own_trick"]
