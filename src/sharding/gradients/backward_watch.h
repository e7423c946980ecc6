#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/types.h>

namespace tessera::sharding {

/// Reports the gradients that backwards produce for a list of parameters. `arrived` runs in the
/// thread that accumulated the gradient, `ended` in the thread that called backward.
///
/// [Note: one backward] A backward begins with the first gradient that arrives (or with begin())
/// and ends with the engine's final callback. The callback owns a token. A backward that throws
/// destroys the callback before it has run; the token then reports `ended(false)`. A backward
/// inside a backward (activation checkpointing) is part of the outer one: see ReentrantScope.
class BackwardWatch {
 public:
  struct Callbacks {
    std::function<void()> began;
    /// `.grad` of the parameter is complete for this graph. `computed` is the tensor that autograd
    /// stored there or added to it.
    std::function<void(size_t parameter, const at::Tensor& computed)> arrived;
    std::function<void(bool complete)> ended;  ///< Not complete: the backward has thrown.
    /// On: `began` runs before autograd changes any `.grad` of the list; costs one more hook a
    /// parameter. Off: the first gradient may be complete already.
    bool begin_before_first = false;
  };

  /// All `parameters` are trainable. Local.
  BackwardWatch(const std::vector<at::Tensor>& parameters, Callbacks callbacks);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  /// The first of the parameters whose gradients are no longer reported, because autograd has
  /// replaced the node that accumulates them (module->to(dtype) does that); nullopt if there is
  /// none. Local.
  std::optional<size_t> lost_parameter() const;

  /// Reports `began` now, from within a backward, unless it has been reported.
  void begin();
  bool running() const;

  /// True if `arrived` is the only one that autograd tells of gradients of `parameter`.
  static bool is_alone(const at::Tensor& parameter);

  /// True if this thread is evaluating a graph.
  static bool in_backward();

  /// Lives around a backward that is called from within another: watches that began inside it end
  /// with the outer one.
  class ReentrantScope {
   public:
    ReentrantScope();
    ~ReentrantScope();
    ReentrantScope(const ReentrantScope&) = delete;
  };

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::sharding
