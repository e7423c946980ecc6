#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/optim/master_weights.h"

namespace tessera::optim {

/// The optimizer of with_master_weights(). Its groups have the parameters. Parameter i of group g
/// of the inner optimizer is the float32 copy of parameter i of group g; or that parameter itself,
/// if it is not of a 16-bit dtype.
class MasterWeights : public torch::optim::Optimizer {
 public:
  static constexpr const char* kMaster = "master";  ///< The copy's name in a parameter's state.

  MasterWeights(std::vector<torch::optim::OptimizerParamGroup> groups,
                const OptimizerFactory& factory);

  torch::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  const torch::optim::Optimizer& inner() const { return *inner_; }
  // What get_state(), set_state() and clear_state() do.
  std::optional<ParamState> read_state(const at::Tensor& param) const;
  void replace_state(const at::Tensor& param, const ParamState& state);
  void reset_state(const at::Tensor& param);

 private:
  struct Place {
    size_t group, index;
  };

  /// Makes the copies of parameters that were added since the last call.
  void extend();
  std::optional<Place> find(const at::Tensor& param) const;
  /// As find(). Throws UsageError for a parameter of no group.
  Place place_of(const at::Tensor& param);
  at::Tensor& copy_at(Place place);
  void use_copy(Place place, at::Tensor copy);
  template <class Visit>
  void visit_copies(const Visit& visit);

  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::vector<std::vector<char>> stepped_;  ///< By group and index.
};

}  // namespace tessera::optim
