"""ModelOpt's EAGLE-3 draft head on the states of a model that it does not run itself.

ModelOpt trains a head on a Transformers model whose layers it has dropped (its offline mode), and
is given states and logits: here those of megtool's own forward pass. Its code makes the head, its
loss (training-time test, arXiv 2503.01840) and the exported folder.
"""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megtool.errors import FormatError, MissingPackageError, RecipeError, StorageError
from megtool.quant.modelopt.load import silence_output
from megtool.quant.recipes.located_yaml import MAX_BYTES, read_documents
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import read_limited
from megtool.storage.location.path import location
from megtool.train.options.eagle import DEFAULT_HEAD

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_CHOICES = (
    "eagle_ttt_steps",
    "eagle_loss_decay_factor",
    "eagle_mix_hidden_states",
    "eagle_architecture_config",
    "eagle_export_rope_scaling",
)
_RUNTIME = ("eagle_offline", "eagle_use_torch_compile", "eagle_enable_nvtx", "eagle_report_acc")
"""How ModelOpt's own trainer runs; nothing here depends on them."""
_SIZES = (
    *("num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "draft_vocab_size"),
)
_OPTIONAL = ("draft_vocab_size",)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, pickle.UnpicklingError, struct.error),
)
"""What `torch.load` raises on files that are not its own."""


def read_eagle_recipe(text: str, path: Path) -> dict[str, Any]:
    """The section `eagle` of a recipe of ModelOpt, or a file of that section alone; {} for
    `default`. `data.draft_vocab_cache` of a recipe is kept as `draft_vocab_cache`.

    Raises:
        RecipeError: it cannot be read, or has no such section.
    """
    if text == DEFAULT_HEAD:
        return {}
    try:
        documents = read_documents(read_limited(path, MAX_BYTES), file=path)
    except (FormatError, StorageError) as e:
        raise RecipeError(
            e.message,
            file=path,
            hint=f"--eagle takes a recipe of ModelOpt (its speculative_decoding/eagle3.yaml), or "
            f"{DEFAULT_HEAD}",
        ) from e
    recipe = documents[0].plain() if len(documents) == 1 else None
    section = recipe.get("eagle", recipe) if isinstance(recipe, dict) else None
    if not isinstance(section, dict):
        raise RecipeError("it has no section 'eagle'", file=path, hint="eagle: {...}")
    out: dict[str, Any] = dict(section)
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if section is not recipe and isinstance(data, dict) and data.get("draft_vocab_cache"):
        out["draft_vocab_cache"] = str(data["draft_vocab_cache"])
    return out


def _import_speculative() -> Any:
    """`modelopt.torch.speculative`, with its plugin for Transformers.

    Raises:
        MissingPackageError: it is not installed, or lacks the plugin.
    """
    try:
        with silence_output():
            import modelopt.torch.speculative as mtsp
            import modelopt.torch.speculative.plugins.hf_eagle
            import transformers
    except ImportError as e:
        raise MissingPackageError(
            f"--eagle needs a package that is not installed: {e}",
            hint="pip install 'megtool[modelopt]'",
        ) from e
    del transformers, modelopt
    return mtsp


def make_eagle_config(
    recipe: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype, *, file: str
) -> dict[str, Any]:
    """ModelOpt's EagleConfig: the recipe's, its architecture completed with the sizes of the model.

    Raises:
        RecipeError: ModelOpt refuses it, or it asks for something else than an EAGLE-3 head beside
            a frozen model.
        MissingPackageError: ModelOpt is not installed.
    """
    _import_speculative()
    from modelopt.torch.speculative.config import EagleConfig, eagle3_default_config

    given = {n: v for n, v in recipe.items() if n != "draft_vocab_cache"}
    try:
        checked: dict[str, Any] = EagleConfig(**given).model_dump()
    except (ValueError, TypeError) as e:  # pydantic's is a ValueError
        raise RecipeError(f"ModelOpt refuses the recipe: {_first_line(e)}", file=file) from e
    usual = EagleConfig().model_dump()
    for name in given:
        if name not in (*_CHOICES, *_RUNTIME) and checked[name] != usual[name]:
            raise RecipeError(
                f"{name} is {checked[name]!r}, and a head beside a frozen model has "
                f"{usual[name]!r}",
                file=file,
                hint="leave it out",
            )
    if checked["eagle_ttt_steps"] < 1:
        raise RecipeError(
            f"eagle_ttt_steps is {checked['eagle_ttt_steps']}", file=file, hint="1 or more"
        )
    decay = checked["eagle_loss_decay_factor"]
    if not 0 <= decay <= 1:
        raise RecipeError(f"eagle_loss_decay_factor is {decay}", file=file, hint="from 0 to 1")
    of_model = {
        "intermediate_size": config.mlp.ffn_hidden_size,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
    }
    own = checked["eagle_architecture_config"]
    known = {*eagle3_default_config, *_TOKENS, *_OPTIONAL, "dtype", "max_position_embeddings"}
    if wrong := sorted(set(own) - known):
        raise RecipeError(
            f"eagle_architecture_config has {wrong[0]!r}, which no EAGLE-3 head has",
            file=file,
            hint=", ".join(sorted(known)),
        )
    architecture = copy.deepcopy(eagle3_default_config)
    architecture |= {n: v for n, v in of_model.items() if v}
    architecture |= own
    architecture["torch_dtype"] = str(dtype).removeprefix("torch.")
    _check_architecture(architecture, config, file)
    checked |= {n: usual[n] for n in _RUNTIME}
    checked |= {"eagle_offline": True, "eagle_use_torch_compile": False}
    checked["eagle_architecture_config"] = architecture
    return checked


