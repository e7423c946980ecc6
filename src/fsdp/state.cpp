#include "fsdp/core.h"
#include "sharding/bucket.h"
#include "sharding/piece_state.h"
#include "tessera/error.h"
#include "tessera/nearest.h"
#include "tessera/safetensors.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <unordered_map>

namespace tessera {

using fsdp::Core;
using fsdp::Flat;
using nlohmann::json;
using State = std::vector<std::pair<std::string, at::Tensor>>;

namespace fsdp {

std::vector<const sharding::OwnedPiece*> Core::pieces() const {
  std::vector<const sharding::OwnedPiece*> result;
  for (const auto& flat : model.flats) {
    for (const auto& piece : flat.pieces) result.push_back(&piece);
  }
  return result;
}

at::Tensor Core::whole(size_t index, int to) {
  at::NoGradGuard no_grad;
  const auto [f, member] = model.places[index];
  const auto& flat = model.flats[f];
  auto& group = model.shard_group;
  const auto& ranks = group.world_ranks();
  const auto place = std::find(ranks.begin(), ranks.end(), to);
  const bool mine = to < 0 || group.size() == 1 ? to < 0 || to == model.world.rank() : place != ranks.end();
  if (!mine && (group.size() == 1 || place == ranks.end())) return {};  // a replica gathers
  const int root = to < 0 ? -1 : static_cast<int>(place - ranks.begin());
  const bool keep = to < 0 || model.world.rank() == to;
  const int64_t begin = flat.layout.offset(member), end = begin + flat.layout.size(member);
  std::vector<int64_t> counts;
  for (int r = 0; r < group.size(); ++r) {
    const int64_t from = flat.layout.segment_begin(r), until = from + flat.layout.counts()[r];
    counts.push_back(std::max<int64_t>(0, std::min(end, until) - std::max(begin, from)));
  }
  const auto own = flat.pieces[member].tensor.detach().to(group.control_device());
  at::Tensor out;
  if (group.size() == 1) {
    out = own;
  } else if (root < 0) {
    out = at::empty({end - begin}, own.options());
    int64_t before = 0;
    for (int r = 0; r < group.rank(); ++r) before += counts[r];
    out.narrow(0, before, own.numel()).copy_(own);
    group.all_gather(out, counts);
  } else {
    std::vector<int64_t> send(group.size(), 0), receive(group.size(), 0);
    send[root] = own.numel();
    if (keep) receive = counts;
    out = at::empty({keep ? end - begin : 0}, own.options());
    group.all_to_all(out, own, receive, send);
  }
  if (!keep) return {};
  return sharding::window(out.cpu(), 0, model.parameters[index].tensor).contiguous().clone();
}

void Core::take_piece(size_t index, const at::Tensor& whole) {
  at::NoGradGuard no_grad;
  const auto& parameter = model.parameters[index].tensor;
  auto& piece = model.flats[model.places[index].flat].pieces[model.places[index].member];
  auto placed = at::empty(whole.sizes(), whole.options());
  if (parameter.is_non_overlapping_and_dense()) placed = at::empty_strided(parameter.sizes(), parameter.strides(), whole.options());
  placed.copy_(whole);
  piece.tensor.copy_(sharding::in_memory_order(placed).narrow(0, piece.begin, piece.numel));
}

}  // namespace fsdp

namespace {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// Buffers of the module by name.
State buffers(const Core& core) {
  State result;
  for (const auto& item : core.module.named_buffers()) {
    if (item.value().defined()) result.emplace_back(item.key(), item.value());
  }
  return result;
}

/// Throws on all ranks what any of them found.
void agree(Core& core, const std::string& problem) {
  for (const auto& found : core.model.world.all_gather_bytes(problem)) {
    if (!found.empty()) throw UsageError(found);
  }
}

std::string mismatch(const Core& core, const std::map<std::string, std::vector<int64_t>>& given) {
  std::map<std::string, std::vector<int64_t>> wanted;
  for (const auto& parameter : core.model.parameters) wanted[parameter.name] = parameter.tensor.sizes().vec();
  for (const auto& [name, buffer] : buffers(core)) wanted[name] = buffer.sizes().vec();
  std::vector<std::string> names;
  for (const auto& [name, sizes] : wanted) names.push_back(name);
  for (const auto& [name, sizes] : wanted) {
    const auto found = given.find(name);
    if (found == given.end()) return fmt::format("{}: load_state_dict: {} is missing", core.prefix(), name);
    if (found->second != sizes) {
      return fmt::format("{}: load_state_dict: {} has shape {}; expected {}", core.prefix(), name, shape_text(found->second), shape_text(sizes));
    }
  }
  for (const auto& [name, sizes] : given) {
    if (!wanted.count(name)) return fmt::format("{}: load_state_dict: the module has no {}{}", core.prefix(), name, did_you_mean(name, names));
  }
  return "";
}

std::string shard_name(int rank, int world) { return fmt::format("rank-{:05d}-of-{:05d}.safetensors", rank, world); }

}  // namespace

State FullyShardedDataParallelBase::state_dict(int to) {
  auto& core = core_->core();
  core.require_idle("state_dict");
  if (to >= core.model.world.size()) throw UsageError(fmt::format("{}: state_dict: to is {}; expected a rank below {}, or -1 for all", core.prefix(), to, core.model.world.size()));
  const bool keep = to < 0 || core.model.world.rank() == to;
  State state;
  for (size_t i = 0; i < core.model.parameters.size(); ++i) {
    auto tensor = core.whole(i, to);
    if (keep) state.emplace_back(core.model.parameters[i].name, std::move(tensor));
  }
  for (const auto& [name, buffer] : buffers(core)) {
    if (keep) state.emplace_back(name, buffer.detach().to(at::kCPU, buffer.scalar_type(), false, true));
  }
  return state;
}

void FullyShardedDataParallelBase::save_state_dict(const std::string& path) {
  auto& core = core_->core();
  core.require_idle("save_state_dict");
  const bool writes = core.model.world.rank() == 0;
  std::optional<SafetensorsWriter> writer;
  std::string problem;
  const auto attempt = [&](const auto& action) {
    try {
      if (writes && problem.empty()) action();
    } catch (const std::exception& error) {
      problem = fmt::format("{}: save_state_dict: {}", core.prefix(), error.what());
    }
  };
  attempt([&] {
    std::vector<SafetensorsSpec> specs;
    for (size_t i = 0; i < core.model.parameters.size(); ++i) {
      specs.push_back({core.model.parameters[i].name, core.model.flat_of(i).dtype, core.model.parameters[i].tensor.sizes().vec()});
    }
    for (const auto& [name, buffer] : buffers(core)) specs.push_back({name, buffer.scalar_type(), buffer.sizes().vec()});
    writer.emplace(path, std::move(specs));
  });
  agree(core, problem);
  for (size_t i = 0; i < core.model.parameters.size(); ++i) {
    const auto tensor = core.whole(i, 0);
    attempt([&] { writer->write(core.model.parameters[i].name, tensor); });
  }
  attempt([&] {
    for (const auto& [name, buffer] : buffers(core)) writer->write(name, buffer.detach());
    writer->commit();
  });
  agree(core, problem);
}

void FullyShardedDataParallelBase::load_state_dict(const State& state) {
  auto& core = core_->core();
  core.require_idle("load_state_dict");
  at::NoGradGuard no_grad;
  std::map<std::string, std::vector<int64_t>> given;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : state) {
    given[name] = tensor.sizes().vec();
    by_name[name] = tensor;
  }
  agree(core, mismatch(core, given));
  core.residency->release_all();
  for (size_t i = 0; i < core.model.parameters.size(); ++i) core.take_piece(i, by_name[core.model.parameters[i].name]);
  for (auto& [name, buffer] : buffers(core)) buffer.copy_(by_name[name]);
}

