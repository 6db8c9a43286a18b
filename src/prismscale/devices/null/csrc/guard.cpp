// What c10 and ATen need of a CUDA device: guard, hooks, generators, pinned memory.
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>

#include "runtime.h"
#include "storage.h"

namespace prismscale {
namespace {

using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device& device_of(const Stream& stream) { return device(stream.device_index()); }
Stream make_stream(c10::Device where, int64_t id) { return Stream(Stream::UNSAFE, where, id); }
int index_or_current(c10::Device where) {
  return where.has_index() ? where.index() : current_device();
}
c10::Device cuda(int index) { return {DeviceType::CUDA, static_cast<DeviceIndex>(index)}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const int previous = current_device();
    setDevice(to);
    return cuda(previous);
  }
  c10::Device getDevice() const override { return cuda(current_device()); }
  void setDevice(c10::Device to) const override {
    if (to.has_index()) {
      device(to.index());  // raises for an ordinal that the node does not have
      set_current_device(to.index());
    }
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) set_current_device(to.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  Stream getStream(c10::Device where) const override {
    const int index = index_or_current(where);
    return make_stream(cuda(index), current_stream(index));
  }
  Stream getDefaultStream(c10::Device where) const override {
    return make_stream(cuda(index_or_current(where)), 0);
  }
  Stream getStreamFromGlobalPool(c10::Device where, bool high_priority) const override {
    const int index = index_or_current(where);
    return make_stream(cuda(index), device(index).new_stream(high_priority));
  }
  Stream getNewStream(c10::Device where, int priority) const override {
    return getStreamFromGlobalPool(where, priority < 0);
  }
  Stream exchangeStream(Stream to) const override {
    const int index = to.device_index();
    const Stream previous = make_stream(cuda(index), current_stream(index));
    set_current_stream(index, to.id());
    return previous;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream& stream) const override {
    return device_of(stream).query_stream(stream.id());
  }
  void synchronizeStream(const Stream& stream) const override {
    device_of(stream).synchronize_stream(stream.id());
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12  // torch 2.11 does not ask the guard
  bool isStreamCapturing(const Stream& stream) const override {
    return device_of(stream).is_capturing(stream.id());
  }
#endif
  void synchronizeDevice(const DeviceIndex index) const override {
    device(index < 0 ? current_device() : index).synchronize_device();
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventState();
    device_of(stream).record(*static_cast<EventState*>(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) device_of(stream).wait(*static_cast<EventState*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || device(current_device()).query(*static_cast<EventState*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) device(current_device()).synchronize(*static_cast<EventState*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    const auto ns =
        static_cast<EventState*>(end)->time_ns - static_cast<EventState*>(start)->time_ns;
    return static_cast<double>(ns) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (Allocation* allocation = allocation_of(data)) {
      device(allocation->device).record_stream(allocation->block, stream.id());
    }
  }
};

// Whether the program has called graphsafe_get_state() on a generator, as it does for graphs.
std::atomic<bool> g_has_graph_states{false};

// Seed and offset of a Philox generator. Its state is 16 bytes, as DTensor's RNG tracker expects.
struct NullGenerator final : c10::GeneratorImpl {
  explicit NullGenerator(DeviceIndex index)
      : GeneratorImpl(c10::Device(DeviceType::CUDA, index),
                      c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { *state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_->offset = offset; }
  uint64_t get_offset() const override { return state_->offset; }
  uint64_t current_seed() const override { return state_->seed; }
  uint64_t seed() override {
    set_current_seed(c10::default_rng_seed_val);  // not random, so that a run can be repeated
    return state_->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    *state_ = {words[0], state.numel() == 16 ? words[1] : 0};
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = state_->seed;
    words[1] = state_->offset;
    return state.getIntrusivePtr();
  }
  // Lets two generators share one state, which a graph may have registered.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* null_generator = dynamic_cast<NullGenerator*>(other.get());
    TORCH_CHECK(null_generator != nullptr, "Provided state is not a CUDA generator");
    state_ = null_generator->state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    g_has_graph_states = true;
    auto same = c10::make_intrusive<NullGenerator>(device().index());
    same->state_ = state_;
    return same;
  }
  NullGenerator* clone_impl() const override {
    auto* copy = new NullGenerator(device().index());
    *copy->state_ = *state_;
    return copy;
  }
  struct State {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Pinned memory is plain CPU memory for which is_pinned() is True. Large blocks take memory only as
// they are written: programs reserve tens of gigabytes on a cluster's hosts and leave most of it
// blank.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes < kLeastReserved ? c10::alloc_cpu(bytes) : reserve(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (memory != nullptr) ranges_[reinterpret_cast<uintptr_t>(memory)] = bytes;
    return {memory, memory, &PinnedAllocator::release, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool owns(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = ranges_.upper_bound(address);
    if (it == ranges_.begin()) return false;
    --it;
    return address < it->first + it->second;
  }
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }

 private:
  static constexpr size_t kLeastReserved = size_t{1} << 20;

  static void* reserve(size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "no room for ", bytes, " bytes of pinned memory in this "
                "process's address space: ", std::strerror(errno));
    return memory;
  }
  static void release(void* memory) {
    size_t bytes = 0;
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      const auto found = get().ranges_.find(reinterpret_cast<uintptr_t>(memory));
      if (found != get().ranges_.end()) {
        bytes = found->second;
        get().ranges_.erase(found);
      }
    }
    if (bytes < kLeastReserved) {
      c10::free_cpu(memory);
    } else {
      munmap(memory, bytes);
    }
  }
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

}  // namespace

c10::Allocator* pinned_allocator() { return &PinnedAllocator::get(); }

const at::Generator& default_generator(int index) {
  static auto* generators = new std::vector<at::Generator>();
  while (static_cast<int>(generators->size()) < kMaxDevices) {
    const auto next = static_cast<DeviceIndex>(generators->size());
    generators->push_back(at::make_generator<NullGenerator>(next));
  }
  return (*generators)[static_cast<size_t>(index < 0 ? current_device() : index)];
}

namespace {
long g_cudnn = 0;
}  // namespace

void set_cudnn(int64_t version) { g_cudnn = static_cast<long>(version); }

// ATen finds the hooks by this exact name in its registry. No data members: see install_hooks().
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override {
    return static_cast<DeviceIndex>(prismscale::current_device());
  }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(cuda(index)); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(cuda(index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  void deviceSynchronize(DeviceIndex index) const override { device(index).synchronize_device(); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<NullGenerator>(index < 0 ? current_device() : index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return cuda(prismscale::current_device()); }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::get().owns(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return cuda_allocator(); }
  // The Python code of a CUDA build calls these. Some versions of torch have only one of the two.
  long versionCuDNN() const { return g_cudnn; }
  long versionRuntimeCuDNN() const { return g_cudnn; }
  std::string showConfig() const override { return "null CUDA device"; }
};

// If the hooks have been used before, ATen holds the default object, or a CUDA build's, for the
// rest of the process. All these classes have one layout (a vtable pointer, no data), so that
// object gets our vtable pointer.
void install_hooks() {
  [[maybe_unused]] static const bool registered = [] {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks",
        [](at::CUDAHooksArgs args) {
          return std::unique_ptr<at::CUDAHooksInterface>(new CUDAHooks(args));
        },
        c10::REGISTRY_PREFERRED);  // before those that a CUDA build has registered
    return true;
  }();
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(CUDAHooks) == sizeof(void*));
  static auto* ours = new CUDAHooks({});
  *reinterpret_cast<void**>(&hooks) = *reinterpret_cast<void**>(ours);
}

void install_guard() {
  static auto* guard = new Guard();
  c10::impl::registerDeviceGuard(DeviceType::CUDA, guard);
}

extern "C" __attribute__((visibility("default"))) int ps_has_graph_states() {
  return g_has_graph_states ? 1 : 0;
}

}  // namespace prismscale