def _check_architecture(architecture: Mapping[str, Any], config: ModelConfig, file: str) -> None:
    """Check the sizes of a head.

    Raises:
        RecipeError: it is no EAGLE-3 head of the model.
    """
    for name in _SIZES:
        value = architecture.get(name)
        if value is None and name in _OPTIONAL:
            continue
        if type(value) is not int or value < 1:
            raise RecipeError(f"{name} is {value!r}", file=file, hint="a number above 0")
    heads, groups = (architecture[n] for n in ("num_attention_heads", "num_key_value_heads"))
    if heads % groups:
        raise RecipeError(
            f"num_key_value_heads {groups} does not divide num_attention_heads {heads}", file=file
        )
    if not architecture["use_aux_hidden_state"] or not architecture["use_last_layernorm"]:
        raise RecipeError(
            "use_aux_hidden_state and use_last_layernorm are true in an EAGLE-3 head", file=file
        )
    layers = architecture["eagle_aux_hidden_state_layer_ids"]
    is_list = isinstance(layers, list) and all(type(n) is int for n in layers)
    if not is_list or layers != sorted(set(layers)):
        raise RecipeError(
            f"eagle_aux_hidden_state_layer_ids is {layers!r}", file=file, hint="[1, 14, 28]"
        )
    if layers and not 0 <= layers[0] <= layers[-1] < config.num_layers:
        raise RecipeError(
            f"eagle_aux_hidden_state_layer_ids is {layers}, and the model has "
            f"{config.num_layers} layers",
            file=file,
            hint=f"0 to {config.num_layers - 1}",
        )
    if (size := architecture.get("draft_vocab_size") or 0) > config.embedding.vocab_size:
        raise RecipeError(
            f"draft_vocab_size is {size}, and the model has {config.embedding.vocab_size} tokens",
            file=file,
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[1:3] or lines)[:200]


