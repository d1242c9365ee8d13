"""Engine limits for some models, and for models in which only the KV cache is quantized.

Used by `quant.recipes.engine_support` before quantization and by `lint` for existing folders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import is_rotary
from megtool.quant.recipes.rules import RecipeProblems

ROTARY_SOURCES: Mapping[str, str] = {
    "vllm": "https://github.com/vllm-project/vllm/pull/34243",
    "sglang": "https://github.com/sgl-project/sglang/pull/35032",
}
"""Engines that permute the rows of q and k of Llama 4 at load time, with sources."""

DEEPSEEK_V4_SOURCES: Mapping[str, str] = {
    "vllm": "vllm models/deepseek_v4/quant_config.py at 234b8ebc",
    "sglang": "https://github.com/sgl-project/sglang/pull/25820",
}
"""Engines that run DeepSeek-V4 with a quantization method of its own, with sources."""

ROTARY_HINT = "keep q, k and v of attention, or take fp8"

_SCALES_TURNED = "0.16.0"
"""The first release of vLLM that permutes scales along with rows (pull request 34243)."""

KV_CACHE_ONLY_ERRORS: Mapping[str, str] = {
    "vllm": "Missing 'quant_algo' in quantization config (vllm modelopt.py at 00155cde)",
    "sglang": "Cannot find 'quant_algo' (sglang modelopt_quant.py at faeb9685)",
    "trtllm": "Pre-quantized checkpoint must have quant_algo (llmapi/llm_utils.py at 0066b2a5)",
}
"""The error of each engine's ModelOpt loader if only the KV cache is quantized.

ModelOpt itself writes such folders (0.47: `quant_algo` null with `kv_cache_quant_algo`)."""

_OWN_CACHE: Mapping[str, str] = {
    "vllm": "--kv-cache-dtype fp8",
    "sglang": "--kv-cache-dtype fp8_e4m3",
    "trtllm": "kv_cache_config dtype: fp8",
}
"""The engine option for an FP8 KV cache with scale 1 in an unquantized model."""

SUPPORTED_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "trtllm": (
        "BertForSequenceClassification",
        "DeciLMForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MllamaForConditionalGeneration",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "NemotronNASForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    ),
}
"""Architectures on an engine's list of supported models; engines without a list here run others
too (vLLM and SGLang through transformers)."""


PLAIN_MODULES = ("gate", "router", "shared_expert_gate", "eh_proj", "weights_proj")
"""Modules, by the last part of their names, that engines build without a quantization method.

Routers, the gate of a shared expert, the projection before a layer of multi-token prediction, and
the weights of an indexer's heads: what the model classes of vLLM 0.11.2, 0.16.0 and 0.33.0, of
SGLang 0.5.23 and of TensorRT-LLM (_torch/models at 000561df) give them as `quant_config`.
"""

_QUANTIZED_ROUTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm", "gate", ("Qwen3", "Lfm2Moe", "Arctic")),
    ("vllm", "eh_proj", ("NemotronH", "Longcat", "Bailing")),
    ("sglang", "gate", ("Qwen3",)),
    ("sglang", "eh_proj", ("NemotronH", "Longcat", "Bailing")),
    ("trtllm", "eh_proj", ("NemotronH",)),
)
"""The model classes, by the start of their names, that give such a module the model's method."""


class Release(Protocol):
    """An engine at a version, such as `engine_support.EngineVersion`."""

    @property
    def engine(self) -> str:
        """The engine."""

    @property
    def name(self) -> str:
        """The engine with its version."""

    def has(self, since: str) -> bool:
        """Whether this is version `since` or a later one."""


def permutes_rotary_rows(release: Release, architecture: str) -> bool:
    """Whether the engine permutes the rows of q and k of such a model at load time."""
    return release.engine in ROTARY_SOURCES and architecture.startswith("Llama4")


def rotary_conflict(release: Release, algo: str) -> str:
    """Why a format does not allow its rows to be permuted, or ""."""
    if algo == "FP8":  # one scale a tensor
        return ""
    if algo == "FP8_PB_WO":
        return "has scales of blocks of rows, which cannot change places"
    if release.engine == "sglang":
        return "has scales of rows, which stay where they are"
    if not release.has(_SCALES_TURNED) and algo not in ("NVFP4", "W4A16_NVFP4"):
        return f"has scales of rows, which stay where they are before {_SCALES_TURNED}"
    return ""


