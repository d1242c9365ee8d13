"""Distillation layer by layer: the student's states after a layer beside the teacher's.

The loss of a token is the mean over pairs of layers of `1 - cos(student, teacher)`, of the residual
of hidden size H behind each layer: `torch.nn.functional.cosine_embedding_loss`, which is ModelOpt's
`HiddenStateCosineLoss` too. Sizes of the loss do not depend on those of the states, which grow from
layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import LayoutError, MappingError, UsageError
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group
from megtool.spec.model_config import ModelConfig

LayerPair = tuple[int, int]
"""The number of a student's layer and that of the teacher's, from 0 on."""


def pair_layers(student: int, teacher: int) -> list[LayerPair]:
    """Every layer of the model with fewer layers, and the one as deep in the other: the last with
    the last."""
    count = min(student, teacher)

    def layer(number: int, total: int) -> int:
        return -(-(number + 1) * total // count) - 1

    return [(layer(n, student), layer(n, teacher)) for n in range(count)]


def read_pairs(text: str) -> list[LayerPair]:
    """Pairs such as `3:7,5:11`.

    Raises:
        UsageError: they are written in another way.
    """
    try:
        pairs = [(int(a), int(b)) for a, b in (pair.split(":") for pair in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or any(n < 0 for pair in pairs for n in pair):
        raise UsageError(
            f"--distill-layers is {text!r}",
            hint="layers of the student with those of the teacher, from 0 on: 3:7,5:11",
        )
    return pairs


def choose_pairs(student: ModelConfig, teacher: ModelConfig, text: str | None) -> list[LayerPair]:
    """The pairs that are compared: those of an option, or by default those of `pair_layers`.

    Raises:
        MappingError: hidden sizes differ, or a layer is none of its model.
        UsageError: the option cannot be read.
    """
    if student.hidden_size != teacher.hidden_size:
        raise MappingError(
            f"the teacher's hidden size is {teacher.hidden_size}, the student's "
            f"{student.hidden_size}",
            hint="without --distill-hidden-weight; logits have the same size in both",
        )
    if student.residual.hyper_streams or teacher.residual.hyper_streams:
        raise MappingError(
            "residuals side by side (hyper-connections) are not compared layer by layer",
            hint="without --distill-hidden-weight",
        )
    if text is None:
        return pair_layers(student.num_layers, teacher.num_layers)
    pairs = read_pairs(text)
    for own, taught in pairs:
        for name, number, config in (("student", own, student), ("teacher", taught, teacher)):
            if number >= config.num_layers:
                raise MappingError(
                    f"--distill-layers names layer {number}, and the {name} has "
                    f"{config.num_layers}",
                    hint=f"0 to {config.num_layers - 1}",
                )
    return pairs


def check_stages(layout: ParallelConfig) -> None:
    """Refuse pipeline stages: the loss is made where the output layer is.

    Raises:
        LayoutError: there are some.
    """
    if layout.pp > 1:
        raise LayoutError(
            f"pp={layout.pp} keeps layers on other ranks than the output layer, and "
            "--distill-hidden-weight compares them there",
            hint="--tp, --cp and replicas split the run; --pp 1",
        )


def layer_loss(
    student: dict[int, Tensor],
    teacher: dict[int, Tensor],
    pairs: Sequence[LayerPair],
    counted_T: Tensor,
    tp: Group,
    *,
    is_sequence_parallel: bool = False,
) -> Tensor:
    """The sum over the tokens that count (`counted_T`, bool) of the mean over pairs, float32.

    With sequence parallelism the student's states are this rank's rows, of which it gets the
    gradient; the sum is that of all.
    """
    if is_sequence_parallel:
        counted_T = counted_T.chunk(tp.size)[tp.rank]
    counted_N = counted_T.nonzero().squeeze(1)
    total = next(iter(student.values())).new_zeros(()).float()
    for own, taught in pairs:
        there_TH = teacher[taught]
        if is_sequence_parallel:
            there_TH = there_TH.chunk(tp.size)[tp.rank]
        a_NH = student[own].index_select(0, counted_N).float()
        b_NH = there_TH.index_select(0, counted_N).float()
        total = total + (1 - F.cosine_similarity(a_NH, b_NH)).sum()
    total = total / len(pairs)
    if is_sequence_parallel:
        whole = total.detach().clone()
        dist.all_reduce(whole, group=tp.handle)
        total = total + (whole - total.detach())
    return total
