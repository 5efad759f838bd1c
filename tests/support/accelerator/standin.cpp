// The device "standin": torch's PrivateUse1 on host memory. What it imitates is described in __init__.py.
//
// An operation without its own kernel goes to `fallback`, which refuses what a real device would refuse and then computes
// on the CPU. `Own` marks what the device does for itself: it is neither refused nor counted.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using OptTensor = std::optional<at::Tensor>;

// What the tests set, and what they read.
std::atomic<bool> is_mps{false}, tf32_matmul{false}, tf32_conv{false}, dead{false};
std::atomic<int64_t> allocated{0}, peak{0}, limit{0}, total{int64_t(1) << 40}, until_failure{0};
std::atomic<void (*)(const char*)> listener{nullptr};
std::mutex counts_mutex;
std::map<std::string, int64_t> counts;

thread_local int own = 0;
struct Own {
  Own() { ++own; }
  ~Own() { --own; }
};

void count(const std::string& kind) {
  if (own) return;
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    ++counts[kind];
  }
  if (auto* heard = listener.load()) heard(kind.c_str());
}

// -- memory -----------------------------------------------------------------------------------------------------------

struct Block {
  void* place;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->bytes;
  std::free(block->place);
  delete block;
}

void check_memory(int64_t bytes) {
  const bool fails = until_failure > 0 && --until_failure == 0;
  if (!fails && (limit <= 0 || allocated + bytes <= limit)) return;
  TORCH_CHECK(!is_mps || bytes <= limit, "Invalid buffer size: ", bytes, " bytes");
  TORCH_CHECK(!is_mps, "MPS backend out of memory (MPS allocated: ", allocated.load(), " bytes, max allowed: ",
      limit.load(), " bytes). Tried to allocate ", bytes, " bytes on private pool.");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU 0 has a total",
      " capacity of ", limit.load(), " bytes of which ", limit - allocated, " bytes is free.");
}

struct StandinAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const auto bytes = static_cast<int64_t>(size);
    const c10::Device device(kDevice, 0);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    check_memory(bytes);
    void* place = nullptr;
    TORCH_CHECK(posix_memalign(&place, 64, size) == 0, "no host memory for the stand-in");
    allocated += bytes;
    for (int64_t now = allocated, seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {}
    return {place, new Block{place, bytes}, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[0].current = allocated;
      (*each)[0].peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = allocated.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const int64_t all = limit > 0 ? limit : total;
    return {all - allocated, all};
  }
};
StandinAllocator allocator;

// -- tensors ----------------------------------------------------------------------------------------------------------

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(!is_mps || (dtype != at::kDouble && dtype != at::kComplexDouble),
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 "
      "instead.");
}

void check_alive() {
  TORCH_CHECK(!dead || own, "CUDA error: device-side assert triggered");
}

