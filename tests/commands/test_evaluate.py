"""`megtool evaluate`: one score from every format, two models against each other, and lm-eval."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megtool import evaluate, reshard, tokenize, verify
from megtool.cli.app import main
from megtool.commands.demo import demo_weights
from megtool.commands.reports.evaluate import EvaluatePlan, EvaluateReport
from megtool.errors import DestinationError, MegtoolError, MissingPackageError
from tests.support.errors import raises
from tests.support.models import tiny_models, tiny_text
from tests.support.worlds.torchrun import torchrun

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at intervals.\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("evaluate")
    (root / "text.txt").write_text(TEXT)
    chats = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    records = [{"messages": chats}, {"messages": chats[:1] + chats[1:]}]
    (root / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = [{"text": line} for line in TEXT.splitlines()]
    (root / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tiny_text.save(root / "other", seed=1)
    return tiny_text.save(root / "hf")


def score(source: Path, data: Path, **options: Any) -> EvaluateReport:
    report = evaluate(source, data=data, device="cpu", **options)
    assert isinstance(report, EvaluateReport)
    return report


def test_every_format_has_the_same_score(folder: Path, tmp_path: Path) -> None:
    text = folder.parent / "text.txt"
    reshard(folder, tmp_path / "dist", to="torch_dist", tp=2, pp=2)
    one = score(folder, text, window=64, stride=32)
    assert one.tokens == len(TEXT) - 1
    for other in (
        score(tmp_path / "dist", text, window=64, stride=32),
        score(folder, text, window=64, stride=32, stream_layers=True),
        score(folder, text, window=64, stride=32, batch_size=3),
    ):
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert (other.tokens, other.accuracy) == (one.tokens, one.accuracy)


def test_records_are_scored_one_by_one_or_joined(folder: Path) -> None:
    lines = folder.parent / "lines.jsonl"
    apart, joined = score(folder, lines), score(folder, lines, join=True)
    length = len(TEXT.splitlines()[0])
    assert (apart.documents, apart.tokens) == (3, 3 * (length - 1))
    assert (joined.documents, joined.tokens) == (1, 3 * length + 2 * 2 - 1)
    assert score(folder, lines, max_tokens=100).tokens == 98


def test_a_data_set_of_tokens_has_the_score_of_its_text(folder: Path, tmp_path: Path) -> None:
    lines = folder.parent / "lines.jsonl"
    tokenize(lines, tmp_path / "lines", tokenizer=folder)
    one, other = score(folder, lines), score(folder, tmp_path / "lines.bin")
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.tokens == one.tokens


def test_layers_are_scored_as_by_transformers_states(folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = folder.parent / "lines.jsonl"
    deep = tiny_text.save(tmp_path / "deep", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(deep)
    states = dict[int, list[torch.Tensor]]()
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, inputs, out, n=number: states.setdefault(n, []).append(
                1 - torch.cosine_similarity(inputs[0], out, dim=-1).detach()
            )
        )
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    for text in [*texts, texts[0][:20]]:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, :-1]
        model(ids)
    expected = [float(torch.cat([c.flatten() for c in states[n]]).mean()) for n in range(4)]
    records = [{"text": t} for t in [*texts, texts[0][:20]]]  # rows of two lengths: padding
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    for options in ({}, {"stream_layers": True}):
        report = score(deep, data, layer_scores=True, **options)
        assert report.layer_scores == pytest.approx(expected, rel=1e-4)
    shown = [row for s in report.sections() if s.table for row in s.table.rows]
    assert [int(row[0]) for row in shown] == sorted(range(4), key=lambda n: expected[n])
    assert report.to_json()["layer_scores"] == report.layer_scores
    assert not score(deep, data).layer_scores


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_parts_are_scored_as_by_modelopt_on_transformers(name: str, tmp_path: Path) -> None:
    """ModelOpt's hook of Minitron's formula, on the modules of transformers' model."""
    hooks = pytest.importorskip("modelopt.torch.prune.importance_hooks")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "hf"
    if name == "llama":
        tiny_text.save(folder, num_hidden_layers=3)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        tiny_models.sparse(folder, vocab_size=tiny_text.VOCABULARY, **sizes)
        tiny_text.save_tokenizer(folder)
    lines = [*TEXT.splitlines(), TEXT[:20], "A window of another length."]
    data = tmp_path / "lines.jsonl"
    data.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def watch(module: torch.nn.Module) -> torch.nn.Module:
        hook = hooks.L2NormHook()
        module.register_forward_hook(  # it takes the sequence first, as Megatron has it
            lambda m, args, out: hook(m, (args[0].transpose(0, 1),), out)
        )
        return hook

    ffn, heads, norms, norms_of_experts = {}, {}, [], dict[int, dict[int, list[float]]]()
    for number, layer in enumerate(model.model.layers):
        heads[number] = watch(layer.self_attn.o_proj)
        norms.append(watch(layer.self_attn.q_proj))
        if hasattr(layer.mlp, "experts"):
            norms.append(watch(layer.mlp))
            of: dict[int, list[float]] = norms_of_experts.setdefault(number, {})

            def add(m: Any, args: Any, _: Any, of: dict[int, list[float]] = of) -> None:
                x_TH, chosen_TK, shares_TK = args
                for token, row in enumerate(chosen_TK.tolist()):
                    for k, e in enumerate(row):
                        gate, up = (m.gate_up_proj[e] @ x_TH[token]).chunk(2)
                        y = m.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
                        of.setdefault(e, []).append(float((y * shares_TK[token, k]).norm()))

            layer.mlp.experts.register_forward_hook(add)
        else:
            ffn[number] = watch(layer.mlp.down_proj)
            norms.append(watch(layer.mlp.gate_proj))
    with torch.no_grad():
        for line in lines:
            model(tokenizer(line, return_tensors="pt", add_special_tokens=False).input_ids[:, :-1])
    for options in ({}, {"stream_layers": True}, {"batch_size": 2}):
        report = score(folder, data, pruning_scores=tmp_path / "scores.json", **options)
        assert report.pruning_scores == str(tmp_path / "scores.json")
        found = json.loads((tmp_path / "scores.json").read_text())
        for number, hook in ffn.items():
            assert found["ffn"][str(number)] == pytest.approx(hook.accumulate().tolist(), rel=2e-5)
        for number, hook in heads.items():
            wanted = hook.accumulate().view(4, -1).norm(dim=1)
            assert found["heads"][str(number)] == pytest.approx(wanted.tolist(), rel=2e-5)
        wanted = torch.stack([hook.accumulate() for hook in norms]).sum(0)
        assert found["hidden"] == pytest.approx(wanted.tolist(), rel=2e-5)
        assert found["experts"].keys() == {str(n) for n in norms_of_experts}
        for number, of in norms_of_experts.items():
            means = [sum(of[e]) / len(of[e]) if e in of else 0.0 for e in range(6)]
            assert found["experts"][str(number)] == pytest.approx(means, rel=2e-5)
    small = tmp_path / "small"
    reshard(folder, small, pruning_scores=tmp_path / "scores.json", hidden_size=24)
    assert verify(folder, small).verdict == "equal"


