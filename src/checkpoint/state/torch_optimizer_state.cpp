#include "tessera/optim/torch_optimizer_state.h"

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/torch_archive.h"
#include "sharding/bucket.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using pickle::Kind;
using pickle::TorchTensor;
using pickle::Value;
using pickle::Values;
using safetensors::in_quotes;

const std::set<std::string> kOptions{
    "lr",        "betas",    "eps",   "weight_decay", "amsgrad",  "momentum",
    "dampening", "nesterov", "alpha", "centered",     "lr_decay", "initial_accumulator_value"};
const std::set<std::string> kWithoutEffect{"foreach",    "fused",  "capturable", "differentiable",
                                           "initial_lr", "params", "param_names"};
constexpr const char* kDecoupled = "decoupled_weight_decay";

// Groups may share one long list; without a limit it would be read once for each group.
constexpr size_t kMaxList = 16;

}  // namespace

struct TorchOptimizerStateFile::Impl {
  using LoadTensor = std::function<at::Tensor(const TorchTensor& tensor)>;

  Impl(const std::string& path, const std::string& key)
      : archive(path), where(archive.where() + "optimizer state: ") {
    const Value dict = find(key);
    for (const auto& group : values().items(*values().find(dict, "param_groups")))
      read_group(group);
    read_states(*values().find(dict, "state"));
  }

  const Values& values() const { return archive.values(); }
  [[noreturn]] void refuse(const std::string& reason) const { throw UsageError(where + reason); }

  Value find(const std::string& key) const {
    const Value dict = pickle::dict_at(archive.where(), values(), key);
    if (pickle::is_optimizer_state(values(), dict)) return dict;
    std::vector<Value> found;
    if (key.empty() && dict.kind == Kind::dict) {
      for (const auto& item : values().items(dict))
        if (pickle::is_optimizer_state(values(), item)) found.push_back(item);
    }
    if (found.size() != 1)
      refuse(fmt::format("{} dicts with state and param_groups{}; expected one, name it",
                         found.size(), key.empty() ? "" : " at " + in_quotes(key)));
    return found[0];
  }

  void read_group(const Value& value) {
    const Value* params = value.kind == Kind::dict ? values().find(value, "params") : nullptr;
    if (params == nullptr || params->kind != Kind::list) refuse("a group has no list of params");
    const Value* names = values().find(value, "param_names");
    const auto& members = values().items(*params);
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].kind != Kind::integer) refuse("a parameter has no number");
      const bool named = names && names->kind == Kind::list && i < values().items(*names).size() &&
                         values().items(*names)[i].kind == Kind::text;
      if (!place_of.emplace(members[i].integer, own_names.size()).second)
        refuse(fmt::format("the parameter {} is in two groups", members[i].integer));
      own_names.push_back(named ? std::string(values().text(values().items(*names)[i])) : "");
    }
    Group& group = groups.emplace_back(Group{members.size()});
    const auto& pairs = values().items(value);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind != Kind::text) continue;
      const std::string name(values().text(pairs[i]));
      if (name != kDecoupled) read_option(name, pairs[i + 1], group.options);
      else if (pairs[i + 1].kind == Kind::boolean)
        group.decoupled_weight_decay = pairs[i + 1].integer != 0;
    }
  }

  void read_states(const Value& dict) {
    states.resize(own_names.size());
    const auto& pairs = values().items(dict);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      const auto found =
          pairs[i].kind == Kind::integer ? place_of.find(pairs[i].integer) : place_of.end();
      if (found == place_of.end()) refuse("it has a state of a parameter that is in no group");
      if (pairs[i + 1].kind != Kind::dict)
        refuse(fmt::format("the state of parameter {} is no dict", pairs[i].integer));
      states[found->second] = pairs[i + 1];
    }
  }

  void read_option(const std::string& name, const Value& value, OptionMap& options) const {
    const bool off = value.kind == Kind::none || (value.kind == Kind::boolean && !value.integer);
    if (kWithoutEffect.count(name) > 0) return;
    if (kOptions.count(name) == 0) {
      if (!off) refuse("the option " + in_quotes(name) + " is set, which C++ optimizers lack");
    } else if (value.kind == Kind::boolean) {
      options[name] = value.integer != 0;
    } else if (value.kind == Kind::tuple || value.kind == Kind::list) {
      std::vector<double> list;
      if (values().items(value).size() > kMaxList)
        refuse(fmt::format("the option {} has {} numbers; expected at most {}", in_quotes(name),
                           values().items(value).size(), kMaxList));
      for (const auto& item : values().items(value)) list.push_back(number(name, item));
      options[name] = std::move(list);
    } else if (!off) {
      options[name] = number(name, value);
    }
  }

  double number(const std::string& name, const Value& value) const {
    if (value.kind == Kind::real) return value.real;
    if (value.kind == Kind::integer) return static_cast<double>(value.integer);
    if (value.kind == Kind::tensor) {
      const auto from = tensor(name, value);
      if (from.numel == 1) return archive.load(from).item<double>();
    }
    refuse(in_quotes(name) + " is a " + pickle::kind_name(value.kind) + "; expected a number");
  }

  /// The parameters' names in the order of the groups.
  std::vector<std::string> names(const std::vector<std::string>& parameters) const {
    if (own_names.size() != parameters.size())
      refuse(fmt::format("it has {} parameters, given are the names of {}", own_names.size(),
                         parameters.size()));
    std::vector<std::string> result = parameters;
    for (size_t i = 0; i < result.size(); ++i)
      if (!own_names[i].empty()) result[i] = own_names[i];
    return result;
  }

  TorchTensor tensor(const std::string& name, const Value& value) const {
    return pickle::tensor_of(where, name, values(), value);
  }

  ParamState state(const std::string& parameter, size_t place, const LoadTensor& load) const {
    ParamState result;
    if (!states[place]) return result;
    const auto& pairs = values().items(*states[place]);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind != Kind::text)
        refuse("a state of " + in_quotes(parameter) + " has no name");
      const std::string name(values().text(pairs[i]));
      const Value& item = pairs[i + 1];
      if (name == "step") result.scalars[name] = steps(parameter, number(name, item));
      else if (item.kind == Kind::tensor)
        result.tensors[name] = load(tensor(parameter + "/" + name, item));
      else if (item.kind == Kind::integer) result.scalars[name] = item.integer;
      else if (item.kind == Kind::real) result.scalars[name] = item.real;
      else if (item.kind != Kind::none)
        refuse(fmt::format("the state {} of {} is a {}; expected a tensor or a number",
                           in_quotes(name), in_quotes(parameter), pickle::kind_name(item.kind)));
    }
    return result;
  }

  /// The elements of `range` in the parameter's memory order.
  at::Tensor elements(const TorchTensor& from, const ElementRange& range) const {
    if (from.shape != range.shape) {
      // As many elements as the parameter would pass for elements in its memory order.
      if (from.numel > 1 && from.numel == c10::multiply_integers(range.shape))
        refuse(fmt::format("{} has shape [{}]; expected [{}], that of the parameter", from.name,
                           fmt::join(from.shape, ", "), fmt::join(range.shape, ", ")));
      return archive.load(from);
    }
    const bool row_major = range.strides.empty() || sharding::order_of(range).is_contiguous();
    if (!row_major)
      return sharding::in_memory_order(archive.load(from), sharding::order_of(range))
          .narrow(0, range.begin, range.numel);
    at::Tensor part = at::empty({range.numel}, pickle::scalar_type_of(where, from));
    archive.load_slice(from, range.begin, range.numel, part);
    return part;
  }

  int64_t steps(const std::string& parameter, double value) const {
    constexpr double kMost = 9e15;
    if (!(value >= 0 && value <= kMost) || value != std::floor(value))
      refuse(fmt::format("the step of {} is {}; expected a whole number", in_quotes(parameter),
                         value));
    return static_cast<int64_t>(value);
  }

  pickle::TorchArchive archive;
  std::string where;
  std::vector<Group> groups;
  std::vector<std::string> own_names;          // "param_names", in the order of the groups
  std::map<int64_t, size_t> place_of;          // by number: its place in that order
  std::vector<std::optional<Value>> states{};  // in that order
};

