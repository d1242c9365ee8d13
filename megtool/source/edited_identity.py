"""The configuration of an open checkpoint changed, in all small files and args that say it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megtool.convert.layer_subset import edited_config
from megtool.convert.megatron.args import args_from_config
from megtool.megatron_state.bridge_files import edit_model
from megtool.megatron_state.nemo_config import BRIDGE_FILE
from megtool.pickles.reader import Inert
from megtool.pickles.writer import make_namespace
from megtool.source.checkpoint import CheckpointSource, ModelIdentity
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import read_file
from megtool.tensors.catalogue import Catalogue


def edit_identity(
    source: CheckpointSource,
    model: ModelIdentity,
    old: ModelConfig,
    config: ModelConfig,
    changed: dict[str, Any],
    hf_config: dict[str, Any] | None = None,
) -> tuple[ModelIdentity, dict[str, bytes]]:
    """The model with its new configuration instead of `old`, and the edited small files.

    `hf_config` is the new config.json, where that is known.
    """
    edited = dict(source.edited)
    if model.hf_config is not None and model.family is not None:
        if hf_config is None:
            hf_config = edited_config(model.hf_config, model.family, old, config)
        text = json.dumps(hf_config, indent=2, ensure_ascii=False) + "\n"
        edited["config.json"] = text.encode()
    bridge = source.catalogue.auxiliary_files.get(BRIDGE_FILE)
    if bridge is not None:
        before = edited.get(BRIDGE_FILE) or read_file(bridge)
        edited[BRIDGE_FILE] = edit_model(before, changed)
    return replace(model, config=config, hf_config=hf_config), edited


def changed_args(old: ModelConfig, new: ModelConfig) -> dict[str, Any]:
    """The args that differ between two configurations."""
    before, after = args_from_config(old), args_from_config(new)
    return {name: value for name, value in after.items() if before.get(name) != value}


def edit_metadata(catalogue: Catalogue, changed: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a catalogue with changed args, if it has args."""
    metadata = dict(catalogue.metadata)
    if isinstance(args := metadata.get("args"), dict):
        metadata["args"] = args | changed
    common = metadata.get("common")
    if isinstance(common, dict):
        common_args = common.get("args")
        if isinstance(common_args, Inert) and isinstance(common_args.state, dict):
            metadata["common"] = {**common, "args": make_namespace(common_args.state | changed)}
    return metadata
