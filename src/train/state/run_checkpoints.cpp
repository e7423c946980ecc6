#include "train/state/run_checkpoints.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>

#include <fmt/format.h>

#include "tessera/detail/folders.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "train/groups/group_files.h"
#include "train/state/checkpoint_to_resume.h"
#include "train/state/random_state.h"

namespace tessera::train {
namespace {

constexpr const char* kConfig = "config.yaml";
/// The moving average is saved as an optimizer state tensor of its shard.
constexpr const char* kAverage = "weight_average";
/// The weights of the best evaluation are saved in the same way.
constexpr const char* kBest = "best_weights";

std::string rank_file(const char* kind, int rank, int world) {
  return fmt::format("{}-{:05d}-of-{:05d}.safetensors", kind, rank, world);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::error_code error;
  auto names = detail::names_in(folder, error);
  if (error) throw Error(fmt::format("{}: cannot be listed: {}", folder, error.message()));
  return names;
}

/// Moves the checkpoints of an earlier run to a subfolder, so that a new run does not resume from
/// them later.
void set_aside_checkpoints(const std::string& folder) {
  namespace fs = std::filesystem;
  if (!latest_checkpoint(folder)) return;
  int number = 1;
  while (fs::exists(fs::path(folder) / fmt::format("earlier-{}", number))) ++number;
  const fs::path aside = fs::path(folder) / fmt::format("earlier-{}", number);
  fs::create_directory(aside);
  for (const auto& name : names_in(folder))
    if (name.rfind("step-", 0) == 0 && fs::is_directory(fs::path(folder) / name))
      fs::rename(fs::path(folder) / name, aside / name);
}

/// Quotes `path` for a shell.
std::string quoted(const std::string& path) {
  std::string text = "'";
  for (const char letter : path) text += letter == '\'' ? "'\\''" : std::string(1, letter);
  return text + "'";
}

/// A free name for a damaged checkpoint. A checkpoint that was set aside earlier stays.
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

/// The checkpoint of the folder from which the run goes on; "": none. Collective.
std::string newest_of(const RunContext& context) {
  const auto found = checkpoint_to_resume(context.config.checkpoint.folder, context.group);
  if (!found.warning.empty()) context.say("warning: " + found.warning);
  return found.path;
}

}  // namespace

RunCheckpoints::RunCheckpoints(RunContext& context) : context_(context) {
  const CheckpointConfig& config = context_.config.checkpoint;
  std::string path = config.folder.empty() ? "" : find();
  const bool own = !path.empty();
  if (!own) path = context_.group.broadcast_bytes(config.from, 0);
  if (path.empty()) return;
  std::string problem;
  while (!(problem = open(path)).empty()) {
    if (!own) throw AgreedError(context_.config.at("checkpoint.from") + problem);
    path = set_aside_damaged(path, problem);
  }
  if (own) saved_at_ = resumed_->step();
}

/// Opens the folder for writing. Returns the checkpoint in it to resume from, or "".
std::string RunCheckpoints::find() {
  const CheckpointConfig& config = context_.config.checkpoint;
  const CheckpointStoreOptions options{.keep_last = static_cast<int>(config.keep_last),
                                       .keep_every = config.keep_every};
  const std::string place = context_.config.at("checkpoint.folder");
  try {
    store_.emplace(config.folder, context_.group, options);
  } catch (const AgreedError& error) {
    throw AgreedError(place + error.what());
  }
  if (!store_->shared())
    context_.say(fmt::format("{}the hosts do not share {}: each writes the files of its ranks",
                             place, config.folder));
  if (config.resume) return newest_of(context_);
  agree(context_.group, [&] {
    if (store_->leads()) set_aside_checkpoints(config.folder);
  });
  return "";
}

/// Opens and verifies the checkpoint to resume from. Returns the text of an error that is the same
/// on all ranks if the checkpoint is damaged. Other errors are thrown, for a checkpoint of a newer
/// version or one that cannot be read now.
std::string RunCheckpoints::open(const std::string& path) {
  try {
    resumed_.emplace(path, context_.group);
    resumed_->verify(context_.group);
    return "";
  } catch (const CheckpointVersionError& error) {
    throw AgreedError(error.what());
  } catch (const CheckpointDamagedError& error) {
    return error.what();
  }
}

/// With checkpoint.fallback: renames the damaged checkpoint and returns the one before it.
/// Otherwise, and if there is none before it, throws on all ranks.
std::string RunCheckpoints::set_aside_damaged(const std::string& path, const std::string& why) {
  const char* restarts = std::getenv("TORCHELASTIC_MAX_RESTARTS");
  const bool restarted = restarts != nullptr && std::atoi(restarts) > 0;
  if (!context_.config.checkpoint.fallback.value_or(restarted))
    throw AgreedError(why + advice_to_skip(path));
  const std::filesystem::path step(path);
  const auto aside = name_aside(step);
  agree(context_.group, [&] {
    if (!context_.first()) return;
    for (const auto& name : names_in(step.parent_path().string())) {
      const bool before = name.rfind("step-", 0) == 0 && name < step.filename().string();
      if (before && std::filesystem::is_directory(step.parent_path() / name)) return;
    }
    throw UsageError(why + "; checkpoint.fallback: there is no checkpoint before it");
  });
  agree(context_.group, [&] {
    if (store_->leads() && std::filesystem::exists(step)) std::filesystem::rename(step, aside);
  });
  const std::string next = newest_of(context_);
  context_.say(fmt::format("warning: {}; it is set aside as {}, and {} is taken", why,
                           aside.string(), next));
  return next;
}

std::string RunCheckpoints::state_file() const {
  return resumed_->path() + "/" + state_file_of(resumed_group_);
}

SavedState RunCheckpoints::read_state() {
  SavedState state = saved_state_of(resumed_->text(state_file_of(0)), state_file());
  resumed_groups_ = state.local_sgd;
  resumed_group_ = group_to_resume(context_.groups->number(), groups_saved());
  if (resumed_group_ > 0)
    state = saved_state_of(resumed_->text(state_file_of(resumed_group_)), state_file());
  check(state);
  return state;
}

void RunCheckpoints::check(const SavedState& state) const {
  const Config& config = context_.config;
  // Steps are counted, scheduled, logged and saved by number. With another global batch the same
  // number would stand for another amount of training.
  const int64_t batch = config.train.global_batch, before = state.global_batch;
  if (before > 0 && batch != before)
    throw UsageError(fmt::format(
        "{}{}, but {} is of a run with {}; expected {}, or a new run from its weights, in another "
        "folder: checkpoint.folder=… model.init={}",
        config.at("train.global_batch"), batch, resumed_->path(), before, before,
        resumed_->path()));
  for (const ModelSections* own : config.trained()) {
    const auto saved = state.models.find(own->name);
    if (saved == state.models.end())
      throw UsageError(own->at("model") + "the models of " + resumed_->path() +
                       " have other names; expected the same");
    check(*own, saved->second);
  }
}

void RunCheckpoints::check(const ModelSections& own, const SavedModel& saved) const {
  const std::string& type = own.optimizer.type;
  if (!context_.config.checkpoint.optimizer)
    context_.say("checkpoint.optimizer: ignore: " + type + " starts anew");
  else if (!saved.optimizer.empty() && saved.optimizer != type)
    context_.say("warning: " + own.at("optimizer.type") + type + " goes on with the state of " +
                 saved.optimizer);
  // Options that change the meaning of weights without changing their shapes.
  const std::map<std::string, std::string> meaning(saved.meaning.begin(), saved.meaning.end());
  for (const auto& [option, value] : own.model.plan.meaning) {
    const auto found = meaning.find(option);
    if (found == meaning.end() || found->second == value) continue;
    throw UsageError(own.at("model." + option) + value + ", but the weights of " +
                     resumed_->path() + " are of a model with " + found->second + "; expected " +
                     found->second);
  }
}

std::vector<at::Tensor> RunCheckpoints::restore(const SavedState& state, ModelWrapper& wrapper,
                                                BestEvaluations& best) {
  for (const auto& warning : best.load_state(state.best, saved_at_ >= 0)) context_.say(warning);
  auto averages = restore_slices(state, wrapper, best);
  load_buffers(*resumed_, resumed_group_, *wrapper.model().module);
  restore_random(state.step, wrapper);
  restore_groups(state.step);
  return averages;
}

int RunCheckpoints::groups_saved() const {
  return resumed_groups_.is_object() ? resumed_groups_.value("groups", 1) : 1;
}

void RunCheckpoints::restore_groups(int64_t steps) {
  const int saved = groups_saved();
  if (saved != context_.groups->count())
    context_.say(fmt::format(
        "warning: {} is of a run with {} group{}, and this one has {}: group i goes on from group "
        "i mod {}",
        resumed_->path(), saved, saved == 1 ? "" : "s", context_.groups->describe(), saved));
  const auto state =
      context_.config.checkpoint.optimizer ? resumed_groups_ : nlohmann::ordered_json();
  if (!context_.groups->load(*resumed_, state, resumed_group_, steps))
    context_.say("parallel.local_sgd: the outer optimizer starts anew");
}

/// Returns the averages of the shards.
std::vector<at::Tensor> RunCheckpoints::restore_slices(const SavedState& state,
                                                       ModelWrapper& wrapper,
                                                       BestEvaluations& best) {
  const Config& config = context_.config;
  const auto shards = wrapper.shards();
  std::vector<StateSlice> slices =
      resumed_->load_slices({shards.begin(), shards.end()}, slice_set_of(resumed_group_));
  const auto take = [&](const char* name) {
    auto tensors = take_from(slices, name);
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].defined()) tensors[i] = in_form_of(shards[i].tensor, tensors[i], slices[i]);
    return tensors;
  };
  const std::vector<at::Tensor> averages = take(kAverage);
  best.load_weights(*resumed_, take(kBest));
  load_parameters(resumed_group_, slices, shards);
  if (!config.checkpoint.optimizer) return averages;
  try {
    wrapper.load_state_slices(std::move(slices));
  } catch (const UsageError& error) {
    const std::string& before = state.models.begin()->second.optimizer;
    const bool several = !config.models.empty();
    throw UsageError(fmt::format(
        "{}{} is of a run with {}, and the error is: {}; expected that optimizer, or "
        "checkpoint.optimizer: ignore",
        several ? config.at("models") : config.at("optimizer.type") + config.optimizer.type + "; ",
        resumed_->path(), several || before.empty() ? "another optimizer" : before, error.what()));
  }
  return averages;
}

