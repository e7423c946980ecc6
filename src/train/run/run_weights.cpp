// The weights of the model on disk: in checkpoints and at train.save.

#include <filesystem>
#include <map>
#include <set>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/module_state_dict.h"
#include "tessera/save_weights.h"
#include "tessera/step/nonfinite.h"
#include "tessera/weights/weights_tools.h"
#include "train/run/run.h"

namespace tessera::train {
namespace {

constexpr const char* kWeights = "weights.safetensors";  // of a checkpoint with one file of weights
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
  if (parts.size() == 1) parts[0].file = kWeights;
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

/// Local.
void Run::load_weights_of(const Checkpoint& checkpoint) {
  WeightsIndex index;
  std::string source = checkpoint.path() + "/" + kWeights;
  if (checkpoint.contains(kWeightsIndexName)) {
    source = checkpoint.path() + "/" + kWeightsIndexName;
    index = parse_weights_index(source, checkpoint.text(kWeightsIndexName));
  } else {
    for (const auto& name : checkpoint.tensors(kWeights).names()) index.files[name] = kWeights;
  }
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, const std::vector<SafetensorsEntry>*> contents;
  for (const auto& file : index.file_names()) {
    const auto& part = checkpoint.tensors(file).entries();
    contents.emplace(file, &part);
    entries.insert(entries.end(), part.begin(), part.end());
  }
  index.check(source, contents);
  const auto load = [&](const std::string& name) {
    heartbeat_.enter(Phase::starting, 0);
    return checkpoint.load_tensor(index.files.at(name), name);
  };
  // Files of other hosts can only be read now, together with the other ranks.
  std::function<void(const std::string&, at::Tensor)> later;
  if (group_.same_host()) {
    later = [this, &checkpoint, files = index.files](const std::string& name, at::Tensor into) {
      heartbeat_.enter(Phase::starting, 0);
      into.copy_(checkpoint.load_tensor(files.at(name), name));
    };
  }
  detail::load_module(*model_.module, source, entries, load, true, later);
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
