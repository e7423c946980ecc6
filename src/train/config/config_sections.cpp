#include "train/config/config_sections.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/train/registries.h"
#include "train/config/overlap_names.h"
#include "train/config/read_component.h"

namespace tessera::train {
namespace {

void read_data_keys(OptionReader& keys, DataConfig& data) {
  keys.require("type", "the name of a dataset");
  keys.read_choice("type", data.type, registry::datasets().names(), "the dataset");
  keys.read_enum("order", data.order,
                 {{"shuffled", SampleOrder::shuffled}, {"sequential", SampleOrder::sequential}},
                 "shuffled: every sample once per epoch, the same order for any world size; "
                 "sequential: the dataset's order");
  keys.read("seed", data.seed, "seed of the shuffling");
  keys.read_choice(
      "uneven", data.uneven, {"error", "drop", "join"},
      "when the world size does not divide global_batch: error, drop the last samples, or join");
  keys.read("loader_threads", data.loader_threads, "threads that load batches in the background",
            kAtLeastOne);
  keys.read("prefetch", data.prefetch,
            "batches loaded ahead; 0: each batch is loaded when it is needed", kNotNegative);
}

void read_data(OptionReader& keys, const Config& config, DataConfig& data) {
  read_data_keys(keys, data);
  if (data.type.empty()) {
    keys.accept_rest();
    return keys.finish();
  }
  const ModelSections& first = *config.trained().front();
  const ModelPlan& plan = first.model.plan;
  const DataContext context{plan.vocab_size, first.at("model.vocab_size"),
                            plan.max_length, plan.classes,
                            data.order,      data.seed};
  data.plan = registry::datasets().read(data.type, keys, context);
}

LossFunction read_loss(OptionReader& keys) {
  return keys.given("loss") || keys.describing()
             ? read_component(registry::losses(), keys, "loss", "",
                              "the loss, for models that have none of their own")
             : nullptr;
}

void read_hooks(OptionReader& keys, Config& config) {
  for (auto& hook : keys.list("hooks", "run hooks, each with type", true)) {
    std::string type;
    hook.require("type", "the name of a hook");
    hook.read_choice("type", type, registry::hooks().names(), "a hook");
    if (type.empty()) hook.finish();
    config.hooks.push_back(registry::hooks().read(type, hook));
  }
}

/// Errors of a metric begin with its place in the config.
Metric with_place(Metric metric, const std::string& place) {
  metric.accumulate = [place, accumulate = std::move(metric.accumulate)](
                          const at::Tensor& prediction, const Batch& batch) {
    try {
      return accumulate(prediction, batch);
    } catch (const UsageError& error) {
      throw UsageError(place + error.what());
    } catch (const c10::Error& error) {
      throw Error(place + message_of(error));
    }
  };
  return metric;
}

void read_metric_keys(OptionReader& keys, std::string& type, std::string& prefix) {
  keys.require("type", "the name of a metric");
  keys.read_choice("type", type, registry::metrics().names(), "a metric");
  keys.read("prefix", prefix, "beginning of the names of its figures");
}

void read_metrics(OptionReader& keys, std::vector<Metric>& metrics) {
  std::map<std::string, std::string> owners;
  for (auto& entry : keys.list("metrics", "figures of evaluations, each with type", true)) {
    std::string type, prefix;
    read_metric_keys(entry, type, prefix);
    if (type.empty()) entry.finish();
    const std::string place = entry.at("type");
    Metric metric = registry::metrics().read(type, entry);
    if (metric.figures.empty() || !metric.accumulate || !metric.result)
      entry.fail("type", type + " lacks figures, accumulate or result; expected all three");
    metric = with_place(std::move(metric), place + type + ": ");
    for (auto& figure : metric.figures) {
      figure = prefix + figure;
      if (figure == "loss") entry.fail("type", "loss is the model's own; expected a prefix");
      const auto [other, fresh] = owners.emplace(figure, type);
      if (!fresh)
        entry.fail("type", type + " has the figure " + figure +
                               ", as a metric before it; expected "
                               "a prefix for one of the two");
    }
    metrics.push_back(std::move(metric));
  }
}

/// Reads the top-level keys that are not sections.
void read_components(OptionReader& keys, Config& config) {
  if (keys.given("train_step"))
    config.train_step =
        read_component(registry::train_steps(), keys, "train_step", "",
                       "how several models are trained: a component of the program");
  else keys.map("train_step");  // null is none
  config.loss = read_loss(keys);
  config.preprocessor = read_component(registry::preprocessors(), keys, "data_preprocessor", "none",
                                       "preprocessing of a batch before the model gets it");
  read_metrics(keys, config.metrics);
  read_hooks(keys, config);
}

/// `host`, or a number.
void read_groups(OptionReader& keys, int64_t& groups) {
  const ConfigNode* node =
      keys.take("groups", "host, or a whole number >= 1",
                "the groups: the ranks of each host, or this number of groups of consecutive ranks",
                ConfigNode::scalar("host"));
  if (node == nullptr) return;
  const OptionValue value = OptionReader::value_of(*node, keys.full("groups"));
  const auto* word = std::get_if<std::string>(&value);
  if (word != nullptr && *word == "host") return;
  const auto* number = std::get_if<int64_t>(&value);
  if (number == nullptr || *number < 1)
    keys.fail("groups", node->describe() + "; expected host, or a whole number >= 1");
  groups = *number;
}

void read_local_sgd(OptionReader& keys, std::optional<LocalSgdConfig>& local_sgd) {
  OptionReader inner = keys.map("local_sgd");
  LocalSgdConfig read;
  LocalSgdOptions& options = read.options;
  int64_t every = inner.node() != nullptr || inner.describing() ? options.sync_every : 0;
  inner.read("every", every,
             "if this section is there: steps from one synchronisation of the groups to the next; "
             "0: all ranks train together",
             kNotNegative);
  read_groups(inner, read.groups);
  inner.read_enum("outer", options.outer,
                  {{"nesterov", OuterOptimizer::nesterov}, {"average", OuterOptimizer::average}},
                  "what a synchronisation does: DiLoCo's step of SGD with Nesterov momentum, or "
                  "the mean of the groups' parameters");
  inner.read("outer_lr", options.lr, "learning rate of nesterov", kPositive);
  inner.read("outer_momentum", options.momentum, "momentum of nesterov", kProbability);
  inner.read_enum("wire", options.wire,
                  {{"float32", OuterWire::float32}, {"int8", OuterWire::int8}},
                  "how differences of parameters travel between the groups");
  inner.read_enum("overlap", options.overlap, overlap_names(),
                  "background: differences travel during the next steps and are applied at the "
                  "next synchronisation; otherwise a synchronisation blocks");
  inner.finish();
  if (every == 0) return;
  options.sync_every = every;
  local_sgd = read;
}

void read_wrapper_type(OptionReader& keys, ParallelConfig& parallel) {
  keys.read_choice("type", parallel.type, registry::parallel().names(),
                   "how the ranks share the work");
}

void read_parallel_keys(OptionReader& keys, ParallelConfig& parallel) {
  read_wrapper_type(keys, parallel);
  keys.read_enum(
      "backend", parallel.group.backend,
      {{"auto", Backend::Auto},
       {"shm", Backend::SharedMemory},
       {"tcp", Backend::TCP},
       {"gloo", Backend::Gloo},
       {"nccl", Backend::NCCL},
       {"mpi", Backend::MPI}},
      "communication backend; auto also uses NCCL if each rank of a host has a GPU of its own");
  parallel.group.tune_process = true;
  double seconds = static_cast<double>(parallel.group.timeout.count()) / 1000;
  keys.read("timeout", seconds, "longest wait for another rank, in seconds", Range{0.001, 1e6});
  parallel.group.timeout = std::chrono::milliseconds(std::llround(seconds * 1000));
  keys.read("check_results", parallel.group.check_results,
            "verify the result of each collective; for debugging, much slower");
  keys.read("deterministic", parallel.group.deterministic,
            "on devices with NCCL: sums in the order of the CPU's, with its bits; slower");
  read_local_sgd(keys, parallel.local_sgd);
}

void read_parallel(OptionReader& keys, ParallelConfig& parallel) {
  read_parallel_keys(keys, parallel);
  parallel.plan = registry::parallel().read(parallel.type, keys);
}

void check_nonfinite(const Config& config) {
  const RunConfig& run = config.train;
  const std::string key = run.rollback_on_spike            ? "rollback_on_spike"
                          : run.on_nonfinite == "rollback" ? "on_nonfinite"
                                                           : "";
  if (!key.empty() && config.checkpoint.folder.empty()) {
    const std::string value =
        run.rollback_on_spike ? fmt::format("{}", *run.rollback_on_spike) : run.on_nonfinite;
    throw UsageError(config.at("train." + key) + value +
                     ", but there is no checkpoint to go back to; expected checkpoint.folder");
  }
  if (run.on_nonfinite != "stop" && run.error_if_nonfinite)
    throw UsageError(config.at("train.error_if_nonfinite") +
                     "true ends the run, and train.on_nonfinite is " + run.on_nonfinite +
                     "; expected one of the two");
}

void check_local_sgd(const Config& config) {
  if (!config.parallel.local_sgd) return;
  const std::string groups = ", and parallel.local_sgd has groups that meet every few steps only; ";
  if (config.train.rollback_on_spike)
    throw UsageError(config.at("train.rollback_on_spike") +
                     "a rollback is one of all ranks at once" + groups + "expected null");
  if (config.train.on_nonfinite == "rollback")
    throw UsageError(config.at("train.on_nonfinite") +
                     "rollback: a rollback is one of all ranks at once" + groups +
                     "expected stop or skip");
  if (config.data.uneven == "join")
    throw UsageError(config.at("data.uneven") +
                     "join: the ranks tell each other in every step "
                     "who has data" +
                     groups + "expected error or drop");
}

/// Evaluations must compute the figure that rankings compare.
void check_rankings(const Config& config) {
  std::vector<std::string> figures{"loss"};
  for (const auto& metric : config.metrics)
    figures.insert(figures.end(), metric.figures.begin(), metric.figures.end());
  const auto check = [&](const std::string& key, const Ranking& ranking) {
    const auto& metric = ranking.metric;
    if (std::find(figures.begin(), figures.end(), metric) != figures.end()) return;
    const bool known = registry::metrics().contains(metric);
    throw UsageError(config.at(key + ".metric") + "\"" + metric + "\" is not evaluated" +
                     (known ? "; expected it in section metrics: [" + metric + "]"
                            : suggestion(metric, figures)));
  };
  check("train.early_stop", config.train.early_stop.ranking);
  check("checkpoint.keep_best", config.checkpoint.keep_best.ranking);
  if (config.checkpoint.keep_best.count > 0 && config.train.eval.every == 0)
    throw UsageError(config.at("checkpoint.keep_best") +
                     "looks at evaluations; expected train.eval_every > 0");
}

}  // namespace

void read_wrapper(OptionReader& keys, ParallelConfig& parallel) {
  read_wrapper_type(keys, parallel);
  parallel.plan = registry::parallel().read(parallel.type, keys);
}

LrSchedule read_scheduler(OptionReader& keys) {
  std::string type = "none";
  keys.read_choice("type", type, registry::schedulers().names(), "how the learning rate changes");
  return registry::schedulers().read(type, keys);
}

void read_config(OptionReader& keys, Config& config) {
  const bool several = keys.given("models");
  if (several) refuse_beside_models(keys);
  else keys.require("model", "a map: which model to train");
  if (!several && keys.given("train_step"))
    keys.fail("train_step", "trains several models; expected models in place of model");
  const bool datasets = keys.has("data");  // without it, the samples come from a program
  if (!several && !keys.has("parallel"))
    keys.require("optimizer", "a map: the optimizer and its options");
  if (datasets) keys.require("train", "a map: steps, global_batch and outputs");
  OptionReader model = keys.map("model"), models = keys.map("models"), data = keys.map("data"),
               optimizer = keys.map("optimizer"), scheduler = keys.map("scheduler"),
               parallel = keys.map("parallel"), run = keys.map("train"),
               checkpoint = keys.map("checkpoint");
  read_components(keys, config);
  keys.finish();
  if (!several) read_model(model, config.model);
  read_parallel(parallel, config.parallel);
  if (several) read_models(models, config);
  if (datasets) read_data(data, config, config.data);
  if (!several) {
    read_optimizer(optimizer, config);
    config.scheduler = read_scheduler(scheduler);
  } else {
    refuse_train_beside_models(run);
  }
  read_train(run, config, config.train);
  read_checkpoint(checkpoint, config.checkpoint);
  finish_models(config);
  check_nonfinite(config);
  check_rankings(config);
  check_local_sgd(config);
}

void describe_top_level(OptionReader& keys) {
  Config config;
  read_components(keys, config);
}

void describe_data(OptionReader& keys) {
  DataConfig data;
  read_data_keys(keys, data);
}

void describe_metric(OptionReader& keys) {
  std::string type, prefix;
  read_metric_keys(keys, type, prefix);
}

void describe_parallel(OptionReader& keys) {
  ParallelConfig parallel;
  read_parallel_keys(keys, parallel);
}

void read_checkpoint(OptionReader& keys, CheckpointConfig& checkpoint) {
  keys.read_path("folder", checkpoint.folder,
                 "folder of the checkpoints, one subfolder per step; null: none");
  keys.read("every", checkpoint.every,
            "steps between checkpoints; 0: only at the end and when interrupted", kNotNegative);
  keys.read("keep_last", checkpoint.keep_last, "number of newest checkpoints that are kept",
            kAtLeastOne);
  keys.read("keep_every", checkpoint.keep_every,
            "checkpoints at multiples of this step are always kept; 0: none", kNotNegative);
  OptionReader best = keys.map("keep_best");
  if (best.node() != nullptr || best.describing()) checkpoint.keep_best.count = 1;
  read_ranking(best, checkpoint.keep_best.ranking);
  best.read("count", checkpoint.keep_best.count,
            "if this section is there: number of checkpoints of the best evaluations that are kept "
            "beside the newest ones; an evaluation among them writes a checkpoint; 0: none",
            kNotNegative);
  best.finish();
  keys.read("resume", checkpoint.resume,
            "continue from the newest checkpoint in folder, if there is one");
  keys.read_optional_enum("fallback", checkpoint.fallback, {{"true", true}, {"false", false}},
                          "set a damaged newest checkpoint aside and take the one before it; null: "
                          "only under tessera run --max-restarts");
  std::string optimizer = "load";
  keys.read_choice("optimizer", optimizer, {"load", "ignore"},
                   "the optimizer state of the checkpoint; ignore: the optimizer starts anew");
  checkpoint.optimizer = optimizer == "load";
  keys.read_path("from", checkpoint.from,
                 "checkpoint of any run to start from; a checkpoint in folder has priority");
  keys.read(
      "single_file", checkpoint.single_file,
      "rank 0 writes all weights to weights.safetensors; otherwise every rank writes its part "
      "of them, and rank 0 model.safetensors.index.json");
  keys.finish();
  for (const auto& [key, value] :
       {std::pair("every", checkpoint.every), std::pair("keep_every", checkpoint.keep_every),
        std::pair("keep_best", checkpoint.keep_best.count)})
    if (checkpoint.folder.empty() && value > 0)
      keys.fail(key, std::to_string(value) + " has no meaning without checkpoint.folder");
}

}  // namespace tessera::train
