// Explains the fault when a C function follows the address of a tensor without bytes.
#include <signal.h>
#include <unistd.h>

#include <cstdint>

namespace {

struct sigaction g_previous;

// Addresses of the null device begin at 2^45 (device.cpp). A signal handler may only make safe
// calls.
void on_fault(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  constexpr char kMessage[] =
      "\nprismscale: a C function was given the address of a tensor on the null CUDA device "
      "(data_ptr) and tried to use it; such tensors have no bytes. Call it through an operator "
      "with a shape rule (torch.library.define, register_fake). The line that called it:\n";
  if (address >> 45 == 1) {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  }
  sigaction(SIGSEGV, &g_previous, nullptr);  // the access repeats, now under the previous handler
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

void ps_explain_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &g_previous);
}

#pragma GCC visibility pop
}  // extern "C"