void FullyShardedDataParallelBase::load_state_dict(const std::string& path) {
  auto& core = core_->core();
  core.require_idle("load_state_dict");
  at::NoGradGuard no_grad;
  std::optional<SafetensorsFile> file;
  std::string problem;
  try {
    file.emplace(path);
    std::map<std::string, std::vector<int64_t>> given;
    for (const auto& entry : file->entries()) given[entry.name] = entry.shape;
    problem = mismatch(core, given);
  } catch (const std::exception& error) {
    problem = fmt::format("{}: load_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  core.residency->release_all();
  for (size_t i = 0; i < core.model.parameters.size(); ++i) core.take_piece(i, file->load(core.model.parameters[i].name));
  for (auto& [name, buffer] : buffers(core)) buffer.copy_(file->load(name));
}

// [Note: sharded files] A rank's file has its piece of each parameter, one-dimensional in the parameter's memory order, of which index.json has shape, strides and, for each file, where
// the piece begins. Buffers are in rank 0's. Any world size reads the runs that it needs.

void FullyShardedDataParallelBase::save_sharded_state_dict(const std::string& folder) {
  auto& core = core_->core();
  core.require_idle("save_sharded_state_dict");
  auto& group = core.model.shard_group;
  const bool first_replica = core.model.replicas.rank() == 0;
  std::string problem;
  try {
    if (core.model.world.rank() == 0) std::filesystem::create_directories(folder);
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  try {
    if (first_replica) {
      State mine;
      json layout = json::object();  // the file tells by itself what its pieces are
      for (const auto* piece : core.pieces()) {
        const auto& [name, tensor] = core.model.parameters[piece->parameter];
        mine.emplace_back(name, piece->tensor.detach());
        layout[name] = {{"shape", tensor.sizes().vec()}, {"strides", tensor.strides().vec()}, {"begin", piece->begin}};
      }
      if (core.model.world.rank() == 0) {
        for (const auto& [name, buffer] : buffers(core)) mine.emplace_back(name, buffer.detach());
      }
      save_safetensors((std::filesystem::path(folder) / shard_name(group.rank(), group.size())).string(), mine,
                       {{"format", "tessera-sharded"}, {"rank", std::to_string(group.rank())}, {"world", std::to_string(group.size())}, {"layout", layout.dump()}});
    }
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  try {
    if (core.model.world.rank() == 0) {
      json index = {{"format", "tessera-sharded"}, {"version", 1}, {"world", group.size()}, {"parameters", json::object()}, {"buffers", json::object()}};
      for (size_t i = 0; i < core.model.parameters.size(); ++i) {
        const auto [f, member] = core.model.places[i];
        const auto& flat = core.model.flats[f];
        json pieces = json::array();
        for (int r = 0; r < group.size(); ++r) {
          const int64_t from = std::clamp(flat.layout.offset(member), flat.layout.segment_begin(r), flat.layout.segment_begin(r) + flat.layout.counts()[r]);
          const int64_t to = std::clamp(flat.layout.offset(member) + flat.layout.size(member), flat.layout.segment_begin(r),
                                        flat.layout.segment_begin(r) + flat.layout.counts()[r]);
          pieces.push_back({{"begin", std::clamp<int64_t>(from - flat.layout.offset(member), 0, flat.layout.size(member))}, {"numel", to - from}});
        }
        const auto& tensor = core.model.parameters[i].tensor;
        index["parameters"][core.model.parameters[i].name] = {{"shape", tensor.sizes().vec()}, {"strides", tensor.strides().vec()},
                                                              {"dtype", c10::toString(flat.dtype)}, {"pieces", pieces}};
      }
      for (const auto& [name, buffer] : buffers(core)) index["buffers"][name] = {{"shape", buffer.sizes().vec()}};
      const auto path = std::filesystem::path(folder) / "index.json";
      const auto beside = path.string() + ".new";
      std::ofstream out(beside);
      out << index.dump(1) << std::flush;
      if (!out) throw Error(beside + ": cannot be written");
      out.close();
      std::filesystem::rename(beside, path);
    }
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
}

void FullyShardedDataParallelBase::load_sharded_state_dict(const std::string& folder) {
  auto& core = core_->core();
  core.require_idle("load_sharded_state_dict");
  at::NoGradGuard no_grad;
  std::string problem;
  json index;
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  try {
    const auto path = std::filesystem::path(folder) / "index.json";
    std::ifstream in(path);
    if (!in) throw Error(path.string() + ": cannot be read");
    index = json::parse(in);
    if (index.value("format", "") != "tessera-sharded" || index.value("version", 0) != 1) throw Error(path.string() + ": is not the index of a sharded state of version 1");
    const int world = index.at("world");
    for (int r = 0; r < world; ++r) files.push_back(std::make_unique<SafetensorsFile>((std::filesystem::path(folder) / shard_name(r, world)).string()));
    std::map<std::string, std::vector<int64_t>> given;
    for (const char* kind : {"parameters", "buffers"}) {
      for (const auto& item : index.at(kind).items()) given[item.key()] = item.value().at("shape").get<std::vector<int64_t>>();
    }
    problem = mismatch(core, given);
  } catch (const std::exception& error) {
    problem = fmt::format("{}: load_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  core.residency->release_all();
  try {
    for (size_t i = 0; i < core.model.parameters.size(); ++i) {
      const auto& name = core.model.parameters[i].name;
      const auto& entry = index.at("parameters").at(name);
      const auto& tensor = core.model.parameters[i].tensor;
      const auto& piece = core.model.piece_of(i);
      const bool same_order = entry.at("strides").get<std::vector<int64_t>>() == tensor.strides().vec();
      const auto& pieces = entry.at("pieces");
      // Another memory order: the whole is put together first.
      const int64_t begin = same_order ? piece.begin : 0, end = same_order ? piece.begin + piece.numel : tensor.numel();
      at::Tensor run;
      for (size_t r = 0; r < files.size(); ++r) {
        const int64_t there = pieces.at(r).at("begin"), numel = pieces.at(r).at("numel");
        const int64_t from = std::max(begin, there), to = std::min(end, there + numel);
        if (!run.defined()) run = at::empty({end - begin}, at::TensorOptions().dtype(files[r]->scalar_type(name)));
        if (from < to) files[r]->load_slice(name, from - there, to - from, run.narrow(0, from - begin, to - from));
      }
      if (same_order) piece.tensor.detach().copy_(run);
      else core.take_piece(i, run.as_strided(tensor.sizes(), entry.at("strides").get<std::vector<int64_t>>()));
    }
    for (auto& [name, buffer] : buffers(core)) buffer.copy_(files.at(0)->load(name));
  } catch (const std::exception& error) {
    problem = fmt::format("{}: load_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
}

OptimizerStateDict FullyShardedDataParallelBase::optim_state_dict(const torch::optim::Optimizer& optimizer, int to) {
  auto& core = core_->core();
  core.require_idle("optim_state_dict");
  check_optimizer(optimizer);
  std::unordered_map<const void*, size_t> index;
  for (const auto* piece : core.pieces()) index[piece->tensor.unsafeGetTensorImpl()] = piece->parameter;
  OptimizerStateDict dict;
  for (const auto& group : optimizer.param_groups()) {
    auto& entry = dict.groups.emplace_back();
    entry.options = get_options(group.options());
    for (const auto& tensor : group.params()) {
      const auto found = index.find(tensor.unsafeGetTensorImpl());
      if (found == index.end()) {
        throw UsageError(fmt::format("{}: optim_state_dict: group {}, parameter {} of the optimizer is none of fsdp.parameters(); expected an optimizer made over these",
                                     core.prefix(), dict.groups.size() - 1, entry.parameters.size()));
      }
      entry.parameters.push_back(core.model.parameters[found->second].name);
    }
  }
  auto& group = core.model.shard_group;
  const auto& ranks = group.world_ranks();
  const auto place = std::find(ranks.begin(), ranks.end(), to);
  if (to >= 0 && group.size() > 1 && place == ranks.end()) return dict;
  const int root = to < 0 || group.size() == 1 ? -1 : static_cast<int>(place - ranks.begin());
  dict.state = sharding::gather_piece_state(optimizer, core.pieces(), core.model.parameters, group, root);
  return dict;
}

void FullyShardedDataParallelBase::load_optim_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  auto& core = core_->core();
  core.require_idle("load_optim_state_dict");
  check_optimizer(optimizer);
  const auto fail = [&](const std::string& problem) { throw UsageError(fmt::format("{}: load_optim_state_dict: {}", core.prefix(), problem)); };
  auto& groups = optimizer.param_groups();
  if (groups.size() != dict.groups.size()) fail(fmt::format("the state dict has {} parameter groups; expected {}", dict.groups.size(), groups.size()));
  std::unordered_map<const void*, size_t> index;
  std::map<std::string, size_t> by_name;
  for (const auto* piece : core.pieces()) {
    index[piece->tensor.unsafeGetTensorImpl()] = piece->parameter;
    by_name[core.model.parameters[piece->parameter].name] = piece->parameter;
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < std::max(groups[g].params().size(), dict.groups[g].parameters.size()); ++i) {
      const auto found = i < groups[g].params().size() ? index.find(groups[g].params()[i].unsafeGetTensorImpl()) : index.end();
      const std::string here = found == index.end() ? "nothing of fsdp.parameters()" : core.model.parameters[found->second].name;
      const std::string there = i < dict.groups[g].parameters.size() ? dict.groups[g].parameters[i] : "nothing";
      if (here != there) fail(fmt::format("group {}, parameter {}: the optimizer has {}, the state dict {}", g, i, here, there));
    }
  }
  for (const auto& [name, state] : dict.state) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) fail(fmt::format("state of unknown parameter {}", name));
    const auto& parameter = core.model.parameters[found->second].tensor;
    for (const auto& [key, tensor] : state.tensors) {
      if (tensor.numel() > 1 && !tensor.sizes().equals(parameter.sizes())) {
        fail(fmt::format("{} of parameter {} has shape {}; expected {}", key, name, shape_text(tensor.sizes()), shape_text(parameter.sizes())));
      }
    }
  }
  for (size_t g = 0; g < groups.size(); ++g) set_options(groups[g].options(), dict.groups[g].options);
  sharding::load_piece_state(optimizer, core.pieces(), core.model.parameters, dict.state);
}

}  // namespace tessera
