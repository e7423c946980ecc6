#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/state_slice.h"

// The optimizer state of Python's torch.optim, whose state_dict() numbers the parameters instead of
// naming them. All functions are local.

#pragma GCC visibility push(default)
namespace tessera {

/// A file of torch.save with the state of an optimizer, {"state": {0: {…}, …}, "param_groups":
/// […]}, opened for reading. `load` and `load_slices` read the tensors and keep all bits. Steps
/// become integers.
class TorchOptimizerStateFile {
 public:
  /// `key` names the state's dict as in TorchFile; empty: the file's own dict, or the only dict in
  /// it that has this form. Throws UsageError with the file for an option that changes the update
  /// and that the C++ optimizers do not have (maximize), and as TorchFile does. Options that do not
  /// change the update are left out: foreach, fused, capturable, differentiable, initial_lr.
  explicit TorchOptimizerStateFile(const std::string& path, const std::string& key = "");
  ~TorchOptimizerStateFile();
  TorchOptimizerStateFile(TorchOptimizerStateFile&&) noexcept;
  TorchOptimizerStateFile& operator=(TorchOptimizerStateFile&&) noexcept;

  struct Group {
    size_t parameters = 0;  ///< their number
    OptionMap options = {};
    /// Adam and AdamW from PyTorch 2.7 on: true if the decay is that of AdamW.
    std::optional<bool> decoupled_weight_decay = std::nullopt;
  };
  const std::vector<Group>& groups() const;

  /// `parameters`: the names of the parameters in the order in which Python's optimizer got them,
  /// usually the order of model.parameters() and named_parameters(). If the groups have
  /// "param_names", these are used instead. Throws UsageError for another number of names.
  OptimizerStateDict load(const std::vector<std::string>& parameters) const;
  /// The state of parts of the parameters, one slice for each of `ranges`, without options. Reads
  /// only their elements of tensors that have the parameter's shape, if both are stored in
  /// row-major order; all other tensors are read whole. A parameter without state gets an empty
  /// slice. Throws UsageError for a parameter that is not in `parameters`, and for a tensor with as
  /// many elements as its parameter and another shape.
  std::vector<StateSlice> load_slices(const std::vector<std::string>& parameters,
                                      const std::vector<ElementRange>& ranges) const;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// TorchOptimizerStateFile(path, key).load(parameters).
OptimizerStateDict load_torch_optimizer_state(const std::string& path,
                                              const std::vector<std::string>& parameters,
                                              const std::string& key = "");

/// Writes `dict` in that form, for load_state_dict() of SGD, Adam, AdamW, Adagrad or RMSprop of
/// Python's torch.optim. Parameters are numbered in the order of the groups, so Python's optimizer
/// must have the same groups. Options of Python's optimizers that `dict` does not have get
/// PyTorch's defaults. Throws UsageError for LBFGS, whose state has lists of tensors, and as
/// TorchFileWriter does.
void save_torch_optimizer_state(const OptimizerStateDict& dict, const std::string& path);

}  // namespace tessera
#pragma GCC visibility pop
