#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "train/groups/group_files.h"
#include "train/run/random_state.h"
#include "train/run/run.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kState = "state.json";
constexpr const char* kConfig = "config.yaml";
/// The moving average is saved as an optimizer state tensor of its shard.
constexpr const char* kAverage = "weight_average";
constexpr const char* kLocalSgd = "local_sgd";  // in state.json: what sync_ has saved

std::string rank_file(const char* kind, int rank, int world) {
  return fmt::format("{}-{:05d}-of-{:05d}.safetensors", kind, rank, world);
}

/// The record of a step, for a resumed run that evaluates it. A figure that is not finite is null:
/// JSON has no number for it.
Json json_of(const StepRecord& record) {
  const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
  Json figures = Json::array();
  for (const auto& [name, value] : record.figures) {
    figures.push_back({name, number(value)});
  }
  return {{"loss", number(record.loss)},
          {"grad_norm", number(record.grad_norm)},
          {"lr", record.lr},
          {"ms", record.ms},
          {"samples", record.samples},
          {"tokens", record.tokens},
          {"epoch", record.epoch},
          {"loss_scale", record.loss_scale},
          {"figures", figures}};
}

StepRecord record_of(const Json& json, int64_t step) {
  const auto number = [](const Json& value) {
    return value.is_null() ? std::nan("") : value.get<double>();
  };
  StepRecord record;
  record.step = step;
  record.loss = number(json.at("loss"));
  record.grad_norm = number(json.at("grad_norm"));
  record.lr = json.at("lr").get<double>();
  record.ms = json.at("ms").get<double>();
  record.samples = json.at("samples").get<int64_t>();
  record.tokens = json.at("tokens").get<int64_t>();
  record.epoch = json.at("epoch").get<double>();
  record.loss_scale = json.at("loss_scale").get<double>();
  for (const auto& figure : json.at("figures")) {
    record.figures.emplace_back(figure.at(0).get<std::string>(), number(figure.at(1)));
  }
  return record;
}

/// Moves the checkpoints of an earlier run to a subfolder, so that a new run does not resume from
/// them later.
void set_aside_checkpoints(const std::string& folder) {
  namespace fs = std::filesystem;
  if (!latest_checkpoint(folder)) {
    return;
  }
  int number = 1;
  while (fs::exists(fs::path(folder) / fmt::format("earlier-{}", number))) {
    ++number;
  }
  const fs::path aside = fs::path(folder) / fmt::format("earlier-{}", number);
  fs::create_directory(aside);
  std::vector<fs::path> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory() && entry.path().filename().string().rfind("step-", 0) == 0) {
      steps.push_back(entry.path());
    }
  }
  for (const auto& step : steps) {
    fs::rename(step, aside / step.filename());
  }
}

/// Quotes `path` for a shell.
std::string quoted(const std::string& path) {
  std::string text = "'";
  for (const char letter : path) {
    text += letter == '\'' ? "'\\''" : std::string(1, letter);
  }
  return text + "'";
}

/// A free name for a damaged checkpoint. One that was set aside before stays.
std::filesystem::path name_aside(const std::filesystem::path& step) {
  const std::string name = "damaged-" + step.filename().string();
  auto free = step.parent_path() / name;
  for (int number = 2; std::filesystem::exists(free); ++number)
    free.replace_filename(fmt::format("{}-{}", name, number));
  return free;
}

/// Advice for the case that the folder's newest checkpoint cannot be read.
std::string advice_to_skip(const std::string& path) {
  return fmt::format("; to go on without it: mv {} {}, and the same command again", quoted(path),
                     quoted(name_aside(path).string()));
}

std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (size_t at = 0; (at = text.find('\n', at)) != text.npos;) text.replace(at, 1, "; ");
  return text;
}

