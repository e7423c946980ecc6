#pragma once

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/optim.h"

// Optimizers and comparisons of trained weights.

namespace tessera::testing {

inline OptimizerFactory adamw_factory() {
  return default_optimizers().factory("AdamW", {{"lr", 0.02}});
}

/// The optimizer that adamw_factory() makes, over `parameters` in one group.
inline std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<at::Tensor>& parameters) {
  return adamw_factory()({torch::optim::OptimizerParamGroup(parameters)});
}

/// Makes `.grad` of all `parameters` undefined.
inline void clear_gradients(const std::vector<at::Tensor>& parameters) {
  for (auto parameter : parameters) parameter.mutable_grad() = at::Tensor();
}

/// Every bit of every parameter.
template <class Net>
void expect_same_weights(const Net& a, const Net& b) {
  for (const auto& item : a->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
}

inline void expect_close(const std::vector<at::Tensor>& actual,
                         const std::vector<at::Tensor>& expected, const std::string& where) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-4, 1e-6))
        << where << ", tensor " << i << ", gap " << (actual[i] - expected[i]).abs().max();
}

}  // namespace tessera::testing
