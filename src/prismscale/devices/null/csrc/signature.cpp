// Op facts, call keys and call descriptions; see signature.h.
#include "signature.h"

#include <cstring>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <ATen/Context.h>

namespace prismscale {
namespace {

const std::unordered_set<std::string>& blas_ops() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_", "aten::bmm",
      "aten::bmm.out", "aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_", "aten::mv",
      "aten::addmv", "aten::addmv.out", "aten::dot", "aten::vdot", "aten::_scaled_mm",
      "aten::_scaled_mm_v2", "aten::_addmm_activation", "aten::_int_mm"};
  return *names;
}

bool convolves(const std::string& name) { return name.find("convolution") != std::string::npos; }

bool has_floats(c10::ArrayRef<c10::IValue> values) {
  bool found = false;
  each_tensor(values, [&](const at::Tensor& tensor, int, int) {
    found = found || tensor.scalar_type() == at::kFloat;
  });
  return found;
}

// Whether the op multiplies 32-bit floats in TF32, which is a setting of the program and no
// argument. If torch's old and new settings contradict each other, torch raises here, as it would
// at the product on a GPU.
bool in_tf32(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  if (!(info.uses_blas || info.convolves) || !has_floats(arguments)) return false;
  const auto& context = at::globalContext();
  return info.convolves ? context.allowTF32CuDNN() : context.allowTF32CuBLAS();
}

// The Meta kernels of these ops are Python and import torch._dynamo (two seconds) to return `self`.
bool fills_self(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_", "aten::exponential_",
      "aten::geometric_", "aten::log_normal_", "aten::cauchy_"};
  return names->count(name) > 0;
}

// Norm layers update their running statistics without an alias mark in the schema.
const std::unordered_set<std::string>& silent_writers() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"};
  return *names;
}

// Ops whose index, source or scalar arguments may be on the CPU.
const std::unordered_set<std::string>& mixed_ops() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::copy_", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_",
      "aten::_index_put_impl_", "aten::index_put", "aten::_copy_from"};
  return *names;
}

bool is_number(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::GeneratorType:
      return true;
    case c10::TypeKind::OptionalType:
      return is_number(type->castRaw<c10::OptionalType>()->getElementType());
    default:
      return false;
  }
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// Whether the op takes one list, which it changes in place, and one number.
bool counts(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name.rfind("aten::_foreach_", 0) == 0 && name.back() == '_' &&
      schema.overload_name() == "Scalar" && schema.arguments().size() == 2;
}

OpInfo make_info(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpInfo info;
  info.name = schema.name();
  if (!schema.overload_name().empty()) info.name += "." + schema.overload_name();
  info.arguments = schema.arguments().size();
  const bool overwrites_self =
      schema.name() == "aten::fill_" || schema.name() == "aten::zero_" ||
      schema.name() == "aten::copy_";
  // arange.out and similar ops take their shape from numbers, although one argument is a tensor.
  bool reads_tensors = false;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    info.written.push_back(written);
    info.overwritten.push_back(written && (argument.is_out() || overwrites_self));
    info.writes = info.writes || written;
    reads_tensors = reads_tensors ||
        (!argument.is_out() && argument.type()->str().find("Tensor") != std::string::npos);
  }
  for (const auto& argument : schema.arguments()) {
    info.value_free.push_back(reads_tensors && is_number(argument.type()));
  }
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  info.exactable = !random && info.name.rfind("aten::", 0) == 0;
  info.counts = counts(schema);
  info.forgets_all = silent_writers().count(info.name) > 0;
  info.fills_self = fills_self(schema.name());
  info.uses_blas = blas_ops().count(info.name) > 0;
  info.convolves = convolves(schema.name());
  info.allows_cpu = mixed_ops().count(info.name) > 0 || !takes_tensors(schema);
  return info;
}

void add_text(CallKey& key, const std::string& text) {
  key.add(text.size());
  for (const char c : text) key.add(static_cast<unsigned char>(c));
}

void add_double(CallKey& key, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  key.add(bits);
}

// Memory of other GPUs has addresses from here on; symmetric_memory.py hands them out.
constexpr uintptr_t kFirstPeerAddress = uintptr_t{1} << 43;

bool is_on_peer(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || !tensor.has_storage()) return false;
  const auto address = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return address >= kFirstPeerAddress && address < 2 * kFirstPeerAddress;
}

