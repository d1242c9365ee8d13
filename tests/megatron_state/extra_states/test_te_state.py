"""Transformer Engine's extra state without it: read, taken apart, put together, written back."""

from __future__ import annotations

import importlib.util
import io
import pickle
import pickletools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.megatron_state.extra_states.te_grouped_state import (
    join_gemms,
    mix_expert_states,
    split_gemms,
    unmix_expert_states,
)
from megtool.megatron_state.extra_states.te_state import (
    ExtraState,
    convert_release,
    decode,
    detect_release,
    is_empty,
    make_bytes_tensor,
    merge,
    raw_bytes,
    resize_history,
    to_tree,
)
from megtool.number_formats.delayed_scaling import KINDS
from megtool.pickles import reader as pickle_reader
from tests.support.checkpoints.te_payloads import DELAYED_2_4, DELAYED_2_20, MXFP8_2_4

RECIPES = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Stands for the recipe's formats."""

    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


class DelayedScaling:
    """Stands for the recipe's class, where it is not installed."""

    def __init__(self, **fields: Any) -> None:
        known = {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 4}
        self.__dict__.update(known | {"amax_compute_algo": "max"} | fields)


class MXFP8BlockScaling:
    """Stands for a recipe without state."""


def recipe_module() -> ModuleType:
    """Transformer Engine's own recipes where they are installed, else what stands for them."""
    found = importlib.util.find_spec("transformer_engine")
    places = (found.submodule_search_locations if found else None) or []
    for place in places:
        file = Path(place) / "common/recipe/__init__.py"
        spec = importlib.util.spec_from_file_location(RECIPES, file) if file.exists() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[RECIPES] = module
            spec.loader.exec_module(module)
            return module
    module = ModuleType(RECIPES)
    for kind in (_FormatHelper, Format, DelayedScaling, MXFP8BlockScaling):
        setattr(module, kind.__name__, kind)
    return module


@pytest.fixture(autouse=True)
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The modules that recipes are pickled by the names of."""
    for part in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for kind in (_FormatHelper, Format, DelayedScaling, MXFP8BlockScaling):
        monkeypatch.setattr(kind, "__module__", RECIPES)
    monkeypatch.setitem(sys.modules, RECIPES, ModuleType(RECIPES))
    monkeypatch.delitem(sys.modules, "transformer_engine")
    module = recipe_module()
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, RECIPES, module)
    return module


def state(gemms: int, *, length: int = 4, seed: int = 0, recipe: Any = None) -> dict[str, Any]:
    """What Transformer Engine pickles; None leaves the recipe out, as releases 1.x do."""
    made = torch.Generator().manual_seed(seed)
    out = {
        "scale_fwd": torch.rand(3 * gemms, generator=made) + 1,
        "amax_history_fwd": torch.rand(length, 3 * gemms, generator=made),
        "scale_bwd": torch.rand(2 * gemms, generator=made) + 1,
        "amax_history_bwd": torch.rand(length, 2 * gemms, generator=made),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": gemms},
    }
    return out if recipe is None else {"recipe": recipe, **out}


def saved(value: Any) -> Any:
    """An extra state of releases 1.x, as a rank file's inert tree has it."""
    out = io.BytesIO()
    torch.save(value, out)
    outer = io.BytesIO()
    torch.save([out], outer)
    from megtool.pickles.zip_reader import load_object_bytes

    return load_object_bytes(outer.getvalue(), file="")[0]


def found(value: Any) -> ExtraState:
    out = decode(value)
    assert out is not None
    return out


def loaded(held: ExtraState) -> Any:
    """What torch's own readers make of a state that is written."""
    raw = raw_bytes(to_tree(held))
    if held.release == 1:
        return torch.load(io.BytesIO(raw), weights_only=True)
    return pickle.loads(raw)


def assert_same(back: Any, given: Any) -> None:
    tensors = {n for n, t in given.items() if isinstance(t, torch.Tensor)}
    assert back.keys() == given.keys()
    assert all(torch.equal(back[n], given[n]) for n in tensors)
    assert back["extra_fp8_variables"] == given["extra_fp8_variables"]


@pytest.mark.parametrize("gemms", [1, 3])
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_written_back_is_what_was_read(
    gemms: int, protocol: int, recipes: ModuleType
) -> None:
    given = state(gemms, recipe=recipes.DelayedScaling(amax_history_len=4))
    held = found(make_bytes_tensor(pickle.dumps(given, protocol=protocol)))
    assert (held.num_gemms, held.release, held.history_length) == (gemms, 2, 4)
    back = loaded(held)
    assert_same(back, given)
    assert back["recipe"].__dict__ == given["recipe"].__dict__


