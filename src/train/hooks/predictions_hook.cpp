#include <sstream>

#include <torch/serialize.h>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"
#include "tessera/step/agreement.h"
#include "tessera/train/model_wrapper.h"
#include "train/hooks/hooks.h"

namespace tessera::train {
namespace {

using Tensors = std::vector<at::Tensor>;

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
    const int64_t first = evaluated.first_sample;
    Tensors rows{at::arange(first, first + prediction.size(0), at::kLong), prediction};
    if (batch.targets.defined()) rows.push_back(batch.targets);
    parts_.resize(rows.size());
    for (size_t i = 0; i < rows.size(); ++i)
      parts_[i].push_back(rows[i].detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  void after_evaluation(RunState& state) override {
    if (!options_.test) write(state);
  }
  void after_test(RunState& state) override {
    if (options_.test) write(state);
  }

 private:
  /// The tensors of all ranks on rank 0, one after another; elsewhere none. Collective.
  std::vector<Tensors> gathered(ProcessGroup group) {
    std::ostringstream own;
    Tensors joined;
    for (const auto& parts : parts_) joined.push_back(at::cat(parts));
    parts_.clear();
    torch::save(joined, own);
    std::vector<Tensors> all(joined.size());
    for (const auto& bytes : group.gather_bytes(own.str(), 0, "predictions")) {
      std::istringstream stream(bytes);
      Tensors theirs;
      torch::load(theirs, stream);
      for (size_t i = 0; i < theirs.size(); ++i) all[i].push_back(theirs[i]);
    }
    if (group.rank() != 0) all.clear();
    return all;
  }

  void write(const RunState& state) {
    const ProcessGroup& group = state.model->group();
    const auto all = gathered(group);
    agree(group, [&] {
      if (all.empty()) return;  // another rank, or another group of parallel.local_sgd
      const at::Tensor order = at::cat(all[0]).argsort();
      const auto sorted = [&](const Tensors& parts) { return at::cat(parts).index({order}); };
      std::vector<std::pair<std::string, at::Tensor>> tensors{{"predictions", sorted(all[1])}};
      if (all.size() > 2) tensors.emplace_back("targets", sorted(all[2]));
      save_safetensors(options_.path, tensors, {{"step", std::to_string(state.step)}});
    });
  }

  const PredictionsHookOptions options_;
  std::vector<Tensors> parts_;  // numbers of samples, predictions, targets; by batch
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