/// The newest sound checkpoint of the folder, or the newest one if none is sound; "" if there is
/// none. Collective.
std::string checkpoint_to_resume(const std::string& folder, const ProcessGroup& group) {
  const auto newest = latest_checkpoint(folder, group);
  const auto sound = latest_sound_checkpoint(folder, group);
  if (group.rank() == 0 && newest && newest != sound) {
    std::printf("warning: %s has elements that are not finite: %s%s\n", newest->c_str(),
                one_line(unsound_tensors(*newest)).c_str(),
                sound ? ("; resuming from " + *sound).c_str() : "");
    std::fflush(stdout);
  }
  return sound ? *sound : newest.value_or("");
}

}  // namespace

/// Opens the checkpoint folder for writing and the checkpoint to resume from.
void Run::open_checkpoints() {
  const CheckpointConfig& config = config_.checkpoint;
  std::string path;
  if (!config.folder.empty()) {
    CheckpointStoreOptions options;
    options.keep_last = static_cast<int>(config.keep_last);
    options.keep_every = config.keep_every;
    try {
      store_.emplace(config.folder, group_, options);
    } catch (const AgreedError& error) {
      throw AgreedError(config_.at("checkpoint.folder") + error.what());
    }
    if (first() && !store_->shared()) {
      std::printf("%sthe hosts do not share %s: each writes the files of its ranks\n",
                  config_.at("checkpoint.folder").c_str(), config.folder.c_str());
      std::fflush(stdout);
    }
    if (config.resume) {
      path = checkpoint_to_resume(config.folder, group_);
    } else {
      agree(group_, [&] {
        if (store_->leads()) set_aside_checkpoints(config.folder);
      });
    }
  }
  const bool own = !path.empty();
  if (!own) {
    path = group_.broadcast_bytes(config.from, 0);
  }
  if (path.empty()) {
    return;
  }
  std::string problem;
  while (!(problem = open_checkpoint(path)).empty()) {
    if (!own) throw AgreedError(config_.at("checkpoint.from") + problem);
    path = set_aside_damaged(path, problem);
  }
  if (std::filesystem::path(path).parent_path() == std::filesystem::path(config.folder)) {
    saved_at_ = resumed_->step();
  }
}

/// Opens and verifies the checkpoint to resume from. Returns the text of an error that is the same
/// on all ranks if the checkpoint is damaged. Other errors are thrown: one of a newer version, and
/// one that cannot be read for now.
std::string Run::open_checkpoint(const std::string& path) {
  try {
    resumed_.emplace(path, group_);
    resumed_->verify(group_);
    return "";
  } catch (const CheckpointVersionError& error) {
    throw AgreedError(error.what());
  } catch (const CheckpointDamagedError& error) {
    return error.what();
  }
}

/// With checkpoint.fallback: renames the damaged checkpoint and returns the one before it.
/// Otherwise, and if there is none before it, throws on all ranks.
std::string Run::set_aside_damaged(const std::string& path, const std::string& why) {
  const char* restarts = std::getenv("TORCHELASTIC_MAX_RESTARTS");
  const bool restarted = restarts != nullptr && std::atoi(restarts) > 0;
  if (!config_.checkpoint.fallback.value_or(restarted)) {
    throw AgreedError(why + advice_to_skip(path));
  }
  const std::filesystem::path step(path);
  const auto aside = name_aside(step);
  agree(group_, [&] {
    if (!first()) return;
    for (const auto& older : std::filesystem::directory_iterator(step.parent_path())) {
      const std::string name = older.path().filename().string();
      const bool before = name.rfind("step-", 0) == 0 && name < step.filename().string();
      if (before && older.is_directory()) return;
    }
    throw UsageError(why + "; checkpoint.fallback: there is no checkpoint before it");
  });
  agree(group_, [&] {
    if (store_->leads() && std::filesystem::exists(step)) std::filesystem::rename(step, aside);
  });
  const std::string next = checkpoint_to_resume(config_.checkpoint.folder, group_);
  if (first()) {
    std::printf("warning: %s; it is set aside as %s, and %s is taken\n", why.c_str(), aside.c_str(),
                next.c_str());
    std::fflush(stdout);
  }
  return next;
}

