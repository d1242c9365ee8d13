"""Sources: the public files that rules are taken from, at the commits they were read at."""

from __future__ import annotations

_VLLM = "https://github.com/vllm-project/vllm/blob/{}/vllm/{}"
_QUANT = "model_executor/layers/quantization/"
_SGLANG = "https://github.com/sgl-project/sglang/blob/{}/python/sglang/srt/layers/quantization/{}"
_TRTLLM = "https://github.com/NVIDIA/TensorRT-LLM/blob/{}/tensorrt_llm/{}"

VLLM_MODELOPT = _VLLM.format("00155cdecca722d98e34234c3d172725b7720b7d", f"{_QUANT}modelopt.py")
VLLM_COMPRESSED = _VLLM.format(
    "be696453ee1bf3b7a2f652cc457b340d5a20c88c",
    f"{_QUANT}compressed_tensors/compressed_tensors.py",
)
VLLM_COMPRESSED_MAIN = _VLLM.format("main", f"{_QUANT}compressed_tensors/compressed_tensors.py")
VLLM_MATCHING = _VLLM.format(
    "008014e8503b206a8ae3eb9d17fd46b48b8d2606", f"{_QUANT}compressed_tensors/utils.py"
)
VLLM_SKIPPED = _VLLM.format(
    "01693a61cbed06543efef7373f6774afb961f244", f"{_QUANT}utils/quant_utils.py"
)
VLLM_FP8 = _VLLM.format("0071b24bf8fe8c3d1bc3516d0ff8477f07964aaf", f"{_QUANT}fp8.py")
VLLM_MXFP4 = _VLLM.format("main", f"{_QUANT}mxfp4.py")
VLLM_LINEAR = _VLLM.format("main", "model_executor/layers/linear.py")
VLLM_FILES = _VLLM.format("main", "transformers_utils/config.py")
VLLM_LOADING = _VLLM.format("main", "model_executor/model_loader/weight_utils.py")
VLLM_MODELS = "https://docs.vllm.ai/en/latest/models/supported_models.html"

SGLANG_MODELOPT = _SGLANG.format("faeb96856c4417d55695feec2f4d2463c8adb7fd", "modelopt_quant.py")
SGLANG_MODELOPT_MAIN = _SGLANG.format("main", "modelopt_quant.py")
SGLANG_MODELOPT_2025 = _SGLANG.format(
    "003ca3e5152c94c92d88fd43d5eb58e55201e895", "modelopt_quant.py"
)
SGLANG_SKIPPED = _SGLANG.format("006d09616c514cf5a0b0a28ed8d94292256601ea", "utils.py")
SGLANG_COMPRESSED = _SGLANG.format(
    "000659aed4db1933af3a4fe8c1eb3c673c19d12e", "compressed_tensors/compressed_tensors.py"
)
SGLANG_COMPRESSED_MAIN = _SGLANG.format("main", "compressed_tensors/compressed_tensors.py")
SGLANG_FP8 = _SGLANG.format("main", "fp8.py")
SGLANG_MXFP4 = _SGLANG.format("main", "mxfp4.py")
SGLANG_LINEAR = "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/layers/linear.py"
SGLANG_LOADING = (
    "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/model_loader/weight_utils.py"
)
SGLANG_MODELS = "https://docs.sglang.ai/supported_models/generative_models.html"

TRTLLM_MODELOPT = _TRTLLM.format(
    "2edf354d4b92161efd50b10b71e8e20fb6c5925a", "quantization/modelopt_config.py"
)
TRTLLM_LOADING = _TRTLLM.format("0066b2a5696f5819dc4c98befa25e957e6e24fe5", "llmapi/llm_utils.py")
TRTLLM_CONFIG = _TRTLLM.format("008e0af8980fc560003631ba4ac37828836a91c8", "_torch/model_config.py")
TRTLLM_CONFIG_1 = _TRTLLM.format("v1.0.0", "_torch/model_config.py")
TRTLLM_COMPRESSED = _TRTLLM.format(
    "21156a7a57acd21e17feb5c2721c30f035e0f2af", "models/quant_config_utils.py"
)
TRTLLM_EXCLUDED = _TRTLLM.format("main", "models/modeling_utils.py")
TRTLLM_EXCLUDED_1 = _TRTLLM.format("v1.0.0", "models/modeling_utils.py")
TRTLLM_LINEAR = _TRTLLM.format("main", "_torch/modules/linear.py")
TRTLLM_ALGOS = _TRTLLM.format("main", "quantization/mode.py")
TRTLLM_MODELS = "https://nvidia.github.io/TensorRT-LLM/models/supported-models.html"

MODELOPT_W1_W3 = "https://github.com/NVIDIA/Model-Optimizer (NVBug 6142360)"
COMPRESSED_FORMATS = (
    "https://github.com/vllm-project/compressed-tensors/blob/main/"
    "src/compressed_tensors/config/base.py"
)
