"""Every key of transformers' configurations is read, ignored by the class, or without effect."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.config.without_effect import REASONS, WITHOUT_EFFECT
from megtool.convert.families.detection import detect_family, family, family_names

pytest.importorskip("transformers")

from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.fidelity.whole_configs import CASES, Seen, whole_config


def declared_keys(name: str, kind: str) -> dict[str, Any]:
    """The keys of a configuration class, of the text model where it has one; none is null."""
    keys = CONFIG_MAPPING[kind]().to_dict()
    inner = keys.get("text_config")
    if family(name).nested is None or not isinstance(inner, dict):
        return dict.fromkeys(keys, 0)
    return {"text_config": {**dict.fromkeys(inner, 0), "model_type": inner["model_type"]}}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_key_of_a_configuration_class_is_unknown(name: str, kind: str) -> None:
    assert family(name).unknown_keys(declared_keys(name, kind)) == ()


def test_a_new_key_is_found() -> None:
    stored = dict.fromkeys([*family("llama").stored_keys, "use_cache"], 0)
    assert family("llama").unknown_keys(stored | {"rope_wobble": 0.1, "other": None}) == (
        "rope_wobble",
    )
    assert family("mistral3").unknown_keys({"text_config": {"wobble": 1}, "vision": 2}) == (
        "wobble",
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_looked_at_is_a_key_that_is_read(name: str, kind: str) -> None:
    """A setting names all keys that it reads, so that none is both read and unknown."""
    whole = whole_config(name, kind) | {"architectures": [family(name).architectures[0]]}
    read = detect_family(whole)
    if read.nested is not None:
        return
    seen = Seen(whole)
    read.read_config(seen)
    assert seen.names - {*read.stored_keys, "model_type", "architectures"} == set()


def test_keys_have_one_reason() -> None:
    keys = [k for keys in WITHOUT_EFFECT.values() for k in keys]
    assert sorted(keys) == sorted(REASONS)


def test_generation_is_said_elsewhere() -> None:
    """What transformers moves to generation_config.json is no setting of a model."""
    assert set(GenerationConfig._get_default_generation_params()) <= REASONS.keys()


def test_a_key_that_a_family_ignores_is_not_read_as_well() -> None:
    for name in family_names():
        found = family(name)
        assert set(found.stored_keys) & found.ignores.keys() == set(), name