void Run::restore() {
  resumed_->read_together([&] {
    const std::string all = resumed_->text(kState);
    resumed_groups_ = Json::parse(all).value(kLocalSgd, Json());
    resumed_group_ = group_to_resume(groups_->number(), groups_in_checkpoint());
    const std::string file = state_file_of(resumed_group_);
    read_state(resumed_group_ == 0 ? all : resumed_->text(file), resumed_->path() + "/" + file);
    restore_slices(*resumed_);
    if (resumed_group_ > 0) load_buffers(*resumed_, resumed_group_, *model_.module);
    restore_random(*resumed_);
    restore_sync();
  });
  if (resumed_group_ > 0) wrapper_->publish_shards();
}

int Run::groups_in_checkpoint() const {
  return resumed_groups_.is_object() ? resumed_groups_.value("groups", 1) : 1;
}

/// Local.
void Run::restore_sync() {
  const bool same = groups_in_checkpoint() == groups_->count();
  if (reporter_ && !same) {
    reporter_->line(fmt::format(
        "warning: {} is of a run with {} group{}, and this one has {}: group i goes on from group "
        "i mod {}",
        resumed_->path(), groups_in_checkpoint(), groups_in_checkpoint() == 1 ? "" : "s",
        groups_->describe(), groups_in_checkpoint()));
  }
  if (!sync_) return;
  const Json saved = config_.checkpoint.optimizer ? resumed_groups_ : Json();
  if (!sync_->load(*resumed_, saved, resumed_group_, done_) && reporter_) {
    reporter_->line("parallel.local_sgd: the outer optimizer starts anew");
  }
}

void Run::restore_slices(const Checkpoint& checkpoint) {
  const auto shards = wrapper_->shards();
  std::vector<StateSlice> slices =
      checkpoint.load_slices({shards.begin(), shards.end()}, slice_set_of(resumed_group_));
  std::vector<at::Tensor> averages = take_from(slices, kAverage);
  if (resumed_group_ > 0) load_parameters(slices, shards);
  if (config_.train.ema.decay) start_averaging();
  if (average_ && averages.size() == slices.size()) {
    for (size_t i = 0; i < averages.size(); ++i)
      averages[i] = in_form_of(average_->averages()[i], averages[i], slices[i]);
    average_->load(averages, averaged_updates_);
  }
  if (config_.checkpoint.optimizer) {
    try {
      wrapper_->take_state_slices(std::move(slices));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format(
          "{}{}; {} is of a run with {}, and the error is: {}; expected that optimizer, or "
          "checkpoint.optimizer: ignore",
          config_.at("optimizer.type"), config_.optimizer.type, checkpoint.path(),
          Json::parse(checkpoint.text(kState)).value("optimizer", "another optimizer"),
          error.what()));
    }
  }
}

/// With the same number of ranks the generators continue. With another number, and on a device of
/// another type, they get a new seed, because no state fits.
void Run::restore_random(const Checkpoint& checkpoint) {
  seed_generators(config_.model.seed + static_cast<uint64_t>(group_.rank()) +
                      static_cast<uint64_t>(done_) * 0x9E3779B97F4A7C15u,
                  device_);
  if (checkpoint.world_size() != group_.size()) return;
  const std::string file = rank_file("rank", group_.rank(), group_.size());
  std::vector<std::pair<std::string, at::Tensor>> random, extra;
  for (const std::string& name : checkpoint.tensors(file).names()) {
    const bool own = name.rfind("random.", 0) == 0;
    (own ? random : extra)
        .emplace_back(name.substr(name.find('.') + 1), checkpoint.load_tensor(file, name));
  }
  set_random_state(random, device_);
  if (!extra.empty() && groups_in_checkpoint() == groups_->count()) {
    wrapper_->load_extra_state(extra);
  }
}

