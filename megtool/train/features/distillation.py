"""Distillation: training on the logits, and hidden states, of a teacher.

The loss is `(1 - weight) * CE + weight * t^2 * KL(teacher || student) + hidden_weight * L`, all
summed over the tokens that have labels: the divergence of both softmaxes at temperature t (Hinton
et al., 2015), and the mean over pairs of layers of `1 - cos` of their states
(`megtool.train.features.layer_distillation`). A teacher with another vocabulary has a loss by spans
of text in the divergence's place (`megtool.train.features.vocabulary_distillation`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.console import Progress
from megtool.convert.megatron.sharding import check_layout
from megtool.data.token_alignment import TokenAligner, TokenBytes, other_tokens
from megtool.errors import LayoutError, MappingError, MegtoolError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.layer_states import LayerStates
from megtool.model.stacks.pipeline import Objective, stream_hidden
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import copy_to, gather_rows
from megtool.parallel.context_parallel import own_tokens
from megtool.parallel.pipeline_split import divisors, near
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder
from megtool.spec.model_config import ModelConfig
from megtool.train.evaluation import world_sum
from megtool.train.features.layer_distillation import (
    check_stages,
    choose_pairs,
    layer_loss,
)
from megtool.train.features.logits_divergence import LogitsHead, kl_divergence
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.features.vocabulary_distillation import (
    SharedTokens,
    SpanComparison,
    SpanDivergence,
    VocabularyPair,
    align_batch,
    check_ranks,
)
from megtool.train.model.build import load_for_training
from megtool.train.model.memory_estimate import estimate_weight_bytes
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

    from megtool.data.tokenizer import Tokenizer


def check_vocabularies(student: ModelConfig, teacher: ModelConfig) -> None:
    """Check that teacher and student have vocabularies of the same size.

    Raises:
        MappingError: they have not.
    """
    if student.embedding.vocab_size != teacher.embedding.vocab_size:
        raise MappingError(
            f"the teacher's vocabulary has {teacher.embedding.vocab_size} tokens, the student's "
            f"{student.embedding.vocab_size}",
            hint="--distill-loss uld or gold, or a teacher with the same tokenizer",
        )


def check_tokens(own: Tokenizer, taught: Tokenizer) -> None:
    """Check that token ids mean the same to student and teacher, but for 1 % of them: names of
    reserved tokens differ between releases of a model.

    Raises:
        MappingError: they do not.
    """
    others = other_tokens(own, taught)
    if len(others) > len(own.vocabulary()) / 100:
        number, (piece, taught_piece) = min(others.items())
        raise MappingError(
            f"the teacher has another tokenizer: {len(others):,} token ids are other tokens than "
            f"the student's, such as {number}, {taught_piece!r} instead of {piece!r}",
            hint="--distill-loss uld or gold; --teacher-tokenizer FOLDER if it is not the "
            "teacher's",
        )


def plan_teacher_layout(
    layout: ParallelConfig, student: ModelConfig, teacher: ModelConfig
) -> ParallelConfig:
    """The teacher's layout on the student's ranks: the student's, with even stages if it has
    another number of layers, and without expert parallelism if it has no experts.

    Raises:
        LayoutError: its layers do not divide evenly, or tp or ep does not divide it.
    """
    if student.num_layers != teacher.num_layers:
        if teacher.num_layers % layout.pp:
            raise LayoutError(
                f"pp={layout.pp} does not divide the {teacher.num_layers} layers of the teacher",
                hint=f"--pp, of {near(divisors(teacher.num_layers), layout.pp)}, or a teacher of "
                "as many layers as the student",
            )
        layout = replace(
            layout,
            vpp=1,
            first_stage_layers=None,
            last_stage_layers=None,
            account_for_embedding=False,
            account_for_loss=False,
            pipeline_layout=None,
        )
    if not teacher.moe.num_experts:
        layout = replace(layout, ep=1, etp=layout.tp)
    try:
        check_layout(teacher, layout)
    except LayoutError as e:
        raise LayoutError(f"{e.message} of the teacher", hint=e.hint) from e
    return layout


class DistillationFeature(TrainingFeature):
    """The loss of a run with a teacher, which is not trained.

    `around_passes` gets the batch, whose micro batches `objective` is called with one by one. The
    teacher has the student's groups, and sees whole rows. With pipeline stages, each runs the
    teacher's own stage on the whole batch before the student's passes, and the last stage keeps the
    output of the teacher's last norm until then.

    Raises:
        UsageError: temperature or weights are out of their range, or `layers` cannot be read.
        MappingError: the vocabularies differ, or hidden states that are compared.
        LayoutError: the vocabularies are split differently, or layers that are compared.

    `vocabularies` are the student's and the teacher's, for the losses between them.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Decoder | Sequence[Decoder],
        *,
        num_microbatches: int,
        temperature: float = 1.0,
        weight: float = 0.5,
        hidden_weight: float = 0.0,
        layers: str | None = None,
        vocabularies: VocabularyPair | None = None,
    ) -> None:
        if temperature <= 0 or not 0 <= weight <= 1 or hidden_weight < 0:
            raise UsageError(
                f"distillation cannot be at temperature {temperature} with weight {weight} and, "
                f"of hidden states, {hidden_weight}",
                hint="a temperature above 0, a weight from 0 to 1, one of hidden states from 0 on",
            )
        self.chunks = [teacher] if isinstance(teacher, Decoder) else list(teacher)
        self.teacher = self.chunks[-1]
        self._aligner: TokenAligner | None = None
        self._shared: SharedTokens | None = None
        if vocabularies is not None:
            check_between_vocabularies(student.groups.parallel, hidden_weight)
            self._aligner = TokenAligner(vocabularies.own, vocabularies.taught)
            if vocabularies.loss == "gold":
                self._shared = vocabularies.shared_tokens(student.groups.device)
        else:
            check_vocabularies(student.config, self.teacher.config)
        if student.groups.tp.size > 1 and student.padded_vocab != self.teacher.padded_vocab:
            raise LayoutError(
                f"tp={student.groups.tp.size} cuts vocabularies padded to {student.padded_vocab} "
                f"and, of the teacher, {self.teacher.padded_vocab}, in different places",
                hint="--tp 1, or a teacher padded alike",
            )
        for chunk in self.chunks:
            chunk.eval().requires_grad_(False)
        self.num_microbatches = num_microbatches
        self.temperature, self.weight = temperature, weight
        self._batches: deque[Batch] = deque()
        self._states: deque[Tensor | None] = deque()
        self.hidden_weight, self._groups = hidden_weight, student.groups
        weights = {"data_loss": 1 - weight, "distill_loss": weight}
        weights |= {"distill_hidden_loss": hidden_weight, "labels": 1.0}
        self._sums: dict[str, list[Tensor]] = {n: [] for n, x in weights.items() if x}
        if hidden_weight:
            check_stages(student.groups.parallel)
            self.pairs = choose_pairs(student.config, self.teacher.config, layers)
            self._own_layers = LayerStates(student, [own for own, _ in self.pairs])
            self._taught_layers = LayerStates(self.teacher, [taught for _, taught in self.pairs])

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that the teacher fits.

        Raises:
            MappingError: its vocabulary differs, or the tokens of its tokenizer if both have one,
                or hidden states that are compared.
            LayoutError: the layout does not divide it, or has stages whose layers are compared.
            MegtoolError: it cannot be opened.
        """
        if settings.teacher is not None:
            opened = open_decoder(settings.teacher)
            teacher = opened.config
            if settings.distill_loss == "kl":
                check_vocabularies(source.config, teacher)
                _check_tokenizers(settings, source, opened)
            else:
                check_between_vocabularies(settings.layout, settings.distill_hidden_weight)
                _read_vocabularies(settings, source, opened)
            plan_teacher_layout(settings.layout, source.config, teacher)
            if settings.distill_hidden_weight:
                check_stages(settings.layout)
                choose_pairs(source.config, teacher, settings.distill_layers)

    @classmethod
    def estimate_memory(
        cls,
        settings: TrainConfig,
        source: CheckpointSource,
        layout: ParallelConfig,
        dtype: str,
        device: str,
    ) -> Mapping[str, int]:
        """Bytes of the teacher's weights."""
        if settings.teacher is None:
            return {}
        teacher = open_decoder(settings.teacher).config
        layout = plan_teacher_layout(layout, source.config, teacher)
        return {"teacher_bytes": estimate_weight_bytes(teacher, layout, dtype)}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Load the teacher.

        Raises:
            MegtoolError: it cannot be read, or does not fit.
        """
        if settings.teacher is None:
            return None
        vocabularies = None
        if settings.distill_loss != "kl" and inputs.source is not None:
            vocabularies = _read_vocabularies(
                settings, inputs.source, open_decoder(settings.teacher)
            )
        return cls(
            stages[-1],
            _load_teacher(settings.teacher, settings, stages[-1], inputs.progress),
            num_microbatches=inputs.num_microbatches,
            temperature=settings.distill_temperature,
            weight=settings.distill_weight,
            hidden_weight=settings.distill_hidden_weight,
            layers=settings.distill_layers,
            vocabularies=vocabularies,
        )

    @contextmanager
    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> Iterator[None]:
        """Run the teacher on the batch, or get ready to; an evaluation does not need it."""
        if is_repeated:
            yield
            return
        if batch is not None:
            self._batches.extend(_split_batch(batch, self.num_microbatches))
            if self.weight and self.teacher.groups.pp.size > 1:
                self._states.extend(stream_hidden(self.chunks, self._batches))
        with ExitStack() as stack:
            stack.callback(self._states.clear)
            stack.callback(self._batches.clear)
            if self.hidden_weight and batch is not None:
                stack.enter_context(self._own_layers.kept())
                stack.enter_context(self._taught_layers.kept())
            yield

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Reset the sums of the losses."""
        self._sums = {name: [] for name in self._sums}

    def end_step(self) -> Mapping[str, float]:
        """The losses that are mixed, each over the number of labels."""
        sums = [float(sum(parts)) for parts in self._sums.values()]
        *losses, labels = world_sum(sums, self._groups)
        return {n: x / labels for n, x in zip(self._sums, losses, strict=False)} if labels else {}

    @property
    def objective(self) -> Objective:
        """The loss of the next micro batch; see the module."""
        return self._loss

    def _loss(self, head: Decoder, x_TH: Tensor, labels_BS: Tensor) -> Tensor:
        batch = self._batches.popleft()
        labels_T = own_tokens(labels_BS, head.groups.cp).flatten()
        parts: dict[str, tuple[float, Tensor]] = {}
        if self.weight < 1:
            parts["data_loss"] = 1 - self.weight, head.loss_of(x_TH, labels_BS)[0]
        if self._aligner is not None and self.weight:
            spans = self._span_loss(self._aligner, head, x_TH, batch, labels_BS)
            parts["distill_loss"] = self.weight, spans
        elif self.weight or self.hidden_weight:
            teacher_x_TH = self._states.popleft() if self._states else None
            if teacher_x_TH is None:
                with torch.no_grad():
                    teacher_x_TH = self.teacher.hidden(batch)
            if self.weight:
                divergence = self._divergence(head, x_TH, teacher_x_TH, labels_T)
                parts["distill_loss"] = self.weight, divergence
        if self.hidden_weight:
            states = layer_loss(
                self._own_layers.take(),
                self._taught_layers.take(),
                self.pairs,
                labels_T != -100,
                head.groups.tp,
                is_sequence_parallel=head.sequence_parallel,
            )
            parts["distill_hidden_loss"] = self.hidden_weight, states
        loss = x_TH.new_zeros((), dtype=torch.float32)
        for name, (weight, part) in parts.items():
            loss = loss + weight * part
            self._sums[name].append(part.detach())
        self._sums["labels"].append((labels_T != -100).sum())
        return loss

    def _span_loss(
        self,
        aligner: TokenAligner,
        head: Decoder,
        x_TH: Tensor,
        batch: Batch,
        labels_BS: Tensor,
    ) -> Tensor:
        """The loss between vocabularies, summed over spans."""
        spans = align_batch(aligner, batch, labels_BS)
        if not spans.num_spans:
            return x_TH.sum() * 0.0
        with torch.no_grad():
            taught_x_TH, taught = _logits_head(self.teacher, self.teacher.hidden(spans.teacher))
        x_TH, student = _logits_head(head, x_TH)

        def logits(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
            by_weight = replace(student, weight_VH=weight_VH)
            return by_weight.logits(x_NH, head.config.embedding.vocab_size).float()

        def taught_logits(x_NH: Tensor) -> Tensor:
            return taught.logits(x_NH, self.teacher.config.embedding.vocab_size).float()

        compared = SpanComparison(
            spans=spans,
            taught_x_TH=taught_x_TH,
            logits=logits,
            taught_logits=taught_logits,
            shared=self._shared,
            temperature=self.temperature,
        )
        out: Tensor = SpanDivergence.apply(  # type: ignore[no-untyped-call]
            x_TH, student.weight_VH, compared
        )
        return out

    def _divergence(
        self, head: Decoder, x_TH: Tensor, teacher_x_TH: Tensor, labels_T: Tensor
    ) -> Tensor:
        tp = head.groups.tp
        x_TH = gather_rows(x_TH, tp) if head.sequence_parallel else copy_to(x_TH, tp)
        counted_N = (labels_T != -100).nonzero().squeeze(1)
        x_TH, student = _logits_head(head, x_TH)
        teacher_x_TH, teacher = _logits_head(self.teacher, teacher_x_TH)
        local = head.padded_vocab // tp.size
        num_columns = min(max(head.config.embedding.vocab_size - tp.rank * local, 0), local)
        return kl_divergence(
            x_TH.index_select(0, counted_N),
            student,
            teacher_x_TH.index_select(0, counted_N),
            teacher,
            num_columns=num_columns,
            temperature=self.temperature,
            group=tp.handle,
        )


def check_between_vocabularies(layout: ParallelConfig, hidden_weight: float) -> None:
    """Refuse what a loss by spans does not go with.

    Raises:
        LayoutError: ranks have parts of rows or vocabularies.
        UsageError: hidden states are compared, of tokens that are not the same.
    """
    check_ranks(layout)
    if hidden_weight:
        raise UsageError(
            "--distill-hidden-weight compares states token by token, and tokens differ between "
            "vocabularies",
            hint="--distill-loss kl, with a teacher that has the same tokenizer",
        )


def _read_vocabularies(
    settings: TrainConfig, source: CheckpointSource, teacher: CheckpointSource
) -> VocabularyPair:
    own = TokenBytes(source.tokenizer(settings.tokenizer))
    taught = TokenBytes(_read_teacher_tokenizer(settings, teacher))
    return VocabularyPair(own=own, taught=taught, loss=settings.distill_loss)


def _read_teacher_tokenizer(settings: TrainConfig, teacher: CheckpointSource) -> Tokenizer:
    try:
        return teacher.tokenizer(settings.teacher_tokenizer)
    except MegtoolError as e:  # its hint names the option for the tokenizer of the one model
        e.hint = e.hint and e.hint.replace("--tokenizer", "--teacher-tokenizer")
        raise


def _check_tokenizers(
    settings: TrainConfig, source: CheckpointSource, teacher: CheckpointSource
) -> None:
    """Compare tokenizers where both can be read; the loss itself needs none."""
    try:
        own = source.tokenizer(settings.tokenizer)
        taught = _read_teacher_tokenizer(settings, teacher)
    except MegtoolError:
        if settings.teacher_tokenizer is not None:
            raise
        return
    check_tokens(own, taught)


def _load_teacher(
    path: Path, settings: TrainConfig, student: Decoder, progress: Progress
) -> list[Decoder]:
    """The teacher's chunks on this rank, in the student's type and layout."""
    source = open_decoder(path)
    groups = student.groups
    layout = plan_teacher_layout(groups.parallel, student.config, source.config)
    return load_for_training(
        source,
        replace(groups, parallel=layout),
        dtype=student.dtype,
        threads=settings.threads,
        vocab_multiple=student.padded_vocab // groups.tp.size,
        keeps_mtp=layout.pipeline_layout is not None,  # which counts these layers
        progress=progress,
    )


def _logits_head(decoder: Decoder, x_TH: Tensor) -> tuple[Tensor, LogitsHead]:
    config = decoder.config
    head = config.head
    x_TH, weight_VH = decoder.head_factors(x_TH)
    return x_TH, LogitsHead(weight_VH=weight_VH, softcap=head.logit_softcap, scale=head.logit_scale)


def _split_batch(batch: Batch, count: int) -> Sequence[Batch]:
    """A batch row by row as `megtool.model.stacks.pipeline.PipelineSchedule` divides it."""
    shape = batch.tokens_BS.shape
    parts: dict[str, tuple[Tensor, ...]] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is not None:
            whole = value if len(value) == shape[0] else value.expand(shape)
            parts[field.name] = whole.chunk(count)
    return [Batch(**{name: part[n] for name, part in parts.items()}) for n in range(count)]
