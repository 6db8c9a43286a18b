// Tensors of the null device: plain TensorImpls without bytes.
//
// A storage whose content is known has a shadow: its bytes, really stored, in CPU memory. A "known
// value" is one with a shadow; views share the shadow of their storage. Values computed from
// constants are known in small storages. Values computed from a copy from the host, and integers
// made of numbers alone, are known in larger storages too.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>
#include <optional>
#include <vector>

#include "device.h"

namespace prismscale {

// Inputs of a graph, by the numbers that its capture gave them, ascending; nullptr: none.
using GraphInputs = std::shared_ptr<const std::vector<uint32_t>>;

// Context of every CUDA storage's DataPtr.
struct Allocation {
  Block* block = nullptr;
  int device = 0;
  size_t bytes = 0;
  c10::Storage shadow;     // undefined: the value is unknown
  // The shadow is computed from a copy from the host or from the user's routing of tokens. It may
  // be larger than others: programs compute sizes from the counts of many experts on many ranks.
  bool from_host = false;
  // The value of every element (masks of finite, NaN or infinite elements, of any size). Between 0
  // and 1: the share of elements that are true (routing maps) or not -1 (indices of experts). Of
  // counts of marks in a large map: their mean.
  std::optional<double> uniform;
  bool is_check = false;   // result of `all`: whether something unknown holds for every element
  // Id of the graph in whose capture the shadow was computed from constants and answers, so that
  // each of its replays computes the same; 0: no graph.
  uint64_t lasts_in = 0;
  GraphInputs made_of;     // also used: replays compute the same while these inputs are unchanged
};

// Largest storage that may have a shadow, and most elements of a tensor in an exact op (exact.cpp).
constexpr size_t kShadowBytes = 4096;
constexpr int64_t kShadowElements = 1024;
// Largest storage whose shadow may be computed from host data, and most bytes of all such shadows.
constexpr size_t kHostBytes = size_t{1} << 20;
constexpr size_t kHostTotalBytes = size_t{1} << 28;

// Counts the bytes of a shadow computed from host data; false if the total would be too large.
bool take_host_bytes(size_t bytes);
void give_host_bytes(size_t bytes);

// Makes a device current for the lifetime of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index) : previous_(current_device()) { set_current_device(index); }
  ~DeviceScope() { set_current_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_;
};

c10::Allocator* cuda_allocator();
// Allocates the host memory that the program pins, which is ordinary memory here.
c10::Allocator* pinned_allocator();
void register_cuda_allocator();

inline bool is_null(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// nullptr for a storage of 0 bytes or one made from a foreign pointer.
Allocation* allocation_of(const c10::DataPtr& data);
Allocation* allocation_of(const c10::Storage& storage);
inline Allocation* allocation_of(const at::Tensor& t) { return allocation_of(t.storage()); }

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      int device);
// Resizes the storage as UntypedStorage.resize_ does on CUDA.
void resize_storage(c10::StorageImpl* storage, size_t bytes);
// Makes a CUDA tensor at the same address that owns no memory and whose values are never known.
at::Tensor make_ghost(const at::Tensor& tensor);
// Makes a CUDA tensor on the same storage.
at::Tensor make_view(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides,
                     int64_t offset);

}  // namespace prismscale
