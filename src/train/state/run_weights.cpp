#include "train/state/run_weights.h"

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
#include "train/weights/checkpoint_weights.h"

namespace tessera::train {
namespace {

/// Adam and AdamW have the same state, so its names do not show which of the two wrote it.
void check_decay(const ModelSections& config, const TorchOptimizerStateFile::Group& group) {
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

RunWeights::RunWeights(RunContext& context, const ModelSections& own, const TrainedModel& model)
    : context_(context), own_(own), model_(model) {
  const auto add = [this](const std::string& name, const at::Tensor& tensor) {
    specs_.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  };
  for (const auto& [name, parameter] : named_parameters(*model_.module)) {
    add(name, parameter);
    elements_ += parameter.numel();
  }
  parameter_count_ = specs_.size();
  for (const auto& buffer : model_.module->named_buffers(true)) add(buffer.key(), buffer.value());
  const auto check = [this](const std::string& key, const std::string& file) {
    named(context_.config.at(key), [&] { SafetensorsWriter::check(file, specs_); });
  };
  const std::string &folder = context_.config.checkpoint.folder, &path = own_.train.save;
  if (!folder.empty()) check("checkpoint.folder", folder + "/…/weights.safetensors");
  if (!path.empty() && !is_torch_path(path)) check("train.save", path);
}

int64_t RunWeights::bytes(bool with_buffers) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < (with_buffers ? specs_.size() : parameter_count_); ++i)
    bytes += static_cast<int64_t>(c10::elementSize(specs_[i].dtype)) *
             c10::multiply_integers(specs_[i].shape);
  return bytes;
}

std::vector<std::string> RunWeights::buffer_names() const {
  std::vector<std::string> names;
  for (size_t i = parameter_count_; i < specs_.size(); ++i) names.push_back(specs_[i].name);
  return names;
}

/// Parameter or buffer number `i` on rank `to` of own_group(). Parameters: collective there.
at::Tensor RunWeights::whole_weight(size_t i, int to) {
  context_.heartbeat.enter(Phase::saving, context_.heartbeat.step());
  const auto& spec = specs_[i];
  const at::Tensor tensor = i < parameter_count_ ? wrapper_->whole_parameter(spec.name, to)
                                                 : model_.module->named_buffers(true)[spec.name];
  return tensor.defined() && context_.own_group().rank() == to ? tensor.to(spec.dtype)
                                                               : at::Tensor();
}

void RunWeights::add_to(CheckpointWriter& writer) {
  const int ranks = context_.config.checkpoint.single_file ? 1 : context_.own_group().size();
  auto parts = divide_weights(specs_, ranks, parameter_count_);
  if (parts.size() == 1) parts[0].file = kCheckpointWeights;
  const auto rank = static_cast<size_t>(context_.own_group().rank());
  if (rank < parts.size()) {
    std::vector<SafetensorsSpec> own;
    for (const size_t i : parts[rank].tensors) own.push_back(specs_[i]);
    writer.begin_tensors(parts[rank].file, std::move(own), kMetadata);
  }
  write_weights(
      parts, context_.own_group().rank(), [this](size_t i, int to) { return whole_weight(i, to); },
      [&](size_t i, const at::Tensor& tensor) {
        writer.write_tensor(parts[rank].file, specs_[i].name, tensor);
      });
  if (context_.first() && parts.size() > 1)
    writer.add_text(kWeightsIndexName, weights_index_text(specs_, parts));
}

void RunWeights::open(const Checkpoint& checkpoint) {
  initial_ = open_weights(checkpoint);
  initial_names_ = match_weights(*model_.module, *initial_);
  skip_initial_values();
}

/// Opens the files and matches their names with the model's.
void RunWeights::open_init() {
  const ModelConfig& config = own_.model;
  if (!config.init.empty()) {
    named(own_.at("model.init"), [&] {
      initial_ = std::make_unique<Weights>(config.init, config.init_options);
      initial_names_ = model_.match_weights
                           ? model_.match_weights(*initial_, config.strict)
                           : match_weights(*model_.module, *initial_, config.strict);
    });
    report_unmatched(initial_names_.unmatched);
    skip_initial_values();
  }
  if (!own_.optimizer_init.path.empty()) open_optimizer_init();
}

void RunWeights::load(ModelWrapper& wrapper, const Checkpoint* checkpoint) {
  wrapper_ = &wrapper;
  if (initial_) {
    if (checkpoint != nullptr) checkpoint->read_together([&] { load_initial(); });
    else agree(context_.group, [&] { named(own_.at("model.init"), [&] { load_initial(); }); });
    wrapper.publish_shards();
    initial_.reset();
  }
  if (optimizer_init_) load_optimizer_init();
}

/// Deferred parameters need no initial values: load_initial() sets all of them.
void RunWeights::skip_initial_values() {
  for (const auto& [name, parameter] : named_parameters(*model_.module))
    if (initial_names_.names.count(name) > 0)
      detail::load_later(parameter, [](const at::Tensor&) {});
}

/// On rank 0, without model.strict.
void RunWeights::report_unmatched(const UnmatchedNames& names) const {
  const auto report = [&](const char* what, const std::vector<std::string>& list) {
    if (!list.empty())
      context_.say(fmt::format("{}model.init: {} {}: {}", own_.prefix(), list.size(), what,
                               fmt::join(list, ", ")));
  };
  report("missing names, which keep their initial values", names.missing);
  report("unexpected names, which are not read", names.unexpected);
}

/// Each rank reads its elements of the parameters, and all buffers. Local.
void RunWeights::load_initial() {
  const auto& [names, equal, unmatched] = initial_names_;
  for (const auto& shard : wrapper_->loaded_shards()) {
    context_.heartbeat.enter(Phase::starting, 0);
    const auto found = names.find(shard.parameter);
    if (found == names.end()) continue;
    for (const auto& [first, second, advice] : equal)
      if (first == found->second) check_equal_shards(*initial_, first, second, shard, advice);
    load_shard(*initial_, found->second, shard);
  }
  const torch::NoGradGuard no_grad;
  for (auto& buffer : model_.module->named_buffers(true)) {
    const auto found = names.find(buffer.key());
    if (found != names.end()) buffer.value().copy_(initial_->load(found->second));
  }
}

/// Opens optimizer.init and finds the order of its parameters. Local.
void RunWeights::open_optimizer_init() {
  named(own_.at("optimizer.init"), [&] {
    optimizer_init_.emplace(own_.optimizer_init.path, own_.optimizer_init.key);
    std::vector<size_t> sizes;
    for (const auto& group : optimizer_init_->groups()) {
      sizes.push_back(group.parameters);
      check_decay(own_, group);
    }
    optimizer_names_ = names_for_python(sizes);
  });
}

/// The parameters in the order in which Python's optimizer got them: the groups of the config, or
/// one group with all parameters of the model, with the frozen ones or without.
std::vector<std::string> RunWeights::names_for_python(
    const std::vector<size_t>& group_sizes) const {
  std::vector<std::string> all, trained, grouped;
  for (const auto& [name, parameter] : named_parameters(*model_.module)) {
    all.push_back(name);
    if (parameter.requires_grad()) trained.push_back(name);
  }
  std::vector<size_t> own_sizes;
  for (const auto& group : own_.optimizer.groups(*model_.module)) {
    own_sizes.push_back(group.parameters.size());
    for (const auto& [name, parameter] : group.parameters) grouped.push_back(name);
  }
  if (group_sizes == own_sizes) return grouped;
  if (group_sizes == std::vector<size_t>{all.size()}) return all;
  if (group_sizes == std::vector<size_t>{trained.size()}) return trained;
  throw UsageError(fmt::format(
      "{}: its parameter groups have {} parameters; expected {}, those of the config's groups, or "
      "one group of {}, the model's parameters",
      own_.optimizer_init.path, fmt::join(group_sizes, ", "), fmt::join(own_sizes, ", "),
      all.size()));
}

/// Each rank reads the state of its shards. Collective.
void RunWeights::load_optimizer_init() {
  agree(context_.group, [&] {
    named(own_.at("optimizer.init"), [&] {
      context_.heartbeat.enter(Phase::starting, 0);
      std::vector<ElementRange> ranges;
      for (const ElementRange& range : wrapper_->shards()) ranges.push_back(range);
      auto slices = optimizer_init_->load_slices(optimizer_names_, ranges);
      try {
        wrapper_->load_state_slices(std::move(slices));
      } catch (const UsageError& error) {
        throw UsageError(fmt::format("{} is not the state of {}: {}", own_.optimizer_init.path,
                                     own_.optimizer.type, error.what()));
      }
    });
  });
  report_other_options();
  optimizer_init_.reset();
}

/// Logs on rank 0 the options that differ from those of the file.
void RunWeights::report_other_options() const {
  const auto& theirs = optimizer_init_->groups();
  const auto& own = wrapper_->optimizer().param_groups();
  if (!context_.reporter || theirs.size() != own.size()) return;
  for (size_t i = 0; i < own.size(); ++i) {
    for (const auto& [name, value] : get_options(own[i].options())) {
      const auto found = theirs[i].options.find(name);
      if (found == theirs[i].options.end() || found->second == value) continue;
      context_.say(
          fmt::format("warning: {}optimizer.init: {} of group {} is {} in {} and {} in the "
                      "config, which counts",
                      own_.prefix(), name, i, to_string(found->second), own_.optimizer_init.path,
                      to_string(value)));
    }
  }
}

/// Frozen parameters have no state and are left out.
void RunWeights::save_optimizer() {
  const std::string& path = own_.train.save_optimizer;
  if (path.empty()) return;
  context_.heartbeat.enter(Phase::saving, context_.heartbeat.step());
  OptimizerStateDict dict;
  context_.groups->in_first([&] { dict = wrapper_->optimizer_state_dict(); });
  agree(context_.group, [&] {
    if (!context_.first()) return;
    std::set<std::string> frozen;
    for (const auto& [name, parameter] : named_parameters(*model_.module))
      if (!parameter.requires_grad()) frozen.insert(name);
    for (auto& group : dict.groups)
      std::erase_if(group.parameters, [&](const auto& name) { return frozen.count(name) > 0; });
    std::erase_if(dict.groups, [](const auto& group) { return group.parameters.empty(); });
    named(context_.config.at("train.save_optimizer"),
          [&] { save_torch_optimizer_state(dict, path); });
    context_.say("optimizer state written to " + path);
  });
}

void RunWeights::save(int64_t steps) {
  const std::string& path = own_.train.save;
  if (path.empty()) return;
  SaveWeightsOptions options;
  options.metadata = kMetadata;
  options.rank0_from = parameter_count_;
  if (own_.train.max_shard_bytes > 0) options.max_shard_bytes = own_.train.max_shard_bytes;
  options.check = [&](size_t i, const at::Tensor& tensor) {
    const std::string nonfinite = i < parameter_count_ ? nonfinite_text(tensor) : "";
    if (nonfinite.empty()) return;
    throw Error(context_.config.at("train.save") + path + " is not written: after " +
                std::to_string(steps) + " steps parameter " + specs_[i].name + " has " + nonfinite);
  };
  const auto write = [&] {
    save_weights(
        context_.own_group(), path, specs_,
        [this](size_t i, int to) { return whole_weight(i, to); }, options);
  };
  context_.groups->in_first(write);
  agree(context_.group, [&] {
    if (!context_.first()) return;
    context_.say("weights written to " + path);
    if (is_weights_folder(path) && std::filesystem::is_directory(own_.model.init))
      for (const auto& name : copy_other_files(own_.model.init, path))
        context_.say(name + " copied from " + own_.model.init);
    if (own_.train.save_config) {
      const auto beside = std::filesystem::path(path).parent_path() / "config.json";
      write_file(beside.string(), model_.config_json);
      context_.say("its config written to " + beside.string());
    }
  });
}

}  // namespace tessera::train
