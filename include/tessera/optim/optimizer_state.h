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

// The state and options of any torch::optim optimizer by name, whichever libtorch keeps them: 1.13
// keys state by address as text, 2.x by pointer, and 1.13 drops options when it loads. Everything
// is local to one rank.
//
// Names are those of PyTorch: SGD momentum_buffer; Adam, AdamW step, exp_avg, exp_avg_sq,
// max_exp_avg_sq; Adagrad step, sum; RMSprop step, square_avg, momentum_buffer, grad_avg; LBFGS
// func_evals, n_iter, t, prev_loss, d, H_diag, prev_flat_grad, and its lists one tensor an entry
// (old_dirs.0, old_dirs.1, …, old_stps.0, ro.0, al.0).

namespace tessera {

using ScalarValue = std::variant<int64_t, double>;

/// The state of one parameter. Undefined tensors do not appear.
struct ParamState {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, ScalarValue> scalars;
};

/// The state of `param`, or none when the optimizer has none yet (never stepped). Tensors are the
/// live ones for the optimizers named above and for types declared with functions; copies for types
/// read through `serialize`. LBFGS keeps its state under its first parameter. Throws UsageError for
/// a type that can be read in no way.
std::optional<ParamState> get_state(const torch::optim::Optimizer& optimizer,
                                    const at::Tensor& param);

/// Replaces the state of `param`; tensors are taken over, not copied. Throws UsageError on a name
/// that the state does not have, a missing tensor that it needs, or a user-defined state type that
/// is not known: see `declare_state`.
void set_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
               const ParamState& state);

/// Back to never stepped. (Adagrad, which wants state from the start, gets its initial one.)
void clear_state(torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// Whether a state tensor goes element by element with the parameter (same sizes), so that it is
/// sharded as the parameter is; otherwise it is kept whole.
bool follows_parameter(const at::Tensor& state, const at::Tensor& param);

/// How to read and make the state of a user-defined optimizer.
struct StateAdapter {
  std::function<ParamState(const torch::optim::OptimizerParamState&)> read;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const ParamState&)> make;
};

/// Declares the adapter for an optimizer class, for the whole process. Thread-safe; the last one
/// stands.
void declare_state(std::type_index optimizer, StateAdapter adapter);

/// The adapter of a state type that implements both `serialize` functions; reads and makes copies,
/// in memory.
StateAdapter serializing_adapter(
    std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_empty);

/// Without a declaration, state of a user-defined type can be read once the optimizer has stepped,
/// and be set only in an optimizer that has some. With it, always.
template <class Opt, class State>
void declare_state() {
  declare_state(typeid(Opt), serializing_adapter([] { return std::make_unique<State>(); }));
}

/// Options by name. Those that are unset (LBFGS's max_eval, line_search_fn) do not appear.
/// User-defined options are read through their `serialize`; without one, only `lr` through get_lr.
OptionMap get_options(const torch::optim::OptimizerOptions& options);

/// Sets the options named in `values` and leaves the others. Throws UsageError, and changes
/// nothing, on an unknown name (with the nearest) or a value of another type.
void set_options(torch::optim::OptimizerOptions& options, const OptionMap& values);

/// Makes `to` equal to `from`. Throws UsageError when the types differ, or for a user-defined type
/// without `serialize`.
void copy_options(const torch::optim::OptimizerOptions& from, torch::optim::OptimizerOptions& to);

/// Gives the group a copy of the other's options, for any type; references to the group's options
/// end.
void copy_options(const torch::optim::OptimizerParamGroup& from,
                  torch::optim::OptimizerParamGroup& to);

/// `optimizer.add_param_group`, but a group's own options stay exactly as given (libtorch from 2.9
/// on takes the defaults where they equal a freshly made options object), and Adagrad gets the
/// state that it wants.
void add_param_group(torch::optim::Optimizer& optimizer,
                     const torch::optim::OptimizerParamGroup& group);

/// Marker for optimizers whose update of an element uses only that element's parameter, gradient
/// and state.
class ElementWise {
 public:
  virtual ~ElementWise() = default;
};

/// Whether parameters may be cut anywhere: true for SGD, Adam, AdamW, Adagrad, RMSprop, the fused
/// ones, classes that inherit ElementWise and classes declared so. False for LBFGS and every other
/// class, also for classes derived from those.
bool is_element_wise(const torch::optim::Optimizer& optimizer);

/// Declares a class element-wise, for the whole process. Thread-safe.
void declare_element_wise(std::type_index optimizer);

template <class Opt>
void declare_element_wise() {
  declare_element_wise(typeid(Opt));
}

}  // namespace tessera
