// A CUDA device that is this CPU: memory of malloc under CUDA's dispatch key, every operation run by
// the CPU's kernel on the same bytes, and CUDA's rules of devices, generators, captures and layouts
// refused as CUDA refuses them. Built and loaded by device.py, before torch is imported.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/addmm.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using Values = std::vector<c10::IValue>;
using See = std::function<void(const at::Tensor&)>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

const c10::Device GPU(c10::DeviceType::CUDA, 0);
const c10::Device CPU(c10::DeviceType::CPU);
constexpr c10::DispatchKeySet GPU_KEYS(c10::DispatchKey::CUDA);
constexpr c10::DispatchKeySet CPU_KEYS(c10::DispatchKey::CPU);

// What torch asks of a device before any operation.

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, GPU);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(GPU); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() : on_host(at::make_generator<at::CPUGeneratorImpl>()) { device_ = GPU; }
  void set_current_seed(uint64_t seed) override {
    at::CPUGeneratorImpl::set_current_seed(seed);
    on_host.set_current_seed(seed);
  }
  at::Generator on_host;
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return GPU; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<Generator>();
    return generator;
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    if (size) std::memset(data, 0x7f, size);  // NaN to most types: nobody may read it unwritten
    return {data, data, &std::free, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} memory;

// The same bytes on either device.

at::Tensor placed(const at::Tensor& like, c10::Storage storage, c10::DispatchKeySet keys) {
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return out;
}

at::Tensor to_host(const at::Tensor& t) {
  if (!t.is_cuda()) return t;
  c10::DataPtr data(t.storage().data_ptr().get(), new c10::Storage(t.storage()),
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, CPU);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, t.storage().nbytes(), std::move(data),
                       c10::GetAllocator(c10::DeviceType::CPU), true);
  return placed(t, std::move(storage), CPU_KEYS);
}

c10::DataPtr owned_by(const at::Tensor& host) {
  return {host.storage().mutable_data(), new at::Tensor(host),
          [](void* kept) { delete static_cast<at::Tensor*>(kept); }, GPU};
}

at::Tensor from_host(const at::Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, t.storage().nbytes(), owned_by(t), &memory,
                       true);
  return placed(t, std::move(storage), GPU_KEYS);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& t) {
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

void each(const c10::IValue& v, const See& see) {
  if (v.isTensor() && v.toTensor().defined()) see(v.toTensor());
  if (v.isTensorList())
    for (const at::Tensor& t : v.toTensorList()) see(t);
  if (v.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      if (t && t->defined()) see(*t);
}

c10::IValue changed(const c10::IValue& v, const Change& change) {
  if (v.isTensor()) return v.toTensor().defined() ? c10::IValue(change(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : v.toTensorList()) out.push_back(change(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(change(*t)) : t);
    return out;
  }
  return v;
}

// Captures: operations run, are noted, and are run again on the same tensors by a replay.

struct Step {
  c10::OperatorHandle op;
  Values inputs, outputs;
  int call = -1;  // of Python: a kernel of Triton
};
std::vector<std::vector<Step>> graphs;
bool is_capturing = false;
void (*call_python)(int) = nullptr;
void (*tell_wait)(const char*) = nullptr;

// What CUDA refuses.

// Operations that take tensors of both devices.
const std::set<std::string> MIXED = {
    "aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::index.Tensor_out", "aten::_unsafe_index.Tensor", "aten::_foreach_copy", "aten::_foreach_copy_"};
// Operations that wait for the device.
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::unique_dim", "aten::_unique2", "aten::unique_consecutive", "aten::bincount",
    "aten::repeat_interleave.Tensor"};

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void refuse(const std::string& name) {
  TORCH_CHECK(!is_capturing, "operation not permitted when stream is capturing: ", name);
}

// The host waits for the device, which no capture permits.
void wait(const std::string& name) {
  refuse(name);
  if (tell_wait) tell_wait(name.c_str());
}

void check_scaled_mm(const Values& inputs) {
  const at::Tensor a = inputs[0].toTensor(), b = inputs[1].toTensor();
  TORCH_CHECK(a.stride(1) == 1 && b.stride(0) == 1, "_scaled_mm: rows times columns");
  for (int64_t size : {a.size(1), b.size(0), b.size(1)})
    TORCH_CHECK(size % 16 == 0, "_scaled_mm: ", size, " is no multiple of 16");
  for (int i : {2, 3}) {
    const at::Tensor scale = inputs[i].toTensor();
    TORCH_CHECK(scale.is_cuda() && scale.scalar_type() == at::kFloat && scale.numel() == 1,
                "_scaled_mm: a scale is one float32 on the device");
  }
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
              "_scaled_mm: two matrices of e5m2");
}

void check_grouped_mm(const Values& inputs) {
  for (int i : {0, 1}) {
    const at::Tensor x = inputs[i].toTensor();
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "_grouped_mm: ", x.scalar_type());
    const bool is_row_major = x.stride(-1) == 1;
    TORCH_CHECK(is_row_major || x.stride(-2) == 1, "_grouped_mm: strides ", x.strides());
    TORCH_CHECK(x.stride(is_row_major ? -2 : -1) % 8 == 0, "_grouped_mm: rows of 16 bytes");
  }
}

