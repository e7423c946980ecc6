#pragma once

#include <type_traits>
#include <typeinfo>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

// The fields of libtorch's option and state structs, each named once. `visit(name, field)` is
// called for each, with a reference to the field (const where the struct is).

namespace tessera::optim {

template <class T, class... Candidates>
inline constexpr bool is_one_of = (std::is_same_v<std::remove_const_t<T>, Candidates> || ...);

template <class Options, class Visit>
void visit_options(Options& o, Visit&& visit) {
  using namespace torch::optim;
  visit("lr", o.lr());
  if constexpr (is_one_of<Options, SGDOptions>) {
    visit("momentum", o.momentum());
    visit("dampening", o.dampening());
    visit("nesterov", o.nesterov());
  } else if constexpr (is_one_of<Options, AdamOptions, AdamWOptions>) {
    visit("betas", o.betas());
    visit("eps", o.eps());
    visit("amsgrad", o.amsgrad());
  } else if constexpr (is_one_of<Options, AdagradOptions>) {
    visit("lr_decay", o.lr_decay());
    visit("initial_accumulator_value", o.initial_accumulator_value());
    visit("eps", o.eps());
  } else if constexpr (is_one_of<Options, RMSpropOptions>) {
    visit("alpha", o.alpha());
    visit("eps", o.eps());
    visit("momentum", o.momentum());
    visit("centered", o.centered());
  } else {
    static_assert(is_one_of<Options, LBFGSOptions>);
    visit("max_iter", o.max_iter());
    visit("max_eval", o.max_eval());
    visit("tolerance_grad", o.tolerance_grad());
    visit("tolerance_change", o.tolerance_change());
    visit("history_size", o.history_size());
    visit("line_search_fn", o.line_search_fn());
  }
  if constexpr (!is_one_of<Options, LBFGSOptions>) {
    visit("weight_decay", o.weight_decay());
  }
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

/// Calls `call` with the options as their own type; false for a type that is not libtorch's.
template <class Base, class Call>
bool with_options(Base& options, Call call) {
  using namespace torch::optim;
  using namespace detail;
  return call_if<SGDOptions>(options, call) || call_if<AdamOptions>(options, call) ||
         call_if<AdamWOptions>(options, call) || call_if<AdagradOptions>(options, call) ||
         call_if<RMSpropOptions>(options, call) || call_if<LBFGSOptions>(options, call);
}

/// The same for states.
template <class Base, class Call>
bool with_state(Base& state, Call call) {
  using namespace torch::optim;
  using namespace detail;
  return call_if<SGDParamState>(state, call) || call_if<AdamParamState>(state, call) ||
         call_if<AdamWParamState>(state, call) || call_if<AdagradParamState>(state, call) ||
         call_if<RMSpropParamState>(state, call) || call_if<LBFGSParamState>(state, call);
}

}  // namespace tessera::optim
