"""Balanced experts: Megatron's own losses and gradients, the same at every layout, and a bias."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.forward_context import ForwardContext
from megtool.model.loss_options import LossOptions
from megtool.model.moe.aux_loss import Balance, moved_bias
from megtool.model.moe.router import Router, choose
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.model.stacks.recompute import recompute
from megtool.options.config_file import build_options
from megtool.options.effects import check_effects
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from megtool.train.features.moe_load_balancing import MoeLoadBalancingFeature, choose_router_losses
from megtool.train.model.build import load_for_training
from megtool.train.options.config import TrainConfig
from megtool.train.options.model_facts import ModelFacts
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

E, K, B, S = 8, 2, 3, 6
SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_positions": 32,
    "num_experts": E,
    "num_experts_per_token": K,
    "moe_ffn_hidden_size": 8,
}
Found = tuple[float, float, Tensor]


def frame(counted: Tensor | None) -> ForwardContext:
    return ForwardContext(
        num_rows=B,
        num_tokens=S,
        positions_BS=torch.arange(S)[None],
        rotary=None,  # type: ignore[arg-type]
        masks=None,  # type: ignore[arg-type]
        counted_BS=counted,
    )


def ours(kind: Any, score: str, logits_BSE: Tensor, counted: Tensor | None) -> Found:
    config = ModelConfig.from_fields(**SIZES, router_score=score, router_pre_softmax=True)
    settings = LossOptions(
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02
    )
    balance = Balance(settings, config, ProcessGroups.alone(), sequence_parallel=False)
    balance.begin(2.5)
    logits = logits_BSE.clone().requires_grad_()
    flat = logits.flatten(0, 1)
    experts, probs = choose(flat, config)
    probs = balance(flat, experts, probs, frame(counted), 0)
    (probs * torch.arange(K)).sum().backward()
    assert logits.grad is not None
    return float(balance.aux), float(balance.z), logits.grad


def megatrons(kind: str, score: str, logits_BSE: Tensor, counted: Tensor | None) -> Found:
    """What megatron-core's router does to the logits of a microbatch, on one process."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import router as theirs
    from megatron.core.transformer.transformer_config import TransformerConfig

    group = dist.group.WORLD
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_router_score_function=score,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.02,
        add_bias_linear=False,
        perform_initialization=False,
    )
    groups = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    router = theirs.TopKRouter(config, groups).train()
    router.set_layer_number(1)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(2.5))
    said: dict[str, float] = {}

    def note(name: str, loss: Tensor, *_: Any, **__: Any) -> None:
        said[name] = float(loss.detach())

    if hasattr(theirs, "get_moe_metrics_tracker"):  # of 0.19
        theirs.get_moe_metrics_tracker = lambda: SimpleNamespace(record=note)
    else:
        theirs.save_to_aux_losses_tracker = note
    logits = logits_BSE.transpose(0, 1).contiguous().requires_grad_()
    padding = None if counted is None else ~counted.T
    probs, _ = router.routing(logits, padding)
    order = logits.detach().view(-1, E).topk(K, -1).indices
    (probs.gather(1, order) * torch.arange(K)).sum().backward()
    grad = logits.grad
    return sum(v for n, v in said.items() if n != "z_loss"), said["z_loss"], grad.transpose(0, 1)


LOADS = torch.tensor([[3.0, 1, 0, 4, 2, 2], [5, 1, 1, 0, 2, 3]])


def bias_of_megatron(bias: Tensor) -> list[Tensor]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    parallel_state.get_tensor_and_data_parallel_group = lambda **_: dist.group.WORLD
    return [get_updated_expert_bias(load.clone(), bias, 0.01) for load in LOADS]