/// With the same number of ranks the generators continue. With another number, and on a device of
/// another type, they get a new seed, because no state fits.
void RunCheckpoints::restore_random(int64_t steps, ModelWrapper& wrapper) {
  const ProcessGroup& group = context_.group;
  seed_generators(context_.config.model.seed + static_cast<uint64_t>(group.rank()) +
                      static_cast<uint64_t>(steps) * 0x9E3779B97F4A7C15u,
                  context_.device);
  if (resumed_->world_size() != group.size()) return;
  const std::string file = rank_file("rank", group.rank(), group.size());
  std::vector<std::pair<std::string, at::Tensor>> random, extra;
  for (const std::string& name : resumed_->tensors(file).names()) {
    const bool own = name.rfind("random.", 0) == 0;
    (own ? random : extra)
        .emplace_back(name.substr(name.find('.') + 1), resumed_->load_tensor(file, name));
  }
  set_random_state(random, context_.device);
  if (!extra.empty() && groups_saved() == context_.groups->count()) wrapper.load_extra_state(extra);
}

std::vector<StateSlice> RunCheckpoints::slices(const SavedParts& parts) const {
  std::vector<StateSlice> all = parts.wrapper.state_slices();
  add_parameters(context_.groups->number(), parts.wrapper.shards(), all);
  std::vector<StateSlice> saved;
  for (const size_t i : parts.wrapper.saved_shards()) {
    saved.push_back(all[i]);
    auto& tensors = saved.back().state.tensors;
    if (parts.averages[i].defined()) tensors[kAverage] = parts.averages[i];
    if (parts.best.has_weights()) tensors[kBest] = parts.best.weights()[i];
  }
  return saved;
}

