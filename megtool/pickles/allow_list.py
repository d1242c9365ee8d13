"""The allow-list of classes and functions that a written pickle may name, and their forms.

It holds what checkpoints of Megatron-Core, NeMo, ModelOpt, Transformer Engine and PyTorch name. A
name is matched exactly, by module and qualified name. A form says what may be done with it, because
a harmless name can be misused: `rules` checks both.
"""

from __future__ import annotations

from enum import StrEnum


class GlobalForm(StrEnum):
    """What a pickle may do with a global."""

    VALUE = "value"
    """Name it, as the dtype of an argument or a function that an argument selects."""
    ENUM = "enum"
    """Call it with the value of one member."""
    CALL = "call"
    """Call it with plain arguments; sets get items."""
    RECORD = "record"
    """Build it from a tuple of fields."""
    OBJECT = "object"
    """Build it without its constructor, and set attributes by name."""
    MAPPING = "mapping"
    """Build it and set items by key."""
    TENSOR = "tensor"
    """Rebuild a tensor from a storage."""
    PARAMETER = "parameter"
    """Rebuild a parameter from a tensor."""
    SUBCLASS = "subclass"
    """Rebuild a tensor by a class and the function that makes it."""
    STORAGE_STREAM = "storage stream"
    """Read a storage from bytes that `torch.save` wrote before release 1.6."""
    BYTES = "bytes"
    """Decode bytes from text."""
    BYTES_IO = "buffer"
    """A file in memory."""
    ARRAY = "array"
    """Build a numpy array, whose contents follow as its state."""
    GENERATOR = "generator"
    """Build a random number generator of a device, whose seed and state follow."""
    ARRAY_DTYPE = "array dtype"
    """Build a numpy dtype, whose byte order follows as its state."""


_TORCH_DTYPES = (
    "bfloat16 float16 float32 float64 half float double complex32 complex64 complex128 cfloat "
    "cdouble uint8 uint16 uint32 uint64 int8 int16 int32 int64 short int long bool float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 uint1 uint2 uint3 "
    "uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 quint8 qint8 qint32"
)
_STORAGES = (
    "FloatStorage DoubleStorage HalfStorage BFloat16Storage ByteStorage CharStorage ShortStorage "
    "IntStorage LongStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage"
)
_LAYOUTS = "strided contiguous_format preserve_format channels_last channels_last_3d"
_ENUMS_OF_LAYERS = (
    "ModelType LayerType AttnType AttnMaskType AttnBackend CudaGraphScope CudaGraphModule "
    "InferenceCudaGraphScope"
)
_INITIALIZERS = (
    "normal_ uniform_ zeros_ ones_ constant_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
    "kaiming_normal_ trunc_normal_ orthogonal_"
)
_DCP = "torch.distributed.checkpoint."
_NODES = "AnyNode IntegerNode FloatNode StringNode BooleanNode EnumNode BytesNode PathNode"

