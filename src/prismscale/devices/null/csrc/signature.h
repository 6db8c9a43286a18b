// Signatures of op calls: the key under which a call's output metadata is cached, and the text
// under which the call is reported.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "storage.h"

namespace prismscale {

// Facts about an op that hold for every call; made once per op from its schema.
struct OpInfo {
  std::string name;               // "aten::add.Tensor"
  size_t arguments = 0;
  std::vector<bool> written;      // by argument: the op writes into it
  std::vector<bool> overwritten;  // by argument: written without being read
  std::vector<bool> value_free;   // by argument: a number whose value cannot change any shape
  bool writes = false;
  bool exactable = false;         // may be computed on shadows
  bool counts = false;            // in-place foreach op with one number: optimizers count steps so
  bool forgets_all = false;       // writes into arguments that its schema does not mark
  bool fills_self = false;        // in-place random fill: its output is `self`
  bool uses_blas = false;
  bool convolves = false;
  bool allows_cpu = false;        // takes CPU tensors with dimensions beside CUDA ones
};
const OpInfo& op_info(const c10::OperatorHandle& op);
// From now on, when an operator is removed, its facts are no longer found.
void forget_removed_ops();

// 128 bits: a collision would hand out wrong shapes, and 64 bits are too few to rule that out.
struct CallKey {
  uint64_t low = 0x9e3779b97f4a7c15, high = 0xc2b2ae3d27d4eb4f;
  void add(uint64_t value) {
    low = (low ^ value) * 0xff51afd7ed558ccd;
    low ^= low >> 32;
    high = ((high << 31) | (high >> 33)) + value * 0x9fb21c651e98df25;
    high ^= high >> 29;
  }
  bool operator==(const CallKey& other) const { return low == other.low && high == other.high; }
};
struct CallKeyHash {
  size_t operator()(const CallKey& key) const { return key.low; }
};

struct CallScan {
  CallKey key;
  int device = -1;             // of the first CUDA tensor; -1: there is none
  int64_t max_elements = 0;    // of all tensor arguments
  bool foreign_cpu = false;    // a CPU tensor with dimensions
};
CallScan scan_call(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Whether the program asked for deterministic algorithms, and not only for warnings.
bool sums_in_fixed_order();

// Fields separated by \x1f: name, inputs, outputs, other arguments; see cost/kernel_signature.py.
std::string describe_call(
    const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
    c10::ArrayRef<c10::IValue> outputs);

// Whether `value` is a list of tensors of which some may be absent, as in an index.
inline bool is_optional_tensor_list(const c10::IValue& value) {
  return value.isList() && !value.toListRef().empty() &&
      value.type()->castRaw<c10::ListType>()->getElementType()->kind() ==
      c10::TypeKind::OptionalType;
}

// Calls `visit(tensor, argument, item)` for every defined tensor; item is -1 outside of lists.
template <typename F>
void each_tensor(c10::ArrayRef<c10::IValue> values, F&& visit) {
  for (size_t i = 0; i < values.size(); ++i) {
    const c10::IValue& value = values[i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined()) visit(tensor, static_cast<int>(i), -1);
    } else if (value.isTensorList() || value.isList()) {
      const auto list = value.toListRef();
      for (size_t j = 0; j < list.size(); ++j) {
        if (!list[j].isTensor()) continue;  // optional tensor lists mix tensors and None
        const at::Tensor& tensor = list[j].toTensor();
        if (tensor.defined()) visit(tensor, static_cast<int>(i), static_cast<int>(j));
      }
    }
  }
}

}  // namespace prismscale
