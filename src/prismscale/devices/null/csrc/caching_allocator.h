// Model of the CUDA caching allocator: no device, no torch, standard C++ only.
//
// It makes the same decisions as c10/cuda/CUDACachingAllocator (rounding, pools, best fit,
// splitting, coalescing, record_stream, expandable segments, retry before out of memory), so the
// figures of torch.cuda.memory_stats are what they would be on the GPU. tests/support/allocator.py
// states the same rules in plain Python. The tests compare both on random programs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace prismscale {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kMinBlock = 512;         // every block is a multiple of this
constexpr size_t kSmallLimit = kMiB;      // requests up to here come from the small pool
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeLimit = 10 * kMiB; // requests from here on get a segment of their own size
constexpr size_t kRoundLarge = 2 * kMiB;
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount) {
    current += amount;
    allocated += amount;
    peak = std::max(peak, current);
  }
  void sub(int64_t amount) {
    current -= amount;
    freed += amount;
  }
};

enum PoolKind { kAllPools = 0, kSmallPool = 1, kLargePool = 2 };
using StatByPool = std::array<Stat, 3>;

// Field order is the order in which capi.cpp exports the figures and cuda_api.py names them.
struct AllocatorStats {
  StatByPool allocation, segment, active, inactive_split;
  StatByPool allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
  Stat oversize_allocations, oversize_segments;
  int64_t num_alloc_retries = 0, num_ooms = 0, num_sync_all_streams = 0;
  int64_t num_device_alloc = 0, num_device_free = 0;
};

struct AllocatorConfig {
  size_t total_bytes = 0;
  size_t outside_bytes = 0;  // device memory that this allocator does not hold: CUDA context, NCCL
  size_t max_split_bytes = kUnlimited;
  size_t max_non_split_rounding_bytes = 20 * kMiB;
  size_t large_segment_bytes = 20 * kMiB;
  double garbage_collection_threshold = 0.0;
  double memory_fraction = 0.0;  // 0: no limit was set
  bool expandable_segments = false;
  bool graph_capture_record_stream_reuse = false;
  std::vector<size_t> roundup_power2_divisions;  // indexed by log2(size in MiB); empty: no rounding
};

// A point of a capture: how much of each stream's work in the graph comes before it; empty: none.
using CapturePoint = std::vector<uint32_t>;
// Moves `point` so that it also comes after `other`.
void move_behind(CapturePoint& point, const CapturePoint& other);

// Lets the allocator ask the device about its streams. A ticket stands for the work enqueued on a
// stream up to now, and passed() says whether that work is done.
struct StreamProgress {
  virtual ~StreamProgress() = default;
  virtual uint64_t ticket(int64_t stream) = 0;
  virtual bool passed(int64_t stream, uint64_t ticket) = 0;
  // The point before the stream's next work in the graph under capture.
  virtual CapturePoint captured(int64_t stream) = 0;
};

enum class MemoryAction : int16_t {
  kAlloc,          // a block is handed out; its bytes are those requested
  kFreeRequested,  // its owner frees it
  kFreeCompleted,  // all streams are done with it, too
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,     // pages of an expandable segment
  kSegmentUnmap,
};

struct AllocationObserver {
  virtual ~AllocationObserver() = default;
  virtual void happened(MemoryAction action, uint64_t address, size_t bytes, size_t block_bytes,
                        int64_t stream) = 0;
};

struct ExpandableSegment {
  uint64_t base = 0;
  size_t page_bytes = 0;
  std::vector<bool> mapped;
};

struct BlockPool;
struct PrivatePool;

struct Block {
  int64_t stream = 0;
  size_t size = 0;
  size_t requested = 0;
  uint64_t address = 0;
  BlockPool* pool = nullptr;
  Block *prev = nullptr, *next = nullptr;
  ExpandableSegment* expandable = nullptr;
  bool allocated = false;
  bool mapped = true;
  int pending_events = 0;
  uint64_t cached_at_search = 0;
  uint32_t made_by = 0;  // signature id of the op that allocated it
  size_t place = 0;      // index in the allocator's list of all blocks
  std::set<int64_t> used_on;
  std::set<int64_t> used_in_capture;  // those of used_on that were recorded during a capture

  bool is_split() const { return prev != nullptr || next != nullptr; }
  bool is_idle() const { return !allocated && pending_events == 0 && used_on.empty(); }
};

struct BySizeThenAddress {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};
// Addresses are unique in the process. The stream comes first because the search for unmapped space
// goes stream by stream.
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
  }
};

struct BlockPool {
  bool is_small = false;
  PrivatePool* owner = nullptr;
  uint64_t searches = 0;  // unit of the age of cached blocks, for garbage collection
  std::set<Block*, BySizeThenAddress> cached;
  std::set<Block*, ByAddress> unmapped;
};

// Ids as torch gives them: {n, 0} for a graph's own pool, {0, n} for one that the program asked
// for.
using PoolId = std::pair<uint64_t, uint64_t>;
// Whether an allocation that the calling thread makes now on `stream` comes from a pool.
using TakesFrom = std::function<bool(int64_t stream)>;

