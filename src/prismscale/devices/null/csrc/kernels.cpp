// Ops that are about storage rather than values: factories, views, set_, resize_, copy_.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/equal_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"
#include "graph_capture.h"
#include "policy.h"
#include "recorder.h"
#include "registration.h"
#include "shared_pages.h"

namespace prismscale {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

int target_device(std::optional<c10::Device> where) {
  return where && where->has_index() ? where->index() : current_device();
}

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

// Names the factory as current op. Otherwise its block would be attributed to the op before it.
void made_by_factory() {
  static const uint32_t id = register_signature("aten::empty");
  set_current_op(id);
}

// Charges the fill of new memory, which torch makes with `use_deterministic_algorithms` unless
// `fill_uninitialized_memory` is off (ATen/native/TensorFactories.h, fill_empty_deterministic_).
// The type is an argument because only arguments and sizes tell calls apart.
void charge_fill(const Tensor& made) {
  const at::Context& context = at::globalContext();
  if (!context.deterministicAlgorithms() || !context.deterministicFillUninitializedMemory()) return;
  if (made.numel() > 0) {
    charge("empty.memory_format", {made.sizes(), static_cast<int64_t>(made.scalar_type())}, {made});
  }
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> where, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const DeviceScope scope(target_device(where));
  made_by_factory();
  Tensor made(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), cuda_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), or_default(dtype), format));
  charge_fill(made);
  return made;
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> where, std::optional<bool>) {
  const DeviceScope scope(target_device(where));
  made_by_factory();
  Tensor made = new_tensor(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                           or_default(dtype), current_device());
  charge_fill(made);
  return made;
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return make_view(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                   self.storage_offset());
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

void fit_storage(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->itemsize(),
      static_cast<size_t>(impl->storage_offset()));
  if (impl->numel() > 0 && needed > impl->unsafe_storage().nbytes()) {
    resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  }
}

const Tensor& resize(const Tensor& self, SymIntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  fit_storage(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, SymInt offset, SymIntArrayRef size,
                    SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device().is_cuda(),
              "Attempted to set the storage of a CUDA tensor to a storage on ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  fit_storage(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  const std::array<SymInt, 1> size{SymInt(elements)};
  return set_storage(self, std::move(source), 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  const std::array<SymInt, 1> size{SymInt(0)};
  const c10::Device where(c10::DeviceType::CUDA, self.device().index());
  const DeviceScope scope(where.index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, cuda_allocator(), true);
  return set_storage(self, std::move(storage), 0, size, {});
}

bool is_set_to(const Tensor& self, const Tensor& source) {
  return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
      self.strides() == source.strides();
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (Allocation* allocation = allocation_of(self)) {
    device(allocation->device).record_stream(allocation->block, stream.id());
  }
}

Question question_for(at::ScalarType dtype) {
  if (dtype == at::kBool) return Question::kBoolean;
  return at::isIntegralType(dtype, false) ? Question::kInteger : Question::kFloat;
}

double answer_for(const Tensor& unknown, const char* op) {
  const auto uniform = uniform_value(unknown);
  if (uniform && !unknown.is_floating_point()) return *uniform;
  const Allocation* allocation = allocation_of(unknown);
  const bool is_check = allocation && allocation->is_check;
  const Question question = is_check ? Question::kCheck : question_for(unknown.scalar_type());
  return ask(op, question, unknown.numel());
}

// A copy to or from memory that is not pinned blocks the host, which a capture does not allow.
void check_copies_in_capture(const Tensor& self, const Tensor& source, bool non_blocking) {
  if (is_null(self) && is_null(source)) return;
  const Tensor& host = is_null(self) ? source : self;
  const int index = (is_null(self) ? self : source).get_device();
  if (!device(index).is_capturing(current_stream(index))) return;
  TORCH_CHECK(host.is_pinned(),
              "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
              "tensor is pinned. Please use tensor.pin_memory() or allocate the tensor with "
              "pin_memory=True.");
  if (!non_blocking) device(index).synchronize_stream(current_stream(index));
}

// The generic kernel handles the metadata, the record and, for small known values, the copy itself.
// This adds the host's side: the host waits, and its real memory must not be left with garbage.
void copy_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const Tensor self = torch::jit::peek(*stack, 0, 3).toTensor();
  const Tensor source = torch::jit::peek(*stack, 1, 3).toTensor();
  const bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  if (open_graph() != nullptr) check_copies_in_capture(self, source, non_blocking);
  null_kernel(op, keys, stack);
  copy_share(self, source);
  if (is_null(self)) {
    // From the host, too: torch synchronizes the stream after a copy that is to block.
    if (!non_blocking && !is_null(source) && self.numel() > 0) {
      device(self.get_device()).synchronize_stream(current_stream(self.get_device()));
    }
    return;
  }
  const int index = source.get_device();
  if (!non_blocking) device(index).synchronize_stream(current_stream(index));
  if (const auto known = known_value(source)) {
    Tensor(self).copy_(*known);
  } else if (self.numel() > 0) {
    fill_host(self, answer_for(source, "aten::copy_ to the host"));
  }
}

at::Scalar local_scalar(const Tensor& self) {
  const int index = self.get_device();
  charge("_local_scalar_dense", {self});
  device(index).synchronize_stream(current_stream(index));
  if (const auto known = known_value(self)) return at::native::_local_scalar_dense_cpu(*known);
  const double answer = answer_for(self, "aten::_local_scalar_dense");
  if (self.scalar_type() == at::kBool) return answer != 0.0;
  if (at::isIntegralType(self.scalar_type(), false)) return static_cast<int64_t>(answer);
  return answer;
}

bool equal(const Tensor& self, const Tensor& other) {
  if (self.is_same(other)) return true;
  if (self.sizes() != other.sizes()) return false;
  charge("equal", {self, other});
  device(self.get_device()).synchronize_stream(current_stream(self.get_device()));
  const auto mine = known_value(self), theirs = known_value(other);
  if (mine && theirs) return at::native::cpu_equal(*mine, *theirs);
  return ask("aten::equal", Question::kCheck, self.numel()) != 0.0;
}

void do_not_assert(const Tensor&) {}
void do_not_assert_msg(const Tensor&, std::string_view) {}

}  // namespace

void register_direct_kernels() {
  implement("empty.memory_format", TORCH_FN(empty));
  implement("empty_strided", TORCH_FN(empty_strided));
  implement("as_strided", TORCH_FN(as_strided));
  implement("view", TORCH_FN(view));
  implement("_reshape_alias", TORCH_FN(reshape_alias));
  implement("unfold", TORCH_FN(unfold));
  implement("view_as_real", TORCH_FN(at::native::view_as_real));
  implement("view_as_complex", TORCH_FN(at::native::view_as_complex));
  implement("resize_", TORCH_FN(resize));
  implement("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  implement("set_.source_Storage", TORCH_FN(set_whole_storage));
  implement("set_.source_Tensor", TORCH_FN(set_tensor));
  implement("set_", TORCH_FN(set_empty));
  implement("is_set_to", TORCH_FN(is_set_to));
  implement("record_stream", TORCH_FN(record_stream));
  implement("_local_scalar_dense", TORCH_FN(local_scalar));
  implement("equal", TORCH_FN(equal));
  implement("_assert_async", TORCH_FN(do_not_assert));
  implement("_assert_async.msg", TORCH_FN(do_not_assert_msg));
  implement("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_kernel>());
}

}  // namespace prismscale
