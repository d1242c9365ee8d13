"""The identity of a run: what must be the same when it is resumed, and what may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.convert.canonical_view import CanonicalView
from megtool.errors import FormatError, StorageError, TrainingError
from megtool.options.field import find_option
from megtool.quant.calibration.fingerprint import hash_model
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.storage.location.path import make_folder
from megtool.tensors.catalogue import Catalogue
from megtool.train.features.registry import feature_identity, is_model_frozen
from megtool.train.options.config import TrainConfig

RUN_FILE = "finetune.json"
FRESH_RUN_FILE = f".{RUN_FILE}.new"
"""`RUN_FILE` while it is written."""

# Options that change the loss curve, in addition to those of the data. A resumed run may have other
# values; it logs a warning.
_CURVE_OPTIONS = (
    "micro_batch_size",
    "optimizer",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "muon_momentum",
    "exp_avg_dtype",
    "store_param_remainders",
    "grad_reduce_in_bf16",
    "mtp_loss_scaling_factor",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_losses_from_checkpoint",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "fp8_recipe",
    "fp8_format",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_margin",
    "fp8_param_gather",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "sequence_parallel",
    "eval_iters",
    "lr_mult",
    "wd_mult",
    "freeze",
    "lora_dropout",
    "hidden_dropout",
    "attention_dropout",
    "teacher",
    "distill_loss",
    "distill_temperature",
    "distill_weight",
    "distill_hidden_weight",
    "distill_layers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What identifies a run when it is started again: its model, its data, and its features.

    `curve` holds options that change the loss curve; a resumed run may have others. `source` is a
    fingerprint of the weights it started from, `names` are the names of the data. With
    `is_model_frozen` a resumed run reads the model's weights from SRC, which must be the same.
    `exported_iteration` is the iteration that `hf/` was last written from; None if it is not known.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    names: tuple[str, ...] = ()
    is_model_frozen: bool = False
    exported_iteration: int | None = None

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        data: Mapping[str, Any],
        settings: TrainConfig,
        curve: Mapping[str, Any],
        *,
        source: str = "",
    ) -> RunIdentity:
        """The identity of a run on `data`.

        `curve` has what changes the loss curve and is no option, such as the number of steps.
        """
        model = {k: v for k, v in config.to_fields().items() if k != "extra"}
        training = feature_identity(settings) | {"optimizer": settings.optimizer.optimizer}
        options = {name: find_option(settings, name) for name in _CURVE_OPTIONS} | dict(curve)
        plain = json.loads(json.dumps([model, dict(data), training, options], default=str))
        return cls(
            model=plain[0],
            data=plain[1],
            training=plain[2],
            curve=plain[3],
            source=source,
            names=tuple(settings.data),
            is_model_frozen=is_model_frozen(settings),
        )

    def write(self, folder: Path) -> None:
        """Write it to a folder.

        Raises:
            DestinationError: something else has the name of its temporary file.
            StorageError: it cannot be written.
        """
        path = folder / RUN_FILE
        try:
            make_folder(folder)
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror or e}", file=path) from e
        text = json.dumps(asdict(self), indent=1) + "\n"
        Files().replace_file(path, text.encode(), FRESH_RUN_FILE)

    @classmethod
    def read(cls, folder: Path) -> RunIdentity | None:
        """Read it from a folder; None if there is none.

        Raises:
            FormatError: the file holds something else.
            StorageError: it cannot be read.
        """
        path = folder / RUN_FILE
        data = Files().read_whole(path)
        if data is None:
            return None
        try:
            return cls(**_check_fields(json.loads(data)))
        except (ValueError, TypeError, RecursionError) as e:
            raise FormatError(
                f"the file does not hold the identity of a run: {str(e)[:120]}",
                file=path,
                hint="delete it: the run resumes from its newest iteration, without a comparison "
                "with what it was started with; or choose another DST",
            ) from e

    def continued(self, previous: RunIdentity | None, iteration: int) -> RunIdentity:
        """This one with what stays known of the run in the folder, which goes on at `iteration`."""
        exported = None if previous is None else previous.exported_iteration
        if exported is not None and exported > iteration:
            exported = None  # the run gets to that iteration again
        return replace(self, exported_iteration=exported)

    def find_changes(self, previous: RunIdentity, folder: Path) -> list[str]:
        """Compare it with that of the run in the folder; returns changes that are allowed.

        Raises:
            TrainingError: the model, the data or a feature is another; or the model is frozen, and
                the weights of SRC are others.
        """
        for kind, current, stored in (
            ("model", self.model, previous.model),
            ("data", self.data, previous.data),
            ("training method", self.training, previous.training),
        ):
            names = [n for n in current if current[n] != stored.get(n)]
            if names:
                n = names[0]
                previous_value, current_value = stored.get(n), current[n]
                if n == "digest" and previous.names != self.names:
                    n, previous_value, current_value = (
                        "--data",
                        ", ".join(previous.names),
                        ", ".join(self.names),
                    )
                raise TrainingError(
                    f"the run in {folder} has another {kind}: {n} was {_short(previous_value)}, "
                    f"and is {_short(current_value)}",
                    file=folder / RUN_FILE,
                    hint="use what it was started with, or another DST",
                    error_id="foreign-run",
                )
        changed = [
            f"{n} was {_short(previous.curve.get(n))}, and is {_short(self.curve[n])}"
            for n in self.curve
            if n in previous.curve and self.curve[n] != previous.curve[n]
        ]
        if self.source and previous.source and self.source != previous.source:
            if self.is_model_frozen:
                raise TrainingError(
                    f"the run in {folder} has adapters for another model: the weights of SRC "
                    "differ from those it started with",
                    file=folder / RUN_FILE,
                    hint="use the SRC that it was started with, or another DST",
                    error_id="foreign-run",
                )
            changed.append("the weights of SRC differ from those it started with")
        return changed


def _check_fields(content: Any) -> dict[str, Any]:
    """Return the fields of an identity as stored, each of its type.

    Raises:
        ValueError: a field has another type, or the content is no object.
    """
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    for name in ("model", "data", "training", "curve"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{name!r} is no object")
    if not isinstance(content.get("source", ""), str):
        raise ValueError("'source' is no text")
    names = content.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("'names' is no list of texts")
    exported = content.get("exported_iteration")
    return content | {
        "names": tuple(names),
        "is_model_frozen": content.get("is_model_frozen") is True,
        "exported_iteration": exported if isinstance(exported, int) else None,
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_FINGERPRINT_TENSORS = 2000


def sample_fingerprint(catalogue: Catalogue, side: CanonicalView) -> str:
    """A digest of the model's configuration and of names, shapes, dtypes and some rows of its
    canonical weights; of a large number of weights, some are chosen, always the same ones.

    Training changes all weights, and so the digest. A copy in another place, format or layout has
    the same digest. Weights of any size take a few reads each.

    Raises:
        StorageError: a file cannot be read.
    """
    names = sorted(name for name in side.canonical if ":" not in name)
    some = names[:: max(1, len(names) // _FINGERPRINT_TENSORS)]
    return hash_model(catalogue, replace(side, canonical={n: side.canonical[n] for n in some}))