@pytest.mark.peers
def test_losses_gradients_and_the_bias_are_megatrons() -> None:
    if find_spec("megatron") is None:  # importing it takes seconds: the other process does
        pytest.skip("megatron-core is the oracle")
    torch.manual_seed(0)
    logits = torch.randn(B, S, E) * 2
    padded = torch.arange(S)[None] < torch.tensor([[S], [S - 2], [1]])
    few = torch.arange(S)[None] < torch.tensor([[1], [0], [0]])  # fewer tokens than rows
    asked = [
        (kind, score, logits, counted)
        for kind in ("aux_loss", "seq_aux_loss")
        for score in ("softmax", "sigmoid")
        for counted in (None, padded, few)
    ]
    bias = torch.randn(6)
    ((found, moved),) = run_world(all_of_megatrons, 1, asked, bias)
    for one, (aux, z, grad) in zip(asked, found, strict=True):
        mine = ours(*one)
        assert mine[:2] == pytest.approx((aux, z), rel=1e-5), one[:2]
        assert torch.allclose(mine[2], grad, rtol=1e-5, atol=1e-7), one[:2]
    for load, theirs in zip(LOADS, moved, strict=True):
        assert torch.equal(theirs, moved_bias(bias, load, 0.01))


def all_of_megatrons(
    rank: int, size: int, asked: list[tuple[Any, ...]], bias: Tensor
) -> tuple[list[Found], list[Tensor]]:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = [megatrons(*one) for one in asked], bias_of_megatron(bias)
    dist.destroy_process_group()
    return found


MOE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixtral")
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE))
    model.save_pretrained(folder)
    return folder


TOKENS = torch.randint(1, 100, (6, 8), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS.roll(-1, 1).masked_fill(TOKENS % 4 == 0, -100)
COUNTED = torch.arange(8)[None].expand(6, 8) < torch.tensor([[8], [7], [6], [8], [8], [3]])
Passed = tuple[dict[str, float], dict[str, Tensor]]


def passed(
    path: Path, layout: dict[str, int], *, sp: bool = False, again: Any = None, kind: Any = None
) -> Passed:
    """What a step says, and gradients of routers and of the words, summed over replicas."""
    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig(**layout)) if layout else ProcessGroups.alone()
    opened = open_source(path)
    assert opened.model is not None
    source = opened
    stages = load_for_training(source, groups, dtype="float32", threads=1, sequence_parallel=sp)
    if again:
        recompute(stages, again)
    micro = 2 // groups.dp.size  # of three rows: sequence parallelism cuts the second
    settings = LossOptions(
        moe_router_load_balancing_type=kind or "aux_loss",
        moe_aux_loss_coeff=0.5,
        moe_z_loss_coeff=0.1,
    )
    balancing = MoeLoadBalancingFeature(stages, settings, micro)
    mine = [t.chunk(groups.dp.size)[groups.dp.rank] for t in (TOKENS, LABELS, COUNTED)]
    balancing.begin_step(mine[1], 2.0)
    schedule = PipelineSchedule(stages, num_microbatches=micro, scale=lambda loss: loss * 2)
    schedule.step(Batch(tokens_BS=mine[0], counted_BS=mine[2]), mine[1])
    line = balancing.end_step()
    found = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            if "router.weight" in name or "word_embeddings" in name:
                grad = p.grad.clone()
                if groups.replicas.size > 1:
                    dist.all_reduce(grad, group=groups.replicas.handle)
                if sp and "router" in name:
                    dist.all_reduce(grad, group=groups.tp.handle)
                if groups.tp.size > 1 and "word" in name:
                    whole = [torch.empty_like(grad) for _ in range(groups.tp.size)]
                    dist.all_gather(whole, grad, group=groups.tp.handle)
                    grad = torch.cat(whole)[:101]
                found[name] = grad[:101]
    if layout:
        groups.stop()
    return line, found


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sp": True}),
    ({"tp": 2, "etp": 1, "ep": 2}, {"sp": True}),
    ({"ep": 2, "dp": 2}, {}),
    ({"pp": 2}, {"again": "full"}),
    ({"cp": 2}, {}),
]


def on_layouts(rank: int, size: int, path: str, number: int, kind: str) -> Passed:
    layout, how = LAYOUTS[number]
    return passed(Path(path), layout, **how, kind=kind)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda n: str(LAYOUTS[n]))
@pytest.mark.parametrize("kind", ["aux_loss", pytest.param("seq_aux_loss", marks=pytest.mark.slow)])
def test_every_layout_has_the_same_losses_and_gradients(mixtral, number, kind) -> None:
    line, grads = passed(mixtral, {}, kind=kind)
    seen = set()
    for said, found in run_world(on_layouts, 2, str(mixtral), number, kind):
        assert said == pytest.approx(line, rel=1e-5)
        for name, grad in found.items():
            assert torch.allclose(grad, grads[name], rtol=1e-4, atol=1e-5), name
            seen.add(name)
    assert len([n for n in seen if "router" in n]) == 2


