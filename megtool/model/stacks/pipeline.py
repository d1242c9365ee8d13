"""Pipeline parallelism: a model's stages on several ranks, run forward or trained by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import KVCache
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.param_attributes import mark
from megtool.model.stacks.decoder import Decoder, StageLayers
from megtool.model.stacks.encoder_decoder import EncoderDecoder, stack_stage
from megtool.options.layout import ParallelConfig
from megtool.parallel.context_parallel import own_tokens
from megtool.parallel.pipeline_split import Pipeline, divisors, near
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig

Stages = Decoder | Sequence[Decoder]
"""What a rank has of a model: one decoder, or one for each of its virtual chunks."""


def build_stages(config: ModelConfig, groups: ProcessGroups, **options: Any) -> list[Decoder]:
    """The virtual chunks of this rank's stage, split as Megatron splits them.

    Of a model of an encoder and a decoder it is one `EncoderDecoder`. `options` are Decoder's.

    Raises:
        LayoutError: the layers do not go over the stages; the hint holds splits that do. Or layers
            of multi-token prediction are apart from the output layer.
    """
    if config.num_decoder_layers:
        return [EncoderDecoder(config, groups, stage=stack_stage(config, groups), **options)]
    split, stage = Pipeline.of(groups.parallel), groups.pp.rank
    check_mtp_stage(config, groups.parallel)
    norm = split.norm(config.num_layers, has_mtp=config.mtp.num_mtp_layers > 0)
    decoders = []
    for chunk in range(split.vpp):
        part = StageLayers(
            layers=tuple(split.layers_of(config.num_layers, stage, chunk)),
            embedding=(stage, chunk) == split.embedding,
            head=(stage, chunk) == split.loss,
            norm=(stage, chunk) == norm,
        )
        decoders.append(Decoder(config, groups, stage=part, **options))
    mark_tied(decoders)
    return decoders


def check_mtp_stage(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse layouts that part layers of multi-token prediction from the output layer they share.

    Raises:
        LayoutError: the model has such layers, and they are on another stage; or an explicit layout
            has another number of them.
    """
    split = Pipeline.of(parallel)
    if split.layout is not None and split.num_mtp != config.mtp.num_mtp_layers:
        raise LayoutError(
            f"pipeline_layout has {split.num_mtp} layers of multi-token prediction (m), and the "
            f"model {config.mtp.num_mtp_layers}",
            hint="one m for each of them, all before the L",
        )
    if config.mtp.num_mtp_layers and split.mtp != split.loss:
        raise LayoutError(
            f"pipeline_layout {split.layout!r} has the layers of multi-token prediction (m) on "
            "another stage than the loss (L)",
            hint="write them together: mL",
        )


def mark_tied(stages: Stages) -> None:
    """Mark word embeddings that another stage has too, so that `finish_gradients` sums their
    gradients.
    """
    for decoder in _chunks(stages):
        words = decoder.embedding.word_embeddings.weight if decoder.embedding else None
        is_copied = (
            decoder.config.embedding.tied_embeddings or decoder.config.mtp.num_mtp_layers > 0
        )
        if words is not None and is_copied and decoder.groups.ends.size > 1:
            is_copy = not decoder.stage.embedding
            mark(words, split_dim=0, tied=True, copy=is_copy, embedding=True)


def forward_stages(
    stages: Stages,
    batch: Batch,
    cache: KVCache | None = None,
    *,
    last_only: bool = False,
    everywhere: bool = False,
) -> Tensor | None:
    """Logits of a batch that every rank has: see `Decoder.forward`. Without gradients.

    They are on the ranks of the last stage, and None on the others; `everywhere` sends them to
    all. Every rank of the pipeline has to call this.
    """
    chunks = _chunks(stages)
    last, pp = chunks[-1], chunks[-1].groups.pp
    x_TH = hidden_of_stages(stages, batch, cache)
    with torch.no_grad():
        is_whole = cache is not None
        out = None
        if x_TH is not None:
            out = last.head(x_TH, batch, last_only=last_only, is_whole=is_whole)
    if not everywhere or pp.handle is None:
        return out
    if out is None:
        rows, tokens = batch.shape
        shape = (rows, 1 if last_only else tokens, last.config.embedding.vocab_size)
        out = torch.empty(shape, dtype=last.dtype, device=last.groups.device)
    out = out.contiguous()
    dist.broadcast(out, src=pp.ranks[-1], group=pp.handle)
    return out


def hidden_of_stages(stages: Stages, batch: Batch, cache: KVCache | None = None) -> Tensor | None:
    """The states after the final norm on the ranks of the last stage, None on the others.

    See `Decoder.hidden`; without gradients.
    """
    (x_TH,) = stream_hidden(stages, [batch], cache)
    return x_TH


