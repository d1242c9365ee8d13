"""A model's configuration: its parts, the facts of their fields, and fields by name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pickle
from collections import Counter
from itertools import pairwise

import pytest

from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.facts import FieldFacts, read_facts
from megtool.spec.model_config import CONFIG_FIELDS, PART_OF, PARTS, ModelConfig

SIZES = {
    "num_layers": 3,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
}
CLASSES = {"": ModelConfig, **PARTS}
MAMBA = {"mamba_num_heads": 2, "mamba_head_dim": 4, "mamba_state_dim": 4, "mamba_num_groups": 1}


def test_no_part_is_large_and_no_two_have_a_field_of_one_name() -> None:
    assert all(len(dataclasses.fields(kind)) <= 25 for kind in CLASSES.values())
    names = Counter(f.name for kind in CLASSES.values() for f in dataclasses.fields(kind))
    assert [name for name, count in names.items() if count > 1] == []
    known = set(names) - set(PARTS)
    assert set(CONFIG_FIELDS) == known
    assert known <= set(PART_OF)


@pytest.mark.parametrize("part", CLASSES)
def test_every_field_has_a_docstring_and_facts(part: str) -> None:
    kind = CLASSES[part]
    tree = ast.parse(inspect.getsource(importlib.import_module(kind.__module__)))
    (body,) = (
        n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    )
    documented = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    facts = read_facts(kind)
    assert documented == {f.name for f in dataclasses.fields(kind)} - set(PARTS) == set(facts)
    for name, (field, said) in facts.items():
        assert said.unit, name
        assert (said.unit == "flag") == (field.type == "bool"), name
        assert said.hf != "", name
        assert said.megatron != "", name


def test_what_a_family_completes_is_what_args_do_not_say() -> None:
    def named(holds: object) -> set[str]:
        return {
            n for n, f in CONFIG_FIELDS.items() if f.from_family and (f.megatron is None) is holds
        }

    assert len(named(True)) == 49
    assert named(False) == {
        "activation_limit",
        "embedding_scale",
        "glu_offset",
        "logit_scale",
        "qk_l2_norm",
        "router_fp32",
        "router_scales_input",
        "softmax_scale",
        "tied_values",
    }  # Megatron has args for these, which are silent in most checkpoints
    without = {n for n, f in CONFIG_FIELDS.items() if f.megatron is None and not f.from_family}
    of_labels = {"num_labels", "score_bias", "score_dense"}
    others = {"extra", "latent_norm_eps", "mamba_conv_kernel", "mamba_norm_eps", "router_bias"}
    assert without == others | of_labels


def test_few_fields_leave_the_function_as_it_is() -> None:
    assert {n for n, f in CONFIG_FIELDS.items() if not f.changes_function} == {
        "extra",
        "max_positions",
        "mtp_own_embedding",
        "mtp_own_head",
        "num_mtp_layers",
        "router_fp32",
    }


def test_fields_are_given_read_and_changed_by_name() -> None:
    config = ModelConfig.from_fields(**SIZES, window_size=5, extra={"a": 1})
    assert (config.attention.num_heads, config.window.window_size) == (4, 5)
    assert config.get("num_heads") == 4
    assert config.to_fields() | SIZES == config.to_fields()
    assert ModelConfig.from_fields(**config.to_fields()) == config
    changed = config.with_fields(num_layers=2, num_heads=2, window_size=0)
    assert changed.to_fields() == config.to_fields() | {
        "num_layers": 2,
        "num_heads": 2,
        "window_size": 0,
    }
    assert changed.norms is config.norms
    assert pickle.loads(pickle.dumps(config)) == config


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="no field 'heads'"):
        ModelConfig.from_fields(**SIZES, heads=2)
    config = ModelConfig.from_fields(**SIZES)
    with pytest.raises(TypeError, match="no field 'value_size'"):
        config.with_fields(value_size=2)
    with pytest.raises(KeyError):
        config.get("heads")
    with pytest.raises(TypeError, match="vocab_size"):
        ModelConfig.from_fields(**{n: v for n, v in SIZES.items() if n != "vocab_size"})


@pytest.mark.parametrize("name", CONFIG_FIELDS)
def test_a_value_out_of_range_is_refused_by_name(name: str) -> None:
    kind = next(f.type for c in CLASSES.values() for f in dataclasses.fields(c) if f.name == name)
    wrong: dict[str, tuple[object, ...]] = {
        "bool": (1, "yes"),
        "int": (-1, 1.5, True),
        "float": (float("nan"), "1", True),
        "float | None": (0.0, float("inf"), "1"),
    }
    for value in wrong.get(str(kind), ()):
        with pytest.raises(MappingError, match=f"^{name} is "):
            ModelConfig.from_fields(**SIZES | {name: value})


def test_sets_of_layers_are_found_by_name() -> None:
    kinds = ("M", "*-", "*E")
    config = ModelConfig.from_fields(
        **SIZES, **MAMBA, num_experts=2, layer_kinds=kinds, num_mtp_layers=1
    )
    assert layer_sets.value_of(config, "mamba_layers") == {0}
    assert layer_sets.value_of(config, "dense_layers") == layer_sets.dense_layers(config) == {1}
    assert layer_sets.value_of(config, "moe_layers") == {2}
    assert layer_sets.value_of(config, "has_mtp_moe") is True
    assert layer_sets.value_of(config, "has_mtp_dense") is False
    assert layer_sets.value_of(config, "value_size") == 4
    assert layer_sets.knows("num_heads")
    assert not layer_sets.knows("with_fields")
    of_mtp = {name for name in layer_sets.DERIVED if name.startswith("has_mtp_")}
    assert of_mtp >= {f"has_mtp_{n[:-7]}" for n in layer_sets.DERIVED if n.endswith("_layers")}


def test_facts_are_frozen() -> None:
    assert isinstance(CONFIG_FIELDS["num_heads"], FieldFacts)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG_FIELDS["num_heads"].unit = "layers"  # type: ignore[misc]


def test_layers_of_the_same_sizes_share_one_configuration() -> None:
    config = ModelConfig.from_fields(**SIZES | {"num_layers": 4, "ffn_hidden_size": 48})
    assert config.by_layer() == [config] * 4
    layers = config.with_fields(layer_sizes={"ffn_hidden_size": (32, 48, 32, 48)}).by_layer()
    assert [x.get("ffn_hidden_size") for x in layers] == [32, 48, 32, 48]
    assert layers[0] is layers[2]
    assert layers[1] == config.with_fields(layer_sizes={})
