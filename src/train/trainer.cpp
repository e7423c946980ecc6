#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "tessera/error.h"
#include "tessera/join.h"
#include "tessera/train.h"
#include "comm/agreement.h"
#include "train/dealing.h"
#include "train/evaluation.h"
#include "train/outputs.h"
#include "train/parallel.h"
#include "train/reporter.h"
#include "train/sample.h"

namespace tessera {
namespace {

using train::Parallel;
using train::Reporter;

/// Counting the pairs of more tokens than this would take longer than it tells.
constexpr int64_t kMostBigramTokens = 20'000'000;

/// Adds the place in the config to an error of what the config names.
template <class Function>
auto named(const Config& config, const std::string& key, const Function& function) {
  try {
    return function();
  } catch (const UsageError& error) {
    throw UsageError(config.at(key) + error.what());
  }
}

TokenData load_data(const Config& config) {
  const DataConfig& data = config.data;
  const int64_t vocab_size = config.model.gpt2.vocab_size;
  if (data.type == "TokenBin") {
    return named(config, "data.path", [&] {
      return TokenBin{data.paths.front(), data.val_paths.empty() ? "" : data.val_paths.front(), vocab_size}.load();
    });
  }
  const bool own_val = !data.val_paths.empty();
  TokenData tokens = named(config, "data.path", [&] {
    return ByteText{data.paths, own_val ? 0.0 : data.val_fraction}.load();
  });
  if (own_val) {
    tokens.val = named(config, "data.val_path", [&] { return ByteText{data.val_paths, 0.0}.load().train; });
  }
  named(config, "model.vocab_size", [&] {
    tokens.train.require_below(vocab_size);
    tokens.val.require_below(vocab_size);
  });
  return tokens;
}

GPT2 make_model(const Config& config, int rank) {
  GPT2 model = named(config, "model", [&] { return GPT2(config.model.gpt2); });
  if (!config.model.init.empty()) {
    named(config, "model.init", [&] { model->load_weights(config.model.init); });
  }
  // Dropout draws from the global state: every rank its own masks.
  torch::manual_seed(config.model.gpt2.seed + static_cast<uint64_t>(rank));
  return model;
}

/// One run on one rank. Members in the order in which they come to be. In a join it is the one joinable: a rank out of
/// data goes through the same steps and evaluations, without a batch.
class Run : private Joinable {
 public:
  Run(const Config& config, ProcessGroup group)
      : config_(config),
        group_(std::move(group)),
        dealing_(config.train.steps, config.train.global_batch, group_.size()) {
    comm::agree(group_, [&] { prepare(); });
    const std::shared_ptr<GPT2Impl> model = model_.ptr();
    for (const auto& parameter : model_->parameters()) {
      parameters_ += parameter.numel();
    }
    parallel_ = train::make_parallel(
        config_, {model, [model](const Batch& batch) { return model->loss(batch.inputs, batch.targets); }}, group_);
    base_lr_ = parallel_->lr();
    if (uneven() && config_.data.uneven == "join" && parallel_->joinable() == nullptr) {
      throw UsageError(config_.at("data.uneven") + "join is not supported by parallel.type " + config_.parallel.type);
    }
  }

  TrainResult run() {
    introduce();
    if (uneven() && config_.data.uneven == "join") {
      JoinOptions options;
      options.divide_by_initial_world_size = false;  // a mean over what there is
      join({static_cast<Joinable&>(*this)}, options, [this](JoinLoop& loop) {
        while (dealing_.part(done_, group_.rank()).count > 0) {
          loop.next();
          iteration(batch_of(done_));
        }
      });
    } else {
      while (done_ < dealing_.full()) {
        iteration(batch_of(done_));
      }
    }
    evaluate(done_);
    report_memory();
    if (!config_.train.save.empty() || config_.train.sample.length > 0) {
      const auto whole = parallel_->whole_on_rank0();
      save();
      sample();
    }
    return std::move(result_);
  }

 private:
  bool first() const { return group_.rank() == 0; }
  bool uneven() const { return config_.train.global_batch % group_.size() != 0; }
  int64_t iterations() const { return uneven() && config_.data.uneven == "join" ? dealing_.some() : dealing_.full(); }

  ProcessGroup join_group() const override { return group_; }
  void on_join_iteration(const JoinIteration& iteration) override {
    parallel_->set_active_ranks(iteration.active_ranks);
    parallel_->joinable()->on_join_iteration(iteration);
  }
  void shadow_step() override { iteration(std::nullopt); }
  void finish_join(int last_active_rank) override { parallel_->joinable()->finish_join(last_active_rank); }

  Batch batch_of(int64_t step) const {
    if (!uneven()) {
      return batches_->batch(step, group_.rank(), group_.size());
    }
    const auto part = dealing_.part(step, group_.rank());
    std::vector<at::Tensor> inputs, targets;
    for (int64_t k = 0; k < part.count; ++k) {
      const Batch one = batches_->batch(part.first + k, 0, 1);
      inputs.push_back(one.inputs);
      targets.push_back(one.targets);
    }
    return {at::cat(inputs), at::cat(targets)};
  }