@torch.no_grad()
def stream_hidden(
    stages: Stages, batches: Iterable[Batch], cache: KVCache | None = None
) -> Iterator[Tensor | None]:
    """`hidden_of_stages` of one batch after another, with the stages working concurrently.

    A stage goes on to the next batch while what it has sent is under way. With virtual chunks
    every batch passes the ranks several times, and a rank waits for it.
    """
    chunks = _chunks(stages)
    first, pp = chunks[0], chunks[0].groups.pp
    ahead, behind = pp.ranks[(pp.rank + 1) % pp.size], pp.ranks[pp.rank - 1]
    sending: list[tuple[dist.Work | None, Tensor]] = []  # what is under way has to stay in memory
    try:
        for batch in batches:
            frame = first.frame(batch, cache)
            rows: tuple[Tensor, ...] = ()
            for decoder in chunks:
                if pp.handle is not None:
                    sizes = decoder.received(batch, is_whole=cache is not None)
                    rows = _empty_rows(decoder, sizes)
                    for row in rows:
                        dist.recv(row, src=behind, group=pp.handle)
                rows = decoder.advance(batch, frame, *rows)
                if not decoder.stage.head and pp.handle is not None:
                    _wait(sending)
                    for row in (r.contiguous() for r in rows):
                        sending.append((dist.isend(row, dst=ahead, group=pp.handle), row))
            if cache is not None:
                cache.advance()
            yield rows[0] if chunks[-1].stage.head else None
    finally:
        _wait(sending)


Objective = Callable[[Decoder, Tensor, Tensor], Tensor]
"""A sum over tokens to be made small: of the last stage, its states x_TH, and labels_BS."""


