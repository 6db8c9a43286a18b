// A time of day that jumps: preloaded, it adds what JUMPING_CLOCK_FILE holds, a 64-bit number of
// seconds that may change at any time. The steady clock goes on.
//
//     c++ -O1 -shared -fPIC -o libjumping_clock.so jumping_clock.cpp
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace {

// What the file holds: seen at once, without a call.
const volatile int64_t* shared_offset() {
  static const volatile int64_t none = 0;
  const char* path = std::getenv("JUMPING_CLOCK_FILE");
  const int file = path != nullptr ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return &none;
  void* mapped = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  return mapped == MAP_FAILED ? &none : static_cast<const volatile int64_t*>(mapped);
}

int64_t offset() {
  static const volatile int64_t* const seconds = shared_offset();
  return *seconds;
}

int real(clockid_t clock, timespec* now) {
  using Function = int (*)(clockid_t, timespec*);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "clock_gettime"));
  return next(clock, now);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const int failed = real(clock, now);
  if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += offset();
  }
  return failed;
}

extern "C" int gettimeofday(timeval* now, void*) noexcept {
  timespec exact{};
  const int failed = clock_gettime(CLOCK_REALTIME, &exact);
  if (failed == 0) *now = {exact.tv_sec, exact.tv_nsec / 1000};
  return failed;
}

extern "C" time_t time(time_t* out) noexcept {
  timespec exact{};
  clock_gettime(CLOCK_REALTIME, &exact);
  if (out != nullptr) *out = exact.tv_sec;
  return exact.tv_sec;
}