void check(const c10::OperatorHandle& op, const Values& inputs) {
  const std::string name = name_of(op);
  bool on_gpu = false;
  for (const auto& v : inputs) each(v, [&](const at::Tensor& t) { on_gpu |= t.is_cuda(); });
  for (const auto& v : inputs) {
    each(v, [&](const at::Tensor& t) {
      TORCH_CHECK(!on_gpu || t.is_cuda() || t.dim() == 0 || MIXED.count(name),
                  "Expected all tensors to be on the same device, but ", name, " got ", t.sizes(),
                  " on ", t.device());
      if (!t.is_cuda() && t.dim()) refuse(name + " of host memory");
      if (name.rfind("aten::index.Tensor", 0) == 0 && t.scalar_type() == at::kBool && t.is_cuda())
        wait(name + " by a mask");
    });
    if (v.isGenerator() && v.toGenerator().defined())
      TORCH_CHECK(v.toGenerator().device().is_cuda(), name,
                  ": Expected a 'cuda' device type for generator but found 'cpu'");
  }
  if (WAITING.count(name)) wait(name);
  if (name == "aten::_scaled_mm") check_scaled_mm(inputs);
  if (name == "aten::_grouped_mm") check_grouped_mm(inputs);
}

// Operations.

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

// Tensors that the CPU's kernel has resized are resized on the device.
void follow(const Pairs& pairs) {
  for (const auto& [there, here] : pairs) {
    if (there.sizes().equals(here.sizes())) continue;
    if (here.storage().data_ptr().get() != there.storage().data_ptr().get()) {
      auto* storage = there.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(owned_by(here));
      storage->set_nbytes(here.storage().nbytes());
    }
    there.unsafeGetTensorImpl()->set_sizes_and_strides(
        here.sizes(), here.strides(), here.storage_offset());
  }
}

void run(const c10::OperatorHandle& op, const Values& inputs, Values* outputs) {
  torch::jit::Stack stack;
  Pairs pairs;
  bool on_gpu = false;
  for (const auto& v : inputs) {
    if (v.isDevice() && v.toDevice().is_cuda()) {
      on_gpu = true;
      stack.emplace_back(CPU);
    } else if (v.isGenerator() && v.toGenerator().defined()) {
      auto* generator = v.toGenerator().unsafeGetGeneratorImpl();
      stack.emplace_back(static_cast<Generator*>(generator)->on_host);
    } else {
      stack.push_back(changed(v, [&](const at::Tensor& t) {
        at::Tensor here = to_host(t);
        if (t.is_cuda()) pairs.emplace_back(t, here);
        return here;
      }));
    }
  }
  if (name_of(op) == "aten::addmm.dtype_out") {  // CUDA alone has it
    auto wide = [&](int i) { return stack[i].toTensor().to(at::kFloat); };
    at::Tensor out = stack[6].toTensor();
    TORCH_CHECK(out.scalar_type() == stack[3].toScalarType(), "addmm: out_dtype is not out's");
    out.copy_(at::addmm(wide(0), wide(1), wide(2), stack[4].toScalar(), stack[5].toScalar()));
    stack = {out};
  } else {
    op.redispatchBoxed(CPU_KEYS, &stack);
  }
  follow(pairs);
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < stack.size(); i++) {
    const auto* alias = i < returns.size() ? returns[i].alias_info() : nullptr;
    outputs->push_back(changed(stack[i], [&](const at::Tensor& t) {
      for (const auto& [there, here] : pairs)
        if (t.is_same(here)) return there;
      const bool is_view = alias && !alias->isWrite();
      for (const auto& [there, here] : pairs)
        if (is_view || (t.numel() && t.storage().data_ptr().get() == here.storage().data_ptr().get()))
          return view_of(there, t);
      return on_gpu || !pairs.empty() ? from_host(t) : t;
    }));
  }
}

