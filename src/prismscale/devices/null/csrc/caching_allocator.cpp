// Rounding, best fit, splitting, coalescing and release; see caching_allocator.h.
#include "caching_allocator.h"

namespace prismscale {

CachingAllocator::CachingAllocator(
    AllocatorConfig config, uint64_t first_address, StreamProgress* progress)
    : config_(std::move(config)), progress_(progress), next_address_(first_address) {
  small_.is_small = true;
}

CachingAllocator::~CachingAllocator() {
  for (Block* block : all_) delete block;
}

void CachingAllocator::own(Block* block) {
  if (block->pool->owner != nullptr) block->pool->owner->blocks += 1;
  block->place = all_.size();
  all_.push_back(block);
}

void CachingAllocator::disown(Block* block) {
  if (block->pool->owner != nullptr) block->pool->owner->blocks -= 1;
  Block* last = all_.back();
  last->place = block->place;
  all_[block->place] = last;
  all_.pop_back();
  delete block;
}

size_t CachingAllocator::round_size(size_t bytes) const {
  if (bytes < kMinBlock) return kMinBlock;
  const auto& divisions_by_size = config_.roundup_power2_divisions;
  if (!divisions_by_size.empty()) {
    const size_t log2_bytes = 63 - static_cast<size_t>(__builtin_clzll(bytes));
    const size_t slot =
        log2_bytes < 20 ? 0 : std::min(log2_bytes - 20, divisions_by_size.size() - 1);
    const size_t divisions = divisions_by_size[slot];
    if (divisions > 1 && bytes > kMinBlock * divisions) {
      const size_t step = (size_t{1} << log2_bytes) / divisions;
      return (bytes + step - 1) / step * step;
    }
  }
  return (bytes + kMinBlock - 1) / kMinBlock * kMinBlock;
}

size_t CachingAllocator::segment_bytes_for(size_t bytes) const {
  const size_t size = round_size(bytes);
  if (size <= kSmallLimit) return kSmallSegment;
  if (size < kLargeLimit) return config_.large_segment_bytes;
  return (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

size_t CachingAllocator::device_free_bytes() const {
  const size_t used =
      config_.outside_bytes + static_cast<size_t>(stats_.reserved_bytes[kAllPools].current);
  return used >= config_.total_bytes ? 0 : config_.total_bytes - used;
}

size_t CachingAllocator::allowed_bytes() const {
  return static_cast<size_t>(config_.memory_fraction * static_cast<double>(config_.total_bytes));
}

bool CachingAllocator::counts_searches() const {
  return config_.memory_fraction > 0.0 && config_.garbage_collection_threshold > 0.0;
}

Block* CachingAllocator::malloc(size_t bytes, int64_t stream) {
  process_events();
  reuse_in_capture(stream);
  const size_t size = round_size(bytes);
  Request request{size, segment_bytes_for(bytes), stream, &pool_for(size, stream)};
  Block* block = find_cached(request);
  if (block == nullptr) {
    if (counts_searches()) collect_garbage();
    block = new_segment(request);
  }
  if (block == nullptr) {
    block = find_in_opted_pools(request);
    if (block != nullptr) request.pool = block->pool;
  }
  if (block == nullptr && release_oversized(request)) block = new_segment(request);
  if (block == nullptr && captures_ == 0) {
    release_cached({0, 0});
    stats_.num_alloc_retries += 1;
    block = new_segment(request);
  }
  if (block == nullptr) {
    stats_.num_ooms += 1;
    return nullptr;
  }
  return hand_out(block, request, bytes);
}

Block* CachingAllocator::find_cached(const Request& request) {
  BlockPool& pool = *request.pool;
  if (counts_searches()) pool.searches += 1;
  Block key;
  key.stream = request.stream;
  key.size = request.size;
  auto it = pool.cached.lower_bound(&key);
  const auto usable = [&] { return it != pool.cached.end() && (*it)->stream == request.stream; };
  if (usable() && (*it)->expandable != nullptr) {
    if (config_.expandable_segments) {
      // Best fit compares the sizes to which blocks can grow, so that small requests do not take
      // the growing end of a segment.
      const auto reach = [](const Block* b) {
        return b->size + (b->next != nullptr && !b->next->mapped ? b->next->size : 0);
      };
      auto next = std::next(it);
      while ((*it)->expandable != nullptr && next != pool.cached.end() &&
             (*next)->stream == request.stream && reach(*next) < reach(*it)) {
        it = next++;
      }
    } else {
      while (usable() && (*it)->expandable != nullptr) ++it;
    }
  }
  if (!usable()) return nullptr;
  Block* block = *it;
  const bool oversized = request.size >= config_.max_split_bytes;
  if (!oversized && block->size >= config_.max_split_bytes) return nullptr;
  if (oversized && block->size >= request.size + config_.max_non_split_rounding_bytes) {
    return nullptr;
  }
  pool.cached.erase(it);
  return block;
}

Block* CachingAllocator::new_segment(const Request& request) {
  const size_t bytes = request.segment_bytes;
  const size_t reserved = static_cast<size_t>(stats_.reserved_bytes[kAllPools].current);
  if (config_.memory_fraction > 0.0 && reserved + bytes > allowed_bytes()) return nullptr;
  if (config_.expandable_segments) return grow_expandable(request);
  if (bytes > device_free_bytes()) return nullptr;
  auto* block = new Block();
  block->stream = request.stream;
  block->size = bytes;
  block->pool = request.pool;
  block->address = next_address_;
  next_address_ += (bytes + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
  own(block);
  each_stat(*request.pool, [&](PoolKind kind) { stats_.segment[kind].add(1); });
  count_reserved(*request.pool, static_cast<int64_t>(bytes));
  if (bytes >= config_.max_split_bytes) stats_.oversize_segments.add(1);
  stats_.num_device_alloc += 1;
  tell(MemoryAction::kSegmentAlloc, block->address, bytes, block->stream);
  return block;
}

bool CachingAllocator::should_split(const Block& block, size_t size) const {
  const size_t remaining = block.size - size;
  if (block.pool->owner != nullptr && block.pool->owner->no_split) return false;
  if (block.pool->is_small || config_.expandable_segments) return remaining >= kMinBlock;
  return size < config_.max_split_bytes && remaining > kSmallLimit;
}

Block* CachingAllocator::hand_out(Block* block, const Request& request, size_t requested) {
  BlockPool& pool = *request.pool;
  const bool already_split = block->is_split();
  const bool counts_split = block->expandable == nullptr;
  if (should_split(*block, request.size)) {
    Block* rest = block;
    block = new Block();
    block->stream = request.stream;
    block->size = request.size;
    block->pool = &pool;
    block->address = rest->address;
    block->expandable = rest->expandable;
    block->prev = rest->prev;
    if (block->prev != nullptr) block->prev->next = block;
    block->next = rest;
    rest->prev = block;
    rest->address += request.size;
    rest->size -= request.size;
    own(block);
    rest->cached_at_search = pool.searches;
    pool.cached.insert(rest);
    if (counts_split) {
      each_stat(pool, [&](PoolKind kind) {
        if (already_split) {
          stats_.inactive_split_bytes[kind].sub(static_cast<int64_t>(block->size));
        } else {
          stats_.inactive_split_bytes[kind].add(static_cast<int64_t>(rest->size));
          stats_.inactive_split[kind].add(1);
        }
      });
    }
  } else if (already_split && counts_split) {
    each_stat(pool, [&](PoolKind kind) {
      stats_.inactive_split_bytes[kind].sub(static_cast<int64_t>(block->size));
      stats_.inactive_split[kind].sub(1);
    });
  }
  block->allocated = true;
  block->requested = requested;
  const auto size = static_cast<int64_t>(block->size);
  each_stat(pool, [&](PoolKind kind) {
    stats_.allocation[kind].add(1);
    stats_.allocated_bytes[kind].add(size);
    stats_.active[kind].add(1);
    stats_.active_bytes[kind].add(size);
    stats_.requested_bytes[kind].add(static_cast<int64_t>(requested));
  });
  if (block->size >= config_.max_split_bytes) stats_.oversize_allocations.add(1);
  tell(MemoryAction::kAlloc, *block);
  return block;
}

void CachingAllocator::free(Block* block) {
  tell(MemoryAction::kFreeRequested, *block);
  block->allocated = false;
  each_stat(*block->pool, [&](PoolKind kind) {
    stats_.allocation[kind].sub(1);
    stats_.allocated_bytes[kind].sub(static_cast<int64_t>(block->size));
  });
  if (block->size >= config_.max_split_bytes) stats_.oversize_allocations.sub(1);
  if (block->used_on.empty()) {
    make_idle(block);
  } else if (captures_ > 0) {
    deferred_.push_back({block, last_uses(*block)});
  } else {
    insert_events(block);
  }
}

void CachingAllocator::make_idle(Block* block) {
  tell(MemoryAction::kFreeCompleted, *block);
  BlockPool& pool = *block->pool;
  const auto size = static_cast<int64_t>(block->size);
  const auto requested = static_cast<int64_t>(block->requested);
  int64_t split_blocks = 0, split_bytes = 0;
  for (Block* neighbour : {block->prev, block->next}) {
    const size_t merged = try_merge(block, neighbour);
    if (merged > 0) {
      split_blocks -= 1;
      split_bytes -= static_cast<int64_t>(merged);
    }
  }
  block->cached_at_search = pool.searches;
  pool.cached.insert(block);
  if (block->is_split()) {
    split_blocks += 1;
    split_bytes += static_cast<int64_t>(block->size);
  }
  const auto change = [](Stat& stat, int64_t amount) {
    if (amount > 0) stat.add(amount);
    if (amount < 0) stat.sub(-amount);
  };
  each_stat(pool, [&](PoolKind kind) {
    if (block->expandable == nullptr) {
      change(stats_.inactive_split[kind], split_blocks);
      change(stats_.inactive_split_bytes[kind], split_bytes);
    }
    stats_.active[kind].sub(1);
    stats_.active_bytes[kind].sub(size);
    stats_.requested_bytes[kind].sub(requested);
  });
}

// Merges `from` into its neighbour `into`; returns the bytes gained, 0 if they cannot be merged.
size_t CachingAllocator::try_merge(Block* into, Block* from) {
  if (from == nullptr || !from->is_idle() || from->mapped != into->mapped) return 0;
  BlockPool& pool = *into->pool;
  if (from->mapped) {
    pool.cached.erase(from);
  } else {
    pool.unmapped.erase(from);
  }
  const size_t gained = from->size;
  if (into->prev == from) {
    into->address = from->address;
    into->prev = from->prev;
    if (into->prev != nullptr) into->prev->next = into;
  } else {
    into->next = from->next;
    if (into->next != nullptr) into->next->prev = into;
  }
  disown(from);
  into->size += gained;
  return gained;
}

void CachingAllocator::record_stream(Block* block, int64_t stream) {
  // Uses on the allocating stream are ordered already.
  if (stream == block->stream) return;
  block->used_on.insert(stream);
  if (captures_ > 0) block->used_in_capture.insert(stream);
}

void CachingAllocator::insert_events(Block* block) {
  block->used_in_capture.clear();
  for (const int64_t stream : block->used_on) {
    block->pending_events += 1;
    events_[stream].emplace_back(progress_->ticket(stream), block);
  }
  block->used_on.clear();
}

void CachingAllocator::finish_event(Block* block) {
  block->pending_events -= 1;
  if (block->pending_events == 0) make_idle(block);
}

void CachingAllocator::process_events() {
  if (captures_ > 0) return;
  insert_deferred_events();
  for (auto it = events_.begin(); it != events_.end();) {
    auto& queue = it->second;
    while (!queue.empty() && progress_->passed(it->first, queue.front().first)) {
      finish_event(queue.front().second);
      queue.pop_front();
    }
    it = queue.empty() ? events_.erase(it) : std::next(it);
  }
}

void CachingAllocator::finish_all_events(const PrivatePool* only) {
  stats_.num_sync_all_streams += 1;
  insert_deferred_events();
  for (auto& [stream, queue] : events_) {
    std::erase_if(queue, [&](const auto& entry) {
      Block* block = entry.second;
      const bool ends = only == nullptr || block->pool->owner == only;
      if (ends) finish_event(block);
      return ends;
    });
  }
  std::erase_if(events_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace prismscale
