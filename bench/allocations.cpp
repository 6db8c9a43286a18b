// Counts what torch's CPU allocator holds, whichever thread asks and whichever frees.
//
// Loaded before libc10 (LD_PRELOAD), whose calls of its own two functions then come here first.

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct Counter {
  std::mutex mutex;
  std::unordered_map<void*, size_t> bytes_of;
  int64_t allocated = 0;
  int64_t peak = 0;
};

// Never destroyed: torch frees until the process is gone.
Counter& counter() {
  static Counter* const the_counter = new Counter;
  return *the_counter;
}

template <typename Function>
Function original(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  // Python loads torch out of the global scope.
  void* const place = found ? found : dlsym(dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD), name);
  return reinterpret_cast<Function>(place);
}

}  // namespace

namespace c10 {

void* alloc_cpu(size_t n_bytes) {
  static const auto allocate = original<void* (*)(size_t)>("_ZN3c109alloc_cpuEm");
  void* const block = allocate(n_bytes);
  Counter& c = counter();
  const std::lock_guard<std::mutex> guard(c.mutex);
  if (block != nullptr) {
    c.bytes_of[block] = n_bytes;
    c.allocated += static_cast<int64_t>(n_bytes);
    c.peak = std::max(c.peak, c.allocated);
  }
  return block;
}

void free_cpu(void* block) {
  static const auto release = original<void (*)(void*)>("_ZN3c108free_cpuEPv");
  Counter& c = counter();
  {
    const std::lock_guard<std::mutex> guard(c.mutex);
    const auto found = c.bytes_of.find(block);
    if (found != c.bytes_of.end()) {
      c.allocated -= static_cast<int64_t>(found->second);
      c.bytes_of.erase(found);
    }
  }
  release(block);
}

}  // namespace c10

extern "C" int64_t peak_bytes() {
  const std::lock_guard<std::mutex> guard(counter().mutex);
  return counter().peak;
}