// The same memory as a CPU tensor.
at::Tensor host(const at::Tensor& x) {
  if (!x.defined() || !x.is_privateuseone()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

OptTensor host(const OptTensor& x) { return x.has_value() && x->defined() ? OptTensor(host(*x)) : std::nullopt; }

// A copy of a CPU tensor in the device's memory.
at::Tensor device(const at::Tensor& x) {
  if (!x.defined()) return x;
  auto copy = at::empty_like(x, x.options().device(c10::Device(kDevice, 0)));
  host(copy).copy_(x);
  return copy;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "the stand-in has strided tensors only");
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride. Use .reshape(...)");
  return as_strided(self, inferred, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t axis, int64_t length, int64_t step) {
  auto size = self.dim() ? self.sizes().vec() : std::vector<int64_t>{1};
  auto stride = self.dim() ? self.strides().vec() : std::vector<int64_t>{1};
  axis = at::maybe_wrap_dim(axis, static_cast<int64_t>(size.size()));
  size.push_back(length);
  stride.push_back(stride[axis]);
  size[axis] = (size[axis] - length) / step + 1;
  stride[axis] *= step;
  return as_strided(self, size, stride, self.storage_offset());
}

void grow(const at::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  auto larger = allocator.allocate(bytes);
  if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* inner = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    grow(self.storage(), (c10::multiply_integers(size) + self.storage_offset()) * self.element_size());
    inner->set_sizes_contiguous(size);
  }
  if (format.has_value()) inner->empty_tensor_restride(*format);
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  check_alive();
  if (to.is_cpu()) count("copy to host");
  if (from.is_cpu()) count("copy to device");
  if (to.is_cpu() && from.scalar_type() != to.scalar_type()) check_dtype(to.scalar_type());  // the device converts
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  host(to).copy_(host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_alive();
  count("item");
  Own here;
  return host(self).item();
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* inner = self.unsafeGetTensorImpl();
  inner->set_storage_keep_dtype(std::move(storage));
  inner->set_sizes_and_strides(size, stride);
  inner->set_storage_offset(offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// -- random numbers ---------------------------------------------------------------------------------------------------

// A generator of the device. The CPU's kernels draw from `inner`; the CPU's own generator is not touched.
struct StandinGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator(c10::default_rng_seed_val);
  explicit StandinGenerator(c10::DeviceIndex index = 0)
      : GeneratorImpl({kDevice, std::max<c10::DeviceIndex>(index, 0)},
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the stand-in's generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the stand-in's generators have no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  StandinGenerator* clone_impl() const override {
    auto* copy = new StandinGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

const at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<StandinGenerator>();
  return generator;
}

at::Generator inner_generator(const c10::IValue& given) {
  const auto generator = given.isGenerator() ? given.toGenerator() : default_generator();
  TORCH_CHECK(own || generator.device().type() == kDevice,
      "Expected a 'standin' device type for generator but found '", generator.device().type(), "'");
  if (generator.device().is_cpu()) return generator;
  return static_cast<StandinGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// Its CPU kernel would draw from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask.to(at::kBool)};
}

// -- TF32 -------------------------------------------------------------------------------------------------------------

// Round to the nearest number with 10 bits of mantissa.
float round_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  bits += 0x0fffu + ((bits >> 13) & 1u);
  bits &= 0xffffe000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

at::Tensor tf32(const at::Tensor& x) {
  if (!x.defined() || x.scalar_type() != at::kFloat) return x;
  auto rounded = host(x).clone(at::MemoryFormat::Contiguous);
  float* values = rounded.data_ptr<float>();
  std::transform(values, values + rounded.numel(), values, round_tf32);
  return x.is_privateuseone() ? device(rounded) : rounded;
}

// -- everything else: on the CPU, after the checks of a device --------------------------------------------------------

const std::set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};
const std::set<std::string> kSynchronizing = {"aten::equal", "aten::nonzero", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::masked_select", "aten::is_nonzero", "aten::linalg_eig", "aten::_linalg_eigh",
    "aten::_linalg_svd", "aten::linalg_lstsq", "aten::repeat_interleave"};
// The operations whose operands TF32 rounds, with the arguments that are not operands of the product.
const std::map<std::string, std::set<std::string>> kProducts = {{"aten::mm", {"out"}}, {"aten::bmm", {"out"}},
    {"aten::mv", {"out"}}, {"aten::addmm", {"self", "out"}}, {"aten::addmm_", {"self"}}, {"aten::addmv", {"self", "out"}},
    {"aten::baddbmm", {"self", "out"}}, {"aten::baddbmm_", {"self"}}};

// Refuse CPU tensors. As on CUDA, a number (0 axes) may come from the CPU if it is only read, and so may indices.
void check_device(const c10::FunctionSchema& schema, const c10::Argument& argument, const at::Tensor& x) {
  if (!x.defined() || x.is_privateuseone()) return;
  const bool written = argument.alias_info() && argument.alias_info()->isWrite();
  if (x.is_cpu() && x.dim() == 0 && !written) return;
  if (argument.name() == "indices" && kIndexing.count(schema.name())) return count("copy to device");
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, standin:0 and ",
      x.device(), "! (when checking argument for argument ", argument.name(), " in method ", schema.name(), ")");
}

void check_devices(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (values[i].isTensor()) {
      check_device(schema, argument, values[i].toTensor());
    } else if (values[i].isTensorList()) {
      for (const at::Tensor& x : values[i].toTensorVector()) check_device(schema, argument, x);
    } else if (values[i].isOptionalTensorList()) {
      for (const auto& x : values[i].toOptionalTensorVector()) check_device(schema, argument, x.value_or(at::Tensor()));
    }
  }
}

bool takes_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>())
    return optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  return type->kind() == c10::TypeKind::GeneratorType;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto number = schema.arguments().size();
  check_alive();
  if (!own) check_devices(schema, torch::jit::last(*stack, number));
  const auto product = kProducts.find(schema.name());
  for (size_t i = 0; i < number; ++i) {
    auto& value = (*stack)[stack->size() - number + i];
    const auto& argument = schema.arguments()[i];
    if (takes_generator(argument)) value = c10::IValue(inner_generator(value));
    if (tf32_matmul && product != kProducts.end() && value.isTensor() && !product->second.count(argument.name()))
      value = c10::IValue(tf32(value.toTensor()));
  }
  if (kSynchronizing.count(schema.name())) count(schema.name());
  try {
    Own here;
    at::native::cpu_fallback(op, stack);
  } catch (const c10::IndexError&) {
    if (is_mps) throw;
    dead = true;  // a device-side assert ends CUDA's context
  }
  check_alive();
}

