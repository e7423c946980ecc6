#include "tessera/join.h"

#include <algorithm>
#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera {

class JoinLoop::Session {
 public:
  Session(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const JoinOptions& options)
      : joinables_(joinables), options_(options) {
    if (joinables_.empty()) throw UsageError("join: there are no joinables; expected at least one");
    group_ = joinables_[0].get().join_group();
    for (size_t i = 1; i < joinables_.size(); ++i) {
      const auto other = joinables_[i].get().join_group();
      if (other.world_ranks() == group_.world_ranks()) continue;
      throw UsageError(
          fmt::format("join: rank {}: joinable {} has the ranks {} and joinable 0 has {}; expected "
                      "the same ranks in "
                      "the same order",
                      group_.rank(), i, fmt::join(other.world_ranks(), ", "),
                      fmt::join(group_.world_ranks(), ", ")));
    }
  }

  ~Session() { tell({group_.size(), 0, group_.size()}); }

  void next() {
    if (!options_.enable) return;
    announce(true);
    ++iterations_;
  }

  void run(const std::function<void(JoinLoop&)>& loop) {
    JoinLoop handle(*this);
    if (!options_.enable) return loop(handle);
    try {
      loop(handle);
      while (announce(false)) {
        for (auto& joinable : joinables_) joinable.get().shadow_step();
      }
      finish();
    } catch (const BrokenWorldError&) {
      throw;
    } catch (const c10::Error& error) {
      tell_the_others(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      tell_the_others(error.what());
      throw;
    } catch (...) {
      tell_the_others("an exception of unknown type");
      throw;
    }
  }

 private:
  /// Who has data for the next iteration? False when nobody has.
  bool announce(bool active) {
    auto count = at::full({1}, active ? 1 : 0,
                          at::TensorOptions().dtype(at::kInt).device(group_.control_device()));
    group_.all_reduce(count);
    JoinIteration iteration;
    iteration.active_ranks = count.item<int>();
    if (iteration.active_ranks == 0) return false;
    if (iteration.active_ranks < group_.size()) {
      uneven_ = true;
      const auto flags = group_.all_gather_bytes(active ? "1" : "0");
      if (options_.throw_on_early_termination) throw_early(flags);
      iteration.first_active =
          static_cast<int>(std::find(flags.begin(), flags.end(), "1") - flags.begin());
    }
    iteration.divisor =
        options_.divide_by_initial_world_size ? group_.size() : iteration.active_ranks;
    tell(iteration);
    return true;
  }

  void tell(const JoinIteration& iteration) {
    for (auto& joinable : joinables_) joinable.get().on_join_iteration(iteration);
  }

  [[noreturn]] void throw_early(const std::vector<std::string>& flags) {
    std::vector<size_t> out;
    for (size_t rank = 0; rank < flags.size(); ++rank) {
      if (flags[rank] == "0") out.push_back(rank);
    }
    contract_checked_ = true;
    throw UsageError(
        fmt::format("join: rank{} {} ran out of data while others have more, and option "
                    "throw_on_early_termination is "
                    "set; expected as many iterations on all ranks (seen on rank {})",
                    out.size() == 1 ? "" : "s", fmt::join(out, ", "), group_.rank()));
  }

  void finish() {
    if (!uneven_) return;
    const auto counts = group_.all_gather(
        at::full({1}, static_cast<int64_t>(iterations_),
                 at::TensorOptions().dtype(at::kLong).device(group_.control_device())));
    const int last = static_cast<int>(counts.argmax().item<int64_t>());
    int lowest = last;
    for (int rank = last; rank >= 0; --rank) {
      if (counts[rank].item<int64_t>() == counts[last].item<int64_t>()) lowest = rank;
    }
    for (auto& joinable : joinables_) joinable.get().finish_join(lowest);
  }

  /// Unless they know: what all ranks threw together, or what another rank has told.
  void tell_the_others(const std::string& message) {
    if (contract_checked_ || group_.ended()) return;
    try {
      group_.fail(fmt::format("join: rank {}: {}", group_.rank(), message));
    } catch (const Error&) {
      // This rank goes on with what it threw itself.
    }
  }

  const std::vector<std::reference_wrapper<Joinable>>& joinables_;
  const JoinOptions& options_;
  ProcessGroup group_;
  int64_t iterations_ = 0;
  bool uneven_ = false;
  bool contract_checked_ = false;
};

void JoinLoop::next() { session_.next(); }

void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const JoinOptions& options, const std::function<void(JoinLoop&)>& loop) {
  JoinLoop::Session(joinables, options).run(loop);
}

}  // namespace tessera
