// Registers the kernels of the null device; see registration.h.
#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <memory>
#include <unordered_set>

#include "fallback.h"
#include "signature.h"

namespace prismscale {
namespace {

using c10::DispatchKey;
using torch::CppFunction;
using torch::jit::Stack;

// Libraries live as long as the process: their destructors would unregister the kernels.
torch::Library& library_for(const std::string& space, DispatchKey key) {
  static auto* all =
      new std::map<std::pair<std::string, DispatchKey>, std::unique_ptr<torch::Library>>();
  auto& library = (*all)[{space, key}];
  if (!library) {
    library = std::make_unique<torch::Library>(
        torch::Library::IMPL, space, key, __FILE__, __LINE__);
  }
  return *library;
}

std::unordered_set<std::string>& implemented() {
  static auto* names = new std::unordered_set<std::string>();
  return *names;
}

std::string text_of(const c10::OperatorName& op) {
  return op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "The null CUDA device has dense tensors only; ", text_of(op.operator_name()),
      " was called on ", toString(keys.highestPriorityTypeId()), ".");
}

bool is_python(const c10::OperatorName& name, DispatchKey key) {
  const auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op) return false;
  const std::string state = op->dumpState();
  const size_t row = state.find(std::string("\n") + toString(key) + ": registered at ");
  return row != std::string::npos &&
      state.substr(row, state.find(" :: ", row) - row).find(".py:") != std::string::npos;
}

// Whether an operator keeps its kernel. c10d's operators call the process group, except one that is
// a kernel. Operators implemented in Python (FSDP's copies) call other operators, which run here.
bool stays(const c10::OperatorName& op, DispatchKey key, const std::string& space) {
  if (space == "c10d") return text_of(op) != "c10d::check_for_nan";
  return space != "aten" && is_python(op, key);
}

// Replaces all kernels that this build of torch has under `key`.
template <void (*kKernel)(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*)>
void replace_all(DispatchKey key) {
  for (const c10::OperatorName& op :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    const std::string name = text_of(op), space = name.substr(0, name.find("::"));
    if (stays(op, key, space) || (key == DispatchKey::CUDA && implemented().count(name))) continue;
    library_for(space, key).impl(name.c_str(), CppFunction::makeFromBoxedFunction<kKernel>());
    if (key == DispatchKey::CUDA) implemented().insert(name);
  }
}

}  // namespace

void implement_kernel(const char* name, CppFunction&& kernel) {
  if (!implemented().insert(std::string("aten::") + name).second) return;
  library_for("aten", DispatchKey::CUDA).impl(name, std::move(kernel));
}

void register_fallback(const char* const* cuda_ops, int count) {
  forget_removed_ops();
  library_for("_", DispatchKey::CUDA)
      .fallback(CppFunction::makeFromBoxedFunction<&null_kernel>());
  // On a GPU a convolution is one kernel, which is chosen below this op. The op's own Meta kernel
  // gives the shape.
  for (const char* name : {"convolution", "convolution_backward"}) {
    implement(name, CppFunction::makeFromBoxedFunction<&null_kernel>());
  }
  replace_all<&null_kernel>(DispatchKey::CUDA);
  for (int i = 0; i < count; ++i) {
    const std::string name(cuda_ops[i]);
    const size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    if (op) implement(cuda_ops[i], CppFunction::makeFromBoxedFunction<&null_kernel>());
  }
  for (const DispatchKey key : {DispatchKey::SparseCUDA, DispatchKey::SparseCsrCUDA,
                                DispatchKey::QuantizedCUDA, DispatchKey::NestedTensorCUDA}) {
    replace_all<&refuse>(key);
  }
}

}  // namespace prismscale
