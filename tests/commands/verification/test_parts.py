"""Pairs of checkpoints that differ in one thing: `verify` says which part it is, and what."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import reshard, verify
from megtool.commands.pages.verify import verify_page
from megtool.errors import UsageError
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints import trained
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_text

RNG = "rng_state/shard_0.0_1.1"
SCHEDULER = {"max_lr": 1e-3, "num_steps": 28, "lr_decay_style": "cosine"}
ARGS = {"consumed_train_samples": 28, "softmax_scale": None}


def random_state(seed: int = 0, **more: Any) -> bytes:
    """Megatron's random state of a rank, as torch saves it."""
    state = {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "rng_tracker_states": {},
    }
    out = io.BytesIO()
    torch.save([[state | more]], out)
    return out.getvalue()


def groups(**changes: Any) -> dict[str, Any]:
    """The optimizer's part of the common state, the first group changed."""
    first, second = ({**g} for g in trained.GROUPS["param_groups"])
    more = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    chain = {"param_groups": [first | more | changes, second | more]}
    scaler = {"scale": 65536.0, "growth_tracker": 3}
    kind = {"param_state_sharding_type": "fully_reshardable"}
    return {"optimizer": {"optimizer": chain, "grad_scaler": scaler, **kind}}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, materialize: Any) -> Callable[..., Path]:
    """Write a trained checkpoint of Megatron; every call has the same tensors.

    An empty `rng` writes no random state.
    """

    def make(
        args: dict[str, Any] | None = None,
        state: dict[str, Any] | None = None,
        rng: bytes | None = None,
        model: dict[str, Any] | None = None,
        beside: dict[str, bytes] | None = None,
    ) -> Path:
        folder = tmp_path_factory.mktemp("trained") / "save"
        trained.write(
            folder,
            trained.config(num_layers=2, gated=True, activation="silu", **model or {}),
            ParallelConfig(),
            materialize,
            args=ARGS | (args or {}),
            objects={} if rng == b"" else {RNG: rng or random_state()},
            beside=beside,
            small_state=groups() | {"opt_param_scheduler": SCHEDULER} | (state or {}),
        )
        return folder

    return make


@pytest.fixture(scope="module")
def megatron(write: Callable[..., Path]) -> Path:
    return write()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_text.save(tmp_path_factory.mktemp("hf") / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    (folder / "README.md").write_text("a model")
    return folder


def differing(a: Path, b: Path, **options: Any) -> tuple[dict[str, str], set[str]]:
    """The verdicts by part, and the names of what differs."""
    report = verify(a, b, threads=1, **options)
    assert report.exit_status == (7 if report.differences else 0)
    values = report.to_json()
    assert [p["part"] for p in values["parts"]] == [p.part for p in report.parts]
    return {p.part: p.verdict for p in report.parts}, {d.tensor for d in report.differences}


def check_one(a: Path, b: Path, part: str, name: str) -> None:
    """Exactly one part differs, in what is named so."""
    verdicts, names = differing(a, b)
    assert {p for p, verdict in verdicts.items() if verdict == "differs"} == {part}, names
    assert names == {name}


# ---- settings


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
    },
}


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"rope_theta": 5e5}, "rope_base"),
        ("llama", {"rms_norm_eps": 1e-2}, "norm_eps"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ("mistral", {"sliding_window": 8}, "window_size"),
        ("mistral", {"rope_theta": 1e6}, "rope_base"),
        ("granite", {"attention_multiplier": 0.25}, "softmax_scale"),
        ("granite", {"residual_multiplier": 0.25}, "residual_scale"),
        ("granite", {"logits_scaling": 8.0}, "logit_scale"),
    ],
    ids=str,
)
def test_a_setting(
    hf: Path, tmp_path: Path, family: str, changes: dict[str, Any], field: str
) -> None:
    config = json.loads((hf / "config.json").read_text()) | FAMILIES[family]
    for name, values in (("a", config), ("b", config | changes)):
        shutil.copytree(hf, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    verdicts, names = differing(tmp_path / "a", tmp_path / "b")
    assert verdicts == {
        "tensors": "equal",
        "configuration": "differs",
        "training state": "not compared",
        "files": "equal",
    }
    assert field in names or any(n.endswith(field) for n in names), names


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "run 7", "transformers_version": "9.1", "torch_dtype": "bfloat16"},
        {"rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 0.5},
    ],
    ids=str,
)
def test_settings_that_mean_the_same(hf: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    config = json.loads((hf / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | changes))
    assert differing(hf, other)[1] == set()


def test_a_setting_that_no_field_holds(hf: Path, tmp_path: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    for name, value in (("a", 2), ("b", 3)):
        shutil.copytree(hf, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"new_scale": value}))
    report = verify(tmp_path / "a", tmp_path / "b", threads=1)
    (found,) = report.differences
    assert (found.tensor, found.part) == ("new_scale", "configuration")
    assert "megtool does not read it" in found.text
    part = verify(hf, tmp_path / "a", threads=1).parts[1]
    assert (part.verdict, "new_scale" in part.not_compared) == ("equal", True)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"rotary_base": 500000}, "rope_base"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"norm_epsilon": 1e-2, "layernorm_epsilon": 1e-2}, "norm_eps"),
        ({"use_rope_scaling": True}, "rope_scaling"),
        ({"window_size": (3, 0)}, "window_size"),
        ({"rotary_interleaved": True}, "rope_interleaved"),
        ({"no_rope_freq": 2}, "no_rope_layers"),
        ({"qk_l2_norm": True}, "qk_l2_norm"),
        ({"softmax_scale": 0.1}, "softmax_scale"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rope_scaling"),
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ({"apply_layernorm_1p": True, "layernorm_zero_centered_gamma": True}, "zero_centered_norm"),
    ],
    ids=str,
)
def test_an_arg_of_megatron(
    megatron: Path, write: Callable[..., Path], args: dict[str, Any], field: str
) -> None:
    verdicts, names = differing(megatron, write(args=args))
    assert {p for p, v in verdicts.items() if v == "differs"} == {"configuration"}
    assert field in names


