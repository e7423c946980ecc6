#include "tessera/train/training_session.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <tuple>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "train/run/evaluate.h"
#include "train/run/given_data.h"
#include "train/run/run.h"

namespace tessera {
namespace {

/// The samples of a batch: 0 without tensors; -1 if check_batch() refuses it.
int64_t samples_of(const Batch& batch) {
  if (!batch.inputs.defined()) return batch.targets.defined() ? -1 : 0;
  const int64_t count = batch.inputs.dim() > 0 ? batch.inputs.size(0) : -1;
  const bool fits =
      !batch.targets.defined() || (batch.targets.dim() > 0 && batch.targets.size(0) == count);
  return fits ? count : -1;
}

std::string shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("a tensor of shape {}", c10::str(tensor.sizes()))
                          : "no tensor";
}

void check_batch(const std::string& function, const Batch& batch, int64_t parts) {
  const int64_t count = samples_of(batch);
  if (count < 0)
    throw UsageError(
        fmt::format("TrainingSession.{}: inputs are {} and targets {}; expected the "
                    "samples of this rank in dimension 0 of both",
                    function, shape_of(batch.inputs), shape_of(batch.targets)));
  if (count > 0 && count < parts)
    throw UsageError(
        fmt::format("TrainingSession.{}: {} samples, and train.accumulation is {}; "
                    "expected as many samples or more, or none",
                    function, count, parts));
}

/// The numbers of samples of all ranks. Throws on all if a rank has a batch that is refused.
std::vector<int64_t> gather_counts(const char* function, ProcessGroup group, const Batch& batch,
                                   int64_t parts) {
  int64_t mine = samples_of(batch);
  if (mine > 0 && mine < parts) mine = -1;
  const at::Tensor all =
      group.all_gather(at::tensor({mine}, at::kLong).to(group.control_device())).cpu();
  const auto* counts = all.data_ptr<int64_t>();
  std::vector<int64_t> result(counts, counts + group.size());
  for (const int64_t count : result)
    if (count < 0) agree(group, [&] { check_batch(function, batch, parts); });
  return result;
}

/// Runs `part`, in which the ranks call collectives. An error on some ranks is an error on all:
/// these ranks go to an exchange. The others meet it in place of a collective of `part`, which is
/// an error of theirs, or, with `always`, after `part`.
void together(ProcessGroup group, bool always, const std::function<void()>& part) {
  if (group.size() == 1) return part();
  constexpr char kErrorOfOneRank[] = "a rank has an error";
  std::string text, kind;  // of the error: "1": a consequence, "2": this rank's own
  std::vector<std::string> kinds;
  for (bool done = false; kinds.empty();) {
    try {
      if (done) kinds = group.all_gather_bytes(kind, kErrorOfOneRank);
      else part();
      if (!done && !always) return;
    } catch (const AgreedError&) {
      throw;
    } catch (const BrokenWorldError&) {
      throw;
    } catch (const std::exception& error) {
      if (group.ended()) throw;
      const std::string now = message_of(error);
      const std::string of_now = now.find(kErrorOfOneRank) == now.npos ? "2" : "1";
      if (of_now > kind) std::tie(kind, text) = std::tie(of_now, now);
    }
    done = true;
  }
  const auto worst = *std::max_element(kinds.begin(), kinds.end());
  if (worst.empty()) return;
  agree(group, [&] {
    if (kind == worst) throw UsageError(text);
  });
}

JoinIteration iteration_of(const std::vector<int64_t>& counts) {
  JoinIteration iteration{0, -1, 0, {}};
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    iteration.has_data.push_back(counts[rank] > 0);
    iteration.active_ranks += counts[rank] > 0;
    if (counts[rank] > 0 && iteration.first_active < 0)
      iteration.first_active = static_cast<int>(rank);
  }
  iteration.divisor = iteration.active_ranks;
  if (iteration.active_ranks == static_cast<int>(counts.size())) iteration.has_data.clear();
  return iteration;
}

