#include "tessera/optim/torch_optimizer_state.h"

#include <cmath>
#include <set>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/torch_archive.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using pickle::Kind;
using pickle::Value;
using pickle::Values;
using safetensors::in_quotes;

const std::set<std::string> kOptions{
    "lr",        "betas",    "eps",   "weight_decay", "amsgrad",  "momentum",
    "dampening", "nesterov", "alpha", "centered",     "lr_decay", "initial_accumulator_value"};
const std::set<std::string> kWithoutEffect{"foreach",        "fused",      "capturable",
                                           "differentiable", "initial_lr", "decoupled_weight_decay",
                                           "params",         "param_names"};

class StateFileReader {
 public:
  StateFileReader(const std::string& path, const std::vector<std::string>& parameters)
      : archive_(path), where_(archive_.where() + "optimizer state: "), parameters_(parameters) {}

  OptimizerStateDict read(const std::string& key) {
    const Value dict = find(key);
    OptimizerStateDict result;
    for (const auto& group : values().items(*values().find(dict, "param_groups")))
      result.groups.push_back(read_group(group));
    if (numbered_.size() != parameters_.size())
      refuse(fmt::format("it has {} parameters, given are the names of {}", numbered_.size(),
                         parameters_.size()));
    const auto& states = values().items(*values().find(dict, "state"));
    for (size_t i = 0; i + 1 < states.size(); i += 2) {
      ParamState state = read_state(name_of(states[i]), states[i + 1]);
      if (!state.tensors.empty() || !state.scalars.empty())
        result.state[name_of(states[i])] = std::move(state);
    }
    return result;
  }

 private:
  const Values& values() const { return archive_.values(); }
  [[noreturn]] void refuse(const std::string& reason) const { throw UsageError(where_ + reason); }

  Value find(const std::string& key) const {
    if (archive_.is_script()) refuse("a file of torch.jit.save has none");
    const Value dict = pickle::dict_at(archive_.where(), values(), key);
    if (pickle::is_optimizer_state(values(), dict)) return dict;
    std::vector<Value> found;
    if (key.empty() && dict.kind == Kind::dict) {
      for (const auto& item : values().items(dict)) {
        if (pickle::is_optimizer_state(values(), item)) found.push_back(item);
      }
    }
    if (found.size() != 1)
      refuse(fmt::format("{} dicts with state and param_groups{}; expected one, name it",
                         found.size(), key.empty() ? "" : " at " + in_quotes(key)));
    return found[0];
  }

  OptimizerStateDict::Group read_group(const Value& value) {
    OptimizerStateDict::Group group;
    const Value* params = value.kind == Kind::dict ? values().find(value, "params") : nullptr;
    if (params == nullptr || params->kind != Kind::list) refuse("a group has no list of params");
    const Value* names = values().find(value, "param_names");
    const auto& numbers = values().items(*params);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i].kind != Kind::integer) refuse("a parameter has no number");
      const size_t place = numbered_.size();
      std::string name = place < parameters_.size() ? parameters_[place] : "";
      if (names && names->kind == Kind::list && i < values().items(*names).size() &&
          values().items(*names)[i].kind == Kind::text)
        name = std::string(values().text(values().items(*names)[i]));
      if (!numbered_.emplace(numbers[i].integer, name).second)
        refuse(fmt::format("the parameter {} is in two groups", numbers[i].integer));
      group.parameters.push_back(std::move(name));
    }
    const auto& pairs = values().items(value);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind == Kind::text)
        read_option(std::string(values().text(pairs[i])), pairs[i + 1], group.options);
    }
    return group;
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
      const at::Tensor tensor = load(name, value);
      if (tensor.numel() == 1) return tensor.item<double>();
    }
    refuse(in_quotes(name) + " is a " + pickle::kind_name(value.kind) + "; expected a number");
  }

  at::Tensor load(const std::string& name, const Value& value) const {
    return archive_.load(pickle::tensor_of(where_, name, values(), value));
  }

  const std::string& name_of(const Value& number) const {
    const auto found =
        number.kind == Kind::integer ? numbered_.find(number.integer) : numbered_.end();
    if (found == numbered_.end()) refuse("it has a state of a parameter that is in no group");
    return found->second;
  }

  ParamState read_state(const std::string& parameter, const Value& value) const {
    if (value.kind != Kind::dict) refuse("the state of " + in_quotes(parameter) + " is no dict");
    ParamState state;
    const auto& pairs = values().items(value);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i].kind != Kind::text)
        refuse("a state of " + in_quotes(parameter) + " has no name");
      const std::string name(values().text(pairs[i]));
      const Value& item = pairs[i + 1];
      if (name == "step") state.scalars[name] = steps(parameter, number(name, item));
      else if (item.kind == Kind::tensor) state.tensors[name] = load(parameter + "/" + name, item);
      else if (item.kind == Kind::integer) state.scalars[name] = item.integer;
      else if (item.kind == Kind::real) state.scalars[name] = item.real;
      else if (item.kind != Kind::none)
        refuse(fmt::format("the state {} of {} is a {}; expected a tensor or a number",
                           in_quotes(name), in_quotes(parameter), pickle::kind_name(item.kind)));
    }
    return state;
  }

  int64_t steps(const std::string& parameter, double value) const {
    constexpr double kMost = 9e15;
    if (!(value >= 0 && value <= kMost) || value != std::floor(value))
      refuse(fmt::format("the step of {} is {}; expected a whole number", in_quotes(parameter),
                         value));
    return static_cast<int64_t>(value);
  }

  pickle::TorchArchive archive_;
  std::string where_;
  const std::vector<std::string>& parameters_;
  std::map<int64_t, std::string> numbered_;
};

}  // namespace

OptimizerStateDict load_torch_optimizer_state(const std::string& path,
                                              const std::vector<std::string>& parameters,
                                              const std::string& key) {
  return StateFileReader(path, parameters).read(key);
}

}  // namespace tessera
