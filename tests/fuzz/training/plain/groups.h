#pragma once

#include <memory>
#include <vector>

#include "fuzz/training/plain/training.h"
#include "tessera/local_sgd.h"

namespace tessera::fuzz {

/// Plain training in the groups of a case, one where the wrapper has no "local_sgd". Every few
/// steps the outer optimizer of LocalSgd is computed, by its definition, over whole parameters.
class PlainGroups {
 public:
  explicit PlainGroups(const Case& which);

  /// As PlainTraining::play(), with the results, for the ranks of all groups.
  std::vector<Record> play(const Item& event, int number);

 private:
  using Tensors = std::vector<at::Tensor>;

  Tensors values(size_t group) const;
  void write(size_t group, const Tensors& values);
  void synchronize();
  void update_anchor(const Tensors& mean);
  Tensors mean(const std::vector<Tensors>& of_groups) const;

  LocalSgdOptions options_;
  std::vector<std::unique_ptr<PlainTraining>> groups_;
  int64_t steps_ = 0;
  Tensors anchor_, momentum_;
  Tensors pending_;              ///< A mean that is to be applied later.
  std::vector<Tensors> starts_;  ///< Parameters of each group when it was taken.
};

}  // namespace tessera::fuzz