/// The figures of a metric over the samples of all ranks.
void add_metric(const Metric& metric, const Evaluated& evaluated,
                const std::vector<int64_t>& counts, ProcessGroup group,
                std::map<std::string, double>& figures) {
  const torch::NoGradGuard no_grad;
  const at::Tensor mine = metric.accumulate(evaluated.prediction, evaluated.batch)
                              .to(at::kCPU, at::kDouble)
                              .contiguous();
  const at::Tensor all = group.all_gather(mine.flatten().to(group.control_device())).cpu();
  at::Tensor total;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    if (counts[rank] == 0) continue;
    const auto first = static_cast<int64_t>(rank) * mine.numel();
    const at::Tensor part = all.flatten().narrow(0, first, mine.numel()).view(mine.sizes());
    if (!total.defined()) total = part;
    else total = metric.merge ? metric.merge(total, part) : total + part;
  }
  const auto values = metric.result(total);
  for (size_t i = 0; i < metric.figures.size(); ++i) figures[metric.figures[i]] = values.at(i);
}

}  // namespace

struct TrainingSession::Impl {
  Impl(Config given, ProcessGroup world)
      : config(std::move(given)),
        run(config, std::move(world), {}, heartbeat, train::RunSource::program),
        data(static_cast<train::GivenData&>(run.data())) {
    run.placing_errors([&] { run.begin(); });
  }

  ProcessGroup group() const { return run.context().own_group(); }

  void require_open(const char* function) const {
    const std::string at = fmt::format("TrainingSession.{}: ", function);
    if (finished) throw UsageError(at + "called after finish(); expected no call");
    if (run.now().done >= data.iterations())
      throw UsageError(
          fmt::format("{}train.steps is {}, and as many steps are done; expected "
                      "finish()",
                      at, run.now().done));
    if (run.stopped())
      throw UsageError(at + "a stop was asked for; expected finish() after SessionStep::stopped");
  }

  /// A batch for a forward pass of all ranks: this rank's, or, if it has no samples, the first
  /// sample of `rank`, whose results are not used.
  Batch filled(Batch batch, const std::vector<int64_t>& counts) const {
    ProcessGroup ranks = group();
    const int first = iteration_of(counts).first_active;
    if (iteration_of(counts).active_ranks == ranks.size()) return batch;
    const bool sends = ranks.rank() == first;
    const auto share = [&](at::Tensor& tensor) {
      const auto words = ranks.all_gather_bytes(sends && tensor.defined() ? layout_of(tensor) : "",
                                                "layout of a sample");
      const auto& layout = words[static_cast<size_t>(first)];
      if (layout.empty()) return;
      at::Tensor sample = sends ? tensor.narrow(0, 0, 1).contiguous() : tensor_like(layout);
      ranks.broadcast(sample, first);
      if (!tensor.defined() || tensor.size(0) == 0) tensor = sample;
    };
    share(batch.inputs);
    share(batch.targets);
    return batch;
  }

  /// The same on the model's device.
  Batch batch_of_all(Batch batch, const std::vector<int64_t>& counts) {
    return copies.to_device(filled(std::move(batch), counts), run.context().device);
  }

  /// `part` with the averaged weights in the model, which gets its own back, also after an error.
  void with_averages(const std::function<void()>& part) {
    run.models().swap_averages();
    try {
      together(group(), true, part);
    } catch (...) {
      run.models().swap_averages();
      throw;
    }
    run.models().swap_averages();
  }

  /// Of a step that has thrown, with the errors that its collectives still have.
  void drop_gradients() {
    try {
      run.models().whole().drop_gradients();
    } catch (const UsageError&) {
    }
  }

  std::string layout_of(const at::Tensor& tensor) const {
    std::string text = std::to_string(static_cast<int>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes().slice(1)) text += " " + std::to_string(size);
    return text;
  }