// Memory that no other allocations share. CUDA graphs need such pools because each replay uses the
// same addresses; programs make others with torch.cuda.MemPool. See caching_allocator_pools.cpp.
struct PrivatePool {
  explicit PrivatePool(PoolId id);
  BlockPool& of(bool is_small) { return is_small ? small : large; }
  const PoolId id;
  BlockPool small, large;
  int use_count = 1;  // graphs, MemPool objects and scopes that hold it
  size_t blocks = 0;  // cached and allocated
  bool use_on_oom = false, no_split = false;
};

class CachingAllocator {
 public:
  CachingAllocator(AllocatorConfig config, uint64_t first_address, StreamProgress* progress);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  Block* malloc(size_t bytes, int64_t stream);  // nullptr: out of memory, after all retries
  void free(Block* block);
  void record_stream(Block* block, int64_t stream);
  void empty_cache(PoolId id = {0, 0});  // everything, or one pool that nobody holds any more
  void reset_peaks();
  void reset_accumulated();

  void observed_by(AllocationObserver* observer) { observer_ = observer; }

  AllocatorConfig& config() { return config_; }
  const AllocatorStats& stats() const { return stats_; }
  size_t device_free_bytes() const;
  size_t segment_bytes_for(size_t bytes) const;
  std::vector<const Block*> blocks() const;  // all, by stream and address

  // Private pools, in torch's terms. They return false where torch fails an internal assertion.
  bool retain_pool(PoolId id);                  // creates the pool, or adds a holder
  bool begin_pool(PoolId id, TakesFrom takes);  // routes to it what `takes`; adds a holder
  bool end_pool(PoolId id);                     // ends the routing; the holder stays
  bool release_pool(PoolId id);
  int pool_use_count(PoolId id) const;  // 0: there is none
  void set_pool_options(PoolId id, bool use_on_oom, bool no_split);
  // What each private pool has reserved, including pools that no longer exist.
  const std::map<PoolId, StatByPool>& reserved_by_pool() const { return reserved_by_pool_; }
  size_t private_bytes() const;  // allocated in private pools
  // During a capture events can be neither recorded nor queried. So a freed block that other
  // streams used is kept until the capture ends, unless the order inside the graph shows that it
  // can be reused (graph_capture_record_stream_reuse).
  void capture_begins() { captures_ += 1; }
  void capture_ends() { captures_ -= 1; }

 private:
  struct Request {
    size_t size;
    size_t segment_bytes;
    int64_t stream;
    BlockPool* pool;
  };

  BlockPool& pool_for(size_t size, int64_t stream);
  Block* find_in_opted_pools(const Request& request);
  void release_freeable_pools(PoolId id);
  void insert_deferred_events();
  CapturePoint last_uses(const Block& block);
  void reuse_in_capture(int64_t stream);
  size_t round_size(size_t bytes) const;
  size_t allowed_bytes() const;
  bool counts_searches() const;
  Block* find_cached(const Request& request);
  Block* new_segment(const Request& request);
  bool should_split(const Block& block, size_t size) const;
  Block* hand_out(Block* block, const Request& request, size_t requested);
  void make_idle(Block* block);
  size_t try_merge(Block* into, Block* from);
  void insert_events(Block* block);
  void process_events();
  void finish_all_events(const PrivatePool* only = nullptr);
  void finish_event(Block* block);
  void collect_garbage();
  bool release_oversized(const Request& request);
  void release_cached(PoolId id);
  void release_blocks(BlockPool& pool);
  void release_segment(Block* block);

  // Expandable segments, in caching_allocator_release.cpp.
  Block* grow_expandable(const Request& request);
  Block* find_expandable(const Request& request);
  bool map_block(Block* block, size_t bytes);
  void unmap_block(Block* block);
  void release_expandable(Block* block);

  template <typename F>
  void each_stat(const BlockPool& pool, F&& change) {
    change(kAllPools);
    change(pool.is_small ? kSmallPool : kLargePool);
  }
  void tell(MemoryAction action, uint64_t address, size_t bytes, int64_t stream) {
    if (observer_ != nullptr) observer_->happened(action, address, bytes, bytes, stream);
  }
  void tell(MemoryAction action, const Block& block) {
    if (observer_ == nullptr) return;
    observer_->happened(action, block.address, block.requested, block.size, block.stream);
  }
  void count_reserved(BlockPool& pool, int64_t change);
  void own(Block* block);
  void disown(Block* block);  // also deletes it

  AllocatorConfig config_;
  StreamProgress* progress_;
  AllocationObserver* observer_ = nullptr;
  uint64_t next_address_;
  AllocatorStats stats_;
  BlockPool small_, large_;
  std::map<PoolId, std::unique_ptr<PrivatePool>> pools_;
  std::map<PoolId, StatByPool> reserved_by_pool_;
  std::set<PoolId> freeable_;  // those of pools_ that nobody holds
  std::vector<std::pair<PoolId, TakesFrom>> routes_;  // oldest first; the latest match wins
  struct Deferred {
    Block* block;
    CapturePoint uses;  // a point after all of the block's uses; empty: there is none
  };
  std::vector<Deferred> deferred_;  // blocks freed in a capture that other streams used
  int captures_ = 0;
  std::vector<Block*> all_;  // unsorted: blocks split and merge far more often than this is read
  std::map<int64_t, std::deque<std::pair<uint64_t, Block*>>> events_;
  std::vector<std::unique_ptr<ExpandableSegment>> expandables_;
};

}  // namespace prismscale