std::string RunCheckpoints::save(int64_t step, const std::function<SavedState()>& state_of,
                                 const SavedParts& parts) {
  if (saved_at_ == step) return "";
  TrainingGroups& groups = *context_.groups;
  const auto begin_part = [&] { context_.heartbeat.enter(Phase::saving, step); };
  begin_part();
  const auto start = std::chrono::steady_clock::now();
  CheckpointWriter writer(*store_, step);
  parts.wrapper.wait();
  if (groups.first()) parts.weights.add_to(writer);
  begin_part();
  writer.add_slices(slices(parts), slice_set_of(groups.number()));
  const auto local_sgd = groups.save(writer);
  auto own = random_state(context_.device);
  for (auto& [name, tensor] : own) name = "random." + name;
  for (const auto& [name, tensor] : parts.wrapper.extra_state())
    own.emplace_back("extra." + name, tensor);
  writer.add_tensors(rank_file("rank", context_.group.rank(), context_.group.size()), own);
  if (context_.own_group().rank() == 0) {
    auto state = state_of();
    state.local_sgd = local_sgd;
    writer.add_text(state_file_of(groups.number()), to_text(state));
    add_buffers(writer, groups.number(), *parts.wrapper.model().module);
  }
  if (context_.first()) {
    writer.add_text(kConfig, context_.config.dump(true));
    parts.best.add_buffers(writer);
  }
  begin_part();
  const std::string path = writer.commit(parts.best.kept());
  saved_at_ = step;
  if (context_.reporter) {
    context_.say("checkpoint written to " + path + parts.best.note(step));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    context_.reporter->event("checkpoint", step, {{"path", path}, {"seconds", seconds.count()}});
  }
  return path;
}

}  // namespace tessera::train