_TABLE: tuple[tuple[GlobalForm, str, str], ...] = (
    # Python
    (GlobalForm.VALUE, "builtins", "object list dict tuple int float str bool type"),
    (GlobalForm.CALL, "builtins", "set frozenset complex slice range"),
    (GlobalForm.BYTES, "builtins", "bytes bytearray"),
    (GlobalForm.VALUE, "__builtin__", "object list dict tuple int long float str unicode bool"),
    (GlobalForm.CALL, "__builtin__", "set frozenset complex slice range xrange"),
    (GlobalForm.BYTES, "__builtin__", "bytes bytearray"),
    (GlobalForm.BYTES, "_codecs", "encode"),
    (GlobalForm.BYTES_IO, "io", "BytesIO"),
    (GlobalForm.BYTES_IO, "_io", "BytesIO"),
    (GlobalForm.OBJECT, "argparse", "Namespace"),
    (GlobalForm.OBJECT, "types", "SimpleNamespace"),
    (GlobalForm.VALUE, "types", "NoneType"),
    (GlobalForm.VALUE, "typing", "Any"),
    (GlobalForm.MAPPING, "collections", "OrderedDict defaultdict Counter deque"),
    (GlobalForm.CALL, "pathlib", "Path PosixPath PurePath PurePosixPath WindowsPath"),
    (GlobalForm.CALL, "pathlib", "PureWindowsPath"),
    (GlobalForm.CALL, "pathlib._local", "Path PosixPath PurePath PurePosixPath"),
    (GlobalForm.CALL, "datetime", "datetime date time timedelta timezone"),
    (GlobalForm.ENUM, "signal", "Signals"),
    # PyTorch
    (GlobalForm.VALUE, "torch", f"{_TORCH_DTYPES} {_STORAGES} {_LAYOUTS} Tensor"),
    (GlobalForm.CALL, "torch", "Size device"),
    (GlobalForm.GENERATOR, "torch._C", "Generator"),
    (GlobalForm.VALUE, "torch.storage", "UntypedStorage TypedStorage"),
    (GlobalForm.STORAGE_STREAM, "torch.storage", "_load_from_bytes"),
    (GlobalForm.TENSOR, "torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3"),
    (GlobalForm.PARAMETER, "torch._utils", "_rebuild_parameter _rebuild_parameter_with_state"),
    (GlobalForm.SUBCLASS, "torch._tensor", "_rebuild_from_type_v2"),
    (GlobalForm.VALUE, "torch.nn.parameter", "Parameter Buffer"),
    (GlobalForm.RECORD, "torch.torch_version", "TorchVersion"),
    (GlobalForm.CALL, "torch.serialization", "_get_layout"),
    (GlobalForm.VALUE, "torch.nn.functional", "gelu silu relu relu6 sigmoid softplus mish tanh"),
    (GlobalForm.VALUE, "torch._C._nn", "gelu silu relu6 softplus mish"),
    (GlobalForm.VALUE, "torch.nn.init", _INITIALIZERS),
    (GlobalForm.ENUM, _DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    (GlobalForm.OBJECT, _DCP + "metadata", "Metadata TensorStorageMetadata BytesStorageMetadata"),
    (GlobalForm.OBJECT, _DCP + "metadata", "ChunkStorageMetadata TensorProperties MetadataIndex"),
    (GlobalForm.OBJECT, _DCP + "metadata", "StorageMeta"),
    (GlobalForm.OBJECT, _DCP + "filesystem", "_StorageInfo"),
    (GlobalForm.ENUM, _DCP + "planner", "WriteItemType"),
    (GlobalForm.OBJECT, _DCP + "planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData"),
    # numpy
    (GlobalForm.ARRAY, "numpy.core.multiarray", "_reconstruct"),
    (GlobalForm.ARRAY, "numpy._core.multiarray", "_reconstruct"),
    (GlobalForm.CALL, "numpy.core.multiarray", "scalar"),
    (GlobalForm.CALL, "numpy._core.multiarray", "scalar"),
    (GlobalForm.CALL, "numpy.core.numeric", "_frombuffer"),
    (GlobalForm.CALL, "numpy._core.numeric", "_frombuffer"),
    (GlobalForm.ARRAY_DTYPE, "numpy", "dtype"),
    (GlobalForm.VALUE, "numpy", "ndarray bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64"),
    (GlobalForm.VALUE, "numpy", "float16 float32 float64 complex64 complex128"),
    # Megatron-Core, and Megatron-LM before it
    (GlobalForm.ENUM, "megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe"),
    (GlobalForm.ENUM, "megatron.core.transformer.enums", _ENUMS_OF_LAYERS),
    (GlobalForm.ENUM, "megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState"),
    (GlobalForm.ENUM, "megatron.core.rerun_state_machine", "RerunValidationStatus"),
    (GlobalForm.RECORD, "megatron.core.rerun_state_machine", "Call Caller"),
    (GlobalForm.OBJECT, "megatron.core.rerun_state_machine", "QuickStats"),
    (
        GlobalForm.OBJECT,
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        "PipelineParallelLayerLayout",
    ),
    (
        GlobalForm.OBJECT,
        "megatron.core.transformer.transformer_config",
        "TransformerConfig MLATransformerConfig",
    ),
    (GlobalForm.OBJECT, "megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
    (GlobalForm.OBJECT, "megatron.core.model_parallel_config", "ModelParallelConfig"),
    (GlobalForm.OBJECT, "megatron.core.optimizer", "OptimizerConfig"),
    (
        GlobalForm.OBJECT,
        "megatron.core.optimizer.optimizer_config",
        "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    ),
    (
        GlobalForm.OBJECT,
        "megatron.core.distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig",
    ),
    (
        GlobalForm.OBJECT,
        "megatron.core.dist_checkpointing.strategies.torch",
        "MCoreMetadata MCoreSavePlan",
    ),
    (GlobalForm.VALUE, "megatron.core.activations", "fast_gelu squared_relu quick_gelu"),
    (GlobalForm.ENUM, "megatron.enums", "ModelType LayerType AttnType AttnMaskType"),
    (GlobalForm.ENUM, "megatron.model.enums", "ModelType LayerType AttnType AttnMaskType"),
    (GlobalForm.ENUM, "megatron.model.enums", "PositionEmbeddingType"),
    (GlobalForm.ENUM, "megatron.legacy.model.enums", "ModelType LayerType AttnType AttnMaskType"),
    # Transformer Engine
    (GlobalForm.ENUM, "transformer_engine.common.recipe", "Format"),
    (
        GlobalForm.RECORD,
        "transformer_engine.common.recipe",
        "_FormatHelper _OverrideLinearPrecision",
    ),
    (
        GlobalForm.OBJECT,
        "transformer_engine.common.recipe",
        "Recipe DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling "
        "NVFP4BlockScaling MMParams QParams",
    ),
    # ModelOpt names the classes of its packed tensors
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.fp8_tensor", "FP8QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.int4_tensor", "INT4QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.int8_tensor", "INT8QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.mxfp4_tensor", "MXFP4QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.mxfp8_tensor", "MXFP8QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.nf4_tensor", "NF4QTensor"),
    (GlobalForm.VALUE, "modelopt.torch.quantization.qtensor.nvfp4_tensor", "NVFP4QTensor"),
    # NeMo and Lightning
    (GlobalForm.OBJECT, "omegaconf.dictconfig", "DictConfig"),
    (GlobalForm.OBJECT, "omegaconf.listconfig", "ListConfig"),
    (GlobalForm.OBJECT, "omegaconf.base", "Metadata ContainerMetadata"),
    (GlobalForm.OBJECT, "omegaconf.nodes", _NODES),
    (GlobalForm.MAPPING, "pytorch_lightning.utilities.parsing", "AttributeDict"),
    (GlobalForm.MAPPING, "lightning.fabric.utilities.data", "AttributeDict"),
    (GlobalForm.MAPPING, "lightning_fabric.utilities.data", "AttributeDict"),
)

ALLOWED_GLOBALS: dict[tuple[str, str], GlobalForm] = {
    (module, name): form for form, module, names in _TABLE for name in names.split()
}
"""The form of every global that a written pickle may name, by module and qualified name."""


def is_allowed(module: str, qualname: str) -> bool:
    """Whether a written pickle may name the global."""
    return (module, qualname) in ALLOWED_GLOBALS
