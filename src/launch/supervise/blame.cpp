#include "launch/supervise/blame.h"

#include <algorithm>
#include <set>

#include <signal.h>

#include "launch/supervise/signal_watch.h"

namespace tessera::launch {
namespace {

using Kind = Cause::Kind;
using Report = detail::RankReport;
using Ranks = std::vector<RankState>;

std::vector<Exit> failures_of(const Ranks& ranks) {
  std::vector<Exit> failures;
  for (const RankState& state : ranks)
    if (state.exit && state.exit->failed()) failures.push_back(*state.exit);
  std::sort(failures.begin(), failures.end(),
            [](const Exit& a, const Exit& b) { return a.order < b.order; });
  return failures;
}

const RankState* find(const Ranks& ranks, int rank) {
  const auto found = std::find_if(ranks.begin(), ranks.end(),
                                  [&](const RankState& state) { return state.rank == rank; });
  return found == ranks.end() ? nullptr : &*found;
}

Cause of_exit(Kind kind, const Exit& exit) {
  Cause cause;
  cause.kind = kind;
  cause.rank = exit.rank;
  cause.pid = exit.pid;
  cause.exit = exit;
  return cause;
}

Cause of_rank(Kind kind, const RankState& state, const Exit& first) {
  Cause cause = of_exit(kind, first);
  cause.rank = state.rank;
  cause.pid = state.pid;
  cause.signal = state.stopped_by;
  return cause;
}

bool reports_stop(const Exit& exit) {
  return exit.by_error() && exit.report && exit.report->kind == Report::Kind::stop;
}

/// The first failure that is not a consequence; deaths by a signal come before others.
std::optional<Cause> own_failure(const std::vector<Exit>& failures) {
  const Exit* best = nullptr;
  for (const Exit& exit : failures) {
    if (exit.consequence() || reports_stop(exit)) continue;
    if (!best || (best->by_error() && !exit.by_error())) best = &exit;
  }
  if (!best) return std::nullopt;
  return of_exit(Kind::failed, *best);
}

std::optional<Cause> request_to_stop(const std::vector<Exit>& failures) {
  const Exit* first = nullptr;
  for (const Exit& exit : failures) {
    if (!reports_stop(exit)) continue;
    if (!first || (!first->report->names(first->rank) && exit.report->names(exit.rank)))
      first = &exit;
  }
  if (!first) return std::nullopt;
  Cause cause = of_exit(Kind::request, *first);
  cause.signal = first->report->signal;
  cause.here = first->report->names(first->rank);
  return cause;
}

/// The ranks to which the reports of the consequences lead.
struct Named {
  std::vector<const RankState*> here;  ///< Ranks of this host that have not failed.
  std::set<int> elsewhere;
  bool any = false;
};

Named follow(const Ranks& ranks, const std::vector<Exit>& failures) {
  Named result;
  std::set<int> seen;
  for (const Exit& exit : failures) {
    if (!exit.report) continue;
    for (const int rank : exit.report->ranks) {
      result.any = true;
      if (!seen.insert(rank).second) continue;
      const RankState* state = find(ranks, rank);
      if (!state) result.elsewhere.insert(rank);
      else if (!state->exit || !state->exit->failed()) result.here.push_back(state);
    }
  }
  return result;
}

const RankState* first_stopped(const std::vector<const RankState*>& states) {
  for (const RankState* state : states)
    if (state->stopped_by != 0) return state;
  return nullptr;
}

/// The rank that exited with 0 first, if that was before `failure`.
const RankState* first_that_left(const std::vector<const RankState*>& states, const Exit& failure) {
  const RankState* first = nullptr;
  for (const RankState* state : states) {
    if (!state->exit || state->exit->failed() || state->exit->order > failure.order) continue;
    if (!first || state->exit->order < first->exit->order) first = state;
  }
  return first;
}

}  // namespace

std::optional<Cause> find_cause(const std::vector<RankState>& ranks, bool final) {
  const auto failures = failures_of(ranks);
  if (auto cause = own_failure(failures)) return cause;
  if (auto cause = request_to_stop(failures)) return cause;

  const Exit& first = failures.front();
  const Named named = follow(ranks, failures);
  std::vector<const RankState*> all;
  for (const RankState& state : ranks) all.push_back(&state);
  // A report without names may mean any rank.
  const auto& suspects = named.any ? named.here : all;
  if (const auto* state = first_stopped(suspects)) return of_rank(Kind::stopped, *state, first);
  if (const auto* state = first_that_left(suspects, first))
    return of_rank(Kind::left, *state, first);
  if (!final) return std::nullopt;

  // The names may be wrong, if the ranks could not reach their store.
  if (const auto* state = first_stopped(all)) return of_rank(Kind::stopped, *state, first);
  for (const RankState* state : named.here)
    if (!state->exit) return of_rank(Kind::late, *state, first);
  Cause cause = of_exit(named.elsewhere.empty() ? Kind::unknown : Kind::elsewhere, first);
  cause.others.assign(named.elsewhere.begin(), named.elsewhere.end());
  return cause;
}

Cause cause_of_stop(const RankState& stopped) { return of_rank(Kind::stopped, stopped, Exit()); }

int Cause::exit_code() const { return kind == Kind::stopped ? 128 + signal : exit.shell_code(); }

std::string describe(const Cause& cause) {
  const std::string subject = name_of_rank(cause.rank, cause.pid);
  switch (cause.kind) {
    case Kind::stopped:
      return subject + " is stopped (" + signal_name(cause.signal) + ")";
    case Kind::left:
      return subject + " exited with code 0 while the other ranks still needed it";
    case Kind::late:
      return subject + (cause.exit.report && cause.exit.report->kind == Report::Kind::agreed
                            ? " still runs, although the error of the other ranks began there"
                            : " still runs, but the other ranks waited for it in vain");
    case Kind::request:
      return signal_name(cause.signal) + (cause.here ? " to " + subject : " on another host") +
             " stopped the program";
    case Kind::elsewhere:
    case Kind::failed:
    case Kind::unknown:
      break;
  }
  return describe(cause.exit);
}

std::string title(const Cause& cause) { return cause.known() ? "root cause" : "first failure"; }

std::string origin(const Cause& cause) {
  if (cause.kind != Kind::elsewhere) return "";
  return "; the failure began on " + list_ranks(cause.others) +
         (cause.others.size() == 1 ? ", which is on another host" : ", which are on other hosts");
}

std::string describe_reason(const Exit& consequence) {
  if (!consequence.report) return "because of another rank, according to its last lines";
  return "because of " + list_ranks(consequence.report->ranks) + ", according to its error";
}

}  // namespace tessera::launch
