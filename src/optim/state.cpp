#include <set>

#include <torch/optim/adagrad.h>

#include "optim/declarations.h"
#include "optim/master_weights.h"
#include "optim/named_values.h"
#include "optim/torch_fields.h"
#include "tessera/detail/nearest.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {

namespace {

constexpr const char* kSize = ".size";

template <class Field>
constexpr bool is_tensor_list =
    optim::is_one_of<Field, std::deque<at::Tensor>, c10::optional<std::vector<at::Tensor>>>;

// --- libtorch's states ---

void put_list(const std::string& name, const auto& list, ParamState& state) {
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i].defined()) state.tensors[name + "." + std::to_string(i)] = list[i];
  state.scalars[name + kSize] = static_cast<int64_t>(list.size());
}

template <class State>
ParamState read_state(const State& typed) {
  ParamState state;
  optim::visit_state(typed, [&state](const char* name, const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      if (field.defined()) state.tensors[name] = field;
    } else if constexpr (std::is_same_v<Field, std::deque<at::Tensor>>) {
      put_list(name, field, state);
    } else if constexpr (is_tensor_list<Field>) {
      if (field) put_list(name, *field, state);
    } else {
      state.scalars[name] = field;
    }
  });
  return state;
}

/// Reads fields of a ParamState by name and finds the names that were not read.
class StateReader {
 public:
  explicit StateReader(const ParamState& state) : state_(state) {}

  at::Tensor tensor(const std::string& name) {
    known_.insert(name);
    const auto found = state_.tensors.find(name);
    return found == state_.tensors.end() ? at::Tensor() : found->second;
  }

  std::optional<ScalarValue> scalar(const std::string& name) {
    known_.insert(name);
    const auto found = state_.scalars.find(name);
    return found == state_.scalars.end() ? std::nullopt : std::optional<ScalarValue>(found->second);
  }

  /// The tensors name.0 … name.(size-1); a missing one is undefined. Empty when there is no size.
  std::optional<std::vector<at::Tensor>> list(const std::string& name) {
    const auto size = scalar(name + kSize);
    if (!size) return std::nullopt;
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < std::get<int64_t>(*size); ++i)
      tensors.push_back(tensor(name + "." + std::to_string(i)));
    return tensors;
  }

  void check_all_taken() const {
    for (const auto& [name, value] : state_.tensors) check_taken(name);
    for (const auto& [name, value] : state_.scalars) check_taken(name);
  }

 private:
  void check_taken(const std::string& name) const {
    if (known_.count(name) == 0) {
      throw UsageError("set_state: unknown state \"" + name + "\"" +
                       (name == optim::MasterWeights::kMaster
                            ? "; it is of an optimizer of with_master_weights(), for parameters "
                              "of bfloat16 or float16; expected the same here"
                            : suggestion(name, {known_.begin(), known_.end()})));
    }
  }

  const ParamState& state_;
  std::set<std::string> known_;
};

template <class Number>
Number as(const ScalarValue& value) {
  return std::visit([](auto v) { return static_cast<Number>(v); }, value);
}

// The tensors that the optimizer's next step requires.
template <class State>
std::vector<std::string> required_tensors() {
  using namespace torch::optim;
  if constexpr (optim::is_one_of<State, AdamParamState, AdamWParamState>)
    return {"exp_avg", "exp_avg_sq"};
  else if constexpr (optim::is_one_of<State, AdagradParamState>) return {"sum"};
  else if constexpr (optim::is_one_of<State, RMSpropParamState>) return {"square_avg"};
  else if constexpr (optim::is_one_of<State, SGDParamState>) return {"momentum_buffer"};
  return {};
}

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const ParamState& state) {
  for (const auto& name : required_tensors<State>())
    if (state.tensors.count(name) == 0)
      throw UsageError("set_state: the tensor " + name + " is missing");
  StateReader reader(state);
  auto made = std::make_unique<State>();
  optim::visit_state(*made, [&reader](const char* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      field = reader.tensor(name);
    } else if constexpr (is_tensor_list<Field>) {
      if (const auto list = reader.list(name)) {
        field = Field();
        if constexpr (std::is_same_v<Field, std::deque<at::Tensor>>)
          field.assign(list->begin(), list->end());
        else field = *list;
      }
    } else if (const auto value = reader.scalar(name)) {
      field = as<Field>(*value);
    } else {
      field = 0;
    }
  });
  reader.check_all_taken();
  return made;
}

std::unique_ptr<torch::optim::OptimizerParamState> make_like_options(
    const torch::optim::OptimizerOptions& options, const ParamState& state) {
  using namespace torch::optim;
  if (typeid(options) == typeid(SGDOptions)) return make_state<SGDParamState>(state);
  if (typeid(options) == typeid(AdamOptions)) return make_state<AdamParamState>(state);
  if (typeid(options) == typeid(AdamWOptions)) return make_state<AdamWParamState>(state);
  if (typeid(options) == typeid(AdagradOptions)) return make_state<AdagradParamState>(state);
  if (typeid(options) == typeid(RMSpropOptions)) return make_state<RMSpropParamState>(state);
  if (typeid(options) == typeid(LBFGSOptions)) return make_state<LBFGSParamState>(state);
  return nullptr;
}

// --- states read through serialize ---

