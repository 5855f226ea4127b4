// A device for tests, PyTorch's PrivateUse1: its memory is not readable from the host, and its
// streams do nothing until somebody waits for them.
//
// A copy is queued on the current stream and made when an event behind it, or the stream, is waited
// for; a wait between streams is queued like a copy. So a wait that is missing gives values of
// before, always, where a GPU gives them now and then. Kernels are PyTorch's for the CPU (its
// fallback): they wait for the current stream, run, and queue the copy of what they have written.
// Memory that is freed is NaN at once unless record_stream was called for the streams that use it.

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;
constexpr std::uintptr_t FAR = 1ull << 62;  // added to addresses: no host can read there

struct Stream {
  std::deque<std::function<void()>> queue;
  std::uint64_t queued = 0, done = 0;
};
struct Event {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  std::uint64_t number = 0;
};
struct Block {
  std::size_t nbytes;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> used;
};

std::recursive_mutex mutex;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Stream> streams;
std::map<char*, Block> blocks;             // by their address on the host
std::map<char*, std::size_t> pinned;       // host memory that is page-locked, it says
c10::StreamId latest = 0;
thread_local c10::DeviceIndex here = 0;
thread_local c10::StreamId current[DEVICES] = {};

// Holds the lock. What a thread has done of a queue is dropped once it holds the lock no more: with
// the last reference to a tensor goes its Python object, for which torch takes the GIL, and who has
// the GIL may be waiting for the lock.
thread_local int depth = 0;
thread_local std::vector<std::function<void()>> finished;
struct Guard {
  Guard() {
    mutex.lock();
    ++depth;
  }
  ~Guard() {
    bool last = --depth == 0;
    mutex.unlock();
    while (last && !finished.empty()) {
      auto drop = std::move(finished.back());
      finished.pop_back();
    }
  }
  Guard(const Guard&) = delete;
};

char* on_host(const void* address) {
  return reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(address) - FAR);
}

void drain(c10::DeviceIndex device, c10::StreamId id, std::uint64_t number) {
  Guard guard;
  auto& stream = streams[{device, id}];
  while (stream.done < number && !stream.queue.empty()) {
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work();
    finished.push_back(std::move(work));
    ++stream.done;
  }
}

void drain(c10::DeviceIndex device, c10::StreamId id) { drain(device, id, ~0ull); }

void queue(c10::DeviceIndex device, std::function<void()> work) {
  Guard guard;
  auto& stream = streams[{device, current[device]}];
  stream.queue.push_back(std::move(work));
  ++stream.queued;
}

// ---- memory --------------------------------------------------------------------------------------

void free_block(void* address) {
  if (address == nullptr) return;
  Guard guard;
  char* host = on_host(address);
  auto found = blocks.find(host);
  Block block = found->second;
  blocks.erase(found);
  drain(block.device, block.stream);
  for (auto used : block.used) drain(block.device, used);
  std::memset(host, 0xff, block.nbytes);
  // what other streams have queued may still write here: the memory is never given back
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_block, c10::Device(TYPE, here)};
    Guard guard;
    char* host = static_cast<char*>(std::malloc(nbytes));
    std::memset(host, 0xff, nbytes);
    blocks[host] = {nbytes, here, current[here], {}};
    void* address = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(host) + FAR);
    return {address, address, &free_block, c10::Device(TYPE, here)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(on_host(to), on_host(from), nbytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(TYPE, &device_allocator);

void free_pinned(void* address) {
  if (address == nullptr) return;
  Guard guard;
  // as CUDA's: not before all copies from and to it are done
  for (auto& [key, stream] : streams) drain(key.first, key.second);
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* address = std::malloc(nbytes ? nbytes : 1);
    Guard guard;
    pinned[static_cast<char*>(address)] = nbytes ? nbytes : 1;
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  Guard guard;
  auto* place = static_cast<const char*>(address);
  auto found = pinned.upper_bound(const_cast<char*>(place));
  if (found == pinned.begin()) return false;
  --found;
  return place < found->first + found->second;
}

// ---- streams and events --------------------------------------------------------------------------

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(TYPE, here);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, here}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) here = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) here = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static c10::DeviceIndex index(c10::Device device) {
    return device.index() < 0 ? here : device.index();
  }
  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Guard guard;
    return stream(index(device), ++latest);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto device = next.device_index();
    auto before = stream(device, current[device]);
    current[device] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    Guard guard;
    return streams[{s.device_index(), s.id()}].queue.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override { drain(s.device_index(), s.id()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Guard guard;
    for (auto& [key, one] : streams)
      if (key.first == device) drain(key.first, key.second);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Guard guard;
    if (*event == nullptr) *event = new Event;
    auto device = s.device_index();
    *static_cast<Event*>(*event) = {device, s.id(), streams[{device, s.id()}].queued};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    Guard guard;
    Event one = *static_cast<Event*>(event);
    if (one.stream == s.id() && one.device == s.device_index()) return;
    auto& waiting = streams[{s.device_index(), s.id()}];
    waiting.queue.push_back([one] { drain(one.device, one.stream, one.number); });
    ++waiting.queued;
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Guard guard;
    auto& one = *static_cast<Event*>(event);
    return streams[{one.device, one.stream}].done >= one.number;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Event one;
    {
      Guard guard;
      one = *static_cast<Event*>(event);
    }
    drain(one.device, one.stream, one.number);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Guard guard;
    auto found = blocks.find(on_host(data.get()));
    if (found != blocks.end()) found->second.used.insert(s.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { here = device; }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = here;
    if (device >= 0) here = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {TYPE, here}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    auto data = storage.allocator()->allocate(nbytes);
    auto kept = std::min(nbytes, storage.nbytes());
    if (kept) {
      drain(here, current[here]);
      std::memcpy(on_host(data.get()), on_host(storage.data()), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

// ---- operations ----------------------------------------------------------------------------------

c10::Device device_of(std::optional<c10::Device> device) {
  return {TYPE, device && device->index() >= 0 ? device->index() : here};
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(sizes, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

// The bytes of a tensor on the device, as the CPU's tensor that lies there.
at::Tensor plain(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU);
  return at::from_blob(on_host(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (to.numel() == 0) return to;
  auto on_device = from.is_cpu() ? to.device() : from.device();
  auto device = on_device.index();
  c10::DeviceGuard guard(on_device);
  bool later = non_blocking;
  at::Tensor source = from.is_cpu() ? from : plain(from);
  at::Tensor target = to.is_cpu() ? to : plain(to);
  if (from.is_cpu() && !(non_blocking && is_pinned(from.const_data_ptr()))) {
    source = from.clone();  // as from memory that is not pinned: read before this returns
    later = true;
  }
  if (!from.is_cpu() && !to.is_cpu()) later = true;
  if (to.is_cpu() && !is_pinned(to.const_data_ptr())) later = false;
  queue(device, [source, target] {
    at::AutoDispatchBelowADInplaceOrView inner;
    target.copy_(source);
  });
  if (!later) drain(device, current[device]);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

// Not by the fallback, which copies back to every element: those of a placeholder share their memory.
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  c10::DeviceGuard guard(self.device());
  queue(self.device().index(), [target = plain(self), value] {
    at::AutoDispatchBelowADInplaceOrView inner;
    target.fill_(value);
  });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Scalar local_scalar(const at::Tensor& tensor) { return tensor.cpu().item(); }

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto nbytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (nbytes > impl->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), nbytes);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(TYPE)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(self, sizes, strides);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
}

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
