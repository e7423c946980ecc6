#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/train/metric.h"
#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// The module is in evaluation mode while alive. Then each of its modules has its own mode again:
/// a program may keep one, such as a frozen batch norm, in evaluation mode for the whole training.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) {
    for (const auto& each : module.modules()) were_.emplace_back(each, each->is_training());
    module.eval();
  }
  ~EvaluationMode() {
    for (const auto& [module, was] : were_) module->train(was);  // each before its children
  }
  EvaluationMode(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> were_;
};

struct EvaluateOptions {
  int64_t max_samples = 0;  ///< the first ones; 0: all
  int64_t batch = 8;        ///< samples of a rank in one forward
  const std::vector<Metric>& metrics;
  bool predictions = false;  ///< computed also without metrics, for `on_batch`
};

/// The means over the samples of every figure of the model's losses ("loss" is the sum of the
/// losses), and the figures of the metrics, which replace figures of the same name. The module is
/// in evaluation mode during the call. The result is bit-identical for any number of ranks.
/// `on_round` is called before each forward. `on_batch` is called with each batch of this rank and
/// the number of its first sample, if there are predictions. Collective.
std::map<std::string, double> evaluate(
    ModelWrapper& model, const Dataset& data, const EvaluateOptions& options,
    const std::function<void()>& on_round,
    const std::function<void(int64_t first_sample, const Evaluated& batch)>& on_batch);

}  // namespace tessera::train