void put_value(const std::string& name, const c10::IValue& value, ParamState& state) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) state.tensors[name] = value.toTensor();
  } else if (value.isInt()) {
    state.scalars[name] = value.toInt();
  } else if (value.isDouble()) {
    state.scalars[name] = value.toDouble();
  } else if (value.isTensorList()) {
    put_list(name, value.toTensorVector(), state);
  } else if (!value.isNone()) {
    throw UsageError(
        "get_state: the state's field " + name + " is a " + value.tagKind() +
        ", expected a tensor, a list of tensors or a number: use declare_state with functions");
  }
}

std::optional<ParamState> read_serialized(const torch::optim::OptimizerParamState& object) {
  const auto values = optim::to_values(object);
  if (!values) return std::nullopt;
  ParamState state;
  for (const auto& [name, value] : *values) put_value(name, value, state);
  return state;
}

UsageError unreadable(const torch::optim::OptimizerParamState& object) {
  return UsageError(std::string("get_state: the state ") + typeid(object).name() +
                    " does not implement serialize(OutputArchive&), and declare_state was not "
                    "called for its optimizer");
}

void fill_serialized(const ParamState& state, torch::optim::OptimizerParamState& object) {
  optim::NamedValues values;
  StateReader reader(state);
  for (const auto& [name, value] : state.scalars) {
    if (name.ends_with(kSize)) {
      const std::string list_name = name.substr(0, name.size() - std::string(kSize).size());
      values[list_name] = c10::IValue(reader.list(list_name).value());
    } else {
      values[name] = std::visit([](auto v) { return c10::IValue(v); }, value);
    }
  }
  for (const auto& [name, tensor] : state.tensors) {
    const auto list = values.find(name.substr(0, name.rfind('.')));
    if (list == values.end() || !list->second.isTensorList()) values[name] = tensor;
  }
  try {
    optim::from_values(values, object);
  } catch (const std::exception& error) {  // not all of libtorch's errors are c10::Error
    throw UsageError(std::string("set_state: the state ") + typeid(object).name() +
                     " does not take these values: " + compat::first_line(error.what()));
  }
}

}  // namespace

StateAdapter serializing_adapter(
    std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_empty) {
  StateAdapter adapter;
  adapter.read = [](const torch::optim::OptimizerParamState& object) {
    if (auto state = read_serialized(object)) return *std::move(state);
    throw unreadable(object);
  };
  adapter.make = [make_empty = std::move(make_empty)](const ParamState& state) {
    auto made = make_empty();
    fill_serialized(state, *made);
    return made;
  };
  return adapter;
}

std::optional<ParamState> get_state(const torch::optim::Optimizer& optimizer,
                                    const at::Tensor& param) {
  if (const auto* masters = dynamic_cast<const optim::MasterWeights*>(&optimizer))
    return masters->read_state(param);
  const auto found = optimizer.state().find(compat::state_key(param));
  if (found == optimizer.state().end() || !found->second) return std::nullopt;
  const auto& object = *found->second;
  if (const auto adapter = optim::declared_adapter(optimizer)) return adapter->read(object);
  std::optional<ParamState> state;
  if (optim::with_state(object, [&state](const auto& typed) { state = read_state(typed); }))
    return state;
  state = read_serialized(object);
  if (!state) throw unreadable(object);
  return state;
}

void set_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
               const ParamState& state) {
  if (auto* masters = dynamic_cast<optim::MasterWeights*>(&optimizer))
    return masters->replace_state(param, state);
  const auto key = compat::state_key(param);
  if (const auto adapter = optim::declared_adapter(optimizer)) {
    optimizer.state()[key] = adapter->make(state);
    return;
  }
  std::unique_ptr<torch::optim::OptimizerParamState> made;
  const auto present = optimizer.state().find(key);
  if (present != optimizer.state().end() && present->second) {
    auto& object = *present->second;
    const bool known = optim::with_state(object, [&](auto& typed) {
      made = make_state<std::remove_reference_t<decltype(typed)>>(state);
    });
    if (!known) {
      fill_serialized(state, object);
      return;
    }
  } else {
    made = make_like_options(optimizer.defaults(), state);
  }
  if (!made) {
    throw UsageError(std::string("set_state: the state of optimizer ") + typeid(optimizer).name() +
                     " is of an unknown type: call declare_state for it first");
  }
  optimizer.state()[key] = std::move(made);
}

void clear_state(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  if (auto* masters = dynamic_cast<optim::MasterWeights*>(&optimizer))
    return masters->reset_state(param);
  optimizer.state().erase(compat::state_key(param));
  for (const auto& group : optimizer.param_groups()) {
    const auto* options = dynamic_cast<const torch::optim::AdagradOptions*>(&group.options());
    for (const auto& one : group.params()) {
      if (options != nullptr && one.is_same(param)) {
        auto initial = std::make_unique<torch::optim::AdagradParamState>();
        initial->sum(at::full_like(param.detach(), options->initial_accumulator_value()));
        optimizer.state()[compat::state_key(param)] = std::move(initial);
      }
    }
  }
}

bool follows_parameter(const at::Tensor& state, const at::Tensor& param) {
  return state.sizes() == param.sizes();
}

void add_param_group(torch::optim::Optimizer& optimizer,
                     const torch::optim::OptimizerParamGroup& group) {
  optimizer.add_param_group(group);
  auto& added = optimizer.param_groups().back();
  if (group.has_options()) copy_options(group, added);
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr)
    for (const auto& param : added.params()) clear_state(optimizer, param);
}

}  // namespace tessera