  /// Local: its errors are agreed upon.
  void prepare() {
    check_config_world(config_, group_.size());
    check_config_files(config_);
    data_ = load_data(config_);
    BatchOptions batches = config_.data.batches;
    if (uneven()) {
      batches.global_batch = 1;  // dealt sequence by sequence
      if (iterations() == 0 && config_.train.steps > 0) {
        throw UsageError(config_.at("data.uneven") + "drop leaves no step in which every rank has " +
                         std::to_string(dealing_.per_rank) + " sequences; expected more steps, or join");
      }
    }
    batches_.emplace(named(config_, "data.seq_len", [&] { return TokenBatches(data_.train, batches); }));
    if (data_.val.size() > 0) {
      named(config_, "data.seq_len", [&] { window_count(data_.val, config_.data.batches.seq_len); });
    }
    model_ = make_model(config_, group_.rank());
    if (first()) {
      train::prepare_outputs(config_);
      reporter_ = std::make_unique<Reporter>(config_);
      if (data_.val.size() > 1 && data_.train.size() + data_.val.size() <= kMostBigramTokens) {
        result_.bigram_loss = bigram_cross_entropy(data_.train, data_.val, config_.model.gpt2.vocab_size);
      }
    }
  }

  void introduce() {
    if (reporter_) {
      reporter_->line("GPT2 with " + std::to_string(parameters_) + " parameters, " + std::to_string(data_.train.size()) +
                      " training and " + std::to_string(data_.val.size()) + " evaluation tokens; " +
                      config_.optimizer.type + ", parallel: " + config_.parallel.type + ", " +
                      std::to_string(group_.size()) + (group_.size() == 1 ? " rank" : " ranks") + " (" +
                      group_.backend_name() + ")");
    }
  }

  /// A step, and an evaluation when it is time. Without a batch: as a shadow of those that have one.
  void iteration(const std::optional<Batch>& batch) {
    train_step(done_, batch);
    ++done_;
    const int64_t every = config_.train.eval_every;
    if (every > 0 && done_ % every == 0 && done_ < iterations()) {
      evaluate(done_);
    }
  }

  void train_step(int64_t step, const std::optional<Batch>& batch) {
    const auto start = std::chrono::steady_clock::now();
    const double lr = config_.scheduler.lr_at(step, base_lr_, config_.train.steps);
    parallel_->set_lr(lr);
    at::Tensor loss;
    if (batch) {
      loss = parallel_->forward(*batch);
      parallel_->backward(loss);
    } else {
      parallel_->shadow_backward();
    }
    const train::StepFigures figures = parallel_->step(loss, config_.train.clip_grad_norm);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    result_.losses.push_back(figures.loss);
    result_.grad_norms.push_back(figures.grad_norm);
    if (reporter_) {
      const auto tokens = static_cast<double>(
          std::min(dealing_.total - step * dealing_.per_rank * dealing_.world, dealing_.per_rank * dealing_.world) *
          config_.data.batches.seq_len);
      reporter_->step({step, figures.loss, figures.grad_norm, lr, seconds * 1000, tokens / seconds});
      if (!warned_ && !std::isfinite(figures.loss)) {
        warned_ = true;
        reporter_->line("warning: the loss is not finite at step " + std::to_string(step) +
                        "; a lower optimizer.lr, a warm-up or train.clip_grad_norm may help");
      }
    }
  }

  void evaluate(int64_t steps_done) {
    if (data_.val.size() == 0) {
      return;
    }
    const double loss = train::evaluate(*model_, [this](const Batch& batch) { return parallel_->evaluate(batch); },
                                        data_.val, config_.data.batches.seq_len, config_.train.eval_batches * config_.train.global_batch, group_);
    result_.eval_loss = loss;
    if (reporter_) {
      reporter_->evaluation(steps_done, loss, result_.bigram_loss);
    }
  }

  void report_memory() {
    const train::MemoryUse use = parallel_->memory();
    at::Tensor mine = at::tensor({use.parameters, use.gradients, use.optimizer_state}, at::kLong);
    const at::Tensor all = group_.all_gather(mine);
    if (reporter_) {
      std::vector<train::MemoryUse> ranks;
      for (int rank = 0; rank < group_.size(); ++rank) {
        const auto* row = all.data_ptr<int64_t>() + 3 * rank;
        ranks.push_back({row[0], row[1], row[2]});
      }
      reporter_->memory_table(ranks, parallel_->unsharded(ranks));
    }
  }

  void save() {
    const std::string& path = config_.train.save;
    if (!first() || path.empty()) {
      return;
    }
    model_->save_weights(path);
    reporter_->line("weights written to " + path);
    if (config_.train.save_config) {
      const auto beside = std::filesystem::path(path).parent_path() / "config.json";
      train::write_text(beside.string(), config_.model.gpt2.to_config_json());
      reporter_->line("its config written to " + beside.string());
    }
  }

  void sample() {
    const SampleConfig& sample = config_.train.sample;
    if (!first() || sample.length == 0) {
      return;
    }
    reporter_->line("sample:\n" + train::sample_text(*model_, sample, config_.data.type == "ByteText"));
  }

  const Config& config_;
  ProcessGroup group_;
  train::Dealing dealing_;
  int64_t done_ = 0;  // iterations
  TokenData data_;
  std::optional<TokenBatches> batches_;
  GPT2 model_{nullptr};
  std::unique_ptr<Reporter> reporter_;  // rank 0
  std::unique_ptr<Parallel> parallel_;
  int64_t parameters_ = 0;  // elements
  double base_lr_ = 0;
  bool warned_ = false;
  TrainResult result_;
};

}  // namespace

TrainResult run_training(const Config& config, ProcessGroup group) { return Run(config, std::move(group)).run(); }

}  // namespace tessera
