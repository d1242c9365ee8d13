"""An EAGLE-3 head on our states beside ModelOpt's own training of one on a Transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool.errors import RecipeError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.storage.files import Files
from megtool.train.features.eagle import EagleFeature
from megtool.train.features.eagle_head import EagleHead, make_eagle_config, read_eagle_recipe
from tests.support.errors import raises
from tests.support.models.eagle_heads import SIZES, modelopt_eagle
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.lora_runs import load

pytest.importorskip("modelopt", reason="ModelOpt makes the head")
pytest.importorskip("modelopt.torch.speculative")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle") / "llama"
    tiny_model("llama", folder, num_hidden_layers=5, tie_word_embeddings=False)
    return folder


def make_feature(
    model: Path, recipe: dict[str, Any], **more: Any
) -> tuple[Decoder, EagleFeature, dict[str, Any]]:
    (stage,), _ = load(model)
    config = make_eagle_config(recipe, stage.config, torch.float32, file="recipe")
    assert stage.embedding is not None
    rows = slice(stage.config.embedding.vocab_size)
    head = EagleHead(
        stage.config,
        config,
        stage.embedding.word_embeddings.weight[rows],
        stage.output_weight[rows],
        seed=1,
        file="recipe",
        tokens=json.loads((model / "config.json").read_bytes()),
        **more,
    )
    return stage, EagleFeature(stage, head, num_microbatches=1, seed=1), config


def their_model(model: Path, config: dict[str, Any], ours: EagleFeature) -> Any:
    """ModelOpt's model with the whole Transformers model in it, and the head of `ours`."""
    theirs = modelopt_eagle(model, config)
    theirs.eagle_module.load_state_dict(ours.head.module.state_dict())
    return theirs.train()


def loss_of(stage: Decoder, feature: EagleFeature, batch: Batch, labels: torch.Tensor) -> float:
    schedule = PipelineSchedule([stage], num_microbatches=1, objective=feature.objective)
    with feature.around_passes(0, batch):
        loss, count = schedule.step(batch, labels)
    return float(loss) / float(count)