  at::Tensor tensor_like(const std::string& layout) const {
    std::istringstream in(layout);
    int type = 0;
    in >> type;
    std::vector<int64_t> sizes{1};
    for (int64_t size = 0; in >> size;) sizes.push_back(size);
    return at::empty(sizes, at::TensorOptions(static_cast<at::ScalarType>(type)));
  }

  Config config;
  train::Heartbeat heartbeat;
  train::Run run;
  train::GivenData& data;
  train::DeviceCopies copies;
  bool finished = false, joined = false;
};

TrainingSession::TrainingSession(Config config, ProcessGroup world)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(world))) {}
TrainingSession::~TrainingSession() = default;
TrainingSession::TrainingSession(TrainingSession&&) noexcept = default;
TrainingSession& TrainingSession::operator=(TrainingSession&&) noexcept = default;

SessionStep TrainingSession::step(const at::Tensor& inputs, const at::Tensor& targets) {
  return step(Batch{inputs, targets, {}});
}

SessionStep TrainingSession::step(const Batch& batch) {
  Impl& own = *impl_;
  own.require_open("step");
  SessionStep done;
  own.run.placing_errors([&] {
    own.run.load();
    const auto counts = gather_counts("step", own.group(), batch, own.config.train.accumulation);
    const JoinIteration iteration = iteration_of(counts);
    done.step = own.run.now().done;
    done.loss = done.grad_norm = std::nan("");
    if (iteration.active_ranks == 0) return;
    own.data.set_counts(counts);
    const bool joins = own.data.joins();
    if (joins && own.run.models().whole().joinable() == nullptr)
      throw UsageError("TrainingSession.step: a rank has no samples, and " +
                       (own.config.models.empty() ? "parallel.type " + own.config.parallel.type
                                                  : std::string("a train_step")) +
                       " supports no joins; expected some on each rank");
    if (joins || own.joined) own.run.on_join(iteration);
    own.joined = joins;
    const bool mine = counts[static_cast<size_t>(own.group().rank())] > 0;
    try {
      together(own.group(), false,
               [&] { own.run.iteration(mine ? std::optional(batch) : std::nullopt); });
    } catch (const AgreedError&) {
      own.drop_gradients();
      throw;
    }
    const train::StepRecord& record = own.run.now().record;
    done.samples = record.samples;
    done.loss = record.loss;
    done.grad_norm = record.grad_norm;
    done.lr = record.lr;
    done.updated = std::isfinite(record.grad_norm);
    done.figures.insert(record.figures.begin(), record.figures.end());
    own.finished = own.run.failed();
    if (own.finished) own.run.end();  // throws
    done.stopped = own.run.stopped();
  });
  return done;
}

at::Tensor TrainingSession::predict(const at::Tensor& inputs) {
  Impl& own = *impl_;
  const auto counts = gather_counts("predict", own.group(), {inputs, {}, {}}, 1);
  if (iteration_of(counts).active_ranks == 0) return at::empty({0});
  const Batch batch = own.batch_of_all({inputs, {}, {}}, counts);
  const torch::NoGradGuard no_grad;
  const train::EvaluationMode mode(model());
  at::Tensor result;
  own.with_averages([&] { result = own.run.models().whole().val_step(batch); });
  const bool mine = counts[static_cast<size_t>(own.group().rank())] > 0;
  return mine ? result : result.narrow(0, 0, 0);
}

