#pragma once

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

namespace detail {

using CheckpointBody =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
std::vector<at::Tensor> checkpoint(CheckpointBody body, std::vector<at::Tensor> inputs);

template <class F, size_t... I>
auto call_with(F& function, const std::vector<at::Tensor>& inputs, std::index_sequence<I...>) {
  return function(inputs[I]...);
}

inline std::vector<at::Tensor> to_list(at::Tensor tensor) { return {std::move(tensor)}; }
inline std::vector<at::Tensor> to_list(std::vector<at::Tensor> tensors) { return tensors; }
template <class... Tensors>
std::vector<at::Tensor> to_list(std::tuple<Tensors...> tensors) {
  return std::apply([](auto&... each) { return std::vector<at::Tensor>{each...}; }, tensors);
}

template <class Result, size_t... I>
Result from_list(const std::vector<at::Tensor>& list, std::index_sequence<I...>) {
  return Result{list[I]...};
}

}  // namespace detail

/// Activation checkpointing (Chen et al., 2016): runs function(inputs…) without saving the tensors
/// that its backward needs, and runs it again during backward. Uses less memory and about a third
/// more time. The values are the same: the second run uses the random numbers (dropout) and the
/// autocast settings of the first.
///
///   x = tessera::checkpoint([&](at::Tensor h) { return block(h); }, x);
///
/// `inputs` are tensors; the function returns a tensor, a tuple of tensors or a vector of tensors.
/// It must compute the same values both times. It may use parameters, which get their gradients. If
/// no input requires a gradient and none of them is trainable, the results require none either. It
/// works inside sharded and data-parallel models, which treat the inner backward pass as part of
/// the outer one. UsageError in a backward with create_graph, and in autograd::grad() or a backward
/// with a list of inputs: both would lose or add gradients. Objects that the function captures by
/// reference must live until backward. Local; calls may be nested.
template <class F, class... Inputs>
auto checkpoint(F function, const Inputs&... inputs) {
  static_assert((std::is_convertible_v<const Inputs&, at::Tensor> && ...),
                "inputs of checkpoint must be tensors");
  using Result = std::decay_t<decltype(function(at::Tensor(inputs)...))>;
  auto outputs = detail::checkpoint(
      [function = std::move(function)](const std::vector<at::Tensor>& list) mutable {
        return detail::to_list(
            detail::call_with(function, list, std::index_sequence_for<Inputs...>()));
      },
      {inputs...});
  if constexpr (std::is_same_v<Result, at::Tensor>) return outputs[0];
  else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) return outputs;
  else
    return detail::from_list<Result>(outputs,
                                     std::make_index_sequence<std::tuple_size_v<Result>>());
}

}  // namespace tessera
#pragma GCC visibility pop