@pytest.mark.parametrize("gemms", [1, 3])
def test_the_form_of_releases_before_2(gemms: int) -> None:
    given = state(gemms)
    given |= {f"scale_inv_{d}": 1 / given[f"scale_{d}"] for d in ("fwd", "bwd")}
    held = found(saved(given))
    assert held.release == 1
    assert_same(loaded(held), given)


def test_states_that_real_recipes_were_pickled_in() -> None:
    one = found(DELAYED_2_4)
    assert (one.recipe_name, one.num_gemms, one.history_length) == ("DelayedScaling", 1, 4)
    assert (one.scaling_rule.margin, one.scaling_rule.algorithm) == (1, "most_recent")
    assert (one.scaling_rule.max_fwd, one.scaling_rule.max_bwd) == (448, 57344)
    assert one.tensors["amax_history_fwd"][-1].tolist() == [1.25, 1.375, 1.5]
    three = found(DELAYED_2_20)
    assert (three.num_gemms, three.scaling_rule.max_bwd, three.scaling_rule.margin) == (3, 448, 0)
    want = np.float32(448) / three.tensors["amax_history_bwd"].max(0)
    assert np.allclose(three.tensors["scale_bwd"], want, rtol=2e-7, atol=0)
    assert "backward_override" in three.recipe
    flat = found(MXFP8_2_4)
    assert not flat.is_delayed
    assert flat.recipe_name == "MXFP8BlockScaling"
    parts = split_gemms(flat, 2)
    assert parts is not None
    assert join_gemms(parts, "blocked") == flat


