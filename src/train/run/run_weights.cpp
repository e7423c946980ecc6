// The weights on disk: in checkpoints, at model.init and at train.save. The state of an optimizer
// of Python's torch.optim, at optimizer.init and train.save_optimizer.

#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/module_state_dict.h"
#include "tessera/save_weights.h"
#include "tessera/step/agreement.h"
#include "tessera/step/nonfinite.h"
#include "tessera/weights/load_shard.h"
#include "tessera/weights/weights_tools.h"
#include "train/run/run.h"
#include "train/weights/checkpoint_weights.h"

namespace tessera::train {
namespace {

/// Adam and AdamW have the same state, so its names do not tell which of them it belongs to.
void check_decay(const Config& config, const TorchOptimizerStateFile::Group& group) {
  const std::string& type = config.optimizer.type;
  if (!group.decoupled_weight_decay || (type != "Adam" && type != "AdamW")) return;
  const std::string theirs = *group.decoupled_weight_decay ? "AdamW" : "Adam";
  if (type == theirs) return;
  throw UsageError(fmt::format(
      "{}: decoupled_weight_decay is {} in it, as in {}; expected optimizer.type {}, given is {}",
      config.optimizer_init.path, *group.decoupled_weight_decay, theirs, theirs, type));
}

const SafetensorsMetadata kMetadata{{"format", "pt"}};

}  // namespace

/// Parameter or buffer number `i` of weights_ on rank `to` of own_group(). Collective there for
/// parameters.
at::Tensor Run::whole_weight(size_t i, int to) {
  heartbeat_.enter(Phase::saving, done_);
  const auto& spec = weights_[i];
  const at::Tensor tensor = i < parameter_count_ ? wrapper_->whole_parameter(spec.name, to)
                                                 : model_.module->named_buffers(true)[spec.name];
  return tensor.defined() && own_group().rank() == to ? tensor.to(spec.dtype) : at::Tensor();
}

/// Every rank of group 0 writes its part of the weights. Buffers are rank 0's, because ranks may
/// differ in them.
void Run::add_weights_to(CheckpointWriter& writer) {
  const int ranks = config_.checkpoint.single_file ? 1 : own_group().size();
  auto parts = divide_weights(weights_, ranks, parameter_count_);
  if (parts.size() == 1) parts[0].file = kCheckpointWeights;
  const auto rank = static_cast<size_t>(own_group().rank());
  if (rank < parts.size()) {
    std::vector<SafetensorsSpec> own;
    for (const size_t i : parts[rank].tensors) own.push_back(weights_[i]);
    writer.begin_tensors(parts[rank].file, std::move(own), kMetadata);
  }
  write_weights(
      parts, own_group().rank(), [this](size_t i, int to) { return whole_weight(i, to); },
      [&](size_t i, const at::Tensor& tensor) {
        writer.write_tensor(parts[rank].file, weights_[i].name, tensor);
      });
  if (first() && parts.size() > 1)
    writer.add_text(kWeightsIndexName, weights_index_text(weights_, parts));
}

/// Opens the weights of the checkpoint and matches their names with the model's. Called within
/// read_together().
void Run::open_checkpoint_weights() {
  initial_ = std::make_unique<CheckpointWeights>(*resumed_);
  initial_names_ = match_weights(*model_.module, *initial_);
  skip_initial_values();
}

/// Collective.
void Run::load_checkpoint_weights() {
  resumed_->read_together([&] { load_initial(); });
  wrapper_->publish_shards();
  initial_.reset();
}

/// Opens model.init and matches its names with the model's. Local.
void Run::open_init() {
  named(config_.at("model.init"), [&] {
    initial_ = std::make_unique<Weights>(config_.model.init, config_.model.init_options);
    initial_names_ = model_.match_weights
                         ? model_.match_weights(*initial_, config_.model.strict)
                         : match_weights(*model_.module, *initial_, config_.model.strict);
  });
  report_unmatched(initial_names_.unmatched);
  skip_initial_values();
}

/// Deferred parameters need no initial values: load_initial() sets all of them.
void Run::skip_initial_values() {
  for (const auto& [name, parameter] : named_parameters(*model_.module)) {
    if (initial_names_.names.count(name) > 0)
      detail::load_later(parameter, [](const at::Tensor&) {});
  }
}

/// On rank 0, without model.strict.
void Run::report_unmatched(const UnmatchedNames& names) const {
  if (!reporter_) return;
  const auto report = [&](const char* what, const std::vector<std::string>& list) {
    if (!list.empty())
      reporter_->line(
          fmt::format("model.init: {} {}: {}", list.size(), what, fmt::join(list, ", ")));
  };
  report("missing names, which keep their initial values", names.missing);
  report("unexpected names, which are not read", names.unexpected);
}

/// Collective.
void Run::load_init() {
  agree(group_, [&] { named(config_.at("model.init"), [&] { load_initial(); }); });
  wrapper_->publish_shards();
  initial_.reset();
}

/// Each rank reads its elements of the parameters, and all buffers. Local.
void Run::load_initial() {
  const auto& [names, equal, unmatched] = initial_names_;
  for (const auto& shard : wrapper_->loaded_shards()) {
    heartbeat_.enter(Phase::starting, 0);
    const auto found = names.find(shard.parameter);
    if (found == names.end()) continue;
    for (const auto& [first, second, advice] : equal) {
      if (first == found->second) check_equal_shards(*initial_, first, second, shard, advice);
    }
    load_shard(*initial_, found->second, shard);
  }
  const torch::NoGradGuard no_grad;
  for (auto& buffer : model_.module->named_buffers(true)) {
    const auto found = names.find(buffer.key());
    if (found != names.end()) buffer.value().copy_(initial_->load(found->second));
  }
}

/// Opens optimizer.init and finds the order of its parameters. Local.
void Run::open_optimizer_init() {
  named(config_.at("optimizer.init"), [&] {
    optimizer_init_.emplace(config_.optimizer_init.path, config_.optimizer_init.key);
    std::vector<size_t> sizes;
    for (const auto& group : optimizer_init_->groups()) {
      sizes.push_back(group.parameters);
      check_decay(config_, group);
    }
    optimizer_names_ = names_for_python(sizes);
  });
}

/// The parameters in the order in which Python's optimizer got them: the groups of the config, or
/// one group with all parameters of the model, with the frozen ones or without.
std::vector<std::string> Run::names_for_python(const std::vector<size_t>& group_sizes) const {
  std::vector<std::string> all, trained, grouped;
  for (const auto& [name, parameter] : named_parameters(*model_.module)) {
    all.push_back(name);
    if (parameter.requires_grad()) trained.push_back(name);
  }
  std::vector<size_t> own_sizes;
  for (const auto& group : config_.optimizer.groups(*model_.module)) {
    own_sizes.push_back(group.parameters.size());
    for (const auto& [name, parameter] : group.parameters) grouped.push_back(name);
  }
  if (group_sizes == own_sizes) return grouped;
  if (group_sizes == std::vector<size_t>{all.size()}) return all;
  if (group_sizes == std::vector<size_t>{trained.size()}) return trained;
  throw UsageError(fmt::format(
      "{}: its parameter groups have {} parameters; expected {}, those of the config's groups, or "
      "one group of {}, the model's parameters",
      config_.optimizer_init.path, fmt::join(group_sizes, ", "), fmt::join(own_sizes, ", "),
      all.size()));
}

/// Each rank reads the state of its shards. Collective.
void Run::load_optimizer_init() {
  agree(group_, [&] {
    named(config_.at("optimizer.init"), [&] {
      heartbeat_.enter(Phase::starting, 0);
      std::vector<ElementRange> ranges;
      for (const ElementRange& range : wrapper_->shards()) ranges.push_back(range);
      auto slices = optimizer_init_->load_slices(optimizer_names_, ranges);
      try {
        wrapper_->take_state_slices(std::move(slices));
      } catch (const UsageError& error) {
        throw UsageError(fmt::format("{} is not the state of {}: {}", config_.optimizer_init.path,
                                     config_.optimizer.type, error.what()));
      }
    });
  });
  report_other_options();
  optimizer_init_.reset();
}

/// On rank 0, options that are not those of the file.
void Run::report_other_options() const {
  const auto& theirs = optimizer_init_->groups();
  const auto& own = wrapper_->optimizer().param_groups();
  if (!reporter_ || theirs.size() != own.size()) return;
  for (size_t i = 0; i < own.size(); ++i) {
    for (const auto& [name, value] : get_options(own[i].options())) {
      const auto found = theirs[i].options.find(name);
      if (found == theirs[i].options.end() || found->second == value) continue;
      reporter_->line(fmt::format(
          "warning: optimizer.init: {} of group {} is {} in {} and {} in the "
          "config, which counts",
          name, i, to_string(found->second), config_.optimizer_init.path, to_string(value)));
    }
  }
}

/// Writes the state at train.save_optimizer. Frozen parameters have none and are left out.
/// Collective.
void Run::save_optimizer() {
  const std::string& path = config_.train.save_optimizer;
  if (path.empty()) return;
  heartbeat_.enter(Phase::saving, done_);
  OptimizerStateDict dict;
  groups_->in_first([&] { dict = wrapper_->optimizer_state_dict(); });
  agree(group_, [&] {
    if (!first()) return;
    std::set<std::string> frozen;
    for (const auto& [name, parameter] : named_parameters(*model_.module)) {
      if (!parameter.requires_grad()) frozen.insert(name);
    }
    for (auto& group : dict.groups)
      std::erase_if(group.parameters, [&](const auto& name) { return frozen.count(name) > 0; });
    std::erase_if(dict.groups, [](const auto& group) { return group.parameters.empty(); });
    named(config_.at("train.save_optimizer"), [&] { save_torch_optimizer_state(dict, path); });
    reporter_->line("optimizer state written to " + path);
  });
}

/// Writes the weights at train.save.
void Run::save() {
  const std::string& path = config_.train.save;
  if (path.empty()) {
    return;
  }
  SaveWeightsOptions options;
  options.metadata = kMetadata;
  options.rank0_from = parameter_count_;
  if (config_.train.max_shard_bytes > 0) options.max_shard_bytes = config_.train.max_shard_bytes;
  options.check = [&](size_t i, const at::Tensor& tensor) {
    const std::string nonfinite = i < parameter_count_ ? nonfinite_text(tensor) : "";
    if (nonfinite.empty()) return;
    throw Error(config_.at("train.save") + path + " is not written: after " +
                std::to_string(done_) + " steps parameter " + weights_[i].name + " has " +
                nonfinite);
  };
  const auto write = [&] {
    save_weights(
        own_group(), path, weights_, [this](size_t i, int to) { return whole_weight(i, to); },
        options);
  };
  groups_->in_first(write);
  agree(group_, [&] {
    if (!first()) return;
    reporter_->line("weights written to " + path);
    if (is_weights_folder(path) && std::filesystem::is_directory(config_.model.init)) {
      for (const auto& name : copy_other_files(config_.model.init, path))
        reporter_->line(name + " copied from " + config_.model.init);
    }
    if (config_.train.save_config) {
      const auto beside = std::filesystem::path(path).parent_path() / "config.json";
      write_file(beside.string(), model_.config_json);
      reporter_->line("its config written to " + beside.string());
    }
  });
}

}  // namespace tessera::train