@pytest.mark.parametrize("again", ["full", "selective"])
def test_what_is_computed_again_counts_once(mixtral, again) -> None:
    line, grads = passed(mixtral, {})
    said, found = passed(mixtral, {}, again=again)
    assert said == line
    assert all(torch.equal(found[n], g) for n, g in grads.items())


def test_a_bias_of_a_model_follows_its_load() -> None:
    config = ModelConfig.from_fields(**SIZES, router_score="sigmoid", router_expert_bias=True)
    torch.manual_seed(0)
    decoder = Decoder(config, device="cpu")
    with torch.no_grad():
        for p in decoder.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)
    router = next(m for m in decoder.modules() if isinstance(m, Router))
    assert router.expert_bias is not None
    before = router.expert_bias.clone()
    balancing = MoeLoadBalancingFeature(
        [decoder.train()], LossOptions(moe_router_bias_update_rate=0.01), 1
    )
    balancing.begin_step(LABELS, 1.0)
    batch = Batch(tokens_BS=TOKENS % 64)
    with torch.no_grad():
        decoder.eval()(batch)  # counts for nothing
    decoder.train().loss(batch, LABELS % 64)
    assert router.balance is not None
    load = torch.as_tensor(router.balance.load_E)
    assert load.sum() == TOKENS.numel() * K
    line = balancing.end_step()
    assert line["max_expert_load"] == pytest.approx(float(load.max() / load.mean()))
    assert torch.equal(router.expert_bias, before + 0.01 * (load.mean() - load).sign())
    assert balancing.megatron_args() == {"moe_router_bias_update_rate": 0.01}


def test_the_checkpoints_own_weights_only_if_asked() -> None:
    config = ModelConfig.from_fields(**SIZES, extra={"router_aux_loss_coef": 0.001})
    assert choose_router_losses(LossOptions(), config, {}) is None
    asked = LossOptions(moe_losses_from_checkpoint=True)
    found = choose_router_losses(asked, config, {})
    assert found is not None
    assert (found.moe_aux_loss_coeff, found.moe_z_loss_coeff) == (0.001, 0.0)
    args = {"moe_aux_loss_coeff": 0.02, "moe_router_load_balancing_type": "seq_aux_loss"}
    found = choose_router_losses(asked, config, args | {"moe_z_loss_coeff": 1e-3})
    assert found == LossOptions(
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.02,
        moe_z_loss_coeff=1e-3,
    )
    found = choose_router_losses(replace(asked, moe_aux_loss_coeff=0.5), config, args)
    assert found == LossOptions(
        moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.5
    )
    found = choose_router_losses(
        replace(asked, moe_router_load_balancing_type="aux_loss"), config, args
    )
    assert found == LossOptions(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02
    )  # what is given wins
    for kind in ("global_aux_loss", ["aux_loss", "seq_aux_loss"]):
        other = args | {"moe_router_load_balancing_type": kind}
        with raises(
            UsageError, match="the checkpoint has", hint="--moe-aux-loss-coeff X --moe-router"
        ):
            choose_router_losses(asked, config, other)
        found = choose_router_losses(replace(asked, moe_aux_loss_coeff=0.5), config, other)
        assert found == LossOptions(
            moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5
        )  # as the hint says
    none = args | {"moe_router_load_balancing_type": "none"}
    found = choose_router_losses(replace(asked, moe_aux_loss_coeff=0.5), config, none)
    assert found == LossOptions(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5)
    with raises(UsageError, "without --moe-aux-loss-coeff", id="option-without-effect"):
        build_options(TrainConfig, {"moe_router_load_balancing_type": "seq_aux_loss"})
    with raises(UsageError, "without an expert bias", id="option-without-effect"):
        check_effects(
            build_options(TrainConfig, {"moe_router_bias_update_rate": 0.1}),
            ModelFacts.from_config(config),
        )
    dense = ModelConfig.from_fields(
        **{k: v for k, v in SIZES.items() if "exp" not in k and "moe" not in k}
    )
    with pytest.raises(UsageError, match="without experts"):
        choose_router_losses(LossOptions(moe_z_loss_coeff=0.1), dense, {})