def is_built_plain(release: Release, architecture: str, module: str) -> bool:
    """Whether the engine builds a module of a model class without a quantization method."""
    last = module.rpartition(".")[2]
    return last in PLAIN_MODULES and not any(
        release.engine == engine and last == name and architecture.startswith(classes)
        for engine, name, classes in _QUANTIZED_ROUTERS
    )


def _check_plain_modules(
    release: Release,
    architecture: str,
    used: Mapping[str, Sequence[Decision]],
    problems: RecipeProblems,
) -> None:
    """Add a problem if the recipe quantizes what the engine builds unquantized."""
    wrong = {
        name: d
        for group in used.values()
        for d in group
        for name in d.module.names_in("hf")
        if is_built_plain(release, architecture, name)
    }
    if wrong:
        (name, decision), more = next(iter(wrong.items())), len(wrong) - 1
        problems.add(
            decision.format.line if decision.format else 0,
            f"{release.name} builds {name} unquantized, and it would be {decision.label}"
            + (f"; so does it {more} more" if more else ""),
            f"keep it: a rule with {_describe_roles(decision)} and format: keep",
        )


def _describe_roles(decision: Decision) -> str:
    role = next((r for r in ("router", "mtp") if r in decision.module.roles), None)
    return f"match: {{role: {role}}}" if role else f"match: {{glob: {decision.module.name!r}}}"


def check_family(
    release: Release,
    architecture: str,
    decisions: Sequence[Decision],
    used: Mapping[str, Sequence[Decision]],
    problems: RecipeProblems,
) -> None:
    """Add problems of the engine with this model, or with quantizing only its KV cache.

    `used` are the decisions about weights by format.
    """
    _check_plain_modules(release, architecture, used, problems)
    if reason := reject_kv_cache_only(release.engine, decisions):
        line = next((d.format.line for d in decisions if d.format), 0)
        problems.add(line, f"{release.name} {reason}", kv_cache_only_hint(release.engine))
    if release.engine in DEEPSEEK_V4_SOURCES and architecture.startswith("DeepseekV4"):
        for algo in [a for a in used if a != "FP8_PB_WO"]:
            format = used[algo][0].format
            reason = f"{release.name} loads {architecture} in FP8 blocks, and in the mix that"
            problems.add(
                format.line if format else 0,
                f"{reason} DeepSeek publishes, not in {algo}",
                "fp8_block128, then megtool export --to fp8-blocks; see "
                + DEEPSEEK_V4_SOURCES[release.engine],
            )
    for algo, group in used.items() if permutes_rotary_rows(release, architecture) else ():
        rotary = [d for d in group if is_rotary(d.module)]
        if rotary and (fault := rotary_conflict(release, algo)):
            reason = f"{rotary[0].module.name} ({algo}) {fault} while {release.name} turns the rows"
            hint = f"{ROTARY_HINT}; see {ROTARY_SOURCES[release.engine]}"
            line = rotary[0].format.line if rotary[0].format else 0
            problems.add(line, f"{reason} of {architecture}: the output would be wrong", hint)


def reject_kv_cache_only(engine: str, decisions: Sequence[Decision]) -> str:
    """Why an engine rejects a model in which only the KV cache is quantized, or ""."""
    formats = [d.format for d in decisions if d.format]
    if not formats or not all(f.kv_algo for f in formats):
        return ""
    message = "does not load folders in which only the KV cache is quantized"
    return f"{message}: {KV_CACHE_ONLY_ERRORS[engine]}"


def kv_cache_only_hint(engine: str) -> str:
    """What to do instead of quantizing only the KV cache, for an engine."""
    return (
        "quantize weights too (fp8_kv_fp8), or leave the model unquantized and run the engine with "
        + _OWN_CACHE[engine]
    )


def is_unlisted(engine: str, architectures: Collection[str]) -> bool:
    """Whether the engine has a list of supported models without any of these."""
    listed = SUPPORTED_ARCHITECTURES.get(engine)
    return listed is not None and bool(architectures) and not set(architectures) & set(listed)


UNLISTED = "is not on the list of supported models"
UNLISTED_HINT = "check the engine's own list for your version"