std::map<std::string, double> TrainingSession::evaluate(const at::Tensor& inputs,
                                                        const at::Tensor& targets) {
  Impl& own = *impl_;
  ProcessGroup group = own.group();
  const auto counts = gather_counts("evaluate", group, {inputs, targets, {}}, 1);
  if (iteration_of(counts).active_ranks == 0)
    throw UsageError("TrainingSession.evaluate: no rank has a sample; expected some");
  const Batch batch = own.batch_of_all({inputs, targets, {}}, counts);
  const torch::NoGradGuard no_grad;
  const train::EvaluationMode mode(model());
  Evaluated evaluated;
  const auto& metrics = own.config.metrics;
  ParsedLosses losses;
  own.with_averages([&] {
    losses = own.run.models().whole().val_losses(batch, metrics.empty() ? nullptr : &evaluated);
  });
  const auto numbers = train::read_figures(losses.values);
  const auto weight = static_cast<double>(counts[static_cast<size_t>(group.rank())]);
  std::vector<double> sums{weight};
  for (const double number : numbers) sums.push_back(weight > 0 ? weight * number : 0);
  const at::Tensor all = at::tensor(sums, at::kDouble).to(group.control_device());
  group.all_reduce(all, 1, "evaluation");
  const at::Tensor total = all.cpu();
  std::map<std::string, double> figures;
  for (size_t i = 0; i < numbers.size(); ++i)
    figures[losses.values[i].first] =
        total[static_cast<int64_t>(i) + 1].item<double>() / total[0].item<double>();
  together(group, false, [&] {
    for (const auto& metric : metrics) add_metric(metric, evaluated, counts, group, figures);
  });
  return figures;
}

std::string TrainingSession::save() {
  Impl& own = *impl_;
  if (own.finished)
    throw UsageError("TrainingSession.save: called after finish(); expected no call");
  if (own.config.checkpoint.folder.empty())
    throw UsageError("TrainingSession.save: the config has no checkpoint.folder; expected one");
  own.run.placing_errors([&] {
    own.run.save_again();  // the program may have changed the model since the step
    own.run.save_checkpoint();
  });
  return own.run.now().result.checkpoint;
}

TrainResult TrainingSession::finish() {
  Impl& own = *impl_;
  if (own.finished)
    throw UsageError("TrainingSession.finish: called a second time; expected one call");
  own.finished = true;
  TrainResult result;
  own.run.placing_errors([&] { result = own.run.end(); });
  return result;
}

void TrainingSession::set_weight(const std::string& name, const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
  std::vector<ParameterShard> shards;
  agree(impl_->group(), [&] {
    for (auto& shard : wrapper().loaded_shards())
      if (shard.parameter == name) shards.push_back(std::move(shard));
    std::string expected;
    for (const auto& shard : shards)
      if (values.sizes() != at::IntArrayRef(shard.shape))
        expected = fmt::format("shape {}", c10::str(at::IntArrayRef(shard.shape)));
    if (!expected.empty())
      throw UsageError(fmt::format("TrainingSession.set_weight: {}: {}; expected {}", name,
                                   shape_of(values), expected));
  });
  const int64_t ranks = static_cast<int64_t>(shards.size() > 0);
  const at::Tensor found = at::tensor({ranks}, at::kLong).to(impl_->group().control_device());
  impl_->group().all_reduce(found);
  if (found.item<int64_t>() == 0)
    throw UsageError("TrainingSession.set_weight: no parameter " + name);
  wrapper().before_shard_writes();
  for (const auto& shard : shards) {
    if (shard.tensor.sizes() == values.sizes()) {
      shard.tensor.copy_(values);
      continue;
    }
    const auto strides =
        shard.strides.empty() ? memory_strides(values.contiguous()) : shard.strides;
    const at::Tensor whole = at::empty_strided(shard.shape, strides, values.options());
    const at::Tensor in_memory_order = whole.copy_(values).as_strided({whole.numel()}, {1});
    shard.tensor.copy_(in_memory_order.narrow(0, shard.begin, shard.numel));
  }
  wrapper().publish_shards();
  impl_->run.save_again();
}

int64_t TrainingSession::steps() const { return impl_->run.now().done; }
torch::nn::Module& TrainingSession::model() const { return *wrapper().model().module; }
ModelWrapper& TrainingSession::wrapper() const { return impl_->run.models().whole(); }

}  // namespace tessera
