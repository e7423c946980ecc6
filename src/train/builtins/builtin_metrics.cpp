#include <cmath>
#include <limits>
#include <sstream>

#include <torch/nn/functional.h>

#include "tessera/error.h"
#include "train/builtins/builtin_components.h"

namespace tessera::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string shapes_of(const at::Tensor& prediction, const at::Tensor& targets) {
  std::ostringstream text;
  text << "a prediction of shape " << prediction.sizes() << " and targets of shape "
       << targets.sizes();
  return text.str();
}

/// The numbers that a batch adds.
at::Tensor numbers(const at::Tensor& a, const at::Tensor& b) {
  return at::stack({a.to(at::kDouble), b.to(at::kDouble)});
}
at::Tensor numbers(const at::Tensor& sum, int64_t count) {
  return numbers(sum, at::scalar_tensor(count, sum.options().dtype(at::kDouble)));
}

/// sum / count, of numbers().
std::vector<double> ratio(const at::Tensor& total) {
  return {total[0].item<double>() / total[1].item<double>()};
}

/// The targets that are not ignored, with one row of scores each. Classes are the last dimension of
/// sequences of predictions and the second of other predictions, as in the loss cross_entropy.
struct Labels {
  at::Tensor scores, classes;
};

Labels labels_of(const at::Tensor& prediction, const Batch& batch, int64_t ignore_index) {
  const at::Tensor& targets = batch.targets;
  const bool numbered = targets.defined() && at::isIntegralType(targets.scalar_type(), false);
  const int64_t dim = prediction.dim() == 3 ? 2 : 1;
  auto shape = prediction.sizes().vec();
  if (prediction.dim() >= 2) shape.erase(shape.begin() + dim);
  if (!numbered || prediction.dim() < 2 || targets.sizes() != at::IntArrayRef(shape))
    throw UsageError((targets.defined() ? shapes_of(prediction, targets) : "no targets") +
                     "; expected numbers of classes as targets, and a score for each class in the "
                     "second dimension of the prediction, or in the third one of three");
  Labels labels{prediction.movedim(dim, -1).flatten(0, -2), targets.flatten().to(at::kLong)};
  const at::Tensor counts = labels.classes.ne(ignore_index);
  if (!counts.all().item<bool>()) {
    labels.classes = labels.classes.masked_select(counts);
    labels.scores = labels.scores.index({counts});
  }
  const int64_t classes = labels.scores.size(1);
  const at::Tensor wrong = labels.classes.lt(0).logical_or(labels.classes.ge(classes));
  if (wrong.any().item<bool>())
    throw UsageError("target " + std::to_string(labels.classes.index({wrong})[0].item<int64_t>()) +
                     " is no class; expected numbers below " + std::to_string(classes) +
                     ", or ignore_index (" + std::to_string(ignore_index) + ")");
  return labels;
}

/// Targets of the prediction's shape (bce_with_logits): any number of labels for a sample.
bool several_labels(const at::Tensor& prediction, const Batch& batch) {
  return batch.targets.defined() && prediction.sizes() == batch.targets.sizes();
}

/// For each class the right predictions, all predictions and all targets: [classes, 3].
at::Tensor class_counts(const at::Tensor& prediction, const Batch& batch, int64_t ignore_index) {
  if (several_labels(prediction, batch) && prediction.dim() >= 2) {
    const auto flat = [](const at::Tensor& flags) { return flags.movedim(1, -1).flatten(0, -2); };
    const at::Tensor predicted = flat(prediction.gt(0)), actual = flat(batch.targets.gt(0.5));
    return at::stack({predicted.logical_and(actual).sum(0), predicted.sum(0), actual.sum(0)}, 1);
  }
  const auto [scores, classes] = labels_of(prediction, batch, ignore_index);
  const at::Tensor predicted = scores.argmax(1);
  const auto count = [n = scores.size(1)](const at::Tensor& of) { return of.bincount({}, n); };
  return at::stack(
      {count(classes.index({predicted.eq(classes)})), count(predicted), count(classes)}, 1);
}

/// The mean of part / whole over the classes that occur, in predictions or in targets.
double mean_over_classes(const at::Tensor& part, const at::Tensor& whole) {
  const at::Tensor occurs = whole.gt(0);
  return (part / whole).index({occurs}).mean().item<double>();
}

