#include "train/groups/training_groups.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"
#include "tessera/local_sgd.h"
#include "tessera/step/agreement.h"

namespace tessera::train {
namespace {

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
  // A run may shrink to one host, and goes on there.
  if (groups == 0 && all.same_host()) return local_sgd_groups(all, all.size());
  return named(place, [&] { return local_sgd_groups(all, groups > 0 ? all.size() / groups : 0); });
}

}  // namespace

TrainingGroups::TrainingGroups(const Config& config, ProcessGroup all)
    : all_(std::move(all)), inner_(all_) {
  if (!config.parallel.local_sgd) return;
  LocalSgdGroups groups = divide(config, all_);
  inner_ = std::move(groups.inner);
  outer_ = std::move(groups.outer);
  // The ranks of hosts may be interleaved. Groups are numbered by their lowest ranks.
  std::set<int> firsts;
  for (const auto& first :
       all_.all_gather_bytes(std::to_string(rank_in_run(0)), "first ranks of the groups"))
    firsts.insert(std::stoi(first));
  count_ = static_cast<int>(firsts.size());
  number_ = static_cast<int>(std::distance(firsts.begin(), firsts.find(rank_in_run(0))));
  if (inner_.size() > 1 && !config.parallel.plan.distributed)
    throw UsageError(
        fmt::format("{}{} with {}; expected groups of one rank, or another parallel.type",
                    config.at("parallel.type"), config.parallel.type, describe()));
}

int TrainingGroups::rank_in_run(int rank) const {
  const auto& all = all_.world_ranks();
  const auto found =
      std::find(all.begin(), all.end(), inner_.world_ranks()[static_cast<size_t>(rank)]);
  return static_cast<int>(found - all.begin());
}

std::string TrainingGroups::describe() const {
  return fmt::format("{} group{} of {} rank{}", count_, count_ == 1 ? "" : "s", inner_.size(),
                     inner_.size() == 1 ? "" : "s");
}

std::string TrainingGroups::label() const {
  if (!several()) return "";
  std::vector<int> ranks;
  for (int rank = 0; rank < inner_.size(); ++rank) ranks.push_back(rank_in_run(rank));
  return fmt::format("group {} (rank{} {}): ", number_, ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks, ", "));
}

CommStats TrainingGroups::stats() const {
  CommStats sum = all_.stats();
  if (inner_.impl() != all_.impl()) {
    add(inner_.stats(), sum);
    add(outer_.stats(), sum);
  }
  return sum;
}

void TrainingGroups::in_first(const std::function<void()>& part) const {
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

std::map<std::string, double> TrainingGroups::mean(std::map<std::string, double> figures) const {
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

}  // namespace tessera::train