std::string Run::state_text() const {
  Json json = {{"step", done_},
               {"samples", assignment_->assigned_before(done_)},
               {"global_batch", config_.train.global_batch},
               {"data",
                {{"size", sampler_->size()},
                 {"order", to_string(config_.data.order)},
                 {"seed", config_.data.seed}}},
               {"parallel", config_.parallel.type},
               {"optimizer", config_.optimizer.type},
               {"ranks", group_.size()}};
  if (config_.train.loss_scale.enabled) {
    const auto& state = optimizer_->scaler().state();
    json["loss_scale"] = {{"scale", state.scale}, {"growth_tracker", state.growth_tracker}};
  }
  if (early_stop_) {
    const auto& state = early_stop_->state();
    json["early_stop"] = {{"best", state.best ? Json(*state.best) : Json()},
                          {"waited", state.waited},
                          {"stopped", state.stopped}};
  }
  json["model"] = Json::object();
  for (const auto& [option, value] : config_.model.plan.meaning) {
    json["model"][option] = value;
  }
  if (evaluation_due_) {
    json["evaluation_due"] = json_of(record_);
  }
  if (average_) {
    json["weight_average_updates"] = average_->updates();
  }
  if (sync_) json[kLocalSgd] = saved_groups_;
  if (!left_out_.empty()) {
    json["left_out"] = left_out_;
  }
  if (result_.best_eval_loss) {
    json["best_eval_loss"] = *result_.best_eval_loss;
  }
  json["hooks"] = Json::array();
  for (const auto& hook : hooks_) {
    json["hooks"].push_back(hook->state());
  }
  return json.dump(2) + "\n";
}

/// Steps are counted, scheduled, logged and saved by number. With another global batch the same
/// number would stand for another amount of training.
void Run::check_global_batch(int64_t before) const {
  const int64_t batch = config_.train.global_batch;
  if (batch != before) {
    throw UsageError(
        config_.at("train.global_batch") + std::to_string(batch) + ", but " + resumed_->path() +
        " is of a run with " + std::to_string(before) + "; expected " + std::to_string(before) +
        ", or a new run from its weights, in another folder: checkpoint.folder=… model.init=" +
        resumed_->path());
  }
}

/// Checks the options that change the meaning of weights without changing their shapes.
void Run::check_model(const std::map<std::string, std::string>& before) const {
  for (const auto& [option, value] : config_.model.plan.meaning) {
    const auto found = before.find(option);
    if (found != before.end() && found->second != value) {
      throw UsageError(config_.at("model." + option) + value + ", but the weights of " +
                       resumed_->path() + " are of a model with " + found->second + "; expected " +
                       found->second);
    }
  }
}

void Run::warn_of_optimizer(const std::string& before) {
  if (!reporter_) return;
  if (!config_.checkpoint.optimizer) {
    reporter_->line("checkpoint.optimizer: ignore: " + config_.optimizer.type + " starts anew");
  } else if (before != config_.optimizer.type) {
    reporter_->line("warning: " + config_.at("optimizer.type") + config_.optimizer.type +
                    " goes on with the state of " + before);
  }
}