def test_a_file_that_is_read_is_not_replaced(folder: Path) -> None:
    lines = folder.parent / "lines.jsonl"
    before = lines.read_bytes()
    with raises(DestinationError, "replaced"):
        score(folder, lines, pruning_scores=folder / ".." / lines.name)
    assert lines.read_bytes() == before


def test_of_a_chat_the_assistant_counts(folder: Path) -> None:
    chats = folder.parent / "chats.jsonl"
    assert 0 < score(folder, chats).tokens < score(folder, chats, all_turns=True).tokens


def test_two_models_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder.parent / "text.txt"
    same = score(folder, text, against=folder).against
    assert same is not None
    assert (same.kl_max, same.agreement, same.logits_max_difference) == (0.0, 1.0, 0.0)
    report = score(folder, text, against=folder.parent / "other")
    far = report.against
    assert far is not None
    assert 0 < far.kl_median <= far.kl_90 <= far.kl_99 <= far.kl_max == far.worst[0].kl
    assert far.worst[0].before + far.worst[0].expected in TEXT
    assert report.loss == pytest.approx(score(folder, text).loss, rel=1e-6)
    line = ["evaluate", str(folder), "--data", str(text), "--device", "cpu", "-q"]
    assert main([*line, "--against", str(folder.parent / "other")]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {word} " in shown for word in ("perplexity", "KL", "agreement"))
    assert "\nworst KL  token" in shown


def test_a_dry_run_loads_nothing(folder: Path) -> None:
    plan = evaluate(folder, data=folder.parent / "text.txt", window=100, stride=50, dry_run=True)
    assert isinstance(plan, EvaluatePlan)
    assert (plan.tokens, plan.num_windows) == (len(TEXT) - 1, 4)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({}, 2, "nothing to evaluate on"),
        ({"against": "hf"}, 2, "--against has no effect without --data"),
        ({"data": "empty.txt"}, 2, "no token to predict"),
        ({"data": "text.txt", "window": 4000}, 2, "the model has 128 positions"),
        (
            {"data": "text.txt", "window": 8, "stride": 9},
            2,
            "a window of 8 tokens cannot move by 9",
        ),
        ({"data": "chats.jsonl", "join": True}, 2, "--join"),
        ({"data": "text.txt", "chat": True}, 2, "--chat has no effect without --tasks"),
        ({"data": "lines.jsonl", "field": "body"}, 3, "no field 'body'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, options: dict[str, Any], status: int, said: str
) -> None:
    root = folder.parent
    (root / "empty.txt").write_text("")
    given = {k: str(root / v) if k in ("data", "against") else v for k, v in options.items()}
    with pytest.raises(MegtoolError) as caught:
        evaluate(folder, device="cpu", **given)
    assert caught.value.exit_status == status
    assert said in caught.value.message


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_tasks_need_lm_eval(folder: Path) -> None:
    with pytest.raises(MissingPackageError, match="lm_eval") as caught:
        evaluate(folder, tasks="arc_easy", device="cpu")
    assert caught.value.hint == "pip install 'megtool[tasks]'"


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["--tp", "--pp"])
def test_several_processes_have_the_same_score(folder: Path, axis: str) -> None:
    text = folder.parent / "text.txt"
    other = folder.parent / "other"
    line = ["evaluate", str(folder), "--data", str(text), "--against", str(other)]
    done = torchrun(2, *line, axis, "2", "--layer-scores", "--device", "cpu", "--json", "-q")
    assert done.returncode == 0, done.stderr
    alone = score(folder, text, against=other, layer_scores=True)
    found = json.loads(done.stdout)
    assert alone.against is not None
    assert found["loss"] == pytest.approx(alone.loss, rel=1e-6)
    assert found["against"]["kl_mean"] == pytest.approx(alone.against.kl_mean, rel=1e-3)
    assert found["layer_scores"] == pytest.approx(alone.layer_scores, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["--tp", "--pp", "--cp"])
