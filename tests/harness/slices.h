#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/optim/state_slice.h"

namespace tessera::testing {

/// Assembles the slices of all ranks, and cuts the whole again for other ranks, as a checkpoint
/// does through files. add() may be called from several threads.
class SlicePool {
 public:
  /// Copies the slices. Over all calls, each element must be given once.
  void add(const std::vector<StateSlice>& slices) {
    std::lock_guard lock(mutex_);
    for (const auto& slice : slices) {
      auto& whole = parameters_[slice.parameter];
      if (whole.covered == 0) {
        whole.shape = slice.shape;
        whole.scalars = slice.state.scalars;
      }
      EXPECT_EQ(whole.shape, slice.shape) << slice.parameter;
      EXPECT_EQ(whole.scalars, slice.state.scalars) << slice.parameter;
      whole.covered += slice.numel;
      for (const auto& [name, tensor] : slice.state.tensors) {
        auto& [follows, into] = whole.tensors[name];
        follows = tensor.dim() > 0 && tensor.numel() == slice.numel;
        if (follows) EXPECT_EQ(tensor.dim(), 1) << slice.parameter << "." << name;
        if (!into.defined())
          into = follows ? at::empty({c10::multiply_integers(whole.shape)}, tensor.options())
                         : tensor.clone();
        if (follows) into.narrow(0, slice.begin, slice.numel).copy_(tensor);
      }
    }
  }

  /// Adds the values of the parameters, as slices of a state tensor "value".
  void add_values(const std::vector<ParameterShard>& shards) {
    std::vector<StateSlice> slices;
    for (const auto& shard : shards) {
      const auto& tensor = shard.tensor;
      const auto run = tensor.detach().as_strided({tensor.numel()}, {1}).clone();
      slices.push_back(
          {{shard.parameter, shard.shape, shard.begin, shard.numel}, {{{"value", run}}, {}}});
    }
    add(slices);
  }

  /// The slices of `shards`, of which all elements must have been added.
  std::vector<StateSlice> cut(const std::vector<ParameterShard>& shards) const {
    std::vector<StateSlice> slices;
    for (const auto& shard : shards) {
      const auto& whole = parameters_.at(shard.parameter);
      EXPECT_EQ(whole.covered, c10::multiply_integers(whole.shape)) << shard.parameter;
      auto& slice = slices.emplace_back(
          StateSlice{{shard.parameter, whole.shape, shard.begin, shard.numel}, {}});
      slice.state.scalars = whole.scalars;
      for (const auto& [name, entry] : whole.tensors) {
        slice.state.tensors[name] =
            entry.first ? entry.second.narrow(0, shard.begin, shard.numel) : entry.second;
      }
    }
    return slices;
  }

  /// Copies the values that add_values() collected into `shards`.
  void cut_values(const std::vector<ParameterShard>& shards) const {
    at::NoGradGuard no_grad;
    const auto slices = cut(shards);
    for (size_t i = 0; i < shards.size(); ++i) {
      const auto& tensor = shards[i].tensor;
      tensor.as_strided({tensor.numel()}, {1}).copy_(slices[i].state.tensors.at("value"));
    }
  }

  /// Compares every bit.
  void expect_equal(const SlicePool& other) const {
    ASSERT_EQ(parameters_.size(), other.parameters_.size());
    for (const auto& [parameter, whole] : parameters_) {
      ASSERT_TRUE(other.parameters_.count(parameter)) << parameter;
      const auto& there = other.parameters_.at(parameter);
      EXPECT_EQ(whole.covered, c10::multiply_integers(whole.shape)) << parameter;
      EXPECT_EQ(whole.covered, there.covered) << parameter;
      EXPECT_EQ(whole.shape, there.shape) << parameter;
      EXPECT_EQ(whole.scalars, there.scalars) << parameter;
      ASSERT_EQ(whole.tensors.size(), there.tensors.size()) << parameter;
      for (const auto& [name, entry] : whole.tensors) {
        EXPECT_TRUE(at::equal(entry.second, there.tensors.at(name).second))
            << parameter << "." << name;
      }
    }
  }

  bool empty() const { return parameters_.empty(); }

 private:
  struct Whole {
    std::vector<int64_t> shape;
    int64_t covered = 0;
    std::map<std::string, std::pair<bool, at::Tensor>> tensors;  // true: cut as the parameter is
    std::map<std::string, ScalarValue> scalars;
  };
  std::map<std::string, Whole> parameters_;
  std::mutex mutex_;
};

}  // namespace tessera::testing