void scan_tensor(CallScan& scan, const at::Tensor& tensor) {
  CallKey& key = scan.key;
  if (!tensor.defined()) {
    key.add(1);
    return;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  const bool on_cuda = impl->is_cuda();
  uint64_t flags =
      2 + static_cast<uint64_t>(on_cuda) + 2 * static_cast<uint64_t>(is_on_peer(tensor));
  flags = flags << 8 | static_cast<uint64_t>(tensor.scalar_type());
  flags = flags << 8 | static_cast<uint64_t>(impl->is_wrapped_number());
  flags = flags << 8 | static_cast<uint64_t>(sizes.size());
  key.add(flags);
  for (const int64_t size : sizes) key.add(static_cast<uint64_t>(size));
  for (const int64_t stride : strides) key.add(static_cast<uint64_t>(stride));
  scan.max_elements = std::max(scan.max_elements, impl->numel());
  if (on_cuda) {
    if (scan.device < 0) scan.device = impl->device().index();
  } else if (!sizes.empty()) {
    scan.foreign_cpu = true;
  }
}

void scan_value(CallScan& scan, const c10::IValue& value, bool value_free) {
  CallKey& key = scan.key;
  if (value.isTensor()) {
    scan_tensor(scan, value.toTensor());
  } else if (value.isNone()) {
    key.add(11);
  } else if (value.isInt()) {
    key.add(12);
    if (!value_free) key.add(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    key.add(value_free ? 13 : 14 + static_cast<uint64_t>(value.toBool()));
  } else if (value.isDouble()) {
    key.add(16);
    if (!value_free) add_double(key, value.toDouble());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.add(17 + (list.size() << 8));
    for (const c10::IValue& item : list) scan_value(scan, item, value_free);
  } else if (value.isString()) {
    add_text(key, value.toStringRef());
  } else if (value.isDevice()) {
    key.add(18 + (static_cast<uint64_t>(value.toDevice().type()) << 8));
    if (scan.device < 0 && value.toDevice().is_cuda() && value.toDevice().has_index()) {
      scan.device = value.toDevice().index();
    }
  } else if (value.isComplexDouble()) {
    key.add(19);
  } else if (value.isGenerator() || value.isStream()) {
    key.add(20);
  } else {
    TORCH_CHECK(false, "the null CUDA device cannot key an argument of type ", value.tagKind());
  }
}

void describe_tensor(std::ostream& out, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    out << "none";
    return;
  }
  out << c10::toString(tensor.scalar_type()) << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) out << (i > 0 ? "," : "") << tensor.size(i);
  out << ']';
  if (!tensor.is_contiguous()) {
    out << '@';
    for (int64_t i = 0; i < tensor.dim(); ++i) out << (i > 0 ? "," : "") << tensor.stride(i);
  }
  if (is_on_peer(tensor)) out << "!peer";
  if (tensor.is_cpu()) out << '!' << c10::DeviceTypeName(tensor.device().type(), true);
}

void describe_tensors(std::ostream& out, c10::ArrayRef<c10::IValue> values) {
  bool first = true;
  each_tensor(values, [&](const at::Tensor& tensor, int, int) {
    if (!first) out << ';';
    first = false;
    describe_tensor(out, tensor);
  });
}

// Facts by the address of the op's schema: one comparison for each call. Infos are never deleted,
// because their addresses are part of the keys in the cache of calls.
struct OpInfos {
  std::shared_mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, const OpInfo*> by_schema;
};

OpInfos& infos() {
  static auto* all = new OpInfos();
  return *all;
}

// Removes the facts of an operator with its torch.library.Library: a later operator may have a
// schema at the same address.
struct ForgetRemoved final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    std::unique_lock<std::shared_mutex> lock(infos().mutex);
    infos().by_schema.erase(&op.schema());
  }
};

}  // namespace

void forget_removed_ops() {
  static auto* registration = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<ForgetRemoved>()));
  (void)registration;  // lives as long as the process
}

const OpInfo& op_info(const c10::OperatorHandle& op) {
  const c10::FunctionSchema* schema = &op.schema();
  {
    std::shared_lock<std::shared_mutex> lock(infos().mutex);
    const auto found = infos().by_schema.find(schema);
    if (found != infos().by_schema.end()) return *found->second;
  }
  std::unique_lock<std::shared_mutex> lock(infos().mutex);
  const OpInfo*& slot = infos().by_schema[schema];
  if (slot == nullptr) slot = new OpInfo(make_info(op));
  return *slot;
}

CallScan scan_call(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  CallScan scan;
  scan.key.add(reinterpret_cast<uintptr_t>(&info));
  for (size_t i = 0; i < arguments.size(); ++i) {
    scan_value(scan, arguments[i], info.value_free[i]);
  }
  if (in_tf32(info, arguments)) scan.key.add(21);
  if (sums_in_fixed_order()) scan.key.add(22);
  return scan;
}

std::string describe_call(
    const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
    c10::ArrayRef<c10::IValue> outputs) {
  constexpr char kField = '\x1f';
  std::ostringstream out;
  out << info.name << kField;
  describe_tensors(out, arguments);
  out << kField;
  describe_tensors(out, outputs);
  out << kField;
  bool first = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (info.value_free[i] || !(value.isInt() || value.isBool() || value.isIntList())) continue;
    out << (first ? "" : ";") << op.schema().arguments()[i].name() << '=';
    first = false;
    if (value.isIntList()) {
      const auto list = value.toIntVector();
      for (size_t j = 0; j < list.size(); ++j) out << (j > 0 ? "," : "") << list[j];
    } else {
      out << (value.isBool() ? static_cast<int64_t>(value.toBool()) : value.toInt());
    }
  }
  if (in_tf32(info, arguments)) {
    out << (first ? "" : ";") << "tf32=1";
    first = false;
  }
  if (info.name.rfind("aten::_scaled_dot_product", 0) == 0 && sums_in_fixed_order()) {
    out << (first ? "" : ";") << "deterministic=1";
  }
  return out.str();
}

bool sums_in_fixed_order() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

}  // namespace prismscale
