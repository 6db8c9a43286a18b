// Tensors of the null device: plain TensorImpls whose bytes do not exist.
//
// A storage whose content is known carries a shadow: the same bytes, really there, in CPU memory.
// Having a shadow is what "known value" means; views share their storage's. Known is what follows from
// constants, in small storages, and what follows from a copy from the host, in larger ones too; so
// do integers that are made of numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>
#include <optional>
#include <vector>

#include "device.h"

namespace prismscale {

// Numbers of inputs that a graph had as it was captured, ascending; nullptr: none.
using GraphInputs = std::shared_ptr<const std::vector<uint32_t>>;

// What the DataPtr of every CUDA storage points to.
struct Allocation {
  Block* block = nullptr;
  int device = 0;
  size_t bytes = 0;
  c10::Storage shadow;     // undefined: the value is unknown
  // The shadow follows from a copy from the host, or from the user's routing of tokens: programs
  // take sizes from counts of many experts on many ranks.
  bool from_host = false;
  // Every element has this value (masks of finite, NaN or infinite elements, of any size); between
  // 0 and 1, this share of the elements is true (routing maps).
  std::optional<double> uniform;
  bool is_check = false;   // made by `all`: whether something unknown holds for every element
  // The graph in whose capture the shadow was made, of constants and answers, so that each of its
  // replays makes the same; 0: no graph.
  uint64_t lasts_in = 0;
  GraphInputs made_of;     // and of these: replays make the same while they are what they were
};

// Largest storage that may carry a shadow, and most elements an exact op may touch.
constexpr size_t kShadowBytes = 4096;
constexpr int64_t kShadowElements = 1024;
// Largest storage whose shadow follows from the host, and the most that all such shadows take.
constexpr size_t kHostBytes = size_t{1} << 20;
constexpr size_t kHostTotalBytes = size_t{1} << 28;

// Counts bytes of shadows that follow from the host; false where they would be too many.
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
// Of the host's memory that the program pins: ordinary memory.
c10::Allocator* pinned_allocator();
void register_cuda_allocator();

inline bool is_null(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// nullptr for a storage without bytes, or with those of a foreign pointer.
Allocation* allocation_of(const c10::DataPtr& data);
Allocation* allocation_of(const c10::Storage& storage);
inline Allocation* allocation_of(const at::Tensor& t) { return allocation_of(t.storage()); }

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device);
// Gives the storage another size, as UntypedStorage.resize_ does on CUDA.
void resize_storage(c10::StorageImpl* storage, size_t bytes);
// A CUDA tensor at the same address that holds no memory, and whose values are never known.
at::Tensor make_ghost(const at::Tensor& tensor);
// A CUDA tensor on the same storage.
at::Tensor make_view(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

}  // namespace prismscale
