#include <exception>

#include <fmt/format.h>

#include "fsdp/paging/detection.h"
#include "fsdp/sharded_module.h"
#include "sharding/bucket.h"
#include "tessera/error.h"

namespace tessera {
namespace fsdp {

std::vector<size_t> ShardedModule::units_under(const std::string& path) const {
  std::vector<size_t> result;
  for (size_t u = 0; u < model.units.size(); ++u) {
    const auto inside = [&](const std::string& name) {
      return path.empty() || name == path || name.rfind(path + ".", 0) == 0;
    };
    bool any = inside(model.units[u].name);
    for (const auto f : model.units[u].flats) {
      for (const auto i : model.flats[f].members) any |= inside(model.parameters[i].name);
    }
    if (any && !model.units[u].flats.empty()) result.push_back(u);
  }
  if (result.empty())
    throw UsageError(fmt::format("{}: summon_full_params: there are no parameters under \"{}\"",
                                 prefix(), path));
  return result;
}

// Whole parameters have the shards' dtype and memory of their own. They are not in pages, so their
// use is not detected.
void ShardedModule::summon(const std::vector<size_t>& units, bool keep) {
  require_idle("summon_full_params");
  at::NoGradGuard no_grad;
  const NoDetection no_detection;
  residency->release_all();
  whole_.resize(model.flats.size());
  for (const auto u : units) {
    for (const auto f : model.units[u].flats) {
      auto& flat = model.flats[f];
      if (flat.permanent) continue;
      const int rank = model.shard_group.rank();
      auto whole = at::empty({flat.layout.numel()},
                             at::TensorOptions().dtype(flat.dtype).device(flat.device));
      whole.narrow(0, flat.layout.segment_begin(rank), flat.layout.counts()[rank])
          .copy_(flat.own_segment);
      if (model.shard_group.size() > 1) model.shard_group.all_gather(whole, flat.layout.counts());
      if (!keep) continue;
      whole_[f] = whole;
      for (size_t m = 0; m < flat.members.size(); ++m) {
        auto& parameter = model.parameters[flat.members[m]].tensor;
        parameter.set_data(sharding::window(whole, flat.layout.offset(m), parameter));
      }
    }
    summoned.insert(u);
  }
}

void ShardedModule::dismiss(const std::vector<size_t>& units, bool writeback) {
  at::NoGradGuard no_grad;
  const NoDetection no_detection;
  std::string problem;
  for (const auto u : units) {
    summoned.erase(u);
    for (const auto f : model.units[u].flats) {
      auto& flat = model.flats[f];
      auto whole = flat.permanent ? flat.own_segment : std::exchange(whole_[f], at::Tensor());
      if (!whole.defined()) continue;
      for (size_t m = 0; m < flat.members.size(); ++m) {
        auto& [name, parameter] = model.parameters[flat.members[m]];
        const auto data = parameter.detach();
        const bool replaced =
            data.storage().unsafeGetStorageImpl() != whole.storage().unsafeGetStorageImpl();
        if (replaced && data.numel() != flat.layout.size(m)) {
          problem = fmt::format(
              "{}: parameter {} (unit {}) has {} elements at the end of summon_full_params(); "
              "expected {}",
              prefix(), name, display_name(model.units[u]), data.numel(), flat.layout.size(m));
        } else if (replaced && writeback) {
          sharding::window(whole, flat.layout.offset(m), flat.layout.size(m))
              .copy_(sharding::in_memory_order(data));
        }
        if (replaced || !flat.permanent) restore(flat, m);
      }
      if (flat.permanent || !writeback) continue;
      const int rank = model.shard_group.rank();
      flat.own_segment.copy_(
          whole.narrow(0, flat.layout.segment_begin(rank), flat.layout.counts()[rank]));
    }
  }
  if (options.mixed_precision.param_dtype)
    watch();  // set_data() with another dtype gives a parameter a new gradient accumulator
  if (!problem.empty()) throw UsageError(problem);
}

}  // namespace fsdp

FullParams::FullParams(std::shared_ptr<fsdp::ShardedModule> sharded, const std::string& prefix,
                       bool writeback, bool rank0_only)
    : sharded_(std::move(sharded)),
      units_(sharded_->units_under(prefix)),
      writeback_(writeback),
      exceptions_(std::uncaught_exceptions()) {
  if (rank0_only && writeback) {
    throw UsageError(sharded_->prefix() +
                     ": summon_full_params: rank0_only needs writeback to be false: one rank's "
                     "values cannot become all ranks' shards");
  }
  sharded_->summon(units_, !rank0_only || sharded_->model.world.rank() == 0);
}

FullParams::~FullParams() noexcept(false) {
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  try {
    sharded_->dismiss(units_, writeback_ && !unwinding);
  } catch (const Error&) {
    if (!unwinding) throw;
  }
}

}  // namespace tessera