int64_t read_ignored(OptionReader& options) {
  int64_t ignore_index = -100;
  options.read("ignore_index", ignore_index, "target that does not count");
  options.finish();
  return ignore_index;
}

Metric read_accuracy(OptionReader& options) {
  const int64_t ignored = read_ignored(options);
  return {{"accuracy"},
          [ignored](const at::Tensor& prediction, const Batch& batch) {
            if (several_labels(prediction, batch))
              return numbers(prediction.gt(0).eq(batch.targets.gt(0.5)).sum(), prediction.numel());
            const auto [scores, classes] = labels_of(prediction, batch, ignored);
            return numbers(scores.argmax(1).eq(classes).sum(), classes.numel());
          },
          ratio};
}

Metric read_top_k(OptionReader& options) {
  int64_t k = 5;
  options.read("k", k, "number of classes with the highest scores, one of which must be right",
               kAtLeastOne);
  const int64_t ignored = read_ignored(options);
  return {{"top_" + std::to_string(k)},
          [k, ignored](const at::Tensor& prediction, const Batch& batch) {
            const auto [scores, classes] = labels_of(prediction, batch, ignored);
            if (k > scores.size(1))
              throw UsageError("k is " + std::to_string(k) + ", and the prediction has " +
                               std::to_string(scores.size(1)) + " classes; expected at most that");
            const at::Tensor best = std::get<1>(scores.topk(k, 1));
            return numbers(best.eq(classes.unsqueeze(1)).any(1).sum(), classes.numel());
          },
          ratio};
}

Metric read_confusion(OptionReader& options) {
  constexpr int64_t kMostClasses = 100;
  int64_t count = 2;
  options.require("classes", "the number of classes");
  options.read("classes", count, "number of classes", Range{1, kMostClasses});
  const int64_t ignored = read_ignored(options);
  Metric metric;
  for (int64_t i = 0; i < count * count; ++i)
    metric.figures.push_back("confusion_" + std::to_string(i / count) + "_" +
                             std::to_string(i % count));
  metric.accumulate = [count, ignored](const at::Tensor& prediction, const Batch& batch) {
    const auto [scores, classes] = labels_of(prediction, batch, ignored);
    if (scores.size(1) != count)
      throw UsageError("classes is " + std::to_string(count) + ", and the prediction has " +
                       std::to_string(scores.size(1)) + "; expected the same number");
    return (classes * count + scores.argmax(1)).bincount({}, count * count);
  };
  metric.result = [](const at::Tensor& total) {
    std::vector<double> counts;
    for (int64_t i = 0; i < total.numel(); ++i) counts.push_back(total[i].item<double>());
    return counts;
  };
  return metric;
}

Metric read_f1(OptionReader& options) {
  const int64_t ignored = read_ignored(options);
  return {{"f1_micro", "f1_macro"},
          [ignored](const at::Tensor& prediction, const Batch& batch) {
            return class_counts(prediction, batch, ignored);
          },
          [](const at::Tensor& total) -> std::vector<double> {
            const at::Tensor right = 2 * total.select(1, 0);
            const at::Tensor all = total.select(1, 1) + total.select(1, 2);
            return {(right.sum() / all.sum()).item<double>(), mean_over_classes(right, all)};
          }};
}

Metric read_mean_iou(OptionReader& options) {
  const int64_t ignored = read_ignored(options);
  return {{"mean_iou"},
          [ignored](const at::Tensor& prediction, const Batch& batch) {
            return class_counts(prediction, batch, ignored);
          },
          [](const at::Tensor& total) -> std::vector<double> {
            const at::Tensor right = total.select(1, 0);
            return {mean_over_classes(right, total.select(1, 1) + total.select(1, 2) - right)};
          }};
}

/// Predictions and targets, with equal numbers of elements. They are never broadcast.
std::pair<at::Tensor, at::Tensor> values_of(const at::Tensor& prediction, const Batch& batch) {
  const at::Tensor& targets = batch.targets;
  if (!targets.defined() || prediction.squeeze().sizes() != targets.squeeze().sizes())
    throw UsageError((targets.defined() ? shapes_of(prediction, targets) : "no targets") +
                     "; expected equal shapes");
  return {prediction.to(at::kDouble).flatten(), targets.to(at::kDouble).flatten()};
}