@pytest.mark.parametrize("recipe", [{}, {"eagle_ttt_steps": 1}, {"num_hidden_layers": 2}])
def test_loss_and_gradients_are_modelopts(llama: Path, tmp_path: Path, recipe: Any) -> None:
    layers = {"num_hidden_layers": recipe.get("num_hidden_layers", 1)}
    recipe = {n: v for n, v in recipe.items() if n.startswith("eagle")}
    recipe["eagle_architecture_config"] = SIZES | layers
    stage, feature, config = make_feature(llama, recipe)
    theirs = their_model(llama, config, feature)
    tokens = torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(3))
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, 11:] = False
    labels = tokens.roll(-1, 1).masked_fill(~valid, -100)
    loss = loss_of(stage, feature, Batch(tokens_BS=tokens, valid_BS=valid), labels)
    out = theirs(input_ids=tokens, attention_mask=valid.long(), loss_mask=labels != -100)
    assert loss == pytest.approx(out.loss.item(), rel=1e-5)
    out.loss.backward()
    num_labels = int((labels != -100).sum())
    for (name, ours), other in zip(
        feature.head.module.named_parameters(), theirs.eagle_module.parameters(), strict=True
    ):
        assert ours.grad is not None
        assert other.grad is not None
        assert torch.allclose(ours.grad / num_labels, other.grad, atol=2e-6, rtol=2e-4), name
    frozen = [n for n, p in stage.named_parameters() if not n.startswith("eagle.")]
    assert frozen
    assert all(stage.get_parameter(n).grad is None for n in frozen)
    accuracies = feature.end_step()
    assert [*accuracies.values()] == pytest.approx(out.train_acc[0], abs=1e-6)
    files = feature.format_files({}, tmp_path / "spool", Files())
    theirs.get_exporter().export(tmp_path / "theirs")
    assert isinstance(files["config.json"], bytes)
    config, base = (
        json.loads((f / "config.json").read_bytes()) for f in (tmp_path / "theirs", llama)
    )
    config |= {
        n: base[n] for n in ("bos_token_id", "eos_token_id")
    }  # theirs are Llama's usual ones
    assert json.loads(files["config.json"]) == config
    one, two = load_file(tmp_path / "spool"), load_file(tmp_path / "theirs/model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in two)


def test_a_smaller_vocabulary_comes_from_modelopts_file(llama: Path, tmp_path: Path) -> None:
    torch.save(torch.arange(32), tmp_path / "d2t.pt")  # every second token
    recipe = {"eagle_architecture_config": SIZES | {"draft_vocab_size": 32}}
    with raises(RecipeError, "Draft vocab cache", "recipe"):
        make_feature(llama, recipe)
    bad = tmp_path / "bad.pt"
    for value, words in (
        (torch.full((32,), 1 << 20), "1048576"),
        (torch.full((32,), -1), "token -1"),
        (-torch.arange(32), "twice"),
        ({"tokens": [1]}, "no vector"),
    ):
        torch.save(value, bad)
        with raises(RecipeError, str(bad), words):
            make_feature(llama, recipe, draft_vocabulary=str(bad))
    bad.write_bytes(b"junk")
    with raises(RecipeError, str(bad), "cannot be read"):
        make_feature(llama, recipe, draft_vocabulary=str(bad))
    stage, feature, config = make_feature(llama, recipe, draft_vocabulary=str(tmp_path / "d2t.pt"))
    theirs = their_model(llama, config, feature)
    tokens = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(5))
    loss = loss_of(stage, feature, Batch(tokens_BS=tokens), tokens.roll(-1, 1))
    assert loss == pytest.approx(theirs(input_ids=tokens).loss.item(), rel=1e-5)
    feature.format_files({}, tmp_path / "spool", Files())
    stored = load_file(tmp_path / "spool")
    assert torch.equal(stored["d2t"], torch.arange(32))
    assert stored["lm_head.weight"].shape == (32, stage.config.hidden_size)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"eagle_ttt_steps": 0}, ("eagle_ttt_steps", "0")),
        ({"eagle_tts_steps": 3}, ("eagle_tts_steps",)),
        ({"eagle_loss_decay_factor": float("nan")}, ("eagle_loss_decay_factor", "nan")),
        ({"eagle_base_lora": True}, ("eagle_base_lora",)),
        ({"eagle_decoder_type": "kimik2"}, ("kimik2",)),
        ({"eagle_architecture_config": {"num_attention_heads": 3}}, ("num_key_value_heads",)),
        ({"eagle_architecture_config": {"head_dim": "8"}}, ("head_dim", "'8'")),
        ({"eagle_architecture_config": {"hidden": 8}}, ("'hidden'",)),
        ({"eagle_architecture_config": {"use_aux_hidden_state": False}}, ("EAGLE-3",)),
        ({"eagle_architecture_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, ("[1, 9]",)),
        ({"eagle_architecture_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}, ("[3, 1]",)),
        ({"eagle_architecture_config": {"draft_vocab_size": 1 << 20}}, ("draft_vocab_size",)),
        ({"eagle_architecture_config": {"hidden_act": "none"}}, ("none",)),
    ],
)
def test_recipes_of_other_heads_are_refused(llama: Path, recipe: Any, words: Any) -> None:
    with raises(RecipeError, *words, "recipe"):
        make_feature(llama, recipe)


def test_a_recipe_of_modelopt_is_read(tmp_path: Path) -> None:
    recipes = pytest.importorskip("modelopt_recipes")
    (folder,) = recipes.__path__
    recipe = Path(folder) / "general/speculative_decoding/eagle3.yaml"
    section = read_eagle_recipe(str(recipe), recipe)
    assert section["eagle_ttt_steps"] == 3
    alone = tmp_path / "eagle.json"
    alone.write_text(json.dumps({"eagle_ttt_steps": 2}))
    assert read_eagle_recipe(str(alone), alone) == {"eagle_ttt_steps": 2}
    for text in ("[]", "eagle: 1", "a: b: c"):
        alone.write_text(text)
        with raises(RecipeError, str(alone)):
            read_eagle_recipe(str(alone), alone)
    with raises(RecipeError, "default"):
        read_eagle_recipe("missing.yaml", tmp_path / "missing.yaml")