// -- kernels that the fallback cannot replace -------------------------------------------------------------------------

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const OptTensor& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  check_alive();
  TORCH_CHECK(x.is_privateuseone() && weight.is_privateuseone() &&
          (!bias.has_value() || !bias->defined() || bias->is_privateuseone()),
      "Input type (standin) and weight type should be the same");
  Own here;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto rounded = [](const at::Tensor& each) { return tf32_conv ? tf32(host(each)) : host(each); };
  return device(at::convolution(rounded(x), rounded(weight), host(bias), stride, padding, dilation, transposed,
      output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& x,
    const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
    bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  check_alive();
  Own here;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto rounded = [](const at::Tensor& each) { return tf32_conv ? tf32(host(each)) : host(each); };
  auto [dx, dweight, dbias] = at::convolution_backward(rounded(gradient), rounded(x), rounded(weight),
      std::vector<int64_t>{gradient.size(1)}, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {device(dx), device(dweight), device(dbias)};
}

// Its schema does not say that it writes the running statistics, so the fallback would not.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& x, const OptTensor& weight,
    const OptTensor& bias, const OptTensor& mean, const OptTensor& variance, bool training, double momentum,
    double epsilon) {
  check_alive();
  for (const auto& each : {weight, bias, mean, variance})
    TORCH_CHECK(!each.has_value() || !each->defined() || each->is_privateuseone(),
        "Expected all tensors to be on the same device, but found at least two devices, standin:0 and cpu!");
  Own here;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto [y, save_mean, save_invstd] = at::native_batch_norm(
      host(x), host(weight), host(bias), host(mean), host(variance), training, momentum, epsilon);
  return {device(y), device(save_mean), device(save_invstd)};
}

// -- guard and hooks --------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, {kDevice, 0}); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count("synchronize"); }
  void synchronizeEvent(void*) const override { count("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { count("synchronize"); }
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<StandinGenerator>(index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

// -- what python calls ------------------------------------------------------------------------------------------------

// In order: allocated, peak, free, total.
std::vector<int64_t> memory() {
  const auto [free, all] = allocator.getMemoryInfo(0);
  return {allocated, peak, static_cast<int64_t>(free), static_cast<int64_t>(all)};
}

c10::Dict<std::string, int64_t> get_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  c10::Dict<std::string, int64_t> found;
  for (const auto& [kind, number] : counts) found.insert(kind, number);
  return found;
}

void reset_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts.clear();
}

}  // namespace

TORCH_LIBRARY(standin, m) {
  m.def("become(bool mps) -> ()", [](bool mps) { is_mps = mps; });
  m.def("revive() -> ()", [] { dead = false; });
  m.def("tf32(bool matmul, bool conv) -> ()", [](bool matmul, bool conv) { tf32_matmul = matmul, tf32_conv = conv; });
  m.def("memory() -> int[]", &memory);
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("fail_at(int allocation) -> int", [](int64_t allocation) { return until_failure.exchange(allocation); });
  m.def("reset_peak() -> ()", [] { peak = allocated.load(); });
  m.def("counts() -> Dict(str, int)", &get_counts);
  m.def("reset_counts() -> ()", &reset_counts);
  m.def("listen(int address) -> ()", [](int64_t address) { listener = reinterpret_cast<void (*)(const char*)>(address); });
  m.def("enter() -> ()", [] { ++own; });
  m.def("leave() -> ()", [] { --own; });
  m.def("get_rng_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) {
    at::Generator generator = default_generator();
    generator.set_state(state);
  });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    at::Generator generator = default_generator();
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

REGISTER_ALLOCATOR(kDevice, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
