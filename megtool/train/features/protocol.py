"""Further: what settings do to a model beside training its weights, as one thing to the loop.

A place for each: FP8, LoRA, quantization-aware training, distillation, balanced experts, dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.checkpoint.catalogue import Catalogue
from megtool.config import ModelConfig
from megtool.convert.families import Family
from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.dropout import Dropout
from megtool.model.lora import LoraSettings, add_adapters, check_experts, layers_for
from megtool.model.moe_aux_loss import BalanceSettings
from megtool.model.pipeline import Objective, build_stages
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.config import TrainConfig
from megtool.train.config_checks import option_flag
from megtool.train.features.fp8 import Fp8Feature
from megtool.train.features.lora import LoraFeature
from megtool.train.features.peft_format import PeftFormat

if TYPE_CHECKING:
    from megtool.optim.fp8.settings import Fp8Config
    from megtool.quant.calibration.activation_sites import ActivationSite
    from megtool.quant.qparams import QParams
    from megtool.train.features.distillation import DistillationFeature
    from megtool.train.features.moe_load_balancing import MoeLoadBalancingFeature
    from megtool.train.features.qat import QatFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What is needed beside settings: the model's `family` and where it lies (`base`), for LoRA;
    what a recipe makes of it, for quantization-aware training; a loaded `teacher`, by its chunks
    here; and what is asked of routers (`balance`)."""

    family: Family | None = None
    base: str = ""
    rounded: tuple[Sequence[ActivationSite], QParams] | None = None
    teacher: Sequence[Decoder] | None = None
    num_microbatches: int = 1
    balance: BalanceSettings | None = None


@dataclass(slots=True, kw_only=True)
class Further:
    """What is done to the stages of this rank. `objective` stands for the decoder's own loss.

    `place` tells ranks apart that are to leave out other elements; None where nothing is left out.
    """

    fp8: Fp8Feature | None = None
    lora: LoraFeature | None = None
    rounding: QatFeature | None = None
    teaching: DistillationFeature | None = None
    objective: Objective | None = None
    balancing: MoeLoadBalancingFeature | None = None
    names: Sequence[str] = ()
    seed: int = 0
    place: str | None = None

    @classmethod
    def of(
        cls,
        stages: Sequence[Decoder],
        settings: TrainConfig,
        groups: ProcessGroups,
        beside: Beside | None = None,
    ) -> Further:
        """Change the stages as settings ask, before their optimizer is made; every rank calls it.

        Raises:
            UsageError: they ask for what cannot be done.
            MegtoolError: so does what is beside them.
        """
        beside = Beside() if beside is None else beside
        teaching = _teaching(stages, settings, beside)
        shares = (settings.hidden_dropout, settings.attention_dropout)
        for stage in stages:
            stage.dropout = Dropout(hidden=shares[0], attention=shares[1])
        return cls(
            fp8=_fp8(stages, settings, groups),
            lora=_lora(stages, settings, beside),
            rounding=_rounding(stages, beside),
            teaching=teaching,
            objective=None if teaching is None else teaching.objective,
            balancing=_balancing(stages, beside),
            seed=settings.seed,
            place=f"{groups.replicas.rank} {groups.pp.rank}"
            if any(shares) or settings.lora_dropout
            else None,
        )

    @contextmanager
    def around(self, iteration: int, batch: Batch | None, *, teach: bool = True) -> Iterator[None]:
        """While the passes of a step are done, or of an evaluation (`batch` None).

        Weights are then rounded, if they are to be: parameters have to be there. What is left out
        by chance is the same each time; without `teach` no teacher is asked.
        """
        with ExitStack() as stack:
            if self.rounding is not None:
                stack.enter_context(self.rounding.around())
            if self.teaching is not None and teach:
                stack.enter_context(self.teaching.around(batch))
            if batch is not None and self.place is not None:
                # By the step alone: a run that goes on leaves out the same.
                digest = hashlib.sha256(f"{self.seed} {iteration} {self.place}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
            yield

    def load(self, catalogue: Catalogue) -> None:
        """Take from a checkpoint what `objects` has put there."""
        if self.fp8 is not None:
            self.fp8.load_objects(catalogue)

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Before the passes of each step; every rank calls it."""
        if self.balancing is not None:
            self.balancing.begin_step(labels_BS, loss_scale)

    def end_step(self) -> dict[str, float]:
        """After each step of the optimizer; every rank calls it. What the log is to say of it."""
        if self.fp8 is not None:
            self.fp8.end_step()
        return {} if self.balancing is None else self.balancing.end_step()

    def objects(self) -> Mapping[str, bytes]:
        """What this rank adds to a checkpoint, by `names` of the checkpoint's tensors."""
        return {} if self.fp8 is None else self.fp8.objects(self.names)


def _lora(stages: Sequence[Decoder], settings: TrainConfig, beside: Beside) -> LoraFeature | None:
    told = lora_settings(settings)
    if told is None:
        return None
    if beside.family is None:
        raise no_names()
    return LoraFeature(stages, told, beside.family, beside.base)


def check_lora(settings: TrainConfig, config: ModelConfig, family: Family | None) -> None:
    """Refuse adapters that this model cannot have, before its weights are loaded.

    Raises:
        UsageError: it is of no known family, or adapters of experts cannot do what is asked.
        MappingError: its family has no place for them in PEFT's form.
    """
    told = lora_settings(settings)
    if told is None:
        return
    check_experts(config, told)
    if family is None:
        raise no_names()
    whole = build_stages(replace(config, num_mtp_layers=0), ProcessGroups.alone("meta"))
    PeftFormat(config, family, [name for s in whole for name, _ in layers_for(s, told)])


def check_patterns(settings: TrainConfig, config: ModelConfig) -> None:
    """Refuse `--freeze`, `--lr-mult` and `--wd-mult` of no parameter, on whichever rank.

    Raises:
        UsageError: a pattern is of none.
    """
    rules = [("--freeze", glob) for glob in settings.freeze]
    for name in ("lr_mult", "wd_mult"):
        rules += [(option_flag(name), text.rpartition("=")[0]) for text in getattr(settings, name)]
    if not rules:
        return
    whole = build_stages(replace(config, num_mtp_layers=0), ProcessGroups.alone("meta"))
    if (told := lora_settings(settings)) is not None:
        add_adapters(whole, told)
    names = [name for stage in whole for name, _ in stage.named_parameters()]
    for option, glob in rules:
        if glob and not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"{option} {glob!r} is of no parameter",
                hint="names are Megatron's, as decoder.layers.0.mlp.linear_fc1.weight",
            )


