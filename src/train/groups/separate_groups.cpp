// The groups of parallel.local_sgd: each trains apart, and all meet every few steps.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"
#include "tessera/local_sgd.h"
#include "tessera/step/agreement.h"
#include "train/groups/training_groups.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kGroups = "groups";
constexpr const char* kUnderWay = "under_way";

std::string outer_set_of(int group) { return fmt::format("outer-{:05d}", group); }

/// True if it is an entry of LocalSgd::state_dict() with elements.
bool has_elements(const std::string& name) { return name != "steps" && name != "synchronizations"; }

void add(const CommStats& from, CommStats& to) {
  for (const auto kind : {&CommStats::all_reduce, &CommStats::reduce, &CommStats::broadcast,
                          &CommStats::all_gather, &CommStats::reduce_scatter,
                          &CommStats::all_to_all, &CommStats::barrier, &CommStats::bytes}) {
    (to.*kind).calls += (from.*kind).calls;
    (to.*kind).bytes_sent += (from.*kind).bytes_sent;
    (to.*kind).bytes_received += (from.*kind).bytes_received;
  }
  to.waited_seconds += from.waited_seconds;
}

LocalSgdGroups divide(const Config& config, ProcessGroup& all) {
  const int64_t groups = config.parallel.local_sgd->groups;
  const std::string place = config.at("parallel.local_sgd.groups");
  if (groups > 0 && all.size() % groups != 0)
    throw UsageError(fmt::format("{}{} with {} rank{}; expected a divisor of the number of ranks",
                                 place, groups, all.size(), all.size() == 1 ? "" : "s"));
  // A run may shrink to one host and continue there.
  if (groups == 0 && all.same_host()) return local_sgd_groups(all, all.size());
  return named(place, [&] { return local_sgd_groups(all, groups > 0 ? all.size() / groups : 0); });
}

/// With one group, as after shrinking to one host, only the outer optimizer remains.
class SeparateGroups : public TrainingGroups {
 public:
  SeparateGroups(const Config& config, const ProcessGroup& all);

  std::string note() const override { return ", local_sgd: " + describe(); }
  std::string label() const override;
  std::string scope() const override {
    return several() ? "in this group" : TrainingGroups::scope();
  }
  CommStats stats() const override;
  std::optional<std::string> latest_sound(const std::string& folder) const override {
    return several() ? latest_sound_checkpoint(folder) : TrainingGroups::latest_sound(folder);
  }

  void start(ModelWrapper& wrapper) override;
  bool end_step(std::vector<double>& flags, int64_t steps) override;
  bool ask_to_stop() override {
    asked_ = several();
    return !several();
  }
  void synchronize() override { local_->synchronize(); }
  void in_first(const std::function<void()>& part) const override;
  std::map<std::string, double> mean(std::map<std::string, double> figures) const override;

  void end_all(const std::string& reason, const std::vector<int>& ranks) const override;
  bool ended() const override { return several() && all_.ended(); }

  Json save(CheckpointWriter& writer) override;
  bool load(const Checkpoint& checkpoint, const Json& saved, int from, int64_t steps) override;

 private:
  bool several() const { return count_ > 1; }
  Json description() const;

  const Config& config_;
  ProcessGroup outer_;  // the ranks with this rank's number in their groups
  std::optional<LocalSgd> local_;
  bool asked_ = false;  // for the end
};

SeparateGroups::SeparateGroups(const Config& config, const ProcessGroup& all)
    : TrainingGroups(all), config_(config), outer_(all) {
  LocalSgdGroups groups = divide(config, all_);
  inner_ = std::move(groups.inner);
  outer_ = std::move(groups.outer);
  // The ranks of hosts may be interleaved. Groups are numbered by their lowest ranks.
  const int own = rank_in_run(inner_, 0);
  std::set<int> firsts;
  for (const auto& first : all_.all_gather_bytes(std::to_string(own), "first ranks of the groups"))
    firsts.insert(std::stoi(first));
  count_ = static_cast<int>(firsts.size());
  number_ = static_cast<int>(std::distance(firsts.begin(), firsts.find(own)));
  for (const ModelSections* model : config.trained())
    if (inner_.size() > 1 && !model->parallel.plan.distributed)
      throw UsageError(
          fmt::format("{}{} with {}; expected groups of one rank, or another parallel.type",
                      model->at("parallel.type"), model->parallel.type, describe()));
}

std::string SeparateGroups::label() const {
  if (!several()) return "";
  std::vector<int> ranks;
  for (int rank = 0; rank < inner_.size(); ++rank) ranks.push_back(rank_in_run(inner_, rank));
  return fmt::format("group {} (rank{} {}): ", number_, ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks, ", "));
}

/// The traffic of all ranks, of inner() and between the groups together.
CommStats SeparateGroups::stats() const {
  CommStats sum = all_.stats();
  add(inner_.stats(), sum);
  add(outer_.stats(), sum);
  return sum;
}

void SeparateGroups::start(ModelWrapper& wrapper) {
  named(config_.at("parallel.local_sgd"), [&] {
    local_.emplace(
        outer_, wrapper.shards(), config_.parallel.local_sgd->options, wrapper.shard_copies(),
        [&wrapper] { wrapper.publish_shards(); },
        [&wrapper] {
          wrapper.wait();
          wrapper.before_shard_writes();
        });
  });
}

