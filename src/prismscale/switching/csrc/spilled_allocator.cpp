// A CPU allocator for torch over a file, so that a suspended process can give its memory back.
//
// Tensors of 64 KiB or more are shared mappings of one file. File space is reserved when a block is
// made, so a full disk fails the allocation instead of raising a signal in the middle of an
// operator. Pressing out writes dirty pages and lets the operating system drop them; the next
// access reads them again. Freed blocks are kept for the next allocation of about their size.
//
// A forked child (a worker of a data loader) keeps the blocks that it inherits as private mappings,
// and makes its own tensors with the allocator from before. So it never writes to the file.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t kSmallest = 64 << 10;
constexpr size_t kPage = 4096;

struct Block {
  off_t offset;
  size_t bytes;
};

class SpilledAllocator final : public c10::Allocator {
 public:
  SpilledAllocator(int file, size_t limit, c10::Allocator* small)
      : file_(file), limit_(limit), small_(small) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest || forked_) return small_->allocate(bytes);
    void* data = take(bytes);
    return {data, data, &SpilledAllocator::release, at::Device(at::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &SpilledAllocator::release; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }

  // Returns 0, or the error number of the call that failed.
  int press_out() {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The file is the parent's: a hole punched here would be zeros there.
    if (forked_) return 0;
    drop_free();
    if (fdatasync(file_) != 0) return errno;
    for (const auto& [data, block] : blocks_) {
      // The pages are clean now, so they leave the process and the page cache.
      madvise(data, block.bytes, MADV_PAGEOUT);
      posix_fadvise(file_, block.offset, static_cast<off_t>(block.bytes), POSIX_FADV_DONTNEED);
    }
    return 0;
  }

  // Most mapped bytes at a time since the last call.
  size_t take_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t peak = peak_;
    peak_ = mapped_;
    return peak;
  }

  // A fork waits until no thread changes the blocks, because the child inherits them as they are.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }

  void after_fork_in_child() {
    // In a child of a child the mappings are private already, and hold what the child wrote.
    if (!forked_) {
      for (const auto& [data, block] : blocks_) make_private(data, block);
      forked_ = true;
    }
    mutex_.unlock();
  }

 private:
  // What this process writes from now on is its own. A page that it has not written yet still
  // shows what the parent writes there: a copy of all pages would take the rank's memory again.
  void make_private(void* data, const Block& block) {
    const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(data, block.bytes, PROT_READ | PROT_WRITE, flags, file_, block.offset) != data) {
      constexpr char text[] = "prismscale: a forked process cannot map its tensors privately\n";
      // To go on would overwrite the parent's tensors.
      [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof text - 1);
      _exit(1);
    }
  }

  void* take(size_t asked) {
    const size_t bytes = (asked + kPage - 1) / kPage * kPage;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.lower_bound(bytes);
    void* data = nullptr;
    // A block that is much larger than requested would waste the memory budget.
    if (found != free_.end() && found->first <= bytes + bytes / 4) {
      data = found->second;
      free_.erase(found);
    } else {
      data = make(bytes);
    }
    peak_ = std::max(peak_, mapped_);
    asked_[data] = asked;
    report(data, static_cast<int64_t>(asked));
    return data;
  }

  void* make(size_t bytes) {
    if (mapped_ + bytes > limit_) drop_free();
    TORCH_CHECK(mapped_ + bytes <= limit_,
                "the store of suspended ranks' memory is full: this rank has ", mapped_,
                " bytes of at most ", limit_, " in it and asks for ", bytes, " more");
    const Block block{place_for(bytes), bytes};
    if (fallocate(file_, 0, block.offset, static_cast<off_t>(bytes)) != 0) {
      const int error = errno;
      unused_[block.offset] = bytes;
      TORCH_CHECK(false, "cannot reserve ", bytes, " bytes for the memory of suspended ranks: ",
                  std::strerror(error), "; give --out on a disk with room for all ranks' tensors");
    }
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, block.offset);
    TORCH_CHECK(data != MAP_FAILED, "cannot map ", bytes, " bytes: ", std::strerror(errno));
    blocks_[data] = block;
    mapped_ += bytes;
    return data;
  }

  // Report to the profiler as torch's own allocator does: memory is tracked that way.
  void report(void* data, int64_t change) {
    in_use_ += change;
    c10::reportMemoryUsageToProfiler(data, change, static_cast<size_t>(in_use_), 0,
                                     c10::Device(c10::kCPU));
  }

  // Offset of a hole in the file that is large enough, or of the end of the file.
  off_t place_for(size_t bytes) {
    for (auto hole = unused_.begin(); hole != unused_.end(); ++hole) {
      if (hole->second < bytes) continue;
      const off_t offset = hole->first;
      const size_t left = hole->second - bytes;
      unused_.erase(hole);
      if (left) unused_[offset + static_cast<off_t>(bytes)] = left;
      return offset;
    }
    const off_t offset = end_;
    end_ += static_cast<off_t>(bytes);
    return offset;
  }

  void drop_free() {
    for (const auto& [bytes, data] : free_) {
      const Block block = blocks_.at(data);
      munmap(data, block.bytes);
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.offset,
                static_cast<off_t>(block.bytes));
      unused_[block.offset] = block.bytes;
      mapped_ -= block.bytes;
      blocks_.erase(data);
    }
    free_.clear();
    merge_holes();
  }

  void merge_holes() {
    for (auto hole = unused_.begin(); hole != unused_.end();) {
      const auto next = std::next(hole);
      if (next != unused_.end() && hole->first + static_cast<off_t>(hole->second) == next->first) {
        hole->second += next->second;
        unused_.erase(next);
      } else {
        ++hole;
      }
    }
  }

  static void release(void* data);

  int file_;
  size_t limit_;
  c10::Allocator* small_;
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::multimap<size_t, void*> free_;
  std::map<off_t, size_t> unused_;
  off_t end_ = 0;
  std::unordered_map<void*, size_t> asked_;
  int64_t in_use_ = 0;
  size_t mapped_ = 0;
  size_t peak_ = 0;
  bool forked_ = false;  // Whether this process was forked from the one that has the file.
};

SpilledAllocator* g_allocator = nullptr;  // Never freed: tensors outlive everything else.

void SpilledAllocator::release(void* data) {
  {
    const std::lock_guard<std::mutex> lock(g_allocator->mutex_);
    const auto asked = g_allocator->asked_.find(data);
    if (asked != g_allocator->asked_.end()) {
      // A child's blocks stay as they are: it makes no tensors in them.
      if (g_allocator->forked_) return;
      g_allocator->report(data, -static_cast<int64_t>(asked->second));
      g_allocator->asked_.erase(asked);
      g_allocator->free_.emplace(g_allocator->blocks_.at(data).bytes, data);
      return;
    }
  }
  g_allocator->small_->raw_deleter()(data);
}

}  // namespace

extern "C" {

// Places tensors that this process makes from now on in `file`, at most `limit` bytes of them.
__attribute__((visibility("default"))) void ps_spill_into(int file, int64_t limit) {
  g_allocator =
      new SpilledAllocator(file, static_cast<size_t>(limit), c10::GetCPUAllocator());
  c10::SetCPUAllocator(g_allocator, 200);
  pthread_atfork([] { g_allocator->before_fork(); }, [] { g_allocator->after_fork_in_parent(); },
                 [] { g_allocator->after_fork_in_child(); });
}

__attribute__((visibility("default"))) int ps_press_out() { return g_allocator->press_out(); }

__attribute__((visibility("default"))) int64_t ps_take_peak() {
  return static_cast<int64_t>(g_allocator->take_peak());
}
}
