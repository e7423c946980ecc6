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

using namespace fsdp;

namespace {

std::vector<size_t> units_under(const ShardedModule& sharded, const std::string& path) {
  const auto& model = sharded.model;
  std::vector<size_t> result;
  for (size_t u = 0; u < model.units.size(); ++u) {
    const auto inside = [&](const std::string& name) {
      return path.empty() || name == path || name.rfind(path + ".", 0) == 0;
    };
    bool any = inside(model.units[u].name);
    for (const auto& flat : model.units[u].flats)
      for (const auto i : flat.members) any |= inside(model.parameters[i].name);
    if (any && !model.units[u].flats.empty()) result.push_back(u);
  }
  if (result.empty())
    throw UsageError(fmt::format("{}: summon_full_params: there are no parameters under \"{}\"",
                                 sharded.prefix(), path));
  return result;
}

/// Frees the whole values of `units`. Local.
void dismiss(ShardedModule& sharded, const std::vector<size_t>& units) {
  at::NoGradGuard no_grad;
  bool other_dtype = false;
  for (const auto u : units) {
    for (const auto& flat : sharded.model.units[u].flats) {
      for (const auto& parameter : flat.parameters)
        other_dtype |= parameter.scalar_type() != flat.compute.dtype;
      sharded.pages->restore(flat);
    }
  }
  sharded.summoned.clear();
  if (other_dtype)
    sharded.watch();  // set_data() with another dtype gives a parameter a new gradient accumulator
}

// Whole parameters have the shards' dtype and memory of their own. They are not in pages, so their
// use is not detected.
void summon(ShardedModule& sharded, const std::vector<size_t>& units, bool keep) {
  sharded.require_idle("summon_full_params");
  auto& model = sharded.model;
  at::NoGradGuard no_grad;
  const sharding::NoDetection no_detection;
  sharded.residency->release_all();
  sharded.summoned.resize(model.flats.size());
  auto undo = c10::make_scope_exit([&] { dismiss(sharded, units); });
  for (const auto u : units) {
    for (auto& flat : model.units[u].flats) {
      if (flat.permanent) continue;
      auto whole = at::empty({flat.layout.numel()},
                             at::TensorOptions().dtype(flat.dtype()).device(flat.device));
      flat.part_of(whole, model.shard_group.rank()).copy_(flat.own_segment);
      if (model.shard_group.size() > 1) model.shard_group.all_gather(whole, flat.layout.counts());
      if (!keep) continue;
      sharded.summoned[flat.index] = whole;
      for (size_t m = 0; m < flat.members.size(); ++m) {
        const auto& parameter = flat.parameters[m];
        parameter.set_data(sharding::window(whole, flat.layout.offset(m), parameter));
      }
    }
  }
  undo.release();
}

/// A parameter that was replaced while it was whole.
struct Replaced {
  at::Tensor window;  // its place among the whole values, in its shape and strides
  at::Tensor now;
};

std::vector<Replaced> replaced(const ShardedModule& sharded, const std::vector<size_t>& units) {
  const auto& model = sharded.model;
  const sharding::NoDetection no_detection;
  std::vector<Replaced> result;
  for (const auto u : units) {
    for (const auto& flat : model.units[u].flats) {
      const auto& whole = flat.permanent ? flat.own_segment : sharded.summoned[flat.index];
      if (!whole.defined()) continue;
      for (size_t m = 0; m < flat.members.size(); ++m) {
        const size_t index = flat.members[m];
        const auto now = model.parameters[index].tensor.detach();
        const auto window =
            sharding::window(whole, flat.layout.offset(m), sharded.pages->shape(index));
        if (now.is_alias_of(window) && now.storage_offset() == window.storage_offset() &&
            now.sizes() == window.sizes() && now.strides() == window.strides())
          continue;
        if (now.sizes() != window.sizes()) {
          throw UsageError(fmt::format(
              "{}: parameter {} (unit {}) has shape {} at the end of summon_full_params(); "
              "expected {}, as before",
              sharded.prefix(), model.parameters[index].name, model.units[u].display_name(),
              c10::str(now.sizes()), c10::str(window.sizes())));
        }
        result.push_back({window, now});
      }
    }
  }
  return result;
}

/// Copies the whole values of `units` to the shards. UsageError on all ranks, with nothing copied,
/// if a parameter of one rank has another shape than before. Collective.
void write_back(ShardedModule& sharded, const std::vector<size_t>& units) {
  auto& model = sharded.model;
  at::NoGradGuard no_grad;
  std::vector<Replaced> changed;
  agree(model.world, [&] {
    changed = replaced(sharded, units);
    // Copies, because two parameters may have exchanged their memory.
    for (auto& [window, now] : changed) now = now.clone();
  });
  const sharding::NoDetection no_detection;
  for (const auto& [window, now] : changed) window.copy_(now);
  for (const auto u : units) {
    for (auto& flat : model.units[u].flats) {
      const auto& whole = sharded.summoned[flat.index];
      if (!flat.permanent && whole.defined())
        flat.own_segment.copy_(flat.part_of(whole, model.shard_group.rank()));
    }
  }
}

}  // namespace

FullParams::FullParams(std::shared_ptr<fsdp::ShardedModule> sharded, const std::string& prefix,
                       bool writeback, bool rank0_only)
    : sharded_(std::move(sharded)),
      units_(units_under(*sharded_, prefix)),
      writeback_(writeback),
      exceptions_(std::uncaught_exceptions()) {
  if (rank0_only && writeback) {
    throw UsageError(sharded_->prefix() +
                     ": summon_full_params: rank0_only needs writeback to be false: one rank's "
                     "values cannot become all ranks' shards");
  }
  summon(*sharded_, units_, !rank0_only || sharded_->model.world.rank() == 0);
}

void FullParams::end() {
  if (std::exchange(ended_, true)) return;
  // The parameters are sharded again even if a rank refuses the values.
  const auto again = c10::make_scope_exit([this] { dismiss(*sharded_, units_); });
  if (writeback_) write_back(*sharded_, units_);
}

FullParams::~FullParams() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    if (!std::exchange(ended_, true)) dismiss(*sharded_, units_);
  } else {
    end();
  }
}

}  // namespace tessera
