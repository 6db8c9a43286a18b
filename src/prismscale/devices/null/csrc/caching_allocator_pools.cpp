// Private pools: memory of CUDA graphs and of torch.cuda.MemPool.
//
// Routes choose the pool of an allocation. A block goes back to its own pool, so a pool's cached
// blocks serve only its routes. A pool's segments stay until nobody holds the pool and all of their
// blocks are free. They are then released the next time that memory is given back to the device.
// See caching_allocator.h.
#include <algorithm>

#include "caching_allocator.h"

namespace prismscale {

PrivatePool::PrivatePool(PoolId id) : id(id) {
  small.is_small = true;
  small.owner = large.owner = this;
}

bool CachingAllocator::retain_pool(PoolId id) {
  const auto [found, is_new] = pools_.try_emplace(id);
  if (is_new) {
    found->second = std::make_unique<PrivatePool>(id);
    return true;
  }
  // A pool whose last holder has released it cannot be held again.
  if (found->second->use_count == 0) return false;
  found->second->use_count += 1;
  return true;
}

bool CachingAllocator::begin_pool(PoolId id, TakesFrom takes) {
  const auto is_it = [&](const auto& route) { return route.first == id; };
  if (std::any_of(routes_.begin(), routes_.end(), is_it) || !retain_pool(id)) return false;
  routes_.emplace_back(id, std::move(takes));
  return true;
}

bool CachingAllocator::end_pool(PoolId id) {
  return std::erase_if(routes_, [&](const auto& route) { return route.first == id; }) > 0;
}

bool CachingAllocator::release_pool(PoolId id) {
  const auto found = pools_.find(id);
  if (found == pools_.end() || found->second->use_count == 0) return false;
  found->second->use_count -= 1;
  if (found->second->use_count == 0) freeable_.insert(id);
  return true;
}

int CachingAllocator::pool_use_count(PoolId id) const {
  const auto found = pools_.find(id);
  return found == pools_.end() ? 0 : found->second->use_count;
}

void CachingAllocator::set_pool_options(PoolId id, bool use_on_oom, bool no_split) {
  PrivatePool& pool = *pools_.at(id);
  pool.use_on_oom = use_on_oom;
  pool.no_split = no_split;
}

void CachingAllocator::count_reserved(BlockPool& pool, int64_t change) {
  const auto count = [&](StatByPool& stats) {
    each_stat(pool, [&](PoolKind kind) {
      if (change > 0) {
        stats[kind].add(change);
      } else {
        stats[kind].sub(-change);
      }
    });
  };
  count(stats_.reserved_bytes);
  if (pool.owner != nullptr) count(reserved_by_pool_[pool.owner->id]);
}

size_t CachingAllocator::private_bytes() const {
  size_t bytes = 0;
  for (const Block* block : all_) {
    if (block->allocated && block->pool->owner != nullptr) bytes += block->size;
  }
  return bytes;
}

BlockPool& CachingAllocator::pool_for(size_t size, int64_t stream) {
  const bool is_small = size <= kSmallLimit;
  for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
    if (route->second(stream)) return pools_.at(route->first)->of(is_small);
  }
  return is_small ? small_ : large_;
}

// Pools made with use_on_oom serve requests for which the device has no memory from their cache.
Block* CachingAllocator::find_in_opted_pools(const Request& request) {
  for (auto& [id, pool] : pools_) {
    BlockPool& blocks = pool->of(request.pool->is_small);
    if (!pool->use_on_oom || &blocks == request.pool) continue;
    Request there = request;
    there.pool = &blocks;
    if (Block* block = find_cached(there)) return block;
  }
  return nullptr;
}

void CachingAllocator::release_freeable_pools(PoolId id) {
  for (auto it = freeable_.begin(); it != freeable_.end();) {
    const PoolId freeable = *it++;
    if (id != PoolId{0, 0} && id != freeable) continue;
    PrivatePool& pool = *pools_.at(freeable);
    if (id == freeable && captures_ == 0) finish_all_events(&pool);
    release_blocks(pool.small);
    release_blocks(pool.large);
    if (pool.blocks > 0) continue;
    pools_.erase(freeable);
    freeable_.erase(freeable);
  }
}

// Uses on streams during a capture need no event: they are over when the graph is, and whatever
// frees the block after that comes later.
void CachingAllocator::insert_deferred_events() {
  std::vector<Deferred> deferred;
  deferred.swap(deferred_);
  for (const auto& [block, uses] : deferred) {
    for (const int64_t stream : block->used_in_capture) block->used_on.erase(stream);
    block->used_in_capture.clear();
    insert_events(block);
    if (block->pending_events == 0) make_idle(block);
  }
}

void move_behind(CapturePoint& point, const CapturePoint& other) {
  point.resize(std::max(point.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) point[i] = std::max(point[i], other[i]);
}

// The point of a capture that comes after what all streams did with the block.
CapturePoint CachingAllocator::last_uses(const Block& block) {
  if (!config_.graph_capture_record_stream_reuse) return {};
  CapturePoint uses = progress_->captured(block.stream);
  for (const int64_t stream : block.used_on) {
    const CapturePoint other = progress_->captured(stream);
    if (uses.empty() || other.empty()) return {};
    move_behind(uses, other);
  }
  return uses;
}

// Blocks of this stream become free if all their uses on other streams come before its next work.
void CachingAllocator::reuse_in_capture(int64_t stream) {
  if (captures_ == 0 || deferred_.empty() || !config_.graph_capture_record_stream_reuse) return;
  const CapturePoint here = progress_->captured(stream);
  std::erase_if(deferred_, [&](const Deferred& deferred) {
    Block* block = deferred.block;
    if (block->stream != stream || deferred.uses.empty() || deferred.uses.size() > here.size()) {
      return false;
    }
    for (size_t i = 0; i < deferred.uses.size(); ++i) {
      if (deferred.uses[i] > here[i]) return false;
    }
    block->used_on.clear();
    block->used_in_capture.clear();
    make_idle(block);
    return true;
  });
}

}  // namespace prismscale