def test_args_of_layouts_and_runs_are_no_settings(
    megatron: Path, write: Callable[..., Path]
) -> None:
    args = {"tensor_model_parallel_size": 2, "save": "/b", "wandb_exp_name": "b", "num_workers": 9}
    assert differing(megatron, write(args=args))[1] == set()


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "deepseek_v3"])
def test_keys_that_one_side_leaves_to_its_class(model_type: str, tmp_path: Path) -> None:
    """A key at the default of transformers' class, and its absence, are one setting."""
    transformers = pytest.importorskip("transformers")
    from tests.support.models import family_models

    a = family_models.save(model_type, tmp_path / "a")
    stored = json.loads((a / "config.json").read_text())
    kept = {"model_type", "architectures", "dtype"}
    defaults = transformers.CONFIG_MAPPING[model_type]().to_dict()
    bare = {k: v for k, v in stored.items() if k in kept or k not in defaults or defaults[k] != v}
    assert len(stored) - len(bare) > 5
    b = shutil.copytree(a, tmp_path / "b")
    (b / "config.json").write_text(json.dumps(bare))
    part = verify(a, b, threads=1, parts="config").parts[0]
    assert (part.verdict, dict(part.not_compared)) == ("equal", {})
    key = {"gemma2": "attn_logit_softcapping", "granite": "residual_multiplier"}.get(
        model_type, "routed_scaling_factor"
    )
    (b / "config.json").write_text(json.dumps(bare | {key: 3.5}))
    part = verify(a, b, threads=1, parts="config").parts[0]
    assert part.verdict == "differs"


