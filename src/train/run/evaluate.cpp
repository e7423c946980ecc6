#include "train/run/evaluate.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "tessera/data/batch_loader.h"
#include "tessera/error.h"
#include "train/step/device_copies.h"

namespace tessera::train {
namespace {

/// The contributions of the chunks of samples to one metric, over all ranks. A few numbers are kept
/// for each chunk and joined in their order, so that the number of ranks changes no bit. If there
/// are more numbers, such as counts, which are exact in any order, each rank joins its own.
class Sums {
 public:
  /// `metric`: null for sums of a model's figures.
  Sums(const Metric* metric, int64_t chunks, const ProcessGroup& group)
      : metric_(metric), chunks_(chunks), group_(group) {}

  /// `counts`: false where another rank evaluates the chunk, too.
  void add(int64_t chunk, const at::Tensor& part, bool counts) {
    constexpr int64_t kFew = 16;
    const at::Tensor values = part.detach().to(at::kCPU, at::kDouble).contiguous();
    if (!rows_.defined()) {
      shape_ = values.sizes().vec();
      by_chunk_ = values.numel() <= kFew;
      const int64_t rows = by_chunk_ ? chunks_ : group_.size();
      rows_ = at::zeros({rows, values.numel()}, at::kDouble);
    }
    if (values.sizes() != at::IntArrayRef(shape_))
      throw UsageError(fmt::format(
          "a batch has added {} numbers, and one before it {}; expected tensors of one shape",
          values.numel(), rows_.size(1)));
    if (!counts) return;
    const at::Tensor row = rows_[by_chunk_ ? chunk : group_.rank()];
    row.copy_((filled_ && !by_chunk_ ? join(row.view(shape_), values) : values).flatten());
    filled_ = true;
  }

  /// Of all ranks. Collective.
  at::Tensor total() {
    const at::Tensor everywhere = rows_.to(group_.control_device());
    group_.all_reduce(everywhere, 1, "evaluation");
    const at::Tensor rows = everywhere.cpu();
    const int64_t used = std::min(rows.size(0), chunks_);
    at::Tensor total = rows[0].view(shape_);
    for (int64_t i = 1; i < used; ++i) total = join(total, rows[i].view(shape_));
    return total;
  }

 private:
  at::Tensor join(const at::Tensor& a, const at::Tensor& b) const {
    return metric_ != nullptr && metric_->merge ? metric_->merge(a, b) : a + b;
  }

  const Metric* metric_;
  const int64_t chunks_;
  ProcessGroup group_;
  std::vector<int64_t> shape_;
  bool by_chunk_ = true, filled_ = false;
  at::Tensor rows_;
};

/// One evaluation on one rank.
class Evaluation {
 public:
  Evaluation(ModelWrapper& model, const Dataset& data, const EvaluateOptions& options)
      : model_(model),
        data_(data),
        options_(options),
        predicts_(options.predictions || !options.metrics.empty()),
        samples_(options.max_samples > 0 ? std::min(options.max_samples, data.size())
                                         : data.size()),
        chunks_((samples_ + options.batch - 1) / options.batch),
        means_(nullptr, chunks_, model.group()) {
    for (const auto& metric : options.metrics) sums_.emplace_back(&metric, chunks_, model.group());
  }

  template <class OnRound, class OnBatch>
  std::map<std::string, double> run(const OnRound& on_round, const OnBatch& on_batch) {
    const ProcessGroup& group = model_.group();
    for (int64_t round = 0; round < chunks_; round += group.size()) {
      on_round();
      // In the last round a rank without a chunk evaluates another rank's; its result is ignored.
      const int64_t own = round + group.rank();
      const int64_t chunk = std::min(own, chunks_ - 1);
      const auto evaluated = forward(chunk, own < chunks_);
      if (predicts_ && own < chunks_) on_batch(chunk * options_.batch, evaluated);
    }
    std::map<std::string, double> figures;
    const at::Tensor means = means_.total() / static_cast<double>(samples_);
    for (size_t i = 0; i < names_.size(); ++i)
      figures[names_[i]] = means[static_cast<int64_t>(i)].item<double>();
    for (size_t m = 0; m < sums_.size(); ++m) add_result(options_.metrics[m], sums_[m], figures);
    return figures;
  }

 private:
  Evaluated forward(int64_t chunk, bool counts) {
    const torch::NoGradGuard no_grad;
    const int64_t first = chunk * options_.batch;
    std::vector<int64_t> samples(static_cast<size_t>(std::min(options_.batch, samples_ - first)));
    std::iota(samples.begin(), samples.end(), first);
    DeviceCopies copies;
    const Batch batch = copies.to_device(load_batch(data_, samples),
                                         model_.model().module->parameters().front().device());
    Evaluated evaluated;
    const ParsedLosses losses = model_.val_losses(batch, predicts_ ? &evaluated : nullptr);
    auto numbers = read_figures(losses.values);
    names_.clear();
    for (const auto& [name, value] : losses.values) names_.push_back(name);
    for (double& number : numbers) number *= static_cast<double>(samples.size());
    means_.add(chunk, at::tensor(numbers, at::kDouble), counts);
    for (size_t m = 0; m < sums_.size(); ++m)
      sums_[m].add(chunk, options_.metrics[m].accumulate(evaluated.prediction, evaluated.batch),
                   counts);
    return evaluated;
  }

  static void add_result(const Metric& metric, Sums& sums, std::map<std::string, double>& figures) {
    const auto values = metric.result(sums.total());
    if (values.size() != metric.figures.size())
      throw UsageError(fmt::format("metric of {}: {} results; expected {}, as it has figures",
                                   metric.figures.front(), values.size(), metric.figures.size()));
    for (size_t i = 0; i < values.size(); ++i) figures[metric.figures[i]] = values[i];
  }

  ModelWrapper& model_;
  const Dataset& data_;
  const EvaluateOptions& options_;
  const bool predicts_;
  const int64_t samples_, chunks_;
  Sums means_;  // of the model's own figures
  std::vector<Sums> sums_;
  std::vector<std::string> names_;
};

}  // namespace

std::map<std::string, double> evaluate(
    ModelWrapper& model, const Dataset& data, const EvaluateOptions& options,
    const std::function<void()>& on_round,
    const std::function<void(int64_t first_sample, const Evaluated& batch)>& on_batch) {
  const EvaluationMode mode(*model.model().module);
  return Evaluation(model, data, options).run(on_round, on_batch);
}

}  // namespace tessera::train