class PipelineSchedule:
    """Forward and backward passes of the microbatches of a step, in the order that Megatron takes.

    One stage alone takes one microbatch after the other; several take turns by 1F1B, and virtual
    chunks by interleaved 1F1B, both torch's own, and free what they have sent. Every
    rank gives the same batches, of one shape.
    Gradients add up in the parameters; nothing is divided, and nothing is summed over ranks:
    `finish_gradients` comes after the last step, for each of the stages. `objective` stands for the
    decoder's own loss, and `scale` is applied to each microbatch's before its backward pass, and
    not to what `step` returns. Layers of multi-token prediction that are trained add to the
    gradients, and not to what `step` returns. `overlap_p2p`: see `make_schedule`. Without a
    pipeline `before_pass` is called before each pass, with whether it is the last one of the step.

    Raises:
        LayoutError: the schedule cannot run so many microbatches; the hint says how many it can.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        num_microbatches: int,
        objective: Objective | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        overlap_p2p: bool | None = None,
        before_pass: Callable[[bool], None] | None = None,
    ) -> None:
        self.overlap_p2p, self.before_pass = overlap_p2p, before_pass
        self.stages, self.num_microbatches = _chunks(stages), num_microbatches
        self.objective, self.scale = objective, scale
        self._losses: list[Tensor] = []
        self.groups = self.stages[0].groups
        pp, rounds = self.groups.pp, 1
        if num_microbatches < (pp.size if len(self.stages) == 1 else 1):
            raise LayoutError(
                f"{num_microbatches} microbatches are too few for pp={pp.size}",
                hint=f"at least one for each stage: {pp.size} or more",
            )
        if len(self.stages) > 1:
            rounds = max(1, num_microbatches // pp.size)
        if num_microbatches % rounds:
            below = rounds * pp.size
            raise LayoutError(
                f"{num_microbatches} microbatches do not divide over pp={pp.size} with virtual "
                "chunks",
                hint=f"a multiple of pp, such as {below} or {below + pp.size}",
            )
        self._links: list[StageLink] = [StageLink(decoder) for decoder in self.stages]
        self._schedules: dict[tuple[int, int, int | None], Any] = {}

    def step(self, batch: Batch, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of all tokens' losses (float32) and their number, on every stage.

        Gradients are those of the sum. With context parallelism all of it is of this rank's tokens.

        Raises:
            LayoutError: the microbatches do not divide the rows.
        """
        rows, tokens = batch.shape
        if rows % self.num_microbatches:
            raise LayoutError(
                f"{self.num_microbatches} microbatches do not divide {rows} rows",
                hint=f"numbers that do: {near(divisors(rows), self.num_microbatches)}",
            )
        pp = self.groups.pp
        self._losses.clear()
        if pp.handle is None:
            self._alone(batch, labels_BS)
        else:
            width = None if batch.source_BE is None else batch.source_BE.shape[1]
            shape = (rows // self.num_microbatches, tokens, width)
            if shape not in self._schedules:
                self._schedules[shape] = self._build(*shape)
            last = self.stages[-1].stage.head
            self._schedules[shape].step(target=labels_BS if last else None, **_facts(batch))
        kind = torch.promote_types(self.stages[0].dtype, torch.float32)
        zero = torch.zeros((), dtype=kind, device=labels_BS.device)
        total = torch.stack(self._losses).sum() if self._losses else zero
        if pp.handle is not None:
            dist.broadcast(total, src=pp.ranks[-1], group=pp.handle)
        return total, (own_tokens(labels_BS, self.groups.cp) != -100).sum()

    def _alone(self, batch: Batch, labels_BS: Tensor) -> None:
        number = self.num_microbatches
        parts = microbatches(batch, number)
        for n, (part, labels) in enumerate(zip(parts, labels_BS.chunk(number), strict=True)):
            if self.before_pass is not None:
                self.before_pass(n == number - 1)
            self._pass(part, labels)

    def _pass(self, part: Batch, labels_BS: Tensor) -> None:
        """Forward and backward of one microbatch; records its loss."""
        x_TH = self._links[0](**_facts(part))
        self._loss(x_TH, labels_BS).backward()  # type: ignore[no-untyped-call]

    def _loss(self, x_TH: Tensor, labels_BS: Tensor) -> Tensor:
        """The scalar at which the backward pass of a microbatch starts; records the loss."""
        head = self.stages[-1]
        if self.objective is None:
            loss, _ = head.loss_of(x_TH, labels_BS)
        else:
            loss = self.objective(head, x_TH, labels_BS)
        self._losses.append(loss.detach())
        if (further := self._links[-1].further_loss(x_TH, labels_BS)) is not None:
            loss = loss + further
        return loss if self.scale is None else self.scale(loss)

    def _build(self, rows: int, tokens: int, source: int | None) -> Any:
        """torch's schedule for microbatches of so many rows of tokens, and of a source."""
        from megtool.model.stacks.pipeline_stage import FreeingStage, make_schedule

        pp, device = self.groups.pp, torch.device("meta")
        tokens_BS, source_BE = (
            None if n is None else torch.empty((rows, n), dtype=torch.int64, device=device)
            for n in (tokens, source)
        )
        sample = Batch(tokens_BS=cast(Tensor, tokens_BS), source_BE=source_BE)

        def buffers(decoder: Decoder, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
            return tuple(x.requires_grad_() for x in _empty_rows(decoder, rows, device))

        order = [
            FreeingStage(
                link,
                chunk * pp.size + pp.rank,
                len(self.stages) * pp.size,
                self.groups.device,
                input_args=buffers(link.decoder, link.decoder.received(sample)),
                output_args=buffers(link.decoder, link.decoder.sent(sample)),
                group=pp.handle,
            )
            for chunk, link in enumerate(self._links)
        ]

        return make_schedule(order, self.num_microbatches, self._loss, overlap_p2p=self.overlap_p2p)


class StageLink(nn.Module):
    """A chunk as torch's schedules call it: what it receives, and the batch field by field.

    The loss of a pass on the last stage follows at once, and finds its batch and context here.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self._last_pass: tuple[Batch, ForwardContext] | None = None

    def forward(self, *rows: Tensor, **facts: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the next stage receives, or the loss is made of."""
        batch = Batch(**facts)
        frame = self.decoder.frame(batch)
        if self.decoder.mtp is not None:
            self._last_pass = batch, frame
        out = self.decoder.advance(batch, frame, *rows)
        return out if len(out) > 1 else out[0]

    def further_loss(self, x_TH: Tensor, labels_BS: Tensor) -> Tensor | None:
        """`Decoder.mtp_loss` of the last pass."""
        if self._last_pass is None:
            return None
        (batch, frame), self._last_pass = self._last_pass, None
        return self.decoder.mtp_loss(x_TH, batch, labels_BS, frame)


def microbatches(batch: Batch, number: int) -> list[Batch]:
    """A batch in `number` parts of as many rows each, in order."""
    parts = {name: value.chunk(number) for name, value in _facts(batch).items()}
    return [Batch(**{name: part[n] for name, part in parts.items()}) for n in range(number)]


def _chunks(stages: Stages) -> list[Decoder]:
    return [stages] if isinstance(stages, Decoder) else list(stages)


def _empty_rows(
    decoder: Decoder, counts: Iterable[int], device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """Buffers for what a stage sends to the next: x_TH, or this rank's rows of it, for example."""
    target_device = decoder.groups.device if device is None else device
    width = decoder.config.residual_size
    return tuple(
        torch.empty(rows, width, dtype=decoder.dtype, device=target_device) for rows in counts
    )


def _wait(sending: list[tuple[dist.Work | None, Tensor]]) -> None:
    while sending:
        work, _ = sending.pop()
        if work is not None:
            work.wait()


def _facts(batch: Batch) -> dict[str, Tensor]:
    """A batch's fields as arguments that go row by row, without those that are not there."""
    out = {"tokens_BS": batch.tokens_BS}
    for name in ("positions_BS", "valid_BS", "documents_BS", "counted_BS"):
        value: Tensor | None = getattr(batch, name)
        if value is not None:
            out[name] = value.expand(batch.shape)
    for name in ("source_BE", "source_valid_BE", "run_starts_BM"):
        value = getattr(batch, name)
        if value is not None:
            out[name] = value
    return out
