"""Load balancing of experts: router losses, the expert bias, and what is logged of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.megatron_state.saved_objects import saved_args
from megtool.model.loss_options import LossOptions
from megtool.model.moe.aux_loss import Balance, moved_bias
from megtool.model.moe.router import Router
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.collectives import all_max, all_sum
from megtool.parallel.context_parallel import own_tokens
from megtool.source.checkpoint import CheckpointSource
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.train.evaluation import world_sum
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

_KINDS = ("aux_loss", "seq_aux_loss", "none")


def choose_router_losses(
    losses: LossOptions, config: ModelConfig, args: Mapping[str, Any]
) -> LossOptions | None:
    """Return the router losses and bias updates that options ask for; None if they do not.

    With `--moe-losses-from-checkpoint`, coefficients that are not given come from the checkpoint:
    from Megatron's `args`, or from the keys of its Hugging Face config. They are used as they are.
    transformers' own loss, of all layers at once, is larger by the number of experts per token.

    Raises:
        UsageError: the model has no experts, or the checkpoint no losses.
    """
    stored: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss"}
    if losses.moe_losses_from_checkpoint:
        stored |= _read_checkpoint_losses(config, args, losses)
    missing = {name: value for name, value in stored.items() if not getattr(losses, name)}
    chosen = replace(losses, **missing, moe_losses_from_checkpoint=False)
    if not (chosen.has_router_losses or chosen.moe_router_bias_update_rate):
        if losses.moe_losses_from_checkpoint:
            raise UsageError(
                "--moe-losses-from-checkpoint, and the checkpoint has none",
                hint="--moe-aux-loss-coeff X, --moe-z-loss-coeff X",
            )
        return None
    if not layer_sets.moe_layers(config):
        raise UsageError("a model without experts has no router losses")
    return chosen


def _read_checkpoint_losses(
    config: ModelConfig, args: Mapping[str, Any], explicit: LossOptions
) -> dict[str, Any]:
    """The router losses that a checkpoint was trained with; `explicit` are those of options.

    Raises:
        UsageError: it was trained with another kind of loss, and options give none.
    """
    extra = config.extra
    stored: dict[str, Any] = {
        "moe_aux_loss_coeff": args.get(
            "moe_aux_loss_coeff", extra.get("router_aux_loss_coef", extra.get("aux_loss_alpha"))
        ),
        "moe_z_loss_coeff": args.get("moe_z_loss_coeff", extra.get("router_z_loss_coef")),
    }
    kind = args.get("moe_router_load_balancing_type")
    if explicit.moe_router_load_balancing_type is not None or explicit.moe_aux_loss_coeff:
        kind = kind if kind in _KINDS[:2] else None
    elif stored["moe_aux_loss_coeff"] and (
        isinstance(stored["moe_aux_loss_coeff"], list) or (kind is not None and kind not in _KINDS)
    ):
        raise UsageError(
            f"--moe-losses-from-checkpoint, and the checkpoint has {kind!r} with coefficient "
            f"{stored['moe_aux_loss_coeff']}",
            hint="--moe-aux-loss-coeff X --moe-router-load-balancing-type aux_loss",
        )
    if kind is None and extra.get("seq_aux"):
        kind = "seq_aux_loss"
    out: dict[str, Any] = {n: float(v) for n, v in stored.items() if isinstance(v, int | float)}
    return out | ({"moe_router_load_balancing_type": kind} if kind in _KINDS else {})


class MoeLoadBalancingFeature(TrainingFeature):
    """Adds losses, counts and bias updates to the routers of this rank's stages."""

    def __init__(
        self, stages: Sequence[Decoder], settings: LossOptions, num_microbatches: int
    ) -> None:
        self.settings, self.num_microbatches = settings, num_microbatches
        self.groups = stages[0].groups
        self._routers: list[tuple[Router, Balance]] = []
        for decoder in stages:
            idle = decoder.mtp is not None and not decoder.mtp.is_trained
            for name, module in decoder.named_modules():
                if isinstance(module, Router) and not (idle and name.startswith("mtp.")):
                    module.balance = Balance(
                        settings,
                        decoder.config,
                        self.groups,
                        sequence_parallel=decoder.sequence_parallel,
                    )
                    self._routers.append((module, module.balance))

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that the model has what options ask for.

        Raises:
            UsageError: see `choose_router_losses`.
        """
        choose_router_losses(settings.losses, source.config, saved_args(source.catalogue))

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Give the routers their losses."""
        args = {} if inputs.source is None else saved_args(inputs.source.catalogue)
        balance = choose_router_losses(settings.losses, stages[0].config, args)
        return None if balance is None else cls(stages, balance, inputs.num_microbatches)

    def megatron_args(self) -> dict[str, Any]:
        """Megatron's args of the router losses."""
        settings = self.settings
        values = {
            "moe_aux_loss_coeff": settings.moe_aux_loss_coeff,
            "moe_router_load_balancing_type": (
                settings.moe_router_load_balancing_type if settings.moe_aux_loss_coeff else None
            ),
            "moe_z_loss_coeff": settings.moe_z_loss_coeff,
            "moe_router_bias_update_rate": settings.moe_router_bias_update_rate,
        }
        return {name: value for name, value in values.items() if value}

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Reset the counts, and scale the losses to the mean loss of a label."""
        local_labels = own_tokens(labels_BS, self.groups.cp)
        (labels,) = world_sum([float((local_labels != -100).sum())], self.groups)
        factor = loss_scale * labels / (self.num_microbatches * self.groups.dp.size)
        for _, balance in self._routers:
            balance.begin(factor)

    def forget_passes(self) -> None:
        for _, balance in self._routers:
            balance.reset()

    @torch.no_grad()
    def end_step(self) -> dict[str, float]:
        """Update the bias; returns `aux_loss` (or `seq_aux_loss`) and `z_loss` without
        coefficients, as means over layers, micro batches and replicas, and the largest and smallest
        load of an expert of any layer, relative to the mean load."""
        groups = self.groups
        sums = torch.zeros(3, dtype=torch.float64, device=groups.device)
        for _, balance in self._routers:
            # Ranks that share the tokens have parts of the loss; others have the same loss.
            if groups.tp.is_first or balance.has_parts:
                sums[0] += balance.aux
                sums[1] += balance.z
            if groups.tp.is_first and groups.cp.is_first:
                sums[2] += balance.passes
        sums = all_sum(sums, groups.world)
        extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=groups.device)
        if self._routers:
            loads = torch.stack([b.load_E for _, b in self._routers]).double()
            loads = all_sum(all_sum(loads, groups.tp), groups.replicas)
            shares = loads / loads.mean(1, keepdim=True).clamp(min=1)
            extremes = torch.stack((shares.max(), -shares.min()))
            if self.settings.moe_router_bias_update_rate:
                for (router, _), load_E in zip(self._routers, loads, strict=True):
                    if router.expert_bias is not None:
                        moved = moved_bias(
                            router.expert_bias,
                            load_E.float(),
                            self.settings.moe_router_bias_update_rate,
                        )
                        router.expert_bias.copy_(moved)
        extremes = all_max(extremes, groups.pp)
        aux, z, passes = sums.tolist()
        line = {"max_expert_load": float(extremes[0]), "min_expert_load": -float(extremes[1])}
        if self.settings.has_router_losses:
            name = (
                "seq_aux_loss"
                if self.settings.moe_router_load_balancing_type == "seq_aux_loss"
                else "aux_loss"
            )
            line |= {name: aux / max(passes, 1), "z_loss": z / max(passes, 1)}
        return line
