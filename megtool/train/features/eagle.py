"""Training of an EAGLE-3 draft head beside a frozen model.

Each pass gives the head (`megtool.train.features.eagle_head`) the model's states and logits. An
iteration of a run is a checkpoint of the model; its folder `eagle/` holds the head as ModelOpt
exports it.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megtool.errors import MappingError, StorageError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.layer_states import LayerStates
from megtool.model.stacks.pipeline import Objective, microbatches
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.storage.location.path import location
from megtool.train.evaluation import EvaluationLoss, world_sum
from megtool.train.features.adapter_tensors import AdapterSlice, AdapterViews
from megtool.train.features.eagle_head import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    EagleHead,
    make_eagle_config,
    read_eagle_recipe,
)
from megtool.train.features.frozen_model import FrozenModelFeature
from megtool.train.features.frozen_weights import DRAFT_HEAD
from megtool.train.features.protocol import FeatureInputs
from megtool.train.options.config import TrainConfig
from megtool.train.run_plan import row_length

if TYPE_CHECKING:
    from typing import Self

    from megtool.model.stacks.ends import Embedding


class _HeadViews(AdapterViews):
    """The parameters of a head, which every replica has whole, under their own names."""

    def __init__(self, stage: Decoder, head: nn.Module) -> None:
        self.groups = stage.groups
        self._tensors = {f"{DRAFT_HEAD}.{n}": p for n, p in head.named_parameters()}
        self._experts = set()
        self.slices = {
            name: [
                AdapterSlice(
                    name=name.removeprefix(f"{DRAFT_HEAD}."),
                    shape=tuple(p.shape),
                    dim=0,
                    local_index=torch.arange(p.shape[0]),
                    global_index=torch.arange(p.shape[0]),
                )
            ]
            for name, p in self._tensors.items()
        }


class EagleFeature(FrozenModelFeature):
    """The loss of a draft head of a model; both are on `stage`, and the model is frozen."""

    folder, state_folder = DRAFT_HEAD, f"{DRAFT_HEAD}_training"
    called = "draft head"

    def __init__(
        self, stage: Decoder, head: EagleHead, *, num_microbatches: int, seed: int
    ) -> None:
        stage.requires_grad_(False)
        stage.add_module(DRAFT_HEAD, head.module)
        super().__init__([stage], _HeadViews(stage, head.module))
        self.head, self.num_microbatches, self.seed = head, num_microbatches, seed
        self._layers = LayerStates(stage, head.layers)
        self._batches: deque[Batch] = deque()
        self._sums: list[float] = []
        self._num_labels = 0.0

    # ---- before weights are loaded

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check the recipe, and that the model can have a head.

        Raises:
            MappingError: it is no decoder of one residual.
            UsageError: rows are too short.
            RecipeError: the recipe is wrong, or of another model.
            MissingPackageError: ModelOpt is not installed.
        """
        if settings.eagle is None:
            return
        config = source.config
        kinds = (
            (config.num_decoder_layers, "a model of an encoder and a decoder"),
            (config.head.num_labels, "a model that scores labels"),
            (config.bidirectional, "an encoder"),
            (config.residual.hyper_streams, "a model with several residuals (hyper-connections)"),
        )
        for is_so, kind in kinds:
            if is_so:
                raise MappingError(f"--eagle: {kind} drafts no tokens")
        steps = _read_config(settings, config, torch.float32)[0]["eagle_ttt_steps"]
        length = row_length(settings, config)
        if length < steps + 2:
            raise UsageError(
                f"rows of {length} tokens have nothing for {steps} drafts to learn",
                hint=f"--seq-length {steps + 2} or more",
            )

    @classmethod
    def add_parameters(cls, settings: TrainConfig, stages: Sequence[Decoder]) -> None:
        """Freeze the model, and add the head."""
        if settings.eagle is not None:
            stage = stages[-1].requires_grad_(False)
            stage.add_module(DRAFT_HEAD, _make_head(settings, stage, {}).module)

    @classmethod
    def freezes_model(cls, settings: TrainConfig) -> bool:
        """The head alone is trained."""
        return settings.eagle is not None

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """The recipe."""
        if settings.eagle is None:
            return {"eagle": None}
        return {"eagle": read_eagle_recipe(settings.eagle, location(settings.eagle))}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Add the head, and freeze the model."""
        if settings.eagle is None:
            return None
        model = None if inputs.source is None else inputs.source.model
        tokens = {} if model is None or model.hf_config is None else model.hf_config
        return cls(
            stages[-1],
            _make_head(settings, stages[-1], tokens),
            num_microbatches=inputs.num_microbatches,
            seed=settings.seed,
        )

    # ---- steps

    @contextmanager
    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> Iterator[None]:
        """Keep the states of passes, and seed what is drawn in them.

        All evaluations draw the same."""
        if is_repeated:
            yield
            return
        if batch is None:
            iteration = 0
        else:
            self._batches.extend(microbatches(batch, self.num_microbatches))
        with ExitStack() as stack:
            stack.callback(self._batches.clear)
            stack.enter_context(self._layers.kept())
            if self.head.is_random:
                groups = self.stages[0].groups
                devices = [groups.device] if groups.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices=devices))
                torch.manual_seed((self.seed << 32) + (groups.dp.rank << 24) + iteration)
            yield

    @property
    def objective(self) -> Objective:
        """The head's loss of the next micro batch, times the tokens that count."""

        def loss_of_next(stage: Decoder, x_TH: Tensor, labels_BS: Tensor) -> Tensor:
            return self._loss(stage, x_TH, self._batches.popleft(), labels_BS)[0]

        return loss_of_next

    @property
    def evaluation_loss(self) -> EvaluationLoss:
        """The head's loss times the tokens that count, and their number."""
        return self._loss

    def _loss(
        self, stage: Decoder, x_TH: Tensor, batch: Batch, labels_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (*batch.shape, -1)
        with torch.no_grad():
            embedded_TH = stage.embed(batch, stage.frame(batch))
            logits_TV = stage.logits(x_TH)
        counted_BS = labels_BS != -100
        valid_BS = None if batch.valid_BS is None else batch.valid_BS.expand(batch.shape)
        loss, accuracies = self.head.loss(
            batch.tokens_BS,
            valid_BS,
            counted_BS,
            embedded_BSH=embedded_TH.view(shape),
            states={n: x.detach().view(shape) for n, x in self._layers.take().items()},
            hidden_BSH=x_TH.detach().view(shape),
            logits_BSV=logits_TV.view(shape),
        )
        num_labels = counted_BS.sum()
        self._sums = self._sums or [0.0] * len(accuracies)
        self._sums = [
            a + b * float(num_labels) for a, b in zip(self._sums, accuracies, strict=True)
        ]
        self._num_labels += float(num_labels)
        return loss.float() * num_labels, num_labels

    def end_step(self) -> Mapping[str, float]:
        """The share of right drafts, of the first token on: `eagle_1_accuracy`, ..."""
        groups = self.stages[0].groups
        *sums, num_labels = world_sum([*self._sums, self._num_labels], groups)
        self._sums, self._num_labels = [], 0.0
        return {f"eagle_{n}_accuracy": s / max(num_labels, 1.0) for n, s in enumerate(sums, 1)}

    def end_evaluation(self) -> Mapping[str, float]:
        """The same of the validation data: `eval_eagle_1_accuracy`, ..."""
        return {f"eval_{name}": share for name, share in self.end_step().items()}

    # ---- checkpoints

    def format_files(
        self, weights: Mapping[str, Tensor], spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The head as ModelOpt exports it."""
        folder = spool.with_name(f"{spool.name}.export")
        try:
            self.head.export(folder)
            config = (folder / CONFIG_FILE).read_bytes()
            shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)  # saved for its owner only
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror or e}", file=folder) from e
        files.rename(folder / WEIGHTS_FILE, spool)
        files.remove(folder)
        return {WEIGHTS_FILE: spool, CONFIG_FILE: config}


def _read_config(
    settings: TrainConfig, config: ModelConfig, dtype: torch.dtype
) -> tuple[dict[str, Any], str | None]:
    """ModelOpt's configuration of the head, and the file of its tokens."""
    text = settings.eagle or ""
    recipe = read_eagle_recipe(text, location(text))
    return make_eagle_config(recipe, config, dtype, file=text), recipe.get("draft_vocab_cache")


def _make_head(settings: TrainConfig, stage: Decoder, tokens: Mapping[str, Any]) -> EagleHead:
    """The head of a stage that is a whole model."""
    config, text = stage.config, settings.eagle or ""
    eagle_config, draft_vocabulary = _read_config(settings, config, stage.dtype)
    embedding = cast("Embedding", stage.embedding)  # there are no pipeline stages
    rows = slice(config.embedding.vocab_size)
    return EagleHead(
        config,
        eagle_config,
        embedding.word_embeddings.weight[rows],
        stage.output_weight[rows],
        seed=settings.seed,
        file=text,
        tokens=tokens,
        draft_vocabulary=draft_vocabulary,
    )
