// Answers to questions about values that do not exist. Python decides and counts (value_policy.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace prismscale {

enum class Question : int {
  kFloat = 0,      // a floating-point value
  kInteger = 1,
  kBoolean = 2,
  kCount = 3,      // how many of `elements` a data-dependent shape holds
  kHistogram = 4,  // asked once per histogram; the answer is not used
  kFoundInf = 5,   // asked once per gradient unscaling; the answer is not used
  kCheck = 6,      // whether something holds for all elements, or two tensors are equal
};

using AnswerCallback = double (*)(const char* op, int question, int64_t elements);
double ask(const char* op, Question question, int64_t elements);

void register_direct_kernels();
void register_policy_kernels();

// Routing maps; see routing.cpp.
void register_routing_kernels();
// The share of elements that map.index_put_((rows, columns), ones) marks, if `map` may be a routing
// map.
std::optional<double> indexed_share(const at::Tensor& map, const c10::IValue& indices);
void set_share(const at::Tensor& map, double share);
// After a copy: gives `to` the share of marks that `from` has, if `to` is the whole of its storage.
void copy_share(const at::Tensor& to, const at::Tensor& from);
void register_attention_choice();
// Sets the devices' compute capability, which decides which attention kernels there are.
void set_capability(int major, int minor);

}  // namespace prismscale