def no_names() -> UsageError:
    """What LoRA of a model of no known family is."""
    return UsageError(
        "LoRA of a model of no known family, whose modules have no names in PEFT's form",
        hint="--family NAME says which",
    )


def lora_settings(settings: TrainConfig) -> LoraSettings | None:
    """What is said of LoRA; None where nothing is.

    Raises:
        UsageError: there is no such role.
    """
    rank = settings.lora_rank
    if rank is None:
        return None
    return LoraSettings(
        rank=rank,
        alpha=2.0 * rank if settings.lora_alpha is None else settings.lora_alpha,
        dropout=settings.lora_dropout,
        roles=tuple(dict.fromkeys(role.strip() for role in settings.lora_target.split(","))),
        seed=settings.seed,
    )


def _rounding(stages: Sequence[Decoder], beside: Beside) -> QatFeature | None:
    if beside.rounded is None:
        return None
    from megtool.train.features.qat import QatFeature

    return QatFeature(stages, *beside.rounded)


def _teaching(
    stages: Sequence[Decoder], settings: TrainConfig, beside: Beside
) -> DistillationFeature | None:
    if beside.teacher is None:
        return None
    from megtool.train.features.distillation import DistillationFeature

    return DistillationFeature(
        stages[-1],
        beside.teacher,
        num_microbatches=beside.num_microbatches,
        temperature=settings.distill_temperature,
        weight=settings.distill_weight,
    )


def _balancing(stages: Sequence[Decoder], beside: Beside) -> MoeLoadBalancingFeature | None:
    if beside.balance is None:
        return None
    from megtool.train.features.moe_load_balancing import MoeLoadBalancingFeature

    return MoeLoadBalancingFeature(stages, beside.balance, beside.num_microbatches)


def _fp8(
    stages: Sequence[Decoder], settings: TrainConfig, groups: ProcessGroups
) -> Fp8Feature | None:
    told = fp8_settings(settings)
    return None if told is None else Fp8Feature(stages, told, groups)


def fp8_settings(settings: TrainConfig) -> Fp8Config | None:
    """What is said of FP8; None where nothing is.

    Raises:
        UsageError: a value is out of its range.
    """
    from megtool.optim.fp8.settings import Fp8Config

    if settings.fp8_recipe is None:
        return None
    return Fp8Config(
        recipe=settings.fp8_recipe,
        format=settings.fp8_format,
        amax_history_len=settings.fp8_amax_history_len,
        amax_compute_algo=settings.fp8_amax_compute_algo,
        margin=settings.fp8_margin,
        start_in_bf16=settings.num_layers_at_start_in_bf16,
        end_in_bf16=settings.num_layers_at_end_in_bf16,
    )