bool SeparateGroups::end_step(std::vector<double>& flags, int64_t steps) {
  bool asked = false;
  if (several() && steps % config_.parallel.local_sgd->options.sync_every == 0) {
    flags.push_back(asked_ ? 1 : 0);
    const at::Tensor sum = at::tensor(flags, at::kDouble).to(all_.control_device());
    all_.all_reduce(sum, 1, "requests to stop");
    const at::Tensor total = sum.cpu();
    flags.assign(total.data_ptr<double>(), total.data_ptr<double>() + total.numel());
    asked = flags.back() > 0;
    flags.pop_back();
  } else if (several()) {
    std::fill(flags.begin(), flags.end(), 0);
  }
  local_->step();
  return asked;
}

void SeparateGroups::in_first(const std::function<void()>& part) const {
  if (!several()) return part();
  ProcessGroup all = all_;
  const auto timeout = all.timeout();
  all.set_timeout(timeout + std::chrono::minutes(30), timeout);
  std::string failure;
  try {
    if (first()) part();
  } catch (const AgreedError& error) {
    failure = error.what();
  }
  const std::string of_first = all.broadcast_bytes(failure, 0, "work of group 0");
  all.set_timeout(timeout);
  if (!of_first.empty()) throw AgreedError(of_first);
}

std::map<std::string, double> SeparateGroups::mean(std::map<std::string, double> figures) const {
  if (!several()) return figures;
  std::vector<double> values;
  for (const auto& [name, value] : figures) values.push_back(value);
  const at::Tensor sums = at::tensor(values, at::kDouble).to(outer_.control_device());
  ProcessGroup(outer_).all_reduce(sums, 1, "figures of the groups");
  const at::Tensor sum = sums.cpu();
  size_t i = 0;
  for (auto& [name, value] : figures) value = sum.data_ptr<double>()[i++] / count_;
  return figures;
}

void SeparateGroups::end_all(const std::string& reason, const std::vector<int>& ranks) const {
  if (!several() || all_.ended()) return;
  const std::string text = label() + reason;
  detail::report_agreed(ranks, text);
  try {
    if (inner_.rank() == 0) ProcessGroup(all_).fail(text);
    ProcessGroup(inner_).barrier("end of the run");
  } catch (const UsageError&) {
    // The text of fail(), which adds the rank.
  }
  throw AgreedError(text);
}

Json SeparateGroups::description() const {
  const auto& options = config_.parallel.local_sgd->options;
  return {{kGroups, count_},
          {"outer", options.outer == OuterOptimizer::nesterov ? "nesterov" : "average"},
          {"wire", options.wire == OuterWire::int8 ? "int8" : "float32"},
          {"in_background", options.overlap == Overlap::background}};
}

Json SeparateGroups::save(CheckpointWriter& writer) {
  const LocalSgd::State state = local_->state_dict();
  std::vector<StateSlice> slices;
  int64_t at = 0;
  for (const auto& range : local_->state_ranges()) {
    StateSlice slice;
    static_cast<ElementRange&>(slice) = range;
    for (const auto& [name, tensor] : state)
      if (has_elements(name)) slice.state.tensors[name] = tensor.narrow(0, at, range.numel);
    at += range.numel;
    slices.push_back(std::move(slice));
  }
  writer.add_slices(slices, outer_set_of(number_));
  Json saved = description();
  saved[kUnderWay] = state.count("pending") > 0;
  return saved;
}

bool SeparateGroups::load(const Checkpoint& checkpoint, const Json& saved, int from,
                          int64_t steps) {
  LocalSgd::State state = local_->state_dict();
  state["steps"] = at::scalar_tensor(steps, at::kLong);
  const Json own = description();
  for (const auto& [key, value] : own.items()) {
    if (saved.is_object() && (key == kGroups || saved.value(key, Json()) == value)) continue;
    local_->load_state_dict(state);
    return false;
  }
  if (saved.value(kUnderWay, false)) state["pending"] = state["start"] = state.at("anchor");
  const auto slices = checkpoint.load_slices(local_->state_ranges(), outer_set_of(from));
  for (auto& [name, tensor] : state) {
    if (!has_elements(name)) continue;
    std::vector<at::Tensor> parts{at::empty({0}, tensor.options())};
    for (const auto& slice : slices) {
      const auto found = slice.state.tensors.find(name);
      if (found == slice.state.tensors.end())
        throw UsageError(fmt::format("checkpoint: {}: {} has no {} of parallel.local_sgd for {}",
                                     checkpoint.path(), outer_set_of(from), name, slice.parameter));
      parts.push_back(found->second.reshape({-1}).to(tensor.options()));
    }
    tensor = at::cat(parts);
  }
  local_->load_state_dict(state);
  return true;
}

}  // namespace

std::unique_ptr<TrainingGroups> make_training_groups(const Config& config,
                                                     const ProcessGroup& all) {
  if (config.parallel.local_sgd) return std::make_unique<SeparateGroups>(config, all);
  return std::make_unique<TrainingGroups>(all);
}

}  // namespace tessera::train
