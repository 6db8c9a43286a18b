// The boxed kernel of (nearly) every op on the null device.
#pragma once

#include <mutex>
#include <optional>

#include "recorder.h"
#include "signature.h"
#include "storage.h"

namespace prismscale {

struct OutputTensor {
  enum Kind { kNew, kArgument, kUndefined } kind = kNew;
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  int argument = 0, item = -1;
};

struct Output {
  enum Kind { kTensor, kTensors, kConstant } kind = kTensor;
  std::vector<OutputTensor> tensors;
  c10::IValue constant;
};

// Everything that follows from the metadata of one call; made once, by running the Meta kernel.
struct CallEntry {
  uint32_t id = 0;
  std::vector<Output> outputs;
  std::vector<OutputTensor> resized;  // `out` arguments that take another shape
  std::vector<size_t> workspaces;     // bytes that the CUDA kernel takes and gives back
  CallCost cost;
  bool small = false;                 // every tensor is small enough for the exact path
  bool fits_host = false;             // the same for values computed from host data
  std::atomic<bool> cpu_fails{false};
};

void null_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Launches a call whose result one of our own kernels has made: adds its cost and records it.
// `name` is that of an aten operator ("nonzero", "index.Tensor").
void charge(const char* name, std::vector<c10::IValue> arguments,
            std::vector<c10::IValue> outputs = {});

// Cost of a new call: fills in the durations from its description. Called without locks.
using CostCallback = void (*)(
    const char* description, int64_t* device_ns, int64_t* host_ns, int64_t* busy_ns);
CallCost cost_of(const std::string& description);
void set_cost_callback(CostCallback callback, int64_t default_device_ns, int64_t default_host_ns);

// exact.cpp: whether the call reads a host tensor or a value computed from one, or makes integers
// of numbers alone (positions), which programs combine with such tensors.
bool follows_from_host(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);
// Computes the call on shadows; false when a value that it needs is unknown.
bool run_exact(const c10::OperatorHandle& op, const OpInfo& info, CallEntry& entry,
               c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> outputs);
void forget_written(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);
void forget(const at::Tensor& tensor);
// Whether writing this tensor overwrites every byte of its storage.
bool covers_storage(const at::Tensor& tensor);
// graph_values.cpp: in a capture, whether the tensor has the same value at each replay, whatever
// the graph's inputs are.
bool lasts_in_graph(const at::Tensor& tensor);
// In a capture, whether the call reads the same values at each replay as long as the graph's inputs
// that are stored in `inputs` keep their present values.
bool repeats_in_graph(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                      GraphInputs& inputs);
// Marks what the call has written: computed from such values, or an answer.
void set_lasting(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                 c10::ArrayRef<c10::IValue> outputs, const GraphInputs& inputs);
void set_lasting(const at::Tensor& tensor, const GraphInputs& inputs = nullptr);
// The value that a replay has left in memory, for a tensor made from a bare pointer to it.
struct LeftValue {
  c10::Storage shadow;            // undefined: the value is unknown
  size_t offset = 0;              // bytes into `shadow` at which the tensor's storage begins
  std::optional<double> uniform;  // as in Allocation
};
LeftValue left_value(const at::Tensor& tensor);
void forget_left(const at::Tensor& tensor);
// In a capture, notes the tensors that replays will write to.
void written_in_graph(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                      c10::ArrayRef<c10::IValue> outputs);
void written_in_graph(const at::Tensor& tensor);
// The value of every element, or the share of elements that are true: see Allocation::uniform.
std::optional<double> uniform_value(const at::Tensor& tensor);
std::optional<at::Tensor> known_value(const at::Tensor& tensor);  // a CPU tensor sharing the shadow
bool set_known(const at::Tensor& tensor, const at::Tensor& value, bool from_host = false);

// workspaces.cpp: bytes that the real kernel of this call takes from the allocator and gives back.
std::vector<size_t> hidden_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);
// reductions.cpp: the same for reductions.
std::vector<size_t> reduction_workspaces(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

}  // namespace prismscale
