#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <variant>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "tessera/config/option_map.h"

// The state and the options of any torch::optim optimizer by name, for all supported libtorch
// versions: 1.13 keys state by address as text, 2.x by pointer, and 1.13 drops options when it
// loads. All functions are local.
//
// Names are those of PyTorch: SGD momentum_buffer; Adam, AdamW step, exp_avg, exp_avg_sq,
// max_exp_avg_sq; Adagrad step, sum; RMSprop step, square_avg, momentum_buffer, grad_avg; LBFGS
// func_evals, n_iter, t, prev_loss, d, H_diag, prev_flat_grad, and its lists as one tensor per item
// (old_dirs.0, old_dirs.1, …, old_stps.0, ro.0, al.0).

#pragma GCC visibility push(default)
namespace tessera {

using ScalarValue = std::variant<int64_t, double>;

/// The state of one parameter. Undefined tensors are omitted.
struct ParamState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, ScalarValue> scalars;
};

/// The state of `param`; no value when the optimizer has none yet (it never stepped). The tensors
/// are the optimizer's own for the optimizers named above and for types declared with functions,
/// and copies for types read through `serialize`. LBFGS keeps its state under its first parameter.
/// Throws UsageError for a type that cannot be read.
std::optional<ParamState> get_state(const torch::optim::Optimizer& optimizer,
                                    const at::Tensor& param);

/// Replaces the state of `param`. The tensors are not copied. Throws UsageError for a name that the
/// state does not have, for a missing tensor, and for an unknown user-defined state type (see
/// `declare_state`).
void set_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
               const ParamState& state);

/// Resets the state of `param` to its state before the first step. (Adagrad, which needs state from
/// the start, gets its initial state.)
void clear_state(torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// True if a state tensor has the same sizes as its parameter, so that it is sharded like the
/// parameter. All other state tensors are kept whole.
bool follows_parameter(const at::Tensor& state, const at::Tensor& param);

/// Functions that read and construct the state of a user-defined optimizer.
struct StateAdapter {
  std::function<ParamState(const torch::optim::OptimizerParamState&)> read;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const ParamState&)> make;
};

/// Declares the adapter of an optimizer class for the whole process; replaces an earlier one.
/// Thread-safe.
void declare_state(std::type_index optimizer, StateAdapter adapter);

/// The adapter of a state type that implements both `serialize` functions. Works on copies in
/// memory.
StateAdapter serializing_adapter(
    std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_empty);

/// Declares that `State` implements both `serialize` functions. Without a declaration, state of a
/// user-defined type can be read only after the optimizer has stepped, and be set only in an
/// optimizer that has state already.
template <class Opt, class State>
void declare_state() {
  declare_state(typeid(Opt), serializing_adapter([] { return std::make_unique<State>(); }));
}

/// Options by name. Unset options (LBFGS's max_eval, line_search_fn) are omitted. User-defined
/// options are read through their `serialize`; without one, only `lr` is read, through get_lr.
OptionMap get_options(const torch::optim::OptimizerOptions& options);

/// Sets the options named in `values` and leaves the others unchanged. Throws UsageError, and
/// changes nothing, for an unknown name (with the nearest known one), a value of another type or an
/// impossible value.
void set_options(torch::optim::OptimizerOptions& options, const OptionMap& values);

/// Makes `to` equal to `from`. Throws UsageError when the types differ, or for a user-defined type
/// without `serialize`.
void copy_options(const torch::optim::OptimizerOptions& from, torch::optim::OptimizerOptions& to);

/// Replaces the options of group `to` by a copy of `from`'s, for any type. Invalidates references
/// to `to`'s options.
void copy_options(const torch::optim::OptimizerParamGroup& from,
                  torch::optim::OptimizerParamGroup& to);

/// As `optimizer.add_param_group`, but the group's own options stay exactly as given (libtorch 2.9
/// and later replaces those that equal a new options object by the defaults), and Adagrad gets its
/// initial state.
void add_param_group(torch::optim::Optimizer& optimizer,
                     const torch::optim::OptimizerParamGroup& group);

/// Marker for optimizers whose update of an element uses only that element's parameter, gradient
/// and state.
class ElementWise {
 public:
  virtual ~ElementWise() = default;
};

/// True if parameters may be split at any element: true for SGD, Adam, AdamW, Adagrad, RMSprop, the
/// fused optimizers, classes that inherit ElementWise and classes declared element-wise. False for
/// LBFGS and every other class, also for classes derived from those listed by name.
bool is_element_wise(const torch::optim::Optimizer& optimizer);

/// Declares a class element-wise for the whole process. Thread-safe.
void declare_element_wise(std::type_index optimizer);

template <class Opt>
void declare_element_wise() {
  declare_element_wise(typeid(Opt));
}

}  // namespace tessera
#pragma GCC visibility pop
