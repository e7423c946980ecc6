#include "tessera/join.h"

#include <algorithm>
#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera {

/// Counts the ranks that have data before each iteration, and notifies the joinables.
class JoinLoop::Coordinator {
 public:
  Coordinator(const std::vector<std::reference_wrapper<Joinable>>& joinables,
              const JoinOptions& options)
      : joinables_(joinables), options_(options) {
    if (joinables_.empty())
      throw UsageError("join: the list of joinables is empty; expected at least one");
    group_ = joinables_[0].get().join_group();
    for (size_t i = 1; i < joinables_.size(); ++i) {
      const auto other = joinables_[i].get().join_group();
      if (other.world_ranks() == group_.world_ranks()) continue;
      throw UsageError(
          fmt::format("join: rank {}: joinable {} has the ranks {} and joinable 0 has {}; expected "
                      "the same ranks in the same order",
                      group_.rank(), i, fmt::join(other.world_ranks(), ", "),
                      fmt::join(group_.world_ranks(), ", ")));
    }
  }

  // From then on the joinables again divide by the world size and take rank 0's buffers.
  ~Coordinator() { notify_joinables({group_.size(), 0, group_.size(), {}}); }

  void next() {
    if (!options_.enable) return;
    begin_iteration(true);
    ++iterations_;
  }

  void run(const std::function<void(JoinLoop&)>& loop) {
    JoinLoop handle(*this);
    if (!options_.enable) return loop(handle);
    try {
      loop(handle);
      while (begin_iteration(false))
        for (auto& joinable : joinables_) joinable.get().shadow_step();
      finish_joinables();
    } catch (const BrokenWorldError&) {
      throw;
    } catch (const c10::Error& error) {
      report_failure(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      report_failure(error.what());
      throw;
    } catch (...) {
      report_failure("an exception of unknown type");
      throw;
    }
  }

 private:
  /// Finds the ranks that have data for the next iteration; `active` is true on these ranks.
  /// Returns false if no rank has data.
  bool begin_iteration(bool active) {
    auto count = at::full({1}, active ? 1 : 0,
                          at::TensorOptions().dtype(at::kInt).device(group_.control_device()));
    group_.all_reduce(count, 1, "ranks with data");
    JoinIteration iteration;
    iteration.active_ranks = count.item<int>();
    if (iteration.active_ranks == 0) return false;
    if (iteration.active_ranks < group_.size()) {
      uneven_ = true;
      const auto flags = group_.all_gather_bytes(active ? "1" : "0");
      if (options_.throw_on_early_termination) throw_early_termination(flags);
      iteration.first_active =
          static_cast<int>(std::find(flags.begin(), flags.end(), "1") - flags.begin());
      for (const auto& flag : flags) iteration.has_data.push_back(flag == "1");
    }
    iteration.divisor =
        options_.divide_by_initial_world_size ? group_.size() : iteration.active_ranks;
    notify_joinables(iteration);
    return true;
  }

  void notify_joinables(const JoinIteration& iteration) {
    for (auto& joinable : joinables_) joinable.get().on_join_iteration(iteration);
  }

  [[noreturn]] void throw_early_termination(const std::vector<std::string>& flags) {
    std::vector<size_t> out;
    for (size_t rank = 0; rank < flags.size(); ++rank)
      if (flags[rank] == "0") out.push_back(rank);
    thrown_on_all_ranks_ = true;
    throw UsageError(
        fmt::format("join: rank{} {} ran out of data while other ranks have more, and option "
                    "throw_on_early_termination is set; expected the same number of iterations on "
                    "all ranks (seen on rank {})",
                    out.size() == 1 ? "" : "s", fmt::join(out, ", "), group_.rank()));
  }

  void finish_joinables() {
    if (!uneven_) return;
    const auto counts = group_.all_gather(
        at::full({1}, static_cast<int64_t>(iterations_),
                 at::TensorOptions().dtype(at::kLong).device(group_.control_device())));
    const int last = static_cast<int>(counts.argmax().item<int64_t>());
    int lowest = last;
    for (int rank = last; rank >= 0; --rank)
      if (counts[rank].item<int64_t>() == counts[last].item<int64_t>()) lowest = rank;
    for (auto& joinable : joinables_) joinable.get().finish_join(lowest);
  }

  /// Ends the group, so that the other ranks throw with this rank's message. Does nothing if all
  /// ranks throw anyway, or if the group has already ended with another message.
  void report_failure(const std::string& message) {
    if (thrown_on_all_ranks_ || group_.ended()) return;
    try {
      group_.fail(fmt::format("join: rank {}: {}", group_.rank(), message));
    } catch (const Error&) {
      // This rank rethrows its own exception instead.
    }
  }

  const std::vector<std::reference_wrapper<Joinable>>& joinables_;
  const JoinOptions& options_;
  ProcessGroup group_;
  int64_t iterations_ = 0;
  bool uneven_ = false;  // some rank ran out of data before the others
  bool thrown_on_all_ranks_ = false;
};

void JoinLoop::next() { coordinator_.next(); }

void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const JoinOptions& options, const std::function<void(JoinLoop&)>& loop) {
  JoinLoop::Coordinator(joinables, options).run(loop);
}

}  // namespace tessera
