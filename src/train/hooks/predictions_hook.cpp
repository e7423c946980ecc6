#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/resolved.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tessera/step/agreement.h"
#include "tessera/train/model_wrapper.h"
#include "train/hooks/hooks.h"

namespace tessera::train {
namespace {

/// The rows that one rank has of a tensor.
class Rows {
 public:
  void add(const at::Tensor& rows) {
    if (!rows.defined()) return;
    const at::Tensor copy = detail::resolved(rows.detach()).to(at::kCPU).clone();
    if (!parts_.empty() && (parts_[0].sizes().slice(1) != copy.sizes().slice(1)))
      throw UsageError(
          "predictions: batches of an evaluation have rows of different shapes, which "
          "one tensor cannot hold; expected equal shapes");
    parts_.push_back(copy);
  }
  bool empty() const { return parts_.empty(); }
  void clear() { parts_.clear(); }

  /// On rank 0 the rows of all ranks, first rank 0's; undefined elsewhere. Collective.
  at::Tensor gathered(ProcessGroup group) const {
    const at::Tensor own = empty() ? at::Tensor() : at::cat(parts_).contiguous();
    const std::string bytes =
        empty() ? "" : std::string(static_cast<const char*>(own.data_ptr()), own.nbytes());
    const auto all = group.gather_bytes(bytes, 0, "predictions");
    if (group.rank() != 0 || empty()) return {};
    std::string joined;
    for (const auto& each : all) joined += each;
    auto shape = own.sizes().vec();
    const auto row = own.nbytes() / static_cast<size_t>(shape[0]);
    shape[0] = static_cast<int64_t>(row == 0 ? 0 : joined.size() / row);
    at::Tensor result = at::empty(shape, own.options());
    std::memcpy(result.data_ptr(), joined.data(), std::min(joined.size(), result.nbytes()));
    return result;
  }

 private:
  std::vector<at::Tensor> parts_;
};

class PredictionsHook : public RunHook {
 public:
  explicit PredictionsHook(PredictionsHookOptions options) : options_(std::move(options)) {}

  bool wants_predictions() const override { return true; }
  void before_run(RunState& state) override {
    const ProcessGroup& group = state.model->group();
    agree(group, [&] {
      if (group.rank() == 0) check_writable(options_.path);
    });
  }
  void on_predictions(const EvaluatedBatch& evaluated) override {
    if (evaluated.test != options_.test) return;
    const auto& [batch, prediction] = evaluated.batch;
    const int64_t first = evaluated.first_sample, samples = batch.inputs.size(0);
    for (const auto& rows : {prediction, batch.targets})
      if (rows.defined() && (rows.dim() == 0 || rows.size(0) != samples))
        throw UsageError(
            fmt::format("predictions: {} samples have predictions or targets of shape [{}]; "
                        "expected a row for each sample",
                        samples, fmt::join(rows.sizes(), ", ")));
    samples_.add(at::arange(first, first + samples, at::kLong));
    predictions_.add(prediction);
    targets_.add(batch.targets);
  }
  void after_evaluation(RunState& state) override {
    if (!options_.test) write(state);
  }
  void after_test(RunState& state) override {
    if (options_.test) write(state);
  }

 private:
  void write(const RunState& state) {
    const ProcessGroup& group = state.model->group();
    const at::Tensor samples = samples_.gathered(group);
    const at::Tensor predictions = predictions_.gathered(group);
    const at::Tensor targets = targets_.gathered(group);
    for (Rows* rows : {&samples_, &predictions_, &targets_}) rows->clear();
    agree(group, [&] {
      if (!samples.defined()) return;  // another rank, or another group of parallel.local_sgd
      const at::Tensor order = samples.argsort();
      std::vector<std::pair<std::string, at::Tensor>> tensors{
          {"predictions", predictions.index_select(0, order)}};
      if (targets.defined()) tensors.emplace_back("targets", targets.index_select(0, order));
      save_safetensors(options_.path, tensors, {{"step", std::to_string(state.step)}});
    });
  }

  const PredictionsHookOptions options_;
  Rows samples_, predictions_, targets_;
};

}  // namespace

void PredictionsHookOptions::read(OptionReader& options) {
  options.require("path", "the file to write");
  options.read_path("path", path,
                    "file of safetensors with the tensors predictions and targets, in the order of "
                    "the samples; each evaluation replaces it");
  options.read_enum("of", test, {{"evaluation", false}, {"test", true}}, "which samples");
}

std::shared_ptr<RunHook> predictions_hook(const PredictionsHookOptions& options) {
  return std::make_shared<PredictionsHook>(options);
}

}  // namespace tessera::train