class EagleHead:
    """A draft head of a model, on its word embeddings [V, H] and output weights [V, H].

    `module` has the head's parameters, with the names of the exported folder. `eagle_config` is
    that of `make_eagle_config`, `tokens` are special tokens as config.json has them.
    `draft_vocabulary` is the file with `draft_vocab_size` differences between tokens of the model
    and of the head, of ModelOpt's `calibrate_frequent_vocab`.

    Raises:
        RecipeError: Transformers or ModelOpt refuse the sizes, or there is no file of tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        eagle_config: Mapping[str, Any],
        embedding_VH: Tensor,
        output_VH: Tensor,
        *,
        seed: int,
        file: str,
        tokens: Mapping[str, Any] | None = None,
        draft_vocabulary: str | None = None,
    ) -> None:
        mtsp = _import_speculative()
        settings = copy.deepcopy(dict(eagle_config))
        if draft_vocabulary is not None and location(draft_vocabulary).is_file():
            _check_draft_vocabulary(draft_vocabulary, config.embedding.vocab_size, file)
        settings["eagle_architecture_config"] |= {
            n: v for n, v in (tokens or {}).items() if n in _TOKENS and v is not None
        }
        try:
            with silence_output(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                base = _make_base(config, embedding_VH, output_VH)
                self._model = mtsp.convert(base, [("eagle", settings)])
                _set_rotary(self._model)
                norm_states_once(self._model.eagle_module)
                self._model.load_draft_vocab_cache(self._model, draft_vocabulary)
        except (TypeError, ValueError, LookupError, AttributeError, FileNotFoundError) as e:
            raise RecipeError(f"ModelOpt cannot build the head: {_first_line(e)}", file=file) from e
        self._model.train()
        self.module: nn.Module = self._model.eagle_module

    @property
    def layers(self) -> list[int]:
        """The layers of the model whose outputs the head reads, ascending, from 0 on."""
        return list(self._model.eagle_config.eagle_aux_hidden_state_layer_ids)

    @property
    def is_random(self) -> bool:
        """Whether the loss mixes states at positions that are drawn."""
        return bool(self._model.eagle_mix_hidden_states)

    def loss(
        self,
        tokens_BS: Tensor,
        valid_BS: Tensor | None,
        counted_BS: Tensor,
        *,
        embedded_BSH: Tensor,
        states: Mapping[int, Tensor],
        hidden_BSH: Tensor,
        logits_BSV: Tensor,
    ) -> tuple[Tensor, list[float]]:
        """The loss of rows of tokens, and the share of right drafts of each step.

        `states` [B, S, H] are those behind `layers`, `hidden_BSH` those after the final norm,
        `logits_BSV` the model's. A position counts if its next token is to be learned
        (`counted_BS`); those that are not `valid_BS` are padding. The loss is the sum over steps of
        the mean cross-entropy with the model's distribution, with ModelOpt's decay.
        """
        outputs = {
            "base_model_hidden_states": hidden_BSH,
            "aux_hidden_states": torch.cat([states[n] for n in self.layers], -1),
            "base_model_logits": logits_BSV,
            "base_model_input_embeds": embedded_BSH,
        }
        out = self._model(
            input_ids=tokens_BS,
            attention_mask=None if valid_BS is None else valid_BS.long(),
            loss_mask=counted_BS,
            base_model_outputs=outputs,
        )
        return out.loss, list(out.train_acc[0])

    def export(self, folder: Path) -> None:
        """Write the head as ModelOpt does: `model.safetensors` and `config.json`, which vLLM,
        SGLang and TensorRT-LLM load."""
        with silence_output():
            self._model.get_exporter().export(folder)


def _check_draft_vocabulary(path: str, vocab_size: int, file: str) -> None:
    """Check that a file of ModelOpt's differences names tokens of the model, each once.

    Raises:
        RecipeError: it does not, or it cannot be read.
    """
    hint = "ModelOpt's calibrate_frequent_vocab writes it"
    try:
        differences = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as e:
        reason = str(e).partition("\n")[0]
        raise RecipeError(
            f"draft_vocab_cache {path!r} cannot be read: {reason}", file=file, hint=hint
        ) from e
    if not isinstance(differences, Tensor) or differences.dim() != 1:
        raise RecipeError(f"draft_vocab_cache {path!r} is no vector", file=file, hint=hint)
    tokens = differences + torch.arange(len(differences))
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
    if wrong or len(set(tokens.tolist())) < len(tokens):
        what = f"names token {wrong[0]}" if wrong else "names a token twice"
        raise RecipeError(
            f"draft_vocab_cache {path!r} {what}, and the model has {vocab_size} tokens",
            file=file,
            hint=hint,
        )


def _make_base(config: ModelConfig, embedding_VH: Tensor, output_VH: Tensor) -> Any:
    """A Llama without layers that has these weights, as ModelOpt loads one in its offline mode."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=config.embedding.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size,
        num_hidden_layers=0,
        num_attention_heads=1,
        max_position_embeddings=config.positions.max_positions,
        tie_word_embeddings=False,
        dtype=str(embedding_VH.dtype).removeprefix("torch."),
    )
    settings.num_orig_hidden_layers = config.num_layers
    settings.transformers_version = transformers.__version__
    with torch.device("meta"):
        base = LlamaForCausalLM(settings)
    for module, weight in ((base.model.embed_tokens, embedding_VH), (base.lm_head, output_VH)):
        module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return base


def norm_states_once(module: Any) -> None:
    """Let the first layer of ModelOpt's head norm states by `hidden_norm` alone.

    ModelOpt 0.47 has them go through `input_layernorm` before, which is that of embeddings; vLLM
    and SGLang do not (`llama_eagle3.py`), nor does ModelOpt's head of Megatron. As long as that
    weight is one, where training begins, it makes no difference.
    """

    def skip_states(_norm: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out if args[0] is module._input_embeds else args[0]

    module.layers[0].input_layernorm.register_forward_hook(skip_states)


def _set_rotary(model: Any) -> None:
    """Give the head its rotary embedding: ModelOpt 0.47 calls a constructor that Transformers 5.23
    no longer has."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config=model.eagle_config)
    model.eagle_module.rotary_emb = rotary.to(model.lm_head.weight.device)
