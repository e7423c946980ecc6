#include <exception>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "fsdp/state/state_dict_checks.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

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
  const sharding::NoDetection no_detection;
  residency->release_all();
  whole_.resize(model.flats.size());
  auto undo = c10::make_scope_exit([&] { dismiss(units); });
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
  undo.release();
}

std::vector<ShardedModule::Replaced> ShardedModule::replaced(const std::vector<size_t>& units) {
  const sharding::NoDetection no_detection;
  std::vector<Replaced> result;
  for (const auto u : units) {
    for (const auto f : model.units[u].flats) {
      const auto& flat = model.flats[f];
      const auto& whole = flat.permanent ? flat.own_segment : whole_[f];
      if (!whole.defined()) continue;
      for (size_t m = 0; m < flat.members.size(); ++m) {
        const size_t index = flat.members[m];
        const auto now = model.parameters[index].tensor.detach();
        const auto window = sharding::window(whole, flat.layout.offset(m), shapes_[index]);
        if (now.is_alias_of(window) && now.storage_offset() == window.storage_offset() &&
            now.sizes() == window.sizes() && now.strides() == window.strides())
          continue;
        if (now.sizes() != window.sizes()) {
          throw UsageError(fmt::format(
              "{}: parameter {} (unit {}) has shape {} at the end of summon_full_params(); "
              "expected {}, as before",
              prefix(), model.parameters[index].name, display_name(model.units[u]),
              shape_text(now.sizes()), shape_text(window.sizes())));
        }
        result.push_back({window, now});
      }
    }
  }
  return result;
}

void ShardedModule::write_back(const std::vector<size_t>& units) {
  at::NoGradGuard no_grad;
  std::vector<Replaced> changed;
  agree(model.world, [&] {
    changed = replaced(units);
    // Copies, because two parameters may have exchanged their memory.
    for (auto& [window, now] : changed) now = now.clone();
  });
  const sharding::NoDetection no_detection;
  for (const auto& [window, now] : changed) window.copy_(now);
  for (const auto u : units) {
    for (const auto f : model.units[u].flats) {
      auto& flat = model.flats[f];
      if (flat.permanent || !whole_[f].defined()) continue;
      const int rank = model.shard_group.rank();
      flat.own_segment.copy_(
          whole_[f].narrow(0, flat.layout.segment_begin(rank), flat.layout.counts()[rank]));
    }
  }
}

void ShardedModule::dismiss(const std::vector<size_t>& units) {
  at::NoGradGuard no_grad;
  bool other_dtype = false;
  for (const auto u : units) {
    summoned.erase(u);
    for (const auto f : model.units[u].flats) {
      const auto& flat = model.flats[f];
      for (const auto i : flat.members)
        other_dtype |= model.parameters[i].tensor.scalar_type() != flat.compute.dtype;
      restore(flat);
      whole_[f] = at::Tensor();
    }
  }
  if (other_dtype)
    watch();  // set_data() with another dtype gives a parameter a new gradient accumulator
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

void FullParams::end() {
  if (std::exchange(ended_, true)) return;
  // The parameters are sharded again even if a rank refuses the values.
  const auto dismiss = c10::make_scope_exit([this] { sharded_->dismiss(units_); });
  if (writeback_) sharded_->write_back(units_);
}

FullParams::~FullParams() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    if (!std::exchange(ended_, true)) sharded_->dismiss(units_);
  } else {
    end();
  }
}

}  // namespace tessera
