#include "tessera/error.h"
#include "zero/impl.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

namespace tessera {

// [Note: gathering state] First the ranks tell each other, in a few bytes, which state tensors each of their pieces has. Then, one tensor at a
// time in an order that follows from that, the pieces go to the rank that asked: nobody ever holds more than one tensor extra.

namespace {

using nlohmann::json;

struct PieceInfo {
  int rank;
  int64_t begin, numel;
  json tensors;  // name -> {dtype, follows, sizes}
  json scalars;
};

json describe(const ParamState& state, const at::Tensor& piece) {
  json tensors = json::object(), scalars = json::object();
  for (const auto& [name, tensor] : state.tensors) {
    tensors[name] = {{"dtype", static_cast<int>(tensor.scalar_type())}, {"follows", follows_parameter(tensor, piece)}, {"sizes", tensor.sizes().vec()}};
  }
  for (const auto& [name, value] : state.scalars) std::visit([&, n = name](auto v) { scalars[n] = v; }, value);
  return {{"tensors", tensors}, {"scalars", scalars}};
}

ScalarValue scalar_of(const json& value) {
  if (value.is_number_integer()) return value.get<int64_t>();
  return value.get<double>();
}

}  // namespace

OptimizerStateDict ZeroRedundancyOptimizer::Impl::gather_state(int to) {
  at::NoGradGuard no_grad;
  OptimizerStateDict dict;
  for (size_t g = 0; g < outer_.param_groups().size(); ++g) {
    dict.groups.push_back({{}, get_options(outer_.param_groups()[g].options())});
  }
  for (size_t i = 0; i < parameters_.size(); ++i) dict.groups[group_of_[i]].parameters.push_back(parameters_[i].name);

  std::map<size_t, ParamState> mine;
  json listing = json::array();
  for (const auto& bucket : buckets_) {
    for (const auto& piece : bucket.pieces) {
      auto state = get_state(*local_, piece.tensor);
      if (!state) continue;
      auto entry = describe(*state, piece.tensor);
      entry.update({{"parameter", piece.parameter}, {"begin", piece.begin}, {"numel", piece.numel}});
      listing.push_back(std::move(entry));
      mine.emplace(piece.parameter, std::move(*state));
    }
  }
  std::map<size_t, std::vector<PieceInfo>> pieces;
  const auto lists = group_.all_gather_bytes(listing.dump());
  for (int rank = 0; rank < group_.size(); ++rank) {
    for (auto& entry : json::parse(lists[rank])) {
      pieces[entry["parameter"]].push_back({rank, entry["begin"], entry["numel"], entry["tensors"], entry["scalars"]});
    }
  }

  const bool keep = to < 0 || to == group_.rank();
  const auto device = group_.control_device();
  for (const auto& [parameter, infos] : pieces) {
    const auto& like = parameters_[parameter].tensor;
    ParamState whole;
    for (const auto& item : infos[0].scalars.items()) whole.scalars[item.key()] = scalar_of(item.value());
    for (const auto& item : infos[0].tensors.items()) {
      const std::string name = item.key();
      const auto dtype = static_cast<at::ScalarType>(item.value()["dtype"].get<int>());
      const bool follows = item.value()["follows"];
      std::vector<int64_t> counts(group_.size(), 0);
      for (const auto& info : infos) {
        if (follows) counts[info.rank] = info.numel;
      }
      const auto sizes = item.value()["sizes"].get<std::vector<int64_t>>();
      if (!follows) counts[infos[0].rank] = c10::multiply_integers(sizes);
      int64_t total = 0;
      for (const auto count : counts) total += count;

      const bool have = counts[group_.rank()] > 0;
      at::Tensor own = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
      if (have) own = sharding::in_memory_order(mine.at(parameter).tensors.at(name)).to(device);
      auto flat = at::empty({keep ? total : 0}, own.options());
      std::vector<int64_t> send(group_.size(), 0), receive(group_.size(), 0);
      if (keep) receive = counts;
      for (int rank = 0; rank < group_.size(); ++rank) {
        if (to < 0 || to == rank) send[rank] = own.numel();
      }
      auto outgoing = own;
      if (to < 0 && group_.size() > 1) outgoing = own.repeat({group_.size()});
      group_.all_to_all(flat, outgoing, receive, send);
      if (!keep) continue;
      flat = flat.cpu();
      // Pieces are in the parameter's memory order; the dict speaks its shape.
      whole.tensors[name] = follows ? sharding::window(flat, 0, like).contiguous().clone() : flat.view(sizes);
    }
    if (keep) dict.state.emplace(parameters_[parameter].name, std::move(whole));
  }
  if (keep) {
    for (const auto& [name, state] : parked_) dict.state.emplace(name, state);
  }
  return dict;
}

void ZeroRedundancyOptimizer::Impl::load(const OptimizerStateDict& dict) {
  at::NoGradGuard no_grad;
  const auto fail = [&](const std::string& problem) { throw UsageError(fmt::format("{}.load_state_dict: rank {}: {}", kName, group_.rank(), problem)); };
  if (dict.groups.size() != outer_.param_groups().size()) {
    fail(fmt::format("the state dict has {} parameter groups; expected {}", dict.groups.size(), outer_.param_groups().size()));
  }
  std::map<std::string, size_t> index;
  std::vector<std::vector<std::string>> names(dict.groups.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    index[parameters_[i].name] = i;
    names[group_of_[i]].push_back(parameters_[i].name);
  }
  for (size_t g = 0; g < names.size(); ++g) {
    if (names[g] == dict.groups[g].parameters) continue;
    const auto [here, there] = std::mismatch(names[g].begin(), names[g].end(), dict.groups[g].parameters.begin(), dict.groups[g].parameters.end());
    fail(fmt::format("group {} has parameter {} where the state dict has {}", g, here == names[g].end() ? "nothing more" : *here,
                     there == dict.groups[g].parameters.end() ? "nothing more" : *there));
  }
  for (const auto& [name, state] : dict.state) {
    const auto found = index.find(name);
    if (found == index.end()) fail(fmt::format("state of unknown parameter {}", name));
    for (const auto& [key, tensor] : state.tensors) {
      const auto& parameter = parameters_[found->second].tensor;
      if (element_wise_ && !tensor.sizes().equals(parameter.sizes()) && tensor.numel() > 1) {
        fail(fmt::format("{} of parameter {} has {} elements; expected {}", key, name, tensor.numel(), parameter.numel()));
      }
    }
  }
  for (size_t g = 0; g < names.size(); ++g) set_options(outer_.param_groups()[g].options(), dict.groups[g].options);
  copy_options(true);
  parked_.clear();
  for (const auto& [name, state] : dict.state) {
    if (!trainable_[index[name]]) parked_.emplace(name, state);
  }
  for (const auto& bucket : buckets_) {
    for (const auto& piece : bucket.pieces) {
      const auto& parameter = parameters_[piece.parameter];
      const auto found = dict.state.find(parameter.name);
      if (found == dict.state.end()) {
        clear_state(*local_, piece.tensor);
        continue;
      }
      ParamState own;
      own.scalars = found->second.scalars;
      for (const auto& [key, tensor] : found->second.tensors) {
        if (!tensor.sizes().equals(parameter.tensor.sizes())) {
          own.tensors[key] = tensor.to(parameter.tensor.device(), tensor.scalar_type(), false, true);
          continue;
        }
        // Into the parameter's memory order, then this rank's part of it.
        auto placed = at::empty_strided(parameter.tensor.sizes(), parameter.tensor.strides(), tensor.options());
        placed.copy_(tensor);
        auto part = sharding::in_memory_order(placed).narrow(0, piece.begin, piece.numel).to(parameter.tensor.device(), tensor.scalar_type(), false, true);
        own.tensors[key] = piece.tensor.dim() == 1 ? part : sharding::window(part, 0, piece.tensor);
      }
      set_state(*local_, piece.tensor, own);
    }
  }
}

ZeroRedundancyOptimizer::Memory ZeroRedundancyOptimizer::Impl::memory() const {
  Memory memory;
  for (const auto& parameter : parameters_) memory.parameters += parameter.tensor.numel() * static_cast<int64_t>(parameter.tensor.element_size());
  for (const auto& bucket : buckets_) {
    if (options_.reduce_gradients) memory.gradients += bucket.gradients.bytes();
    if (bucket.reduced.defined()) memory.gradients += static_cast<int64_t>(bucket.reduced.nbytes());
    for (const auto& piece : bucket.pieces) {
      const auto state = get_state(*local_, piece.tensor);
      if (!state) continue;
      for (const auto& [name, tensor] : state->tensors) memory.optimizer_state += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return memory;
}

}  // namespace tessera
