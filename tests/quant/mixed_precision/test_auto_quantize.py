"""Formats chosen by what they cost: measured on a small model, and decided within a budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool.errors import CalibrationError, FormatError, RecipeError, UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.micro_batches import MicroBatch
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.calibration.solve_qparams import solve_qparams
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.mixed_precision.auto_quantize import FormatChoice, choose
from megtool.quant.mixed_precision.sensitivity import spread
from megtool.quant.recipes.decision_units import key_of, list_units
from megtool.quant.recipes.engine_support import parse_engine
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.match import match_rules
from megtool.quant.recipes.rules import RecipeProblems
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from tests.support.errors import raises
from tests.support.models import family_models, tiny_models
from tests.support.quant.loaded import measure_sensitivities, points_of, source_of
from tests.support.quant.recipe_texts import recipe_from


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("auto") / "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def moe_random(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixture of experts with weights that are not zero."""
    folder = tmp_path_factory.mktemp("auto") / "moe"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(t.shape, generator=generator) * 0.1).to(t.dtype)
        for name, t in load_file(moe / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((moe / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def decided(folder: Path) -> ResolvedRecipe:
    return resolve_recipe(folder, "auto_nvfp4_fp8")


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [Batch(tokens_BS=torch.randint(0, 128, (3, 32), generator=generator)) for _ in range(2)]


@pytest.fixture(scope="module")
def sensitivities(decided: ResolvedRecipe, batches: list[Batch]) -> Sensitivities:
    return measure_sensitivities(decided, batches)


def chosen(decided: ResolvedRecipe, sensitivities: Sensitivities, **more: object) -> FormatChoice:
    return choose(
        decided.matched.decisions,
        decided.recipe,
        sensitivities,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def true_loss(decided: ResolvedRecipe, batches: list[Batch]) -> Callable[[FormatChoice], float]:
    """The divergence of the model with a whole choice simulated, over the data."""
    source, points = source_of(decided), points_of(decided)
    decoder = load(source, dtype="float32")
    recorder, statistics = ActivationRecorder(decoder, points), {}
    with torch.inference_mode():
        for layer in decoder.stage.layers:
            recorder.start(layer)
            for batch in batches:
                recorder.set_batch(batch)
                decoder(batch)
            statistics |= recorder.collect()
        recorder.start(None)
        for batch in batches:
            recorder.set_batch(batch)
            decoder(batch)
        statistics |= recorder.collect()
        expected = [decoder(b).flatten(0, 1) for b in batches]

    def loss(choice: FormatChoice) -> float:
        by_name = {d.module.name: d for d in choice.decisions}
        with CanonicalWeights(source) as weights:
            settled = solve_qparams(points, statistics, by_name, decided.recipe, weights)
        with FakeQuantModel(decoder, points, settled), torch.inference_mode():
            found = [decoder(b).flatten(0, 1) for b in batches]
        log_p, log_q = (torch.cat(x).double().log_softmax(-1) for x in (expected, found))
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    return loss


def mixed(decided: ResolvedRecipe, choice: FormatChoice, seed: int) -> FormatChoice:
    """Formats dealt out to units of the same kind at random: the same bytes, another place."""
    rng = np.random.default_rng(seed)
    by_name = {d.module.name: d for d in choice.decisions}
    for _, some in itertools.groupby(
        sorted(choice.units, key=lambda u: u.name.partition(".")[2].partition(".")[2]),
        key=lambda u: u.name.partition(".")[2].partition(".")[2],
    ):
        units = list(some)
        for unit, other in zip(units, rng.permutation(len(units)), strict=True):
            given = by_name_of(choice, units[other].modules[0])
            for m in unit.modules:
                by_name[m] = replace(by_name[m], format=given)
    return replace(choice, decisions=tuple(by_name.values()))


def by_name_of(choice: FormatChoice, module: str):  # type: ignore[no-untyped-def]
    return next(d.format for d in choice.decisions if d.module.name == module)


def test_a_unit_is_what_runs_as_one(decided: ResolvedRecipe, moe: Path) -> None:
    units = list_units(decided.matched.decisions, decided.recipe)
    assert [u.name for u in units[:4]] == [
        "layers.0.attn.qkv",
        "layers.0.attn.o",
        "layers.0.mlp.fc1",
        "layers.0.mlp.down",
    ]
    assert units[0].modules == ("layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v")
    assert len(units) == 12
    experts = resolve_recipe(moe, "auto_nvfp4_fp8")
    found = {u.name: u for u in list_units(experts.matched.decisions, experts.recipe)}
    assert len(found["layers.2.mlp.experts"].modules) == 12
    assert "layers.2.mlp.router" not in found


def test_every_unit_costs_what_it_costs_alone(
    decided: ResolvedRecipe,
    sensitivities: Sensitivities,
    true_loss: Callable[[FormatChoice], float],
) -> None:
    """The streamed measure is the divergence of the whole model with that unit rounded."""
    everything = chosen(decided, sensitivities, bits=16)
    units = list_units(decided.matched.decisions, decided.recipe)
    for unit in (units[0], units[6], units[11]):
        for found in unit.formats:
            alone = replace(
                everything,
                decisions=tuple(
                    replace(d, format=found if d.module.name in unit.modules else None)
                    for d in everything.decisions
                ),
            )
            key = key_of(found, decided.recipe)
            expected = true_loss(alone)
            assert sensitivities.losses[unit.name][key] == pytest.approx(
                expected, rel=0.01, abs=1e-8
            )


def test_little_memory_and_layers_on_disk_change_nothing(
    decided: ResolvedRecipe, sensitivities: Sensitivities, batches: list[Batch]
) -> None:
    found = measure_sensitivities(decided, batches, memory_bytes=1, stream_layers=False)
    for name, some in sensitivities.losses.items():
        assert found.losses[name] == pytest.approx(dict(some), rel=1e-6, abs=1e-12)
    few = measure_sensitivities(decided, batches, most_tokens=40)
    assert few.num_tokens == 64, "whole rows"


def test_layers_that_share_keys_are_not_measured_one_by_one(tmp_path: Path) -> None:
    """KL runs layers from the output of the one before, which is not all that Gemma 4 E2B's read;
    gradients are of all at once."""
    source = family_models.save("gemma4-small", tmp_path / "model")
    tokens = [Batch(tokens_BS=torch.arange(16)[None] % 128)]
    decided = resolve_recipe(source, "auto_nvfp4_fp8")
    with raises(UsageError, "keys and values of another", hint="`gradient`"):
        measure_sensitivities(decided, tokens)
    recipe = replace(decided.recipe, algorithm={"method": "gradient"})
    measured = measure_sensitivities(replace(decided, recipe=recipe), tokens)
    assert {name.split(".")[1] for name in measured.losses if "layers." in name} >= {"2", "3"}


def test_a_heads_inputs_are_rounded_with_it(
    folder: Path,
    batches: list[Batch],
    checkout: Path,
    tmp_path: Path,
    true_loss: Callable[[FormatChoice], float],
) -> None:
    text = (checkout / "quant_recipes" / "auto_nvfp4_fp8.yaml").read_text()
    head = "  - match: {role: lm_head}"
    before, _, after = text.partition(head)
    rest = after[after.index("  - match") :]
    (tmp_path / "head.yaml").write_text(before + rest)
    decided = resolve_recipe(folder, tmp_path / "head.yaml")
    found = measure_sensitivities(decided, batches)
    everything = chosen(decided, found, bits=16)
    unit = next(u for u in list_units(decided.matched.decisions, decided.recipe) if u.layer is None)
    for f in unit.formats:
        alone = tuple(
            replace(d, format=f if d.module.name in unit.modules else None)
            for d in everything.decisions
        )
        expected = true_loss(replace(everything, decisions=alone))
        key = key_of(f, decided.recipe)
        assert found.losses[unit.name][key] == pytest.approx(expected, rel=0.01, abs=1e-8)


@pytest.mark.parametrize("method", ["kl_div", "gradient"])
def test_progress_goes_on_all_the_time(
    decided: ResolvedRecipe, batches: list[Batch], method: str
) -> None:
    said: list[tuple[str, int, int]] = []
    recipe = replace(decided.recipe, algorithm={"method": method})
    measure_sensitivities(
        replace(decided, recipe=recipe), batches, progress=lambda *about: said.append(about)
    )
    assert {stage for stage, _, _ in said} == {"sensitivity"}
    totals = {total for _, _, total in said}
    assert len(totals) == 1, "what is expected is known from the first word on"
    assert sum(n for _, n, _ in said) == totals.pop()
    assert sum(n > 0 for _, n, _ in said) > 3


def test_few_tokens_are_taken_from_all_over_the_data() -> None:
    def piece(first: int, rows: int, width: int, **more: torch.Tensor) -> MicroBatch:
        tokens = torch.arange(first * 1000, first * 1000 + rows * width).view(rows, width)
        return MicroBatch(batch=Batch(tokens_BS=tokens, **more), first_row=first)

    pieces = [piece(0, 4, 200), piece(4, 4, 200)]
    some = spread(pieces, 256)
    assert [p.batch.shape for p in some] == [(2, 64), (2, 64)]
    assert torch.equal(some[1].batch.tokens_BS, pieces[1].batch.tokens_BS[::2, :64])
    assert [p.batch.shape for p in spread(pieces, 10**6)] == [(4, 200), (4, 200)]
    assert [p.batch.shape for p in spread([piece(0, 2, 200)], 256)] == [(2, 128)], "of few, more"
    left = torch.ones(4, 200, dtype=torch.bool)
    left[:, :150] = False
    (whole,) = spread([piece(0, 4, 200, valid_BS=left)], 256)
    assert whole.batch.shape == (2, 200), "what stands on the right is not cut off"


def test_the_choice_is_better_than_others_of_its_size(
    decided: ResolvedRecipe,
    sensitivities: Sensitivities,
    true_loss: Callable[[FormatChoice], float],
) -> None:
    choice = chosen(decided, sensitivities, bits=6)
    assert choice.num_bytes <= choice.budget_bytes
    assert choice.bound == choice.loss
    labels = {u.label for u in choice.units}
    assert len(labels) > 1
    loss = true_loss(choice)
    others = sorted(true_loss(mixed(decided, choice, seed)) for seed in range(8))
    assert loss <= others[len(others) // 2]
    assert loss == pytest.approx(choice.loss, rel=1), "costs about add up"


def test_gradients_tell_the_same_story(
    decided: ResolvedRecipe, sensitivities: Sensitivities, batches: list[Batch]
) -> None:
    recipe = replace(decided.recipe, algorithm={"method": "gradient"})
    found = measure_sensitivities(replace(decided, recipe=recipe), batches)
    assert found.method == "gradient"
    pairs = []
    for unit in list_units(decided.matched.decisions, decided.recipe):
        for f in unit.formats:
            pairs.append(
                (
                    sensitivities.losses[unit.name][key_of(f, decided.recipe)],
                    found.losses[unit.name][key_of(f, recipe)],
                )
            )
    logs = np.log(np.array(pairs))
    assert np.corrcoef(logs.T)[0, 1] > 0.8


def test_more_bits_cost_no_more(decided: ResolvedRecipe, sensitivities: Sensitivities) -> None:
    losses, sizes = [], []
    for bits in np.linspace(4.6, 16.1, 24):
        choice = chosen(decided, sensitivities, bits=float(bits))
        assert choice.bits <= bits
        losses.append(choice.loss)
        sizes.append(choice.num_bytes)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0
    assert all(u.label == "keep" for u in choice.units)
    assert [p.num_bytes for p in choice.curve] == sorted(p.num_bytes for p in choice.curve)
    assert choice.curve[-1].loss == 0


def test_every_decision_is_explained(decided: ResolvedRecipe, sensitivities: Sensitivities) -> None:
    choice = chosen(decided, sensitivities, bits=7)
    given = {d.module.name: d for d in choice.decisions}
    for before in decided.matched.decisions:
        after = given[before.module.name]
        if not before.choices:
            assert after == before
            continue
        assert not after.choices
        assert after.reason.startswith("chosen: ")
        assert "nats for" in after.reason
        assert after.format is None or after.format.algo in ("NVFP4", "FP8")
    assert sum(given[m].num_bytes for u in choice.units for m in u.modules) == choice.num_bytes
    assert json.loads(json.dumps(choice.to_json()))["num_bytes"] == choice.num_bytes
    assert chosen(decided, sensitivities, bits=7) == choice


def test_another_budget_needs_no_data(
    decided: ResolvedRecipe, sensitivities: Sensitivities
) -> None:
    again = Sensitivities.from_json(json.loads(json.dumps(sensitivities.to_json())))
    assert again == sensitivities
    assert chosen(decided, again, bits=5) == chosen(decided, sensitivities, bits=5)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"method": "kl_div"},
        {"method": "other", "num_tokens": 3, "losses": {}},
        {"method": "kl_div", "num_tokens": 0, "losses": {}},
        {"method": "kl_div", "num_tokens": 3, "losses": {"a": {"b": "nan"}}},
        {"method": "kl_div", "num_tokens": 3, "losses": {"a": 3}},
    ],
)
def test_what_is_no_sensitivities(value: object) -> None:
    with pytest.raises(FormatError):
        Sensitivities.from_json(value)


def test_engines_get_what_they_mix(decided: ResolvedRecipe, sensitivities: Sensitivities) -> None:
    def labels(target: str, bits: float) -> set[str]:
        choice = chosen(decided, sensitivities, bits=bits, target=parse_engine(target))
        return {u.label for u in choice.units} - {"keep"}

    assert labels("vllm@main", 6) == {"NVFP4", "FP8"}
    assert labels("vllm@0.19.0", 6) == {"NVFP4"}, "FP8 alone takes 8 bits"
    assert len(labels("vllm@0.19.0", 9)) == 1
    assert labels("sglang", 8.2) <= {"NVFP4", "FP8"}
    assert len(labels("sglang", 8.2)) == 1
    choice = chosen(decided, sensitivities, bits=6, target=parse_engine("sglang"))
    assert choice.notes == ("FP8 left out: sglang does not mix them",)
    turned = {"target": parse_engine("sglang"), "architecture": "Llama4ForCausalLM"}
    choice = chosen(decided, sensitivities, bits=9, **turned)
    assert {u.label for u in choice.units} <= {"FP8", "keep"}
    assert choice.notes == ("NVFP4 left out: sglang does not load them",)
    fixed = tuple(
        replace(d, format=decided.recipe.formats["fp8"], choices=())
        if d.module.name.startswith("layers.0.mlp.") and d.module.kind == "linear"
        else d
        for d in decided.matched.decisions
    )
    found = choose(
        fixed, decided.recipe, sensitivities, bits=12, target=parse_engine("vllm@0.19.0")
    )
    assert {u.label for u in found.units} <= {"FP8", "keep"}


def test_a_cache_is_not_left_alone(decided: ResolvedRecipe, sensitivities: Sensitivities) -> None:
    cache = RecipeFormat(name="kv", kv_algo="FP8")
    cached = tuple(
        replace(d, format=cache) if d.module.kind == "kv_cache" else d
        for d in decided.matched.decisions
    )
    given = (cached, decided.recipe, sensitivities)
    assert any(d.format is None for d in choose(*given, bits=16).decisions)
    with pytest.raises(UsageError, match="only the KV cache is quantized"):
        choose(*given, bits=16, target=parse_engine("vllm"))


def test_a_budget_that_nothing_meets(decided: ResolvedRecipe, sensitivities: Sensitivities) -> None:
    with raises(UsageError, "4 bits", "4.50") as caught:
        chosen(decided, sensitivities, bits=4)
    hint = str(caught.value.hint)
    least = float(hint.split()[1].rstrip(","))
    assert chosen(decided, sensitivities, bits=least).bits <= least


def test_nothing_was_measured_about_it(
    decided: ResolvedRecipe, sensitivities: Sensitivities
) -> None:
    other = replace(sensitivities, losses={})
    with pytest.raises(CalibrationError, match=r"layers\.0\.attn\.qkv in NVFP4"):
        chosen(decided, other)


def test_siblings_are_left_to_one_choice(decided: ResolvedRecipe) -> None:
    torn = tuple(
        replace(d, format=None, choices=()) if d.module.name == "layers.1.mlp.up" else d
        for d in decided.matched.decisions
    )
    with pytest.raises(RecipeError, match=r"run layers\.1\.mlp\.fc1 as one"):
        list_units(torn, decided.recipe)


def test_modelopts_own_lists_of_formats(
    decided: ResolvedRecipe, sensitivities: Sensitivities
) -> None:
    """Its recipes name formats by what they do; those measured once serve them too."""
    entries = [{"quantizer_name": "*", "enable": False}]
    four = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
    eight = {"num_bits": "e4m3", "axis": None}
    given = {
        "auto_quantize": {
            "candidate_formats": [
                {
                    "quant_cfg": [
                        *entries,
                        {"quantizer_name": "*proj.weight_quantizer", "cfg": cfg},
                        {"quantizer_name": "*proj.input_quantizer", "cfg": cfg},
                    ]
                }
                for cfg in (four, eight)
            ],
            "constraints": {"effective_bits": 6.0},
            "auto_quantize_method": "kl_div",
        }
    }
    recipe = recipe_from(given)
    problems = RecipeProblems("given")
    matched = match_rules(recipe, decided.modules.modules, problems)
    problems.raise_all()
    found = choose(matched.decisions, recipe, sensitivities)
    expected = chosen(decided, sensitivities, bits=6)
    assert [u.label for u in found.units] == [u.label for u in expected.units]


def test_experts_are_measured_together(moe_random: Path, batches: list[Batch]) -> None:
    decided = resolve_recipe(moe_random, "auto_nvfp4_fp8")
    found = measure_sensitivities(decided, batches)
    choice = chosen(decided, found, bits=6)
    experts = [d for d in choice.decisions if ".mlp.experts." in d.module.name]
    assert len({d.label for d in experts if d.module.layer == 2}) == 1
    assert all(x > 0 for some in found.losses.values() for x in some.values())
