#include "shared_pages.h"

#include <ATen/ops/full.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "storage.h"

namespace prismscale {
namespace {

// Smallest block that malloc maps by itself and unmaps when it is freed, so that no other block can
// get its pages: see map_large_blocks. Experts' weights have a few MiB.
constexpr size_t kLeastBytes = size_t{1} << 20;
// Size of a file of one value. Mappings repeat it; a process may have 65,530 mappings by default.
constexpr size_t kFileBytes = size_t{16} << 20;
// Each file takes its bytes once. Programs copy few kinds of values.
constexpr size_t kMostFiles = 8;

// Returns a file that repeats `item`; -1 if there are too many files or the system gives none.
int file_of(const std::string& item) {
  static std::mutex mutex;
  static auto* files = new std::map<std::string, int>;
  const std::scoped_lock lock(mutex);
  if (const auto found = files->find(item); found != files->end()) return found->second;
  if (files->size() >= kMostFiles) return -1;
  const int file = memfd_create("prismscale-null-values", MFD_CLOEXEC);
  if (file < 0) return -1;
  void* bytes = MAP_FAILED;
  if (ftruncate(file, kFileBytes) == 0) {
    bytes = mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (bytes == MAP_FAILED) {
    close(file);
    return -1;
  }
  for (size_t at = 0; at < kFileBytes; at += item.size()) {
    std::memcpy(static_cast<char*>(bytes) + at, item.data(), item.size());
  }
  munmap(bytes, kFileBytes);
  files->emplace(item, file);
  return file;
}

// Only memory that torch allocated may be remapped, not shared memory or a file of the program's.
bool is_own_memory(const at::Tensor& tensor) {
  const auto deleter = tensor.storage().data_ptr().get_deleter();
  return deleter == c10::GetCPUAllocator()->raw_deleter() ||
      deleter == pinned_allocator()->raw_deleter();
}

// Replaces the pages in [begin, end) by those of `file`; false if the system refuses.
bool map_pages(char* begin, char* end, int file) {
  for (char* at = begin; at < end; at += kFileBytes) {
    const size_t bytes = std::min(kFileBytes, static_cast<size_t>(end - at));
    const int flags = MAP_PRIVATE | MAP_FIXED;
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, flags, file, 0) != MAP_FAILED) continue;
    // The failed call may have unmapped the old pages.
    void* plain =
        mmap(at, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(plain != MAP_FAILED, "no memory map for a copy of ", end - begin,
                " bytes to the host; ", "raise vm.max_map_count");
    return false;
  }
  return true;
}

bool fill_by_pages(const at::Tensor& tensor, const std::string& item) {
  const size_t bytes = tensor.nbytes(), page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes < kLeastBytes || !tensor.is_contiguous() || !is_own_memory(tensor)) return false;
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % item.size() != 0 || page % item.size() != 0) return false;
  const int file = file_of(item);
  if (file < 0) return false;
  char* begin = data + (page - address % page) % page;
  char* end = data + bytes - (address + bytes) % page;
  if (!map_pages(begin, end, file)) return false;
  for (char* at = data; at < begin; at += item.size()) std::memcpy(at, item.data(), item.size());
  for (char* at = end; at < data + bytes; at += item.size()) {
    std::memcpy(at, item.data(), item.size());
  }
  return true;
}

}  // namespace

void map_large_blocks() {
  // Without this call glibc raises the limit, up to 32 MiB, whenever a larger block is freed.
  mallopt(M_MMAP_THRESHOLD, kLeastBytes);
}

void fill_host(const at::Tensor& tensor, double value) {
  if (tensor.nbytes() >= kLeastBytes && !tensor.is_conj() && !tensor.is_neg()) {
    const at::Tensor one = at::full({1}, value, tensor.options().pinned_memory(false));
    const std::string item(static_cast<const char*>(one.const_data_ptr()), one.element_size());
    if (fill_by_pages(tensor, item)) return;
  }
  at::Tensor(tensor).fill_(value);
}

}  // namespace prismscale