def test_only_what_transformer_engine_pickles_is_named() -> None:
    """Readers that allow its recipes and torch's tensors alone refuse any other global."""
    for held in (found(DELAYED_2_4), convert_release(found(saved(state(2))), 2)):
        assert held is not None
        raw = raw_bytes(to_tree(held))
        named = {arg for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL"}
        known = {"torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes"}
        assert {n for n in named if not n.startswith(RECIPES)} <= {
            "collections OrderedDict",
            *known,
        }


def trained(gemms: int, columns: str, seed: int = 0) -> dict[str, Any]:
    """A state in which outputs and gradients of inputs were never quantized, as in all runs."""
    out = state(gemms, seed=seed)
    for d, kinds in (("fwd", 3), ("bwd", 2)):
        at = torch.arange(kinds * gemms)
        idle = (at % kinds if columns == "interleaved" else at // gemms) == kinds - 1
        out[f"amax_history_{d}"][:, idle], out[f"scale_{d}"][idle] = 0, 1
    return out


@pytest.mark.parametrize("gemms", [2, 3, 4, 8])
def test_products_are_told_apart_as_transformer_engine_lays_them_out(gemms: int) -> None:
    """Up to 2.2 kind after kind, since 2.3 product after product; nothing but the data says so."""
    for columns in ("blocked", "interleaved"):
        given = trained(gemms, columns)
        held = found(pickle.dumps(given))
        assert held.column_order == columns
        parts = split_gemms(held, gemms)
        assert parts is not None
        for k, part in enumerate(parts):
            mine = {"blocked": given["scale_fwd"].view(3, -1)[:, k],
                    "interleaved": given["scale_fwd"].view(-1, 3)[k]}[columns]  # fmt: skip
            assert np.array_equal(part.tensors["scale_fwd"], mine)
            history = given["amax_history_bwd"].view(4, 2, -1)[:, :, k]
            if columns == "interleaved":
                history = given["amax_history_bwd"].view(4, -1, 2)[:, k]
            assert np.array_equal(part.tensors["amax_history_bwd"], history)
        whole = join_gemms(parts, "interleaved" if columns == "interleaved" else "blocked")
        assert whole is not None
        assert whole.facts == held.facts
        assert all(np.array_equal(whole.tensors[n], t) for n, t in held.tensors.items())
        assert split_gemms(held, gemms + 1) is None


@pytest.mark.parametrize("gemms", [2, 3, 4, 7])
def test_what_megatron_splits_as_if_blocked_is_put_right(gemms: int) -> None:
    """`TEGroupedLinear._split_extra_state` takes `view(3, -1)[:, k]`, whatever the release."""
    given = trained(gemms, "interleaved")
    saved_parts = []
    for k in range(gemms):
        part = {f"scale_{d}": given[f"scale_{d}"].view(n, -1)[:, k] for d, n in KINDS.items()}
        part |= {f"amax_history_{d}": given[f"amax_history_{d}"].view(4, n, -1)[..., k]
                 for d, n in KINDS.items()}  # fmt: skip
        part["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": 1}
        saved_parts.append(found(pickle.dumps(part)))
    right = unmix_expert_states(saved_parts)
    assert right is not None
    assert right[1] == "interleaved"
    own = split_gemms(found(pickle.dumps(given)), gemms)
    assert own is not None
    for a, b in zip(right[0], own, strict=True):
        assert a is not None
        assert all(np.array_equal(a.tensors[n], t) for n, t in b.tensors.items())
    again = mix_expert_states(own)
    assert again is not None
    for a, b in zip(again, saved_parts, strict=True):
        assert all(np.array_equal(a.tensors[n], t) for n, t in b.tensors.items())
    sound = unmix_expert_states(own)
    assert sound is not None
    assert (sound[0], sound[1]) == (own, "blocked")


def test_what_does_not_tell_its_columns(recipes: ModuleType) -> None:
    """States in which all columns are in use: the recipe's fields name few releases."""
    odd = state(2, recipe=recipes.DelayedScaling(amax_history_len=4))
    held = found(pickle.dumps(odd))
    assert held.column_order is None
    assert split_gemms(held, 2) is None
    assert unmix_expert_states(split_gemms(held, 2, "blocked") or []) is None
    for field, columns in (("interval", "blocked"), ("backward_override", "interleaved")):
        recipe = recipes.DelayedScaling(amax_history_len=4)
        vars(recipe)[field] = None
        assert found(pickle.dumps(odd | {"recipe": recipe})).column_order == columns
    assert found(saved(state(2))).column_order == "blocked"  # 1.x has no other
    nothing = {n: torch.zeros_like(t) if "amax" in n else torch.ones_like(t)
               for n, t in state(2).items() if isinstance(t, torch.Tensor)}  # fmt: skip
    assert len(split_gemms(found(pickle.dumps(nothing)), 2) or ()) == 2


def test_products_that_megatron_itself_split(recipes: ModuleType) -> None:
    """Its parts are views, saved with the whole storage behind them."""
    given = state(3, recipe=recipes.DelayedScaling(amax_history_len=4))
    part = {n: t.view(-1, 3)[:, 1] if n.startswith("scale") else t for n, t in given.items()}
    part |= {n: t.view(4, -1, 3)[..., 1] for n, t in given.items() if n.startswith("amax")}
    held = found(pickle.dumps(part))
    assert np.array_equal(held.tensors["scale_fwd"], given["scale_fwd"].view(3, -1)[:, 1])
    assert len(raw_bytes(to_tree(held))) < len(pickle.dumps(part))


def test_a_product_without_a_state_gets_one_that_saw_nothing() -> None:
    parts = split_gemms(found(pickle.dumps(trained(2, "blocked"))), 2)
    assert parts is not None
    whole = join_gemms([None, parts[1]], "blocked")
    assert whole is not None
    assert whole.num_gemms == 2
    assert whole.tensors["scale_fwd"].reshape(3, 2)[:, 0].tolist() == [1, 1, 1]
    assert not whole.tensors["amax_history_bwd"].reshape(4, 2, 2)[..., 0].any()


def test_histories_of_other_lengths_are_brought_to_the_longest() -> None:
    one, other = found(pickle.dumps(state(1))), found(pickle.dumps(state(1, length=8)))
    whole = join_gemms([one, other], "blocked")
    assert whole is not None
    assert whole.tensors["amax_history_fwd"].shape == (8, 6)


def test_from_release_1_to_2_and_back(recipes: ModuleType) -> None:
    given = state(2, length=16)
    given |= {f"scale_inv_{d}": 1 / given[f"scale_{d}"] for d in ("fwd", "bwd")}
    old = found(saved(given))
    new = convert_release(old, 2)
    assert new is not None
    back = loaded(new)
    assert list(back) == [
        "recipe",
        "scale_fwd",
        "amax_history_fwd",
        "scale_bwd",
        "amax_history_bwd",
        "extra_fp8_variables",
    ]
    assert isinstance(back["recipe"], recipes.DelayedScaling)
    assert back["recipe"].amax_history_len == 16
    assert back["recipe"].fp8_format is recipes.Format.HYBRID
    again = convert_release(new, 1)
    assert again is not None
    assert_same(loaded(again), given)
    flat = found(MXFP8_2_4)
    assert convert_release(flat, 1) is None


def test_a_margin_that_release_1_does_not_keep_shows_in_the_scales() -> None:
    given = state(1)
    for d, largest in (("fwd", 448), ("bwd", 57344)):
        given[f"scale_{d}"] = largest / given[f"amax_history_{d}"].max(0).values / 8
    held = found(saved(given))
    assert held.scaling_rule.margin == 3
    assert found(saved(state(1))).scaling_rule.margin == 0


def test_the_recipe_follows_the_length_of_the_history() -> None:
    held = resize_history(found(DELAYED_2_4), 9)
    assert held.history_length == 9
    assert held.recipe["amax_history_len"] == 9
    assert loaded(held)["recipe"].amax_history_len == 9
    assert found(DELAYED_2_4).recipe["amax_history_len"] == 4


def test_ranks_of_both_releases_are_merged_in_the_form_of_the_first() -> None:
    a, b = found(pickle.dumps(state(1, seed=1))), found(saved(state(1, seed=2)))
    both = merge([a, b])
    assert both is not None
    assert both.release == 2
    want = np.maximum(a.tensors["amax_history_fwd"], b.tensors["amax_history_fwd"])
    assert np.array_equal(both.tensors["amax_history_fwd"], want)
    assert merge([a, found(pickle.dumps(state(2)))]) is None


NOTHING = [None, b"", make_bytes_tensor(b""), pickle.dumps(None), saved(None)]


@pytest.mark.parametrize("value", NOTHING)
def test_what_holds_nothing(value: Any) -> None:
    assert decode(value) is None
    assert is_empty(value)


@pytest.mark.parametrize("value", [pickle.dumps({"scale": 1}), b"\0\1\2", {"a": 1}, [3]])
def test_what_is_not_transformer_engines_is_left_alone(value: Any) -> None:
    assert decode(value) is None
    assert not is_empty(value)


@pytest.mark.parametrize("release", [1, 2])
def test_a_module_without_fp8_in_both_forms(release: int) -> None:
    tree = to_tree(None, release=release)
    assert is_empty(tree)
    assert detect_release(tree) == release
    if release == 1:
        assert torch.load(io.BytesIO(raw_bytes(tree)), weights_only=True) is None
    with pytest.raises(ValueError, match="release"):
        to_tree(found(DELAYED_2_4), release=1)


class Hostile:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        return (__import__("os").system, ("touch /tmp/hostile",))


class Calls:
    """A pickle that calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@contextmanager
def watched() -> Iterator[list[str]]:
    """What is imported, opened to write, or run meanwhile."""
    seen: list[str] = []
    is_on = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on and event in ("import", "os.system", "subprocess.Popen", "exec", "compile"):
            seen.append(f"{event} {args[:1]}")

    sys.addaudithook(hook)
    try:
        yield seen
    finally:
        is_on = False


@pytest.mark.parametrize("release", [1, 2])
@pytest.mark.parametrize("where", ["scale_fwd", "recipe", "storage", "other"])
def test_hostile_states_are_refused_and_nothing_runs(release: int, where: str) -> None:
    inner = state(1) | {"other": 1}
    if where == "storage":  # in the stream that a tensor keeps its storage in
        evil = pickle.dumps(Hostile(), protocol=2)
        head = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2)
        stream = head + pickle.dumps({}, protocol=2) + evil + pickle.dumps([], protocol=2)
        storage = Calls(torch.storage._load_from_bytes, stream + bytes(8))
        rebuild = Calls(torch._utils._rebuild_tensor_v2, storage, 0, (3,), (1,), False, None)
        data = pickle.dumps({"scale_fwd": rebuild})
    else:
        data = pickle.dumps(inner | {where: Hostile()})
    value = make_bytes_tensor(data)
    if release == 1:
        if where == "storage":
            pytest.skip("releases 1.x keep storages in the container")
        value = saved(inner | {where: Hostile()})
    pickle_reader.decode(pickle.dumps({}), file="")  # imports what reading needs
    with watched() as seen, pytest.raises(FormatError, match="hostile"):
        decode(value)
    assert seen == []


def test_numbers_that_do_not_fit_are_refused() -> None:
    data = pickle.dumps(state(1))
    with pytest.raises(FormatError):
        decode(data[:-40])
    short = data.replace(b"K\x04K\x03\x86", b"K\x05K\x03\x86")  # a row more than there is
    assert short != data
    with pytest.raises(FormatError, match="larger than its storage"):
        decode(short)