void Run::read_state(const std::string& text, const std::string& where) {
  int64_t global_batch = 0;
  std::map<std::string, std::string> model;
  try {
    const Json json = Json::parse(text);
    model = json.value("model", model);
    warn_of_optimizer(json.value("optimizer", config_.optimizer.type));
    const Json& data = json.at("data");
    SamplerState sampler = sampler_->state();
    sampler.position = json.at("samples").get<int64_t>();
    sampler.size = data.at("size").get<int64_t>();
    sampler.order = data.at("order").get<std::string>() == "shuffled" ? SampleOrder::shuffled
                                                                      : SampleOrder::sequential;
    sampler.seed = data.at("seed").get<uint64_t>();
    sampler_->load_state(sampler);
    done_ = json.at("step").get<int64_t>();
    global_batch = json.value("global_batch",
                              done_ > 0 ? sampler.position / done_ : config_.train.global_batch);
    assignment_->start_iteration = done_;
    assignment_->start_sample = sampler.position;
    if (json.contains("evaluation_due")) {
      evaluation_due_ = data_.val != nullptr;
      record_ = record_of(json.at("evaluation_due"), done_ - 1);
    }
    if (json.contains("loss_scale")) {
      const Json& scale = json.at("loss_scale");
      optimizer_->scaler().load_state(
          {scale.at("scale").get<double>(), scale.at("growth_tracker").get<int64_t>()});
    }
    if (early_stop_ && json.contains("early_stop")) {
      const Json& stop = json.at("early_stop");
      EarlyStop::State state{{}, stop.at("waited").get<int64_t>(), stop.at("stopped").get<bool>()};
      if (!stop.at("best").is_null()) {
        state.best = stop.at("best").get<double>();
      }
      early_stop_->load_state(state);
    }
    averaged_updates_ = json.value("weight_average_updates", int64_t{0});
    left_out_.merge(json.value("left_out", std::set<int64_t>()));
    if (json.contains("best_eval_loss")) {
      result_.best_eval_loss = json.at("best_eval_loss").get<double>();
    }
    const Json& hooks = json.at("hooks");
    for (size_t i = 0; i < std::min(hooks.size(), hooks_.size()); ++i) {
      hooks_[i]->load_state(hooks[i].get<std::string>());
    }
  } catch (const UsageError& error) {
    throw UsageError(where + ": " + error.what());
  } catch (const Json::exception& error) {
    throw UsageError(where + ": " + error.what());
  }
  check_global_batch(global_batch);
  check_model(model);
}

std::vector<StateSlice> Run::slices_to_save() {
  std::vector<StateSlice> all = wrapper_->state_slices();
  if (!groups_->first()) add_parameters(wrapper_->shards(), all);
  std::vector<StateSlice> slices;
  for (const size_t i : wrapper_->saved_shards()) {
    slices.push_back(all[i]);
    if (average_) slices.back().state.tensors[kAverage] = average_->averages()[i];
  }
  return slices;
}

void Run::save_checkpoint() {
  if (saved_at_ == done_) {
    return;
  }
  heartbeat_.enter(Phase::saving, done_);
  const auto start = std::chrono::steady_clock::now();
  CheckpointWriter writer(*store_, done_);
  wrapper_->wait_for_parameters();
  if (groups_->first()) add_weights_to(writer);
  heartbeat_.enter(Phase::saving, done_);
  writer.add_slices(slices_to_save(), slice_set_of(groups_->number()));
  if (sync_) saved_groups_ = sync_->save(writer);
  auto own = random_state(device_);
  for (auto& [name, tensor] : own) {
    name = "random." + name;
  }
  for (const auto& [name, tensor] : wrapper_->extra_state()) {
    own.emplace_back("extra." + name, tensor);
  }
  writer.add_tensors(rank_file("rank", group_.rank(), group_.size()), own);
  if (own_group().rank() == 0) {
    writer.add_text(state_file_of(groups_->number()), state_text());
    if (!groups_->first()) add_buffers(writer, groups_->number(), *model_.module);
  }
  if (first()) writer.add_text(kConfig, config_.dump(true));
  heartbeat_.enter(Phase::saving, done_);
  result_.checkpoint = writer.commit();
  saved_at_ = done_;
  if (reporter_) {
    reporter_->line("checkpoint written to " + result_.checkpoint);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    reporter_->event("checkpoint", done_,
                     {{"path", result_.checkpoint}, {"seconds", seconds.count()}});
  }
  check_checkpoint();
}

}  // namespace tessera::train
