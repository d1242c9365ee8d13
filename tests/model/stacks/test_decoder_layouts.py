"""Every decoder family on real ranks: transformers -> torch_dist at a layout -> the same model.

A tiny random model of transformers' own class is saved, resharded to each layout on disk, and
loaded by ranks of that layout the way the commands do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from megtool.convert.families.detection import families, family_names
from megtool.convert.language.mapping import Row
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

from megtool.inference.load import load
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models import dense_decoders as dense
from tests.support.models import moe_cases, moe_models, mtp_models, nested_cases
from tests.support.models.dense_cases import GEMMA4_SMALL, LOCAL, PADDED, WITH_BIASES
from tests.support.models.dense_decoders import LLAMA3, MULTIPLIED, WINDOWED
from tests.support.models.tiny_model import BIASED, TIED, UNTIED, Case
from tests.support.runs.loading import source_of
from tests.support.worlds import family_layouts
from tests.support.worlds.family_layouts import Answer, Job

THEIRS, OURS = 1e-4, 1e-5
NO_FORWARD = {
    "bert": "Megatron's names of an encoder, which have no forward pass",
    **dict.fromkeys(
        ("t5", "mt5", "umt5"),
        "an encoder and a decoder: tests/model/stacks/test_encoder_decoder.py",
    ),
    "deepseek_v4": "scalars' gradients cancel out: tests/model/attention/test_compressed.py",
}
AS_OTHERS = {"bailing_moe_v2": "glm4_moe", "mimo": "qwen2"}  # transformers has no class
FOUR = {"num_hidden_layers": 4}
THREE = {"num_hidden_layers": 3}
HEAD, WINDOW = {"head_dim": 8}, {"sliding_window": 5}
ENCODERS = [
    Case("bert_post_norm", UNTIED, "bert_post_norm"),
    Case("roberta", TIED | PADDED | {"max_position_embeddings": 66}, "roberta"),
    Case("modernbert", TIED | LOCAL | FOUR, "modernbert"),
    Case("modernbert", UNTIED | BIASED | WITH_BIASES | LOCAL, "modernbert-biases"),
]
CASES = [
    Case("llama", TIED | BIASED | FOUR | LLAMA3 | {"mlp_bias": True, "head_dim": 12}, "llama"),
    Case("qwen2", UNTIED | WINDOWED | {"max_window_layers": 1}, "qwen2"),
    Case("qwen3", TIED | {"head_dim": 16}, "qwen3"),
    Case("qwen3_5_text", TIED | FOUR | dense.DELTA | {"rms_norm_eps": 1e-3}, "qwen3_5_text"),
    Case("gemma", TIED | {"head_dim": 16, "num_key_value_heads": 1}, "gemma"),
    Case("gemma2", TIED | FOUR | WINDOW | HEAD, "gemma2"),
    Case("gemma3", TIED | WINDOW | HEAD | {"num_hidden_layers": 6}, "gemma3"),
    Case("phi3", UNTIED | WINDOW, "phi3"),
    Case("gpt2", TIED, "gpt2"),
    Case("gpt_neox", UNTIED, "gpt_neox"),
    Case("granite", TIED | BIASED | MULTIPLIED | {"mlp_bias": True}, "granite"),
    Case("bamba", UNTIED | dense.MIXED | {"attn_layer_indices": [1]}, "bamba"),
    Case("falcon_h1", UNTIED | BIASED | dense.MUP, "falcon_h1"),
    Case("smollm3", TIED | FOUR, "smollm3"),
    Case("starcoder2", TIED | WINDOW, "starcoder2"),
    Case("nemotron", UNTIED | BIASED | HEAD, "nemotron"),
    Case("mistral", UNTIED | THREE | WINDOW | HEAD, "mistral-3"),
    Case("qwen2", TIED | THREE, "qwen2-3"),
    Case("seed_oss", UNTIED | HEAD, "seed_oss"),
    next(c for c in dense.CASES if c.family == "ministral3"),
    Case("ernie4_5", TIED | HEAD | {"use_bias": True}, "ernie4_5"),
    Case("glm4", UNTIED | HEAD, "glm4"),
    Case("olmo2", UNTIED, "olmo2"),
    Case("olmo3", UNTIED | FOUR | WINDOW, "olmo3"),
    Case("exaone4", UNTIED | FOUR | WINDOW, "exaone4"),
    Case("cohere", TIED | {"use_qk_norm": True, "logit_scale": 0.5}, "cohere"),
    Case("cohere2", TIED | FOUR | WINDOW | {"logit_scale": 0.5}, "cohere2"),
    next(c for c in dense.CASES if c.family == "nemotron_nas"),
    *(c for c in dense.CASES if c.name in ("gemma4", "arcee", "helium")),
    *dense.MORE,
    # Norms of what is almost 0 make much of rounding.
    Case("gemma4", TIED | GEMMA4_SMALL | {"rms_norm_eps": 0.1}, "gemma4-small"),
    *ENCODERS,
]
DENSE: dict[str, Callable[[], Any]] = {
    case.name: partial(dense.transformers_model, case) for case in CASES
}
MOE: dict[str, Callable[[], Any]] = {
    name: partial(moe_models.transformers_model, name, **FOUR)
    for name in (
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "llama4",
        "olmoe",
        "glm4_moe",
        "ernie4_5_moe",
        "minimax_m2",
        "granitemoe",
        "mistral4",
        "dots1",
        "glm4_moe_lite",
        "deepseek_v32",
        *(n for n in moe_models.MORE if n != "phimoe-plain"),
    )
}
MOE["glm_moe_dsa"] = partial(
    moe_models.transformers_model,
    "glm_moe_dsa",
    **FOUR,
    indexer_types=["full", "shared"] * 2,
)
MOE["mixtral"] = partial(moe_models.transformers_model, "mixtral", **FOUR | TIED)
# With the seed 0 rounding alone moves these by about 1e-5.
for _name in ("deepseek_v2-groups", "gpt_oss"):
    MOE[_name] = partial(moe_models.transformers_model, _name, seed=1, **FOUR)
# A norm of outputs that are almost 0 makes much of rounding.
for _name, _seed, _eps in (("qwen3_next", 2, 1e-3), ("qwen3_5_moe_text", 1, 0.1)):
    MOE[_name] = partial(
        moe_models.transformers_model, _name, seed=_seed, rms_norm_eps=_eps, **FOUR
    )
for _name, _seed, _eps in (("nemotron_h", 4, 0.01), ("nemotron_h-latent", 2, 0.1)):
    MOE[_name] = partial(
        moe_models.transformers_model, _name, seed=_seed, layer_norm_epsilon=_eps, **FOUR
    )
# So do norms after experts alone.
MOE["flex_olmo"] = partial(
    moe_models.transformers_model, "flex_olmo", seed=1, rms_norm_eps=0.1, **FOUR
)
MOE["granitemoehybrid"] = partial(
    moe_models.transformers_model,
    "granitemoehybrid",
    **FOUR,
    layer_types=["linear_attention", "full_attention"] * 2,
)
MOE["lfm2_moe"] = partial(
    moe_models.transformers_model,
    "lfm2_moe",
    **FOUR,
    layer_types=moe_cases.LFM2["layer_types"],
)
MOE["gemma4-experts"] = partial(
    moe_models.transformers_model,
    "gemma4-experts",
    **FOUR,
    seed=1,
    rms_norm_eps=0.1,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


def kimi_linear() -> Any:
    """So do norms of the outputs of Kimi delta attention. Latents are normalized with the same
    epsilon, as engines do it, where transformers has 1e-6."""
    model = moe_models.transformers_model("kimi_linear", rms_norm_eps=0.01, **FOUR)
    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.variance_epsilon = 0.01
    return model


MOE["kimi_linear"] = kimi_linear
KINDS = {"dense": DENSE, "experts": MOE}
SMALL_EPSILONS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {"rms_norm_eps": 1e-6},
    "qwen3_next": {"rms_norm_eps": 1e-6},
    "flex_olmo": {"rms_norm_eps": 1e-6},
    "kimi_linear": {"rms_norm_eps": 1e-5},
    "nemotron_h": {"layer_norm_epsilon": 1e-5},
    "gemma4-experts": {"rms_norm_eps": 1e-6}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
"""Of the models that other tests have with larger ones, those with which they are published."""
ON_ONE_STAGE = {"gemma4-small"}

Layout = dict[str, int]
TP2, PP2, TP2_PP2 = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}
EP2 = {"ep": 2, "dp": 2}
TP4 = {"tp": 4}  # more ranks than key and value heads
CP2 = {"cp": 2}
EVEN = 12  # tokens that two ranks of context parallelism share
LAYOUTS: dict[tuple[str, int], list[Layout]] = {
    ("dense", 2): [TP2, PP2],
    ("dense", 4): [TP2_PP2],
    ("experts", 2): [TP2, PP2, EP2, {"tp": 2, "ep": 2, "etp": 1}],
    ("experts", 4): [TP2_PP2, {"tp": 2, "ep": 2, "etp": 2, "dp": 2}],
}
MORE: dict[tuple[str, int], dict[str, list[Layout]]] = {
    ("dense", 4): {
        name: [TP4] for name in ("llama", "qwen3", "gemma", "starcoder2", "olmo2", "cohere")
    },
    ("experts", 4): {"gpt_oss": [TP4], "qwen3_moe": [TP4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}]},
}


def layouts(kind: str, size: int) -> Iterator[tuple[str, Layout]]:
    """The models of a kind with each layout of so many ranks; three layers are split unevenly."""
    for name in KINDS[kind]:
        for layout in LAYOUTS[kind, size] + MORE.get((kind, size), {}).get(name, []):
            if name in ON_ONE_STAGE and layout.get("pp", 1) > 1:
                continue
            odd = name.endswith("-3") and layout.get("pp", 1) > 1
            yield name, layout | ({"first_stage_layers": 2} if odd else {})


OF_MODEL = {case.name: case.family for case in CASES} | {n: moe_models.CASES[n][0] for n in MOE}
"""The family of each model of `KINDS`."""

WITHIN = {case.family: partial(case.build, dtype="float32") for case in nested_cases.CASES}
"""Text models within larger models."""


def hybrid_families() -> set[str]:
    """Families whose layers are not all attention, by the rows of their converters."""
    rows = {f.name: [str(row.when) for row in f.hf if isinstance(row, Row)] for f in families()}
    kinds = ("mamba_layers", "delta_layers", "kda_layers", "conv_layers")
    return {name for name, whens in rows.items() if any(k in w for w in whens for k in kinds)}


HYBRIDS = [name for name, its_family in OF_MODEL.items() if its_family in hybrid_families()]


def test_every_decoder_family_is_here() -> None:
    covered = {*OF_MODEL.values(), *WITHIN}
    assert {f.name for f in families() if f.nested} == set(WITHIN)
    assert covered | set(NO_FORWARD) | set(AS_OTHERS) == set(family_names())
    assert hybrid_families() <= covered
    assert {OF_MODEL[name] for name in HYBRIDS} == hybrid_families() - set(WITHIN)


def reference(model: Any, folder: Path) -> None:
    """Save a model, and one process' answer once it is transformers' own."""
    model.save_pretrained(folder / "hf")
    tokens, labels = family_layouts.tokens_and_labels()
    first = 2 if model.config.model_type == "roberta" else 0
    logits = model(tokens, position_ids=torch.arange(tokens.shape[1])[None] + first).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )
    loss.backward()
    alone = ProcessGroups.alone()
    ours = family_layouts.answer_of(load(source_of(folder / "hf"), dtype="float32"), alone)
    assert logits.std() > 0.1
    apart = dense.largest(logits, ours.logits)
    print(f"{folder.name}: logits {apart:.1e} from transformers")
    assert apart < THEIRS, folder.name
    if not model.config.__dict__.get("attn_temperature_tuning"):  # it counts padding as positions
        real = family_layouts.valid()
        places = (real.cumsum(1) - 1).clamp_min(0) + first
        with torch.no_grad():
            padded = model(tokens, attention_mask=real.long(), position_ids=places).logits
        apart = dense.largest(padded * real[:, :, None], ours.decoded)
        print(f"  {apart:.1e} decoding, padded on the left")
        assert apart < THEIRS, folder.name
    assert abs(loss.item() - ours.loss) < THEIRS * ours.loss, folder.name
    torch.save(ours, folder / "answer")
    # Gradients go to our names and splits as weights do: saved as one more model, and loaded.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    model.save_pretrained(folder / "gradients")
    gradients = load(source_of(folder / "gradients"), dtype="float32")
    check_gradients(
        gradients.state_dict(), ours, is_centered=gradients.config.norms.zero_centered_norm
    )


def check_gradients(theirs: dict[str, Any], ours: Answer, *, is_centered: bool) -> None:
    missing = {n for n in theirs if n not in ours.gradients}
    fixed = ("expert_bias", "layer_scalar", "activation_func.beta", "activation_func.eps")
    assert all(n.endswith(fixed) or ".indexer." in n for n in missing)
    largest = max(float(g.abs().max()) for g in ours.gradients.values())
    assert math.isfinite(largest)
    if is_centered:  # weights of this norm are stored plus 1, and gradients are not
        theirs |= {n: g + 1 for n, g in theirs.items() if n.endswith("out_norm.weight")}
    apart = {n: dense.largest(g, theirs[n]) / largest for n, g in ours.gradients.items()}
    worst = max(apart, key=apart.__getitem__)
    print(f"  {worst} {apart[worst]:.1e} of the largest gradient from transformers")
    assert apart[worst] < THEIRS, worst


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), LAYOUTS)
def test_a_layout_is_one_process(kind: str, size: int, tmp_path: Path) -> None:
    """Logits, those of cached decoding with padding, loss and all gradients, of every family."""
    jobs: list[Job] = []
    for number, (name, layout) in enumerate(layouts(kind, size)):
        folder = tmp_path / name
        if not folder.exists():
            reference(KINDS[kind][name](), folder)
        there = tmp_path / f"{number}"
        reshard(folder / "hf", there, to="torch_dist", fsync=False, **layout)  # type: ignore[arg-type]
        hows: list[dict[str, Any]] = [{}]
        if layout.get("tp", 1) > 1:
            hows.append({"sequence_parallel": True})
        answer = folder / "answer"
        jobs += [
            Job(name=name, checkpoint=there, answer=answer, layout=layout, how=how) for how in hows
        ]
    ranks = run_world(family_layouts.compare, size, jobs, timeout_s=900)
    wrong = []
    for job in map(str, jobs):
        found = {n: max(r[job].get(n, 0.0) for r in ranks) for r in ranks for n in r[job]}
        said = ", ".join(f"{n} {found[n]:.1e}" for n in ("logits", "decoded") if n in found)
        worst = max(found.keys() - {"logits", "decoded"}, key=found.__getitem__)
        print(f"{job}: {said}, {worst} {found[worst]:.1e}")
        wrong += [f"{job}: {n} differs by {d}" for n, d in found.items() if not d <= OURS]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), SMALL_EPSILONS.items())
def test_what_layouts_with_the_epsilons_of_published_models_differ_by_is_rounding(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """In fp32 norms of small values make 2e-5 of it; in fp64 it is gone.

    Routers compute in fp32, where the last bits of fp64 may round to another number, and losses of
    a vocabulary that is cut are summed in it: so a little stays.
    """
    model = moe_models.transformers_model(name, seed=1, **FOUR | keys)
    model.save_pretrained(tmp_path / "hf")
    alone = load(source_of(tmp_path / "hf"), dtype="float32").double()
    torch.save(family_layouts.answer_of(alone, ProcessGroups.alone()), tmp_path / "answer")
    jobs = []
    for how, layout in (("tp", TP2), ("ep", EP2), ("both", {"tp": 2, "ep": 2, "etp": 1})):
        reshard(tmp_path / "hf", tmp_path / how, to="torch_dist", fsync=False, **layout)  # type: ignore[arg-type]
        places = {"checkpoint": tmp_path / how, "answer": tmp_path / "answer"}
        jobs.append(Job(name=how, **places, layout=layout, dtype=torch.float64))
    for found in run_world(family_layouts.compare, 2, jobs, timeout_s=300):
        for differences in found.values():
            assert max(differences.values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_two_ranks_of_context_parallelism_have_transformers_logits(
    name: str, tmp_path: Path
) -> None:
    """Also loss and gradients of one process; with experts also at EP=2."""
    model = (DENSE | MOE)[name]()
    model.save_pretrained(tmp_path / "hf")
    tokens, _ = family_layouts.tokens_and_labels()
    with torch.no_grad():
        logits = model(tokens[:, :EVEN]).logits
    alone = load(source_of(tmp_path / "hf"), dtype="float32")
    ours = family_layouts.answer_of(alone, ProcessGroups.alone(), EVEN)
    assert dense.largest(logits, ours.logits) < THEIRS
    torch.save(replace(ours, logits=logits), tmp_path / "answer")
    places: dict[str, Any] = {"checkpoint": tmp_path / "hf", "answer": tmp_path / "answer"}
    layouts = [CP2, *([CP2 | {"ep": 2}] if name in MOE else [])]
    jobs = [Job(name=name, **places, layout=layout, length=EVEN) for layout in layouts]
    for found in run_world(family_layouts.compare, 2, jobs):
        assert len(found) == len(jobs)
        for job, apart in found.items():
            assert apart.pop("logits") < THEIRS, job
            worst = max(apart, key=apart.__getitem__)
            print(f"{job}: {worst} {apart[worst]:.1e}")
            assert apart[worst] < OURS, (job, worst)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITHIN, *AS_OTHERS])
def test_models_within_others_or_like_others_at_a_layout(name: str, tmp_path: Path) -> None:
    """Logits of transformers' model, or of the one that computes the same."""
    build = WITHIN.get(name) or (lambda folder: mtp_models.FAMILIES[name](folder)[0].float())
    model = build(tmp_path / "hf").eval()
    tokens, _ = family_layouts.tokens_and_labels()
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :EVEN]).logits
    torch.save(logits, tmp_path / "answer")
    config = load(source_of(tmp_path / "hf"), dtype="float32").config
    layouts = [TP2, PP2, *([EP2] if config.moe.num_experts else [])]
    layouts += [CP2] if name in hybrid_families() else []
    jobs = []
    for number, layout in enumerate(layouts):
        there = tmp_path / f"{number}"
        cut = {k: v for k, v in layout.items() if k != "cp"}
        reshard(tmp_path / "hf", there, to="torch_dist", fsync=False, **cut)
        jobs.append(
            Job(
                name=name,
                checkpoint=there,
                answer=tmp_path / "answer",
                layout=layout,
                length=EVEN,
            )
        )
    for found in run_world(family_layouts.compare_logits, 2, jobs):
        assert len(found) == len(jobs)
        print(found)
        assert not [job for job, apart in found.items() if not apart < THEIRS]
