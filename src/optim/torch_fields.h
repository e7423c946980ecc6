#pragma once

#include <type_traits>
#include <typeinfo>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tessera/config/option_reader.h"

// The fields of libtorch's option and state structs, each named once. `visit` is called for each
// field with its name and a reference to it (const where the struct is const).

namespace tessera::optim {

template <class T, class... Candidates>
inline constexpr bool is_one_of = (std::is_same_v<std::remove_const_t<T>, Candidates> || ...);

/// The options of libtorch's optimizers: name, field, meaning, range.
template <class Options, class Visit>
void visit_options(Options& o, Visit&& visit) {
  using namespace torch::optim;
  visit("lr", o.lr(), "learning rate", kNotNegative);
  if constexpr (is_one_of<Options, SGDOptions>) {
    visit("momentum", o.momentum(), "factor of the momentum buffer; 0: none", kNotNegative);
    visit("dampening", o.dampening(), "1 - dampening multiplies the gradient added to it", Range{});
    visit("nesterov", o.nesterov(), "Nesterov momentum", Range{});
  } else if constexpr (is_one_of<Options, AdamOptions, AdamWOptions>) {
    visit("betas", o.betas(), "decay of the averages of the gradient and of its square",
          kProbability);
    visit("eps", o.eps(), "added to the denominator", kNotNegative);
    visit("amsgrad", o.amsgrad(), "divide by the largest average of squares so far", Range{});
  } else if constexpr (is_one_of<Options, AdagradOptions>) {
    visit("lr_decay", o.lr_decay(), "decay of the learning rate", kNotNegative);
    visit("initial_accumulator_value", o.initial_accumulator_value(),
          "initial sum of squared gradients", kNotNegative);
    visit("eps", o.eps(), "added to the denominator", kNotNegative);
  } else if constexpr (is_one_of<Options, RMSpropOptions>) {
    visit("alpha", o.alpha(), "decay of the average of squared gradients", kNotNegative);
    visit("eps", o.eps(), "added to the denominator", kNotNegative);
    visit("momentum", o.momentum(), "factor of the momentum buffer; 0: none", kNotNegative);
    visit("centered", o.centered(), "divide by the estimated standard deviation", Range{});
  } else {
    static_assert(is_one_of<Options, LBFGSOptions>);
    visit("max_iter", o.max_iter(), "iterations of one step", kAtLeastOne);
    visit("max_eval", o.max_eval(), "evaluations of the loss in one step; null: 5/4 max_iter",
          kAtLeastOne);
    visit("tolerance_grad", o.tolerance_grad(), "stop below this gradient", kNotNegative);
    visit("tolerance_change", o.tolerance_change(), "stop below this change", kNotNegative);
    visit("history_size", o.history_size(), "updates that are kept", kAtLeastOne);
    visit("line_search_fn", o.line_search_fn(), "line search; null: none", Range{});
  }
  if constexpr (!is_one_of<Options, LBFGSOptions>)
    visit("weight_decay", o.weight_decay(), "weight decay", kNotNegative);
}

template <class State, class Visit>
void visit_state(State& s, Visit&& visit) {
  using namespace torch::optim;
  if constexpr (is_one_of<State, SGDParamState>) {
    visit("momentum_buffer", s.momentum_buffer());
  } else if constexpr (is_one_of<State, AdamParamState, AdamWParamState>) {
    visit("step", s.step());
    visit("exp_avg", s.exp_avg());
    visit("exp_avg_sq", s.exp_avg_sq());
    visit("max_exp_avg_sq", s.max_exp_avg_sq());
  } else if constexpr (is_one_of<State, AdagradParamState>) {
    visit("step", s.step());
    visit("sum", s.sum());
  } else if constexpr (is_one_of<State, RMSpropParamState>) {
    visit("step", s.step());
    visit("square_avg", s.square_avg());
    visit("momentum_buffer", s.momentum_buffer());
    visit("grad_avg", s.grad_avg());
  } else {
    static_assert(is_one_of<State, LBFGSParamState>);
    visit("func_evals", s.func_evals());
    visit("n_iter", s.n_iter());
    visit("t", s.t());
    visit("prev_loss", s.prev_loss());
    visit("d", s.d());
    visit("H_diag", s.H_diag());
    visit("prev_flat_grad", s.prev_flat_grad());
    visit("old_dirs", s.old_dirs());
    visit("old_stps", s.old_stps());
    visit("ro", s.ro());
    visit("al", s.al());
  }
}

namespace detail {

template <class Derived, class Base, class Call>
bool call_if(Base& object, Call& call) {
  using Target = std::conditional_t<std::is_const_v<Base>, const Derived, Derived>;
  return typeid(object) == typeid(Derived) && (call(static_cast<Target&>(object)), true);
}

}  // namespace detail

/// Calls `call` with the options as their own type. Returns false for a type that is not one of
/// libtorch's.
template <class Base, class Call>
bool with_options(Base& options, Call call) {
  using namespace torch::optim;
  using namespace detail;
  return call_if<SGDOptions>(options, call) || call_if<AdamOptions>(options, call) ||
         call_if<AdamWOptions>(options, call) || call_if<AdagradOptions>(options, call) ||
         call_if<RMSpropOptions>(options, call) || call_if<LBFGSOptions>(options, call);
}

/// The same for the state of one parameter.
template <class Base, class Call>
bool with_state(Base& state, Call call) {
  using namespace torch::optim;
  using namespace detail;
  return call_if<SGDParamState>(state, call) || call_if<AdamParamState>(state, call) ||
         call_if<AdamWParamState>(state, call) || call_if<AdagradParamState>(state, call) ||
         call_if<RMSpropParamState>(state, call) || call_if<LBFGSParamState>(state, call);
}

}  // namespace tessera::optim