Metric mean_of_errors(const std::string& name, at::Tensor (*error)(const at::Tensor& difference)) {
  return {{name},
          [error](const at::Tensor& prediction, const Batch& batch) {
            const auto [values, targets] = values_of(prediction, batch);
            return numbers(error(values - targets).sum(), values.numel());
          },
          ratio};
}

/// Number, mean and squared deviations of the targets, and squared errors. They are joined by the
/// formula of Chan, Golub and LeVeque, which loses no digits where the mean is large.
Metric r2() {
  return {{"r2"},
          [](const at::Tensor& prediction, const Batch& batch) {
            const auto [values, targets] = values_of(prediction, batch);
            const at::Tensor mean = targets.mean();
            return at::stack({at::full_like(mean, targets.numel()), mean,
                              (targets - mean).square().sum(), (values - targets).square().sum()});
          },
          [](const at::Tensor& total) -> std::vector<double> {
            const double spread = total[2].item<double>();
            return {spread > 0 ? 1 - total[3].item<double>() / spread : kNone};
          },
          [](const at::Tensor& a, const at::Tensor& b) {
            const at::Tensor count = a[0] + b[0], step = b[1] - a[1];
            return at::stack({count, a[1] + step * b[0] / count,
                              a[2] + b[2] + step.square() * a[0] * b[0] / count, a[3] + b[3]});
          }};
}

Metric read_perplexity(OptionReader& options) {
  const int64_t ignored = read_ignored(options);
  return {
      {"perplexity"},
      [ignored](const at::Tensor& prediction, const Batch& batch) {
        constexpr int64_t kRows = 1024;  // no second tensor of all scores
        const auto [scores, classes] = labels_of(prediction, batch, ignored);
        at::Tensor sum = at::zeros({}, scores.options().dtype(at::kDouble));
        for (int64_t i = 0; i < classes.numel(); i += kRows) {
          const int64_t rows = std::min(kRows, classes.numel() - i);
          const at::Tensor each =
              at::cross_entropy_loss(scores.narrow(0, i, rows).to(at::kFloat),
                                     classes.narrow(0, i, rows), {}, at::Reduction::None);
          sum += each.to(at::kDouble).sum();
        }
        return numbers(sum, classes.numel());
      },
      [](const at::Tensor& total) -> std::vector<double> { return {std::exp(ratio(total)[0])}; }};
}

Metric read_mean_loss(OptionReader& options) {
  options.require("loss", "a loss, as in section loss");
  OptionReader inner = options.map_or_type("loss");
  std::string type;
  if (inner.node() != nullptr) inner.require("type", "a loss");
  inner.read_choice("type", type, registry::losses().names(), "a loss");
  if (type.empty()) {
    inner.finish();
    options.finish();
    return {};
  }
  const LossFunction loss = registry::losses().read(type, inner);
  options.finish();
  const std::string name = type.find("loss") == std::string::npos ? type + "_loss" : type;
  return {{name},
          [loss](const at::Tensor& prediction, const Batch& batch) {
            const int64_t samples = prediction.size(0);
            const at::Tensor mean = parse_losses(loss(prediction, batch)).total;
            return numbers(mean.to(at::kDouble) * static_cast<double>(samples), samples);
          },
          ratio};
}

}  // namespace

void add_metrics(Registry<Metric>& metrics) {
  metrics.add("accuracy", read_accuracy,
              "accuracy: the part of the targets whose class has the highest score");
  metrics.add("top_k", read_top_k,
              "top_K: the part of the targets whose class is among the K highest scores");
  metrics.add("confusion", read_confusion,
              "confusion_I_J: the number of targets of class I with the highest score for class J");
  metrics.add("f1", read_f1,
              "f1_micro, of all classes together, and f1_macro, the mean over the classes that "
              "occur");
  metrics.add("mean_iou", read_mean_iou,
              "mean_iou: intersection over union, the mean over the classes that occur");
  metrics.add_plan("mae", mean_of_errors("mae", [](const at::Tensor& d) { return d.abs(); }),
                   "mae: mean absolute error");
  metrics.add_plan("mse", mean_of_errors("mse", [](const at::Tensor& d) { return d.square(); }),
                   "mse: mean squared error");
  metrics.add_plan("r2", r2(), "r2: coefficient of determination");
  metrics.add("perplexity", read_perplexity,
              "perplexity: the exponential of the mean cross entropy over tokens");
  metrics.add("loss", read_mean_loss, "NAME_loss: the mean of a loss over samples");
}

}  // namespace tessera::train
