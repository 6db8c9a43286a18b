// All events in the memory of a device, in order: for peaks by kind, timelines and torch's
// snapshots. They are recorded only while somebody asks for it; prismscale itself does so from the
// program's first line.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "caching_allocator.h"
#include "capi.h"

namespace prismscale {

// Returns an id of the code that allocates. The table of ids is kept in Python. 0: unknown.
using OriginCallback = int32_t (*)(int64_t bytes);

class MemoryHistory final : public AllocationObserver {
 public:
  void start() { on_ = true; }
  void stop() { on_ = false; }
  bool is_on() const { return on_; }
  void happened(MemoryAction action, uint64_t address, size_t bytes, size_t block_bytes,
                int64_t stream) override;
  // Describes the allocation that comes next, before happened() writes its row.
  void allocates(uint32_t made_by, int32_t origin) {
    made_by_ = made_by;
    origin_ = origin;
  }
  std::vector<MemoryRow>& rows() { return rows_; }

 private:
  bool on_ = false;
  uint32_t made_by_ = 0;
  int32_t origin_ = 0;
  std::vector<MemoryRow> rows_;
};

// Sets what gives the origin of allocations of `least_bytes` and more; nullptr: nothing does.
void set_origin_callback(OriginCallback callback, int64_t least_bytes);
int32_t origin_of(int64_t bytes);
constexpr int32_t kWorkspace = -1;  // origin of libraries' workspaces

}  // namespace prismscale
