// The c10::Allocator of the null device and tensor construction; see storage.h.
#include "storage.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>

namespace prismscale {
namespace {

std::atomic<size_t> g_host_bytes{0};

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  if (allocation->from_host) give_host_bytes(allocation->bytes);
  device(allocation->device).free(allocation->block);
  delete allocation;
}

// Copies the figures to torch's structure, for torch.accelerator.
c10::CachingDeviceAllocator::DeviceStats to_torch(const AllocatorStats& stats) {
  c10::CachingDeviceAllocator::DeviceStats out;
  const auto copy = [](const StatByPool& from, auto& to) {
    for (size_t pool = 0; pool < from.size(); ++pool) {
      to[pool].current = from[pool].current;
      to[pool].peak = from[pool].peak;
      to[pool].allocated = from[pool].allocated;
      to[pool].freed = from[pool].freed;
    }
  };
  copy(stats.allocation, out.allocation);
  copy(stats.segment, out.segment);
  copy(stats.active, out.active);
  copy(stats.inactive_split, out.inactive_split);
  copy(stats.allocated_bytes, out.allocated_bytes);
  copy(stats.reserved_bytes, out.reserved_bytes);
  copy(stats.active_bytes, out.active_bytes);
  copy(stats.inactive_split_bytes, out.inactive_split_bytes);
  copy(stats.requested_bytes, out.requested_bytes);
  out.num_alloc_retries = stats.num_alloc_retries;
  out.num_ooms = stats.num_ooms;
  out.num_sync_all_streams = stats.num_sync_all_streams;
  out.num_device_alloc = stats.num_device_alloc;
  out.num_device_free = stats.num_device_free;
  return out;
}

class NullCudaAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device where(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    auto allocation = std::make_unique<Allocation>();
    allocation->device = index;
    allocation->bytes = bytes;
    allocation->block = device(index).malloc(bytes, current_stream(index));
    auto* address = reinterpret_cast<void*>(allocation->block->address);
    return {address, allocation.release(), &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t id) override {
    for (int index = 0; index < device_count(); ++index) {
      device(index).empty_cache(id);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (const Allocation* allocation = allocation_of(data)) {
      device(allocation->device).record_stream(allocation->block, stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    return device(index).with_allocator([](CachingAllocator& a) { return to_torch(a.stats()); });
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    device(index).with_allocator([](CachingAllocator& a) { a.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    device(index).with_allocator([](CachingAllocator& a) { a.reset_peaks(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return device(index).with_allocator([](CachingAllocator& a) {
      return std::pair{a.device_free_bytes(), a.config().total_bytes};
    });
  }
  // There are no bytes to copy. A clone of a DataPtr gets its size through allocate().
  void copy_data(void*, const void*, size_t) const override {}
};

}  // namespace

bool take_host_bytes(size_t bytes) {
  if (g_host_bytes.fetch_add(bytes) + bytes <= kHostTotalBytes) return true;
  g_host_bytes.fetch_sub(bytes);
  return false;
}

void give_host_bytes(size_t bytes) { g_host_bytes.fetch_sub(bytes); }

c10::Allocator* cuda_allocator() {
  static auto* allocator = new NullCudaAllocator();
  return allocator;
}

Allocation* allocation_of(const c10::Storage& storage) {
  return storage ? allocation_of(storage.data_ptr()) : nullptr;
}

void register_cuda_allocator() { c10::SetAllocator(c10::DeviceType::CUDA, cuda_allocator(), 1); }

Allocation* allocation_of(const c10::DataPtr& data) {
  // Storages made from foreign pointers (from_blob) have another deleter, and no allocation.
  return data.get_deleter() == &release ? static_cast<Allocation*>(data.get_context()) : nullptr;
}

at::Tensor new_tensor(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int index) {
  const DeviceScope scope(index);
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, cuda_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const DeviceScope scope(storage->device().index());
  // As on CUDA, the new block is allocated while the old one is still held.
  c10::DataPtr data = storage->allocator() != nullptr ? storage->allocator()->allocate(bytes)
                                                       : cuda_allocator()->allocate(bytes);
  const Allocation* before = allocation_of(storage->data_ptr());
  Allocation* after = allocation_of(data);
  if (before != nullptr && after != nullptr && before->shadow && before->bytes == bytes &&
      (!before->from_host || take_host_bytes(bytes))) {
    after->shadow = before->shadow;
    after->from_host = before->from_host;
  }
  storage->set_data_ptr(std::move(data));
  storage->set_nbytes(bytes);
}

at::Tensor make_ghost(const at::Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(tensor.storage().mutable_data(), tensor.device()));
  auto ghost = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  ghost.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  ghost.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return ghost;
}

at::Tensor make_view(
    const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

}  // namespace prismscale