def test_several_processes_score_parts_alike(folder: Path, tmp_path: Path, axis: str) -> None:
    text = folder.parent / "lines.jsonl"
    line = ["evaluate", str(folder), "--data", str(text), axis, "2", "--device", "cpu", "-q"]
    done = torchrun(2, *line, "--pruning-scores", str(tmp_path / "two.json"))
    assert done.returncode == 0, done.stderr
    score(folder, text, pruning_scores=tmp_path / "one.json")
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    for key in ("layers", "hidden"):
        assert two[key] == pytest.approx(one[key], rel=1e-4)
    for key in ("ffn", "heads"):
        assert two[key].keys() == one[key].keys()
        for layer, row in one[key].items():
            assert two[key][layer] == pytest.approx(row, rel=1e-4)


@pytest.mark.slow
def test_a_real_model_has_the_perplexity_it_has_in_transformers(
    tmp_path: Path, checkout: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = demo_weights()
    # The file's own values, which bfloat16 would round.
    reshard(gguf, tmp_path / "hf", dtype="float32")
    reshard(tmp_path / "hf", tmp_path / "tp3", to="torch_dist", tp=3, pp=2)
    text = tmp_path / "text.txt"
    text.write_text((checkout / "docs" / "reference" / "recipes.md").read_text())
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text.read_text()).input_ids[:8193]
    assert len(ids) == 8193
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    loss = 0.0
    with torch.no_grad():
        for start in range(0, 8192, 512):
            window = torch.tensor(ids[start : start + 513])
            logits = peer(window[None, :-1]).logits[0]
            loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    expected = float(torch.tensor(loss / 8192, dtype=torch.float64).exp())
    del peer
    for source in (tmp_path / "hf", tmp_path / "tp3", gguf):
        found = score(source, text, max_tokens=8193, window=512, dtype="float32")
        assert found.tokens == 8192
        assert found.perplexity == pytest.approx(expected, rel=5e-5)