TorchOptimizerStateFile::TorchOptimizerStateFile(const std::string& path, const std::string& key)
    : impl_(std::make_unique<Impl>(path, key)) {}
TorchOptimizerStateFile::~TorchOptimizerStateFile() = default;
TorchOptimizerStateFile::TorchOptimizerStateFile(TorchOptimizerStateFile&&) noexcept = default;
TorchOptimizerStateFile& TorchOptimizerStateFile::operator=(TorchOptimizerStateFile&&) noexcept =
    default;

const std::vector<TorchOptimizerStateFile::Group>& TorchOptimizerStateFile::groups() const {
  return impl_->groups;
}

OptimizerStateDict TorchOptimizerStateFile::load(const std::vector<std::string>& parameters) const {
  const auto names = impl_->names(parameters);
  OptimizerStateDict result;
  for (size_t i = 0; i < names.size(); ++i) {
    auto state =
        impl_->state(names[i], i, [this](const auto& t) { return impl_->archive.load(t); });
    if (!state.tensors.empty() || !state.scalars.empty()) result.state[names[i]] = std::move(state);
  }
  auto next = names.begin();
  for (const auto& group : impl_->groups) {
    const auto end = next + static_cast<std::ptrdiff_t>(group.parameters);
    result.groups.push_back({{next, end}, group.options});
    next = end;
  }
  return result;
}

std::vector<StateSlice> TorchOptimizerStateFile::load_slices(
    const std::vector<std::string>& parameters, const std::vector<ElementRange>& ranges) const {
  const auto names = impl_->names(parameters);
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < names.size(); ++i) places.emplace(names[i], i);
  std::vector<StateSlice> slices;
  for (const auto& range : ranges) {
    const auto found = places.find(range.parameter);
    if (found == places.end())
      impl_->refuse(fmt::format("it has no parameter {}", in_quotes(range.parameter)));
    slices.push_back({range, impl_->state(range.parameter, found->second, [&](const auto& tensor) {
                        return impl_->elements(tensor, range);
                      })});
  }
  return slices;
}

OptimizerStateDict load_torch_optimizer_state(const std::string& path,
                                              const std::vector<std::string>& parameters,
                                              const std::string& key) {
  return TorchOptimizerStateFile(path, key).load(parameters);
}

}  // namespace tessera
