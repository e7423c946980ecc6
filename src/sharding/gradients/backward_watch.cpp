#include "sharding/gradients/backward_watch.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera::sharding {
namespace {

// A shared_ptr or an intrusive_ptr to a node, depending on the libtorch version.
using Accumulator =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

thread_local int reentrant_depth = 0;
thread_local std::vector<std::weak_ptr<BackwardWatch::State>> waiting_for_the_outer;

/// The node that adds to `parameter.grad()`. A frozen parameter gets one for later, when it is
/// trainable again.
Accumulator accumulator_of(const at::Tensor& parameter) {
  const bool trainable = parameter.requires_grad();
  parameter.set_requires_grad(true);
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  parameter.set_requires_grad(trainable);
  return accumulator;
}

}  // namespace

class BackwardWatch::State : public std::enable_shared_from_this<State> {
 public:
  explicit State(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  void attach(const std::vector<at::Tensor>& parameters) {
    class Hook : public torch::autograd::FunctionPostHook {
     public:
      Hook(std::weak_ptr<State> state, size_t parameter)
          : state_(std::move(state)), parameter_(parameter) {}
      torch::autograd::variable_list operator()(
          const torch::autograd::variable_list& outputs,
          const torch::autograd::variable_list& inputs) override {
        if (auto state = state_.lock()) {
          state->begin();
          state->callbacks_.arrived(parameter_, inputs.empty() ? at::Tensor() : inputs[0]);
        }
        return outputs;
      }

     private:
      std::weak_ptr<State> state_;
      size_t parameter_;
    };
    class BeforeFirst : public torch::autograd::FunctionPreHook {
     public:
      explicit BeforeFirst(std::weak_ptr<State> state) : state_(std::move(state)) {}
      torch::autograd::variable_list operator()(
          const torch::autograd::variable_list& gradients) override {
        if (auto state = state_.lock()) state->begin();
        return gradients;
      }

     private:
      std::weak_ptr<State> state_;
    };
    parameters_ = parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto accumulator = accumulator_of(parameters[i]);
      const auto key = accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), i));
      torch::autograd::FunctionPreHook* before = nullptr;
      if (callbacks_.begin_before_first) {
        auto hook = std::make_unique<BeforeFirst>(weak_from_this());
        before = hook.get();
        accumulator->add_pre_hook(std::move(hook));
      }
      hooks_.push_back({std::move(accumulator), key, before});
    }
  }

  std::optional<size_t> lost_parameter() const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto now = torch::autograd::impl::try_get_grad_accumulator(parameters_[i]);
      if (now.get() != hooks_[i].accumulator.get()) return i;
    }
    return std::nullopt;
  }

  void detach() {
    for (auto& [accumulator, key, before] : hooks_) {
      accumulator->del_post_hook(key);
      auto& pre = accumulator->pre_hooks();
      pre.erase(
          std::remove_if(pre.begin(), pre.end(),
                         [before = before](const auto& hook) { return hook.get() == before; }),
          pre.end());
    }
    hooks_.clear();
  }

  void begin() {
    if (running_) return;
    const std::lock_guard lock(begin_mutex_);  // another thread of this backward may run this too
    if (running_) return;
    if (callbacks_.began) callbacks_.began();
    running_ = true;
    queue_end();
  }

  void queue_end() {
    struct Token {
      std::weak_ptr<State> state;
      bool over = false;
      ~Token() {
        const auto owner = state.lock();
        if (over || !owner) return;
        owner->running_ = false;
        owner->callbacks_.ended(false);
      }
    };
    auto token = std::make_shared<Token>();
    token->state = weak_from_this();
    torch::autograd::Engine::get_default_engine().queue_callback([token] {
      token->over = true;
      if (const auto owner = token->state.lock()) owner->end();
    });
  }

  std::atomic<bool> running_ = false;

 private:
  struct Hooks {
    Accumulator accumulator;
    uintptr_t key;
    const torch::autograd::FunctionPreHook* before;  // null without begin_before_first
  };

  void end() {
    if (!running_) return;
    if (reentrant_depth > 0) {
      waiting_for_the_outer.push_back(weak_from_this());
      return;
    }
    running_ = false;
    callbacks_.ended(true);
  }

  Callbacks callbacks_;
  std::mutex begin_mutex_;
  std::vector<at::Tensor> parameters_;
  std::vector<Hooks> hooks_;
};

BackwardWatch::BackwardWatch(const std::vector<at::Tensor>& parameters, Callbacks callbacks)
    : state_(std::make_shared<State>(std::move(callbacks))) {
  state_->attach(parameters);
}

BackwardWatch::~BackwardWatch() { state_->detach(); }

std::optional<size_t> BackwardWatch::lost_parameter() const { return state_->lost_parameter(); }
void BackwardWatch::begin() { state_->begin(); }
bool BackwardWatch::running() const { return state_->running_; }
bool BackwardWatch::is_alone(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator && accumulator->post_hooks().size() == 1;
}

bool BackwardWatch::in_backward() {
  return torch::autograd::get_current_graph_task_exec_info() != nullptr;
}

BackwardWatch::ReentrantScope::ReentrantScope() { ++reentrant_depth; }

BackwardWatch::ReentrantScope::~ReentrantScope() {
  if (--reentrant_depth > 0) return;
  for (auto& waiting : std::exchange(waiting_for_the_outer, {})) {
    const auto state = waiting.lock();
    if (state && state->running_) state->queue_end();
  }
}

}  // namespace tessera::sharding
