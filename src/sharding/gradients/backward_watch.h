#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/torch.h>

namespace tessera::sharding {

/// Tells what a backward does to a list of parameters. `arrived` runs in the thread that
/// accumulated the gradient, `end` in the one that called backward.
///
/// [Note: one backward] A backward begins with the first gradient that arrives (or with begin())
/// and ends with the engine's final callback. The callback owns a token; a backward that throws
/// destroys it unused, which is told as `abandoned`, and the next one starts clean. A backward
/// inside a backward (activation checkpointing) is part of the outer one: see ReentrantScope.
class BackwardWatch {
 public:
  struct Callbacks {
    std::function<void()> began;
    /// `.grad` of the parameter is complete for this graph; `computed` is what was put there, or
    /// added to it.
    std::function<void(size_t parameter, const at::Tensor& computed)> arrived;
    std::function<void()> ended;
    std::function<void()> abandoned;
  };

  /// `parameters`: all trainable. Local.
  BackwardWatch(const std::vector<at::Tensor>& parameters, Callbacks callbacks);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  /// From within a backward: it has begun, whatever gradient comes first.
  void begin();
  bool running() const;

  /// Whether this thread is evaluating a graph.
  static bool in_backward();

  /// Around a backward that is called from within one: watches that began inside end with the outer
  /// one.
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