# ---- training state


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"state": {"iteration": 9}}, "iteration"),
        ({"args": {"consumed_train_samples": 36}}, "consumed_train_samples"),
        ({"state": groups(step=8)}, "param group wd_mult=1.0 lr_mult=1.0: step"),
        ({"state": groups(lr=2e-3)}, "param group wd_mult=1.0 lr_mult=1.0: lr"),
        ({"state": groups(weight_decay=0.0)}, "param group wd_mult=1.0 lr_mult=1.0: weight_decay"),
        ({"state": groups(betas=(0.9, 0.999))}, "param group wd_mult=1.0 lr_mult=1.0: betas"),
        ({"state": groups(lr_mult=0.1)}, "param group wd_mult=1.0 lr_mult=1.0: lr_mult"),
        (
            {"state": {"opt_param_scheduler": SCHEDULER | {"num_steps": 36}}},
            "opt_param_scheduler.num_steps",
        ),
        (
            {"state": {"opt_param_scheduler": SCHEDULER | {"lr_decay_style": "linear"}}},
            "opt_param_scheduler.lr_decay_style",
        ),
        ({"rng": random_state(random_rng_state=random.Random(5).getstate())}, "random state"),
        ({"rng": random_state(torch_rng_state=torch.zeros(16, dtype=torch.uint8))}, "random state"),
        ({"rng": random_state(np_rng_state=np.random.RandomState(3).get_state())}, "random state"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_entry_of_the_training_state(
    megatron: Path, write: Callable[..., Path], changed: dict[str, Any], name: str
) -> None:
    name = f"{name} shard_0.0_1.1" if name == "random state" else name
    check_one(megatron, write(**changed), "training state", name)


def test_the_loss_scale(megatron: Path, write: Callable[..., Path]) -> None:
    state = groups()
    state["optimizer"]["grad_scaler"] = {"scale": 32768.0, "growth_tracker": 3}
    check_one(megatron, write(state=state), "training state", "grad_scaler.scale")


def test_state_that_one_side_lacks_is_a_difference(megatron: Path, tmp_path: Path) -> None:
    reshard(megatron, tmp_path / "b", optimizer_format="none", fsync=False)
    report = verify(megatron, tmp_path / "b", threads=1, parts="state")
    assert (report.parts[0].verdict, report.exit_status) == ("differs", 7)
    missing = {d.tensor for d in report.differences if d.kind == "missing"}
    assert any(name.startswith("param group") for name in missing)
    assert "grad_scaler.scale" in missing
    assert verify(megatron, tmp_path / "b", threads=1, parts="config,files").exit_status == 0


def test_a_format_without_a_place_for_state_is_no_difference(
    megatron: Path, tmp_path: Path
) -> None:
    reshard(megatron, tmp_path / "hf", to="hf", family="llama", fsync=False)
    report = verify(megatron, tmp_path / "hf", threads=1, family="llama")
    state = next(p for p in report.parts if p.part == "training state")
    assert (report.exit_status, state.verdict) == (0, "not compared")
    assert {"iteration", "opt_param_scheduler.num_steps"} <= state.not_compared.keys()


def test_random_state_belongs_to_a_layout(
    megatron: Path, write: Callable[..., Path], tmp_path: Path
) -> None:
    reshard(megatron, tmp_path / "tp2", tp=2, fsync=False)
    part = verify(megatron, tmp_path / "tp2", threads=1, parts="state").parts[0]
    assert part.verdict == "equal"
    assert any(name.startswith("random state") for name in part.not_compared)
    without = write(rng=b"")
    check_one(megatron, without, "training state", "random state shard_0.0_1.1")


def test_state_of_a_trainer_beside_weights(hf: Path, tmp_path: Path) -> None:
    for name, step in (("a", 5), ("b", 6)):
        shutil.copytree(hf, tmp_path / name)
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        torch.save({"state": {}, "step": step}, tmp_path / name / "optimizer.pt")
    verdicts, names = differing(tmp_path / "a", tmp_path / "b")
    assert verdicts["training state"] == "differs"
    assert names == {"trainer_state.global_step", "optimizer.pt"}


# ---- files and tensors


def edit_json(name: str, **changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (edit_json("tokenizer.json", truncation={"max_length": 8}), "tokenizer.json"),
        (edit_json("tokenizer_config.json", add_bos_token=True), "tokenizer_config.json"),
        (edit_json("tokenizer_config.json", chat_template="{{ x }}"), "chat_template.jinja"),
        (edit_json("generation_config.json", temperature=0.7), "generation_config.json"),
        (lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json"),
        (lambda folder: (folder / "modeling_x.py").write_text("x = 1"), "modeling_x.py"),
    ],
)
def test_a_file(hf: Path, tmp_path: Path, edit: Callable[[Path], Any], name: str) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    edit(other)
    check_one(hf, other, "files", name)


def test_files_that_mean_the_same(hf: Path, tmp_path: Path) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    (other / "README.md").write_text("another text")
    edit_json("generation_config.json", transformers_version="9")(other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (other / "tokenizer_config.json").write_text(json.dumps(settings, indent=4))
    report = verify(hf, other, threads=1)
    assert (report.verdict, report.parts[3].verdict) == ("equal", "equal")
    assert "README.md" in report.parts[3].not_compared


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight(hf: Path, tmp_path: Path, stored: str) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    held = load_file(other / "model.safetensors")
    held[stored][1, 2] += 1
    save_file(held, other / "model.safetensors", {"format": "pt"})
    verdicts, names = differing(hf, other)
    assert {p for p, v in verdicts.items() if v == "differs"} == {"tensors"}
    assert len(names) == 1


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq", "param"])
def test_a_moment_or_master(megatron: Path, tmp_path: Path, state: str) -> None:
    from tests.support.stored_bits import flip

    other = shutil.copytree(megatron, tmp_path / "b")
    flip(other, f"optimizer.state.{state}.decoder.layers.mlp.linear_fc2.weight")
    verdicts, names = differing(megatron, other)
    assert {p for p, v in verdicts.items() if v == "differs"} == {"tensors"}
    (name,) = names
    assert name.endswith(".mlp.down.weight")
    page = verify_page(verify(megatron, other, threads=1))
    titles = [getattr(b, "title", "") for s in page.sections for b in s.blocks]
    assert "Settings side by side" in titles
    grids = {t.partition(": ")[2] for t in titles if t.startswith("Differing elements: ")}
    assert grids == {"weights", "master weights", "first moments", "second moments"}


# ---- equal ones, and what is asked for


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "pp": 2}, {"to": "megatron", "tp": 2}, {"to": "dcp"}],
    ids=str,
)
def test_a_reshard_is_equal_in_every_part(
    megatron: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    reshard(megatron, tmp_path / "out", fsync=False, **layout)
    verdicts, names = differing(megatron, tmp_path / "out")
    assert names == set()
    assert {verdicts[p] for p in ("tensors", "training state")} == {"equal"}


def test_formats_of_one_model_are_equal_in_every_part(hf: Path, tmp_path: Path) -> None:
    reshard(hf, tmp_path / "megatron", to="torch_dist", tp=2, fsync=False)
    verdicts, names = differing(hf, tmp_path / "megatron")
    assert names == set()
    assert verdicts == {
        "tensors": "equal",
        "configuration": "equal",
        "training state": "not compared",
        "files": "equal",
    }


def test_parts_that_are_asked_for(hf: Path, tmp_path: Path) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    edit_json("config.json", rope_theta=5e5)(other)
    assert verify(hf, other, parts="tensors,files", threads=1).exit_status == 0
    report = verify(hf, other, parts="configuration", threads=1)
    assert (report.exit_status, report.num_tensors) == (7, 0)
    assert [p.part for p in report.parts] == ["configuration"]
    assert verify(hf, other, parts="state").verdict == "unverified"
    with raises(UsageError):
        verify(hf, other, parts="weights")


def test_logits(hf: Path, tmp_path: Path) -> None:
    other = shutil.copytree(hf, tmp_path / "b")
    edit_json("config.json", rms_norm_eps=1e-1)(other)
    reshard(hf, tmp_path / "megatron", to="torch_dist", tp=2, fsync=False)
    same = verify(hf, tmp_path / "megatron", logits=12, threads=1)
    assert same.logits is not None
    assert (same.exit_status, same.logits.num_equal_choices) == (0, 12)
    assert same.logits.largest_abs <= 1e-6 * same.logits.largest
    report = verify(hf, other, logits=12, threads=1)
    assert report.exit_status == 7
    assert {d.part for d in report.differences} == {"configuration", "logits"}


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "1 elements are NaN"), (float("inf"), "1 are Inf")]
)
def test_data_without_a_digest_is_read(hf: Path, tmp_path: Path, value: float, text: str) -> None:
    report = verify(hf, threads=1)
    assert (report.verdict, report.num_finite, report.num_tensors) == ("unverified", 21, 21)
    assert "nothing vouches for the bytes" in "\n".join(report.lines())
    other = shutil.copytree(hf, tmp_path / "b")
    held = load_file(other / "model.safetensors")
    held["lm_head.weight"][3, 4] = value
    save_file(held, other / "model.safetensors", {"format": "pt"})
    (found,) = verify(other, threads=1).differences
    assert (found.tensor, found.num_differing) == ("head.weight", 1)
    assert text in found.text


def test_a_folder_named_by_a_number_states_no_iteration(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32")
    for number in ("0", "1"):
        reshard(tmp_path / "hf", tmp_path / number, to="dcp", fsync=False)
    assert verify(tmp_path / "0", tmp_path / "1").differences == ()
