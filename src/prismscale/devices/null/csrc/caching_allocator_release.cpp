// Releases memory to the device (garbage collection, retry, empty_cache), and expandable segments.
#include <algorithm>

#include "caching_allocator.h"

namespace prismscale {

void CachingAllocator::empty_cache(PoolId id) { release_cached(id); }

// Frees the cached segments that have not been reused for longer than average, until reserved
// memory is below the threshold.
void CachingAllocator::collect_garbage() {
  const auto threshold = static_cast<size_t>(
      config_.garbage_collection_threshold * static_cast<double>(allowed_bytes()));
  const auto reserved = static_cast<size_t>(stats_.reserved_bytes[kAllPools].current);
  if (reserved <= threshold) return;
  const size_t target = reserved - threshold;
  const auto age = [&](const Block* b) { return large_.searches - b->cached_at_search; };
  uint64_t total_age = 0;
  size_t count = 0, reclaimed = 0;
  for (const Block* block : large_.cached) {
    if (block->is_split()) continue;
    total_age += age(block);
    count += 1;
  }
  bool freed = true;
  while (reclaimed < target && freed && count > 0) {
    const double mean_age = static_cast<double>(total_age) / static_cast<double>(count);
    freed = false;
    for (auto it = large_.cached.begin(); it != large_.cached.end();) {
      Block* block = *it++;
      if (block->is_split() || block->expandable != nullptr) continue;
      if (static_cast<double>(age(block)) < mean_age) continue;
      freed = true;
      reclaimed += block->size;
      total_age -= age(block);
      count -= 1;
      release_segment(block);
    }
  }
}

// With max_split_size set, first releases oversized segments, as few as satisfy the request. Those
// that are expandable are passed over: their pages are unmapped later, with all that is cached.
bool CachingAllocator::release_oversized(const Request& request) {
  if (config_.max_split_bytes == kUnlimited) return false;
  auto& cached = request.pool->cached;
  Block key;
  key.stream = request.stream;
  key.size = std::max(request.size, config_.max_split_bytes);
  auto it = cached.lower_bound(&key);
  if (it != cached.end() && (*it)->stream == request.stream && (*it)->expandable == nullptr) {
    release_segment(*it);
    return true;
  }
  size_t released = 0;
  while (it != cached.begin() && released < key.size) {
    Block* block = *std::prev(it);
    if (block->size < config_.max_split_bytes || block->stream != request.stream) break;
    if (block->expandable != nullptr) {
      --it;
      continue;
    }
    released += block->size;
    release_segment(block);
  }
  return released >= key.size;
}

void CachingAllocator::release_cached(PoolId id) {
  if (id == PoolId{0, 0} && captures_ == 0) {
    finish_all_events();
    release_blocks(large_);
    release_blocks(small_);
  }
  release_freeable_pools(id);
}

void CachingAllocator::release_blocks(BlockPool& pool) {
  std::vector<Block*> to_unmap;  // unmapping changes the set that is being walked
  for (auto it = pool.cached.begin(); it != pool.cached.end();) {
    Block* block = *it++;
    if (block->expandable != nullptr) {
      to_unmap.push_back(block);
    } else if (!block->is_split()) {
      release_segment(block);
    }
  }
  for (Block* block : to_unmap) {
    unmap_block(block);
    if (!block->is_split() && !block->mapped) release_expandable(block);
  }
}

void CachingAllocator::release_segment(Block* block) {
  tell(MemoryAction::kSegmentFree, block->address, block->size, block->stream);
  each_stat(*block->pool, [&](PoolKind kind) { stats_.segment[kind].sub(1); });
  count_reserved(*block->pool, -static_cast<int64_t>(block->size));
  if (block->size >= config_.max_split_bytes) stats_.oversize_segments.sub(1);
  stats_.num_device_free += 1;
  block->pool->cached.erase(block);
  disown(block);
}

std::vector<const Block*> CachingAllocator::blocks() const {
  std::vector<const Block*> sorted(all_.begin(), all_.end());
  std::sort(sorted.begin(), sorted.end(), ByAddress());
  return sorted;
}

void CachingAllocator::reset_peaks() {
  auto* stat = reinterpret_cast<Stat*>(&stats_);
  auto* end = &stats_.oversize_segments + 1;
  for (; stat != end; ++stat) stat->peak = stat->current;
  for (auto& [id, by_pool] : reserved_by_pool_) {
    for (Stat& reserved : by_pool) reserved.peak = reserved.current;
  }
}

void CachingAllocator::reset_accumulated() {
  auto* stat = reinterpret_cast<Stat*>(&stats_);
  auto* end = &stats_.oversize_segments + 1;
  for (; stat != end; ++stat) stat->allocated = stat->freed = 0;
  for (auto& [id, by_pool] : reserved_by_pool_) {
    for (Stat& reserved : by_pool) reserved.allocated = reserved.freed = 0;
  }
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

// ---- expandable segments: one address range per pool and stream, mapped page by page ----

Block* CachingAllocator::find_expandable(const Request& request) {
  BlockPool& pool = *request.pool;
  Block key;
  key.stream = request.stream;
  for (auto it = pool.unmapped.lower_bound(&key);
       it != pool.unmapped.end() && (*it)->stream == request.stream; ++it) {
    Block* first = *it;
    if (first->prev != nullptr && first->prev->is_idle()) first = first->prev;
    size_t room = 0;
    for (Block* b = first; b != nullptr && room < request.size && b->is_idle(); b = b->next) {
      room += b->size;
    }
    if (room >= request.size) return first;
  }
  auto segment = std::make_unique<ExpandableSegment>();
  segment->page_bytes = pool.is_small ? kSmallSegment : config_.large_segment_bytes;
  // The range has an eighth more addresses than memory: pages freed early can be mapped at the end.
  const size_t range = config_.total_bytes + config_.total_bytes / 8;
  const size_t pages = (range + segment->page_bytes - 1) / segment->page_bytes;
  segment->mapped.resize(pages, false);
  segment->base = next_address_;
  next_address_ += pages * segment->page_bytes;
  auto* block = new Block();
  block->stream = request.stream;
  block->size = pages * segment->page_bytes;
  block->pool = &pool;
  block->address = segment->base;
  block->mapped = false;
  block->expandable = segment.get();
  expandables_.push_back(std::move(segment));
  own(block);
  pool.unmapped.insert(block);
  return block;
}

bool CachingAllocator::map_block(Block* block, size_t bytes) {
  ExpandableSegment& segment = *block->expandable;
  const size_t first = (block->address - segment.base) / segment.page_bytes;
  const size_t last =
      (block->address + bytes - segment.base + segment.page_bytes - 1) / segment.page_bytes;
  const size_t mapped_bytes = (last - first) * segment.page_bytes;
  if (mapped_bytes > device_free_bytes()) return false;
  std::fill(segment.mapped.begin() + static_cast<int64_t>(first),
            segment.mapped.begin() + static_cast<int64_t>(last), true);
  tell(MemoryAction::kSegmentMap, block->address, mapped_bytes, block->stream);
  BlockPool& pool = *block->pool;
  pool.unmapped.erase(block);
  block->mapped = true;
  if (mapped_bytes < block->size) {
    auto* rest = new Block(*block);
    rest->mapped = false;
    rest->address = block->address + mapped_bytes;
    rest->size = block->size - mapped_bytes;
    rest->prev = block;
    if (rest->next != nullptr) rest->next->prev = rest;
    block->next = rest;
    block->size = mapped_bytes;
    own(rest);
    pool.unmapped.insert(rest);
  }
  try_merge(block, block->prev);
  try_merge(block, block->next);
  block->cached_at_search = pool.searches;
  pool.cached.insert(block);
  count_reserved(pool, static_cast<int64_t>(mapped_bytes));
  stats_.num_device_alloc += 1;
  return true;
}

Block* CachingAllocator::grow_expandable(const Request& request) {
  Block* block = find_expandable(request);
  if (!block->mapped && !map_block(block, std::min(block->size, request.size))) return nullptr;
  while (block->size < request.size) {
    Block* next = block->next;
    if (!map_block(next, std::min(request.size - block->size, next->size))) return nullptr;
    block = next;  // mapping merged the free block before it into `next`
  }
  request.pool->cached.erase(block);
  return block;
}

void CachingAllocator::unmap_block(Block* block) {
  ExpandableSegment& segment = *block->expandable;
  const size_t page = segment.page_bytes;
  const size_t first = (block->address - segment.base + page - 1) / page;
  const size_t last = (block->address + block->size - segment.base) / page;
  if (first >= last) return;
  BlockPool& pool = *block->pool;
  pool.cached.erase(block);
  const uint64_t begin = segment.base + first * page, end = segment.base + last * page;
  const auto keep = [&](uint64_t address, size_t bytes, Block* prev, Block* next) {
    if (bytes == 0) return;
    auto* kept = new Block(*block);
    kept->address = address;
    kept->size = bytes;
    kept->prev = prev;
    kept->next = next;
    if (prev != nullptr) prev->next = kept;
    if (next != nullptr) next->prev = kept;
    kept->cached_at_search = pool.searches;
    own(kept);
    pool.cached.insert(kept);
  };
  // Whole pages are unmapped. The rest shares a page with a used neighbour; it stays mapped and
  // cached.
  const uint64_t old_end = block->address + block->size;
  keep(block->address, begin - block->address, block->prev, block);
  keep(end, old_end - end, block, block->next);
  block->address = begin;
  block->size = end - begin;
  block->mapped = false;
  std::fill(segment.mapped.begin() + static_cast<int64_t>(first),
            segment.mapped.begin() + static_cast<int64_t>(last), false);
  try_merge(block, block->prev);
  try_merge(block, block->next);
  pool.unmapped.insert(block);
  count_reserved(pool, -static_cast<int64_t>(end - begin));
  stats_.num_device_free += 1;
  tell(MemoryAction::kSegmentUnmap, begin, end - begin, block->stream);
}

void CachingAllocator::release_expandable(Block* block) {
  ExpandableSegment* segment = block->expandable;
  block->pool->unmapped.erase(block);
  disown(block);
  expandables_.erase(std::find_if(expandables_.begin(), expandables_.end(),
                                  [&](const auto& s) { return s.get() == segment; }));
}

}  // namespace prismscale
