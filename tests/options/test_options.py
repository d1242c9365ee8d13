"""Options dataclasses: conversion, ranges, YAML files, and options that have no effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.options.export import ExportOptions
from megtool.commands.options.models import EvaluateOptions, GenerateOptions
from megtool.commands.options.reshard import ReshardOptions
from megtool.commands.verbs import VERBS, Verb
from megtool.errors import FormatError, UsageError
from megtool.options.config_file import build_options, read_options
from megtool.options.effects import check_effects, requires
from megtool.options.field import (
    REQUIRED,
    OptionCondition,
    Options,
    all_fields,
    find_option,
    group,
    option,
    option_fields,
    replace_options,
)
from megtool.train.options.config import TrainConfig
from tests.support.errors import raises


@dataclass(frozen=True, kw_only=True)
class Facts:
    has_wings: bool


@dataclass(frozen=True, kw_only=True)
class Flight(Options):
    """Fly."""

    height: int = option("Air", "Height.", 3, minimum=1, metavar="M")
    speed: float | None = option("Air", "Speed.", alias="--velocity")
    mode: Literal["slow", "fast"] = option("Air", "Mode.", "slow")
    paths: tuple[Path, ...] = option("Air", "Paths.", ())
    is_long: bool = option("Air", "Long.", True, needs=(requires("speed", "--speed X"),))
    wings: str | None = option(
        "Air",
        "Wings.",
        needs=(
            OptionCondition(
                holds=lambda options, facts: facts.has_wings,
                reason="{has} no effect without wings",
                hint="leave {it} out",
                on_facts=True,
            ),
        ),
    )
    song: str | None = option(
        "Air",
        "Song.",
        needs=(
            OptionCondition(
                holds=lambda options, facts: options.mode == "fast", reason="{names} {is} not used"
            ),
        ),
    )


def test_values_are_converted() -> None:
    values: dict[str, Any] = {"speed": 2, "paths": "a", "height": None}
    flight = Flight(**values)
    assert (flight.speed, flight.paths, flight.height) == (2.0, (Path("a"),), 3)
    assert isinstance(flight.speed, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"height": 0}, "--height is 0"),
        ({"height": 1.5}, "--height is 1.5"),
        ({"height": True}, "--height is True"),
        ({"speed": float("nan")}, "--speed is nan"),
        ({"mode": "quick"}, "--mode is 'quick'"),
        ({"paths": [3]}, "--paths"),
        ({"is_long": "yes"}, "--is-long is 'yes'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Flight(**values)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_a_file_gives_options_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("velocity: 2e-5\nheight: 9\nmode: fast\npaths: [a, b]\nis-long: false\n")
    flight = build_options(Flight, {"height": 4, "mode": None, "paths": []}, file)
    assert (flight.height, flight.speed, flight.mode) == (4, 2e-5, "fast")
    assert flight.paths == (Path("a"), Path("b"))
    assert not flight.is_long


def test_an_option_that_is_given_leaves_out_its_rivals_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("train-iters: 9\nbf16: true\nlr: 0.5\n")
    config = build_options(TrainConfig, {"epochs": 2, "fp32": True}, file)
    assert (config.epochs, config.train_iters) == (2, None)
    assert (config.fp32, config.bf16, find_option(config, "lr")) == (True, None, 0.5)


@dataclass(frozen=True, kw_only=True)
class Landing(Options):
    """Land."""

    place: Path = option("Air", "Place to land.", REQUIRED)


def test_a_required_option_that_nobody_gives_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("place: here\n")
    assert build_options(Landing, {}, file).place == Path("here")
    with raises(UsageError, "--place is missing") as caught:
        build_options(Landing, {"place": None})
    assert caught.value.hint == "Place to land."


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("tallness: 3", UsageError, "there is no option 'tallness'"),
        ("height: 3\nheight: [", FormatError, "not YAML"),
        ("[1, 2]", FormatError, "holds a list, not options"),
        ("is-long: true\nis_long: true", FormatError, "given twice"),
        ("mode: quick", UsageError, "mode is 'quick'"),
    ],
)
def test_a_bad_file_is_refused(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    file = tmp_path / "o.yaml"
    file.write_text(text)
    with pytest.raises(kind, match=message.replace("[", r"\[")) as caught:
        read_options(Flight, file)
    assert str(file) in str(caught.value)


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(UsageError, match="--no-is-long has no effect without --speed"):
        check_effects(Flight(is_long=False))
    check_effects(Flight(is_long=False, speed=1.0))
    check_effects(Flight(wings="big"))  # facts are not known yet
    with pytest.raises(UsageError, match="--wings has no effect without wings") as caught:
        check_effects(Flight(wings="big"), Facts(has_wings=False))
    assert caught.value.hint == "leave it out"
    check_effects(Flight(wings="big"), Facts(has_wings=True))


def test_what_only_this_run_does_not_use_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_effects(Flight(song="la"))
    assert "--song is not used" in caplog.text


PATHS = {"source": "a", "destination": "b"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            build_options(
                ReshardOptions, {"source": "a", "destination": "b", "average_weights": "1,2"}
            ),
            "without --average",
        ),
        (VerifyOptions(a="a", atol=1.0), "--atol has no effect without B"),
        (
            VerifyOptions(a="a", b="b", atol=1.0, sqnr=3.0),
            "--sqnr has no effect with --atol or --rtol",
        ),
        (
            GenerateOptions(source="a", prompt="x", system="y"),
            "--system has no effect without --chat",
        ),
        (GenerateOptions(source="a", prompt="x", prompts="y"), "--prompt and --prompts"),
        (
            GenerateOptions(source="a", prompt="x", field="y"),
            "--field has no effect without --prompts",
        ),
        (
            EvaluateOptions(source="a", data="x", num_fewshot=2),
            "--num-fewshot has no effect without --tasks",
        ),
        (
            EvaluateOptions(source="a", tasks="x", against="y"),
            "--against has no effect without --data",
        ),
        (
            build_options(
                ExportOptions, {"source": "a", "destination": "b", "to": "gguf", "tp": 2}
            ),
            "--tp has no effect",
        ),
        (
            build_options(
                ExportOptions, {"source": "a", "destination": "b", "to": "hf", "outtype": "f16"}
            ),
            "--outtype has no",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_verbs_refuse_options_without_effect(options: Options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_effects(options)


@dataclass(frozen=True, kw_only=True)
class Fuel(Options):
    litres: int = option("Fuel", "Litres.", 10, minimum=1)
    tanks: tuple[Path, ...] = option("Fuel", "Tanks.", (), is_written=True)


@dataclass(frozen=True, kw_only=True)
class LongHaulFuel(Fuel):
    litres: int = option("Fuel", "Litres.", 90, minimum=50)


@dataclass(frozen=True, kw_only=True)
class Engines(Options):
    fuel: Fuel = group(LongHaulFuel)
    engines: int = option("Engines", "Number.", 2)


@dataclass(frozen=True, kw_only=True)
class LongHaul(Flight):
    engines: Engines = group(Engines)
    has_bar: bool = option("Air", "Bar.", False, needs=(requires("engines", "--engines N"),))

    extra_needs: ClassVar = {requires("height", "--height M"): ("litres",)}


def test_options_of_groups_stand_beside_the_others(tmp_path: Path) -> None:
    names = [entry.name for entry in option_fields(LongHaul)]
    assert names[:5] == ["litres", "tanks", "engines", "has_bar", "height"]
    file = tmp_path / "o.yaml"
    file.write_text("litres: 60\nengines: 4\n")
    options = build_options(LongHaul, {"litres": 70, "tanks": ["a"], "height": 9}, file)
    assert (options.height, options.engines.engines, options.engines.fuel.litres) == (9, 4, 70)
    assert type(options.engines.fuel) is LongHaulFuel
    assert find_option(options, "litres") == 70
    assert find_option(options, "wheels") is None
    assert [e.name for e in option_fields(LongHaul) if e.path == ("engines", "fuel")] == names[:2]
    assert LongHaul().engines.fuel.litres == 90
    with pytest.raises(UsageError, match="--litres is 5"):
        build_options(LongHaul, {"litres": 5})


def test_one_option_of_a_group_is_replaced() -> None:
    options = build_options(LongHaul, {"litres": 70, "engines": 3})
    other = replace_options(options, litres=80, mode="fast")
    assert (other.engines.fuel.litres, other.engines.engines, other.mode) == (80, 3, "fast")
    assert options.engines.fuel.litres == 70


def test_options_of_groups_have_conditions_of_the_verb() -> None:
    check_effects(build_options(LongHaul, {"litres": 70, "height": 9}))
    with pytest.raises(UsageError, match="--litres has no effect without --height"):
        check_effects(build_options(LongHaul, {"litres": 70}))
    with pytest.raises(UsageError, match="--has-bar has no effect without --engines"):
        check_effects(build_options(LongHaul, {"has_bar": True}))


def test_an_option_stands_in_one_group() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Options):
        litres: int = option("Fuel", "Litres.", 1)
        fuel: Fuel = group(Fuel)

    with pytest.raises(TypeError, match="Twice has the option litres twice"):
        all_fields(Twice)


def test_a_shared_option_has_one_value_in_all_its_groups() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Both(Options):
        shared: ClassVar = frozenset({"litres", "tanks"})
        near: Fuel = group(Fuel)
        far: Fuel = group(LongHaulFuel)

    assert [entry.name for entry in all_fields(Both)] == ["litres", "tanks"]
    options = build_options(Both, {"litres": 60})
    assert (options.near.litres, options.far.litres) == (60, 60)
    assert (Both().near.litres, Both().far.litres) == (10, 90)
    assert replace_options(options, litres=70).far.litres == 70


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.api)
def test_every_option_is_declared_in_full(verb: Verb) -> None:
    groups = {f.name for f in fields(verb.options) if "group" in f.metadata}
    names = {f.name for f in fields(verb.options)} - groups
    assert names == {entry.name for entry in all_fields(verb.options) if not entry.path}
    assert groups == {entry.path[0] for entry in all_fields(verb.options) if entry.path}
    for entry in option_fields(verb.options):
        assert entry.spec.panel
        assert entry.spec.help.endswith(".")


def test_the_same_option_means_the_same_in_every_verb() -> None:
    types: dict[str, set[str]] = {}
    for verb in VERBS:
        for entry in option_fields(verb.options):
            if not entry.spec.is_argument and entry.name not in DIFFERENT_TYPES:
                types.setdefault(entry.flag, set()).add(str(entry.hint))
    assert {flag: hints for flag, hints in types.items() if len(hints) > 1} == {}


DIFFERENT_TYPES = {
    "data": "finetune blends several data sets",
    "to": "each verb writes other formats",
    "target": "lint checks several engines",
    "calibration": "quantize merges several files",
    "field": "a name in all of them",
}