void any(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->end() - op.schema().arguments().size();
  const Values inputs(first, stack->end());
  Values outputs;
  check(op, inputs);
  run(op, inputs, &outputs);
  stack->erase(first, stack->end());
  stack->insert(stack->end(), outputs.begin(), outputs.end());
  if (is_capturing) graphs.back().push_back({op, inputs, outputs});
}

using Dtype = std::optional<at::ScalarType>;
using Pinned = std::optional<bool>;

at::Tensor empty(c10::SymIntArrayRef size, Dtype dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, Pinned pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, GPU_KEYS,
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, Dtype dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, Pinned pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &memory, GPU_KEYS,
                                           dtype.value_or(at::kFloat));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda()) {
    refuse("a copy between host and device");
    if (!non_blocking) wait(self.is_cuda() ? "a copy to the device" : "a copy to the host");
  }
  to_host(self).copy_(to_host(source));
  if (is_capturing) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    graphs.back().push_back({op, {self, source, false}, {self}});
  }
  return self;
}

void set_storage(at::Tensor& self, const c10::Storage& source, c10::IntArrayRef size,
                 c10::IntArrayRef stride, int64_t offset) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
}

at::Tensor& set_whole(at::Tensor& self, c10::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize(), stride = 1;
  set_storage(self, source, c10::IntArrayRef(&size, 1), c10::IntArrayRef(&stride, 1), 0);
  return self;
}

at::Tensor& set_part(at::Tensor& self, c10::Storage source, c10::SymInt offset,
                     c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  set_storage(self, source, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
              offset.expect_int());
  return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&any>());
}

// Collectives are gloo's, on the same bytes.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "reduce_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_",
        "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any>());
}

const bool registered = (c10::SetAllocator(c10::DeviceType::CUDA, &memory, 10), true);

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks);
}

extern "C" {

// Begins a graph, and returns its number.
int capture_begin() {
  graphs.emplace_back();
  is_capturing = true;
  return static_cast<int>(graphs.size()) - 1;
}

void capture_pause(int is_paused) { is_capturing = !is_paused; }

void capture_end() { is_capturing = false; }

void on_call(void (*call)(int)) { call_python = call; }

void on_wait(void (*tell)(const char*)) { tell_wait = tell; }

void note_call(int number) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  graphs.back().push_back({op, {}, {}, number});
}

int replay(int graph) {
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  try {
    for (const Step& step : std::vector<Step>(graphs[graph])) {
      if (step.call >= 0) {
        call_python(step.call);
        continue;
      }
      if (step.op.operator_name().name == "aten::copy_") {
        to_host(step.inputs[0].toTensor()).copy_(to_host(step.inputs[1].toTensor()));
        continue;
      }
      Values outputs;
      run(step.op, step.inputs, &outputs);
      for (size_t i = 0; i < outputs.size(); i++) {
        std::vector<at::Tensor> recorded, made;
        each(step.outputs[i], [&](const at::Tensor& t) { recorded.push_back(t); });
        each(outputs[i], [&](const at::Tensor& t) { made.push_back(t); });
        for (size_t j = 0; j < made.size(); j++)
          if (made[j].numel() && made[j].data_ptr() != recorded[j].data_ptr())
            to_host(recorded[j]).copy_(to_host(made[j]));
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

}  // extern "C"
