#include "train/run/evaluate.h"

#include <algorithm>
#include <numeric>

#include <c10/util/ScopeExit.h>

#include "tessera/data/batch_loader.h"
#include "train/step/device_copies.h"

namespace tessera::train {
namespace {

/// Samples per forward, on one rank.
constexpr int64_t kChunk = 8;

std::vector<std::pair<std::string, double>> figures_of(ModelWrapper& model, const Dataset& data,
                                                       int64_t first, int64_t count) {
  std::vector<int64_t> samples(static_cast<size_t>(count));
  std::iota(samples.begin(), samples.end(), first);
  DeviceCopies copies;
  const Batch batch = copies.to_device(load_batch(data, samples),
                                       model.model().module->parameters().front().device());
  const ParsedLosses losses = model.val_losses(batch);
  const auto numbers = read_figures(losses.values);
  std::vector<std::pair<std::string, double>> figures;
  for (size_t i = 0; i < numbers.size(); ++i)
    figures.emplace_back(losses.values[i].first, numbers[i]);
  return figures;
}

}  // namespace

std::map<std::string, double> evaluate(ModelWrapper& model, const Dataset& data,
                                       int64_t max_samples, const std::function<void()>& on_round) {
  const int64_t samples = max_samples > 0 ? std::min(max_samples, data.size()) : data.size();
  const int64_t chunks = (samples + kChunk - 1) / kChunk;
  ProcessGroup group = model.group();
  torch::nn::Module& module = *model.model().module;
  const auto end = c10::make_scope_exit([&, was = module.is_training()] { module.train(was); });
  module.eval();
  at::Tensor sums;
  std::vector<std::string> names;
  for (int64_t round = 0; round < chunks; round += group.size()) {
    on_round();
    // In the last round a rank without a chunk evaluates another rank's; its result is ignored.
    const int64_t chunk = std::min(round + group.rank(), chunks - 1);
    const int64_t first = chunk * kChunk;
    const int64_t count = std::min(kChunk, samples - first);
    const auto figures = figures_of(model, data, first, count);
    if (!sums.defined())
      sums = at::zeros({chunks, static_cast<int64_t>(figures.size())}, at::kDouble);
    names.resize(figures.size());
    for (size_t i = 0; i < figures.size(); ++i) {
      names[i] = figures[i].first;
      if (round + group.rank() < chunks)
        sums.index_put_({chunk, static_cast<int64_t>(i)},
                        figures[i].second * static_cast<double>(count));
    }
  }
  const at::Tensor everywhere = sums.to(group.control_device());
  group.all_reduce(everywhere, 1, "evaluation");
  sums = everywhere.cpu();
  std::map<std::string, double> means;
  for (size_t i = 0; i < names.size(); ++i) {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      total += sums[chunk][static_cast<int64_t>(i)].item<double>();
    means[names[i]] = total / static_cast<double>(samples);
  }
  return means;
}

}  // namespace tessera::train
