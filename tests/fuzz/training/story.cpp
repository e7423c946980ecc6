#include "fuzz/training/story.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>

#include <fmt/format.h>

#include "fuzz/training/expectation.h"
#include "fuzz/training/plain/groups.h"
#include "fuzz/training/player.h"
#include "fuzz/training/wire.h"
#include "harness/ranks.h"

namespace tessera::fuzz {
namespace {

/// `part` may be -1: none.
bool in_part(const Net& net, int part, const std::string& name) {
  return part >= 0 && name.rfind(net.part_name(part) + ".", 0) == 0;
}

}  // namespace

std::vector<std::vector<std::string>> group_names(Net& net, const Item& wrapper, int late) {
  std::vector<std::string> names;
  const auto ignored = wrapper.kind == "fsdp" ? wrapper.number("ignored", -1) : -1;
  for (const auto& item : named_parameters(net))
    if (!in_part(net, late, item.first) && !in_part(net, ignored, item.first))
      names.push_back(item.first);
  const auto half = names.size() / 2;
  if (wrapper.number("groups", 1) < 2 || half == 0) return {names};
  const auto middle = names.begin() + static_cast<std::ptrdiff_t>(half);
  return {{names.begin(), middle}, {middle, names.end()}};
}

std::set<std::string> local_names(Net& net, const Item& wrapper) {
  std::set<std::string> names;
  for (const auto& item : named_parameters(net))
    if (in_part(net, wrapper.number("ignored", -1), item.first)) names.insert(item.first);
  const auto groups = group_names(net, wrapper, -1);
  if (wrapper.flag("local_group") && groups.size() == 2)
    names.insert(groups[1].begin(), groups[1].end());
  return names;
}

BufferSync buffer_rule(const Item& wrapper) {
  const auto rule = wrapper.text("buffers", "broadcast");
  return rule == "mean"   ? BufferSync::mean
         : rule == "none" ? BufferSync::none
                          : BufferSync::broadcast;
}

double norm_type(const Item& event) {
  return event.text("norm_of") == "inf" ? INFINITY : event.real("norm_of", 2);
}

bool shows_norm_of_step(const Item& wrapper, const Item& event) {
  return wrapper.flag("track_norm") && event.kind == "step" && !event.has("closure") &&
         !event.has("clip") && !event.has("norm_of");
}

Case twin_of(const Case& which) {
  auto twin = which;
  twin.seed += 1000003;
  return twin;
}

Trap trap_of(const Item& event) {
  const auto where = event.text("trap");
  return where == "forward" ? Trap::forward : where == "hook" ? Trap::hook : Trap::backward;
}

int batches_in_join(const Item& event, int rank) {
  const auto counts = event.text("batches", "1111");
  return counts[static_cast<size_t>(rank) % counts.size()] - '0';
}

int groups_apart(const Item& wrapper) { return wrapper.number("local_sgd", 1); }

LocalSgdOptions local_sgd_options(const Item& wrapper) {
  LocalSgdOptions options;
  options.sync_every = wrapper.number("every", 2);
  options.outer =
      wrapper.text("outer") == "average" ? OuterOptimizer::average : OuterOptimizer::nesterov;
  if (wrapper.flag("outer_background")) options.overlap = Overlap::background;
  return options;
}

Item wrapper_after(const Item& event, const Item& before) {
  Item after = before;
  after.values.erase("late_part");
  if (event.has("wrapper")) after = Item{event.text("wrapper")};
  for (const auto& [name, value] : event.values)
    if (name != "wrapper" && name != "world" && name != "state" && name != "folder")
      after.values[name] = value;
  return after;
}

namespace {

using Clock = std::chrono::steady_clock;

#ifdef TESSERA_SANITIZED
constexpr double kSlowSeconds = 10;
#else
constexpr double kSlowSeconds = 1;
#endif

constexpr double kTimeoutSeconds = 6 * kSlowSeconds;

struct Difference : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<Segment> segments_of(const Case& which) {
  std::vector<Segment> segments{{which.world, which.wrapper, 0, 0}};
  for (size_t i = 0; i < which.story.size(); ++i) {
    auto& last = segments.back();
    last.end = i;
    if (which.story[i].kind != "move") continue;
    const auto& event = which.story[i];
    segments.push_back(
        {event.number("world", last.world), wrapper_after(event, last.wrapper), i, i});
  }
  segments.back().end = which.story.size();
  return segments;
}

/// What plain training has computed: records by event and rank, up to an event in which libtorch
/// itself throws.
struct Truth {
  std::vector<std::vector<Record>> records;
  std::string thrown;
};

void append(Record& record, Record of_twin) {
  for (auto& [name, tensor] : of_twin) record.emplace_back(name + " of the twin", tensor);
}

Truth plain_truth(const Case& which) {
  Truth truth;
  const auto other = twin_of(which);
  PlainGroups plain(which), twin(other);
  for (size_t i = 0; i < which.story.size(); ++i) {
    try {
      auto records = plain.play(which.story[i], static_cast<int>(i));
      if (which.wrapper.flag("twin")) {
        auto of_twin = twin.play(which.story[i], static_cast<int>(i));
        for (size_t rank = 0; rank < records.size(); ++rank)
          append(records[rank], std::move(of_twin[rank]));
      }
      truth.records.push_back(std::move(records));
    } catch (const std::exception& error) {
      truth.thrown = error.what();
      return truth;
    }
  }
  return truth;
}

/// How far a rank came, and when.
struct Progress {
  size_t event = 0;
  Clock::time_point begun{}, ended{};
};

ProcessGroupOptions group_options(const Item& wrapper) {
  ProcessGroupOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int>(kTimeoutSeconds * 1000));
  if (wrapper.text("backend") == "gloo") options.backend = Backend::Gloo;
  if (wrapper.text("backend") == "tcp") options.backend = Backend::TCP;
  if (wrapper.text("backend") == "mpi") options.backend = Backend::MPI;
  options.check_results = wrapper.flag("check_results");
  return options;
}

/// What came of a segment.
struct Played {
  std::optional<Finding> finding;
  bool ended = false;                   ///< Before its last event.
  std::vector<std::vector<Seen>> seen;  ///< By event and rank, for Lockstep: as far as all came.
};

/// Plays a segment and judges it. `carried` is read and written. `rounded`: Lockstep compares.
Played run_segment(const Case& which, const Segment& segment, const Truth& truth, Carried& carried,
                   bool rounded) {
  Played played;
  played.seen.assign(segment.end - segment.begin, std::vector<Seen>(segment.world));
  std::vector<Progress> progress(segment.world);
  const double tolerance = tolerance_of(which);
  const Carried before = carried;
  const bool stores = segment.end < which.story.size() && which.story[segment.end].flag("folder");
  const auto folder = stores ? std::make_shared<testing::TemporaryFolder>() : nullptr;
  const testing::TemporaryFolder scratch;  // of resumes
  const auto other = twin_of(which);
  std::mutex mutex;
  std::vector<Expectation> due;
  size_t comparable = std::min(segment.end, truth.records.size());
  for (size_t i = segment.begin; i < segment.end; ++i) {
    const int together = segment.world / groups_apart(segment.wrapper);
    due.push_back(expectation(which, segment.wrapper, together, i, i >= truth.records.size()));
    // A wrapper's shards keep their dtype, and the error comes with the next use.
    if (is_error(due.back()) || which.story[i].kind == "to_dtype")
      comparable = std::min(comparable, i);
  }
  // The construction counts as part of the first event.
  const auto errors = testing::run_ranks_catching(
      segment.world,
      [&](ProcessGroup group, int rank) {
        auto& mine = progress[rank];
        mine.event = segment.begin;
        mine.begun = Clock::now();
        struct End {
          Progress& mine;
          ~End() { mine.ended = Clock::now(); }
        } end{mine};
        Player player(which, segment, group, before, scratch.path() + "/one");
        std::optional<Player> twin;
        if (which.wrapper.flag("twin"))
          twin.emplace(other, segment, group, before, scratch.path() + "/twin");
        for (size_t i = segment.begin; i < segment.end; ++i) {
          mine.event = i;
          mine.begun = Clock::now();
          const auto number = static_cast<int>(i);
          if (rounded && rounds(segment.wrapper) && i < comparable) {
            played.seen[i - segment.begin][rank] = player.show(which.story[i], number);
            continue;
          }
          auto record = player.play(which.story[i], number);
          if (twin) append(record, twin->play(which.story[i], number));
          if (i >= comparable) continue;
          if (rounded) {
            played.seen[i - segment.begin][rank].record = std::move(record);
            continue;
          }
          const auto gap = difference(record, truth.records[i][rank], tolerance);
          if (!gap.empty()) throw Difference(gap);
        }
        mine.begun = Clock::now();
        player.barrier();
        auto state = player.carry(folder);
        if (rank == 0) {
          std::lock_guard lock(mutex);
          carried = std::move(state);
        }
      },
      group_options(segment.wrapper), hosts_of(segment.wrapper, segment.world));

  std::vector<Outcome> outcomes;
  double seconds = 0;
  Clock::time_point latest_begin{}, latest_end{};
  size_t reached = segment.end;
  for (int rank = 0; rank < segment.world; ++rank) {
    outcomes.push_back(outcome_of(errors[rank]));
    if (outcomes.back().kind != Outcome::Kind::none)
      reached = std::min(reached, progress[rank].event);
    latest_begin = std::max(latest_begin, progress[rank].begun);
    latest_end = std::max(latest_end, progress[rank].ended);
  }
  seconds = std::chrono::duration<double>(latest_end - latest_begin).count();
  const bool ended =
      reached < segment.end ||
      std::any_of(errors.begin(), errors.end(), [](const auto& e) { return e != nullptr; });
  played.ended = ended;
  played.seen.resize(std::max(segment.begin, std::min(reached, comparable)) - segment.begin);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (outcomes[rank].kind != Outcome::Kind::difference) continue;
    played.finding =
        Finding{"difference",
                fmt::format("event {} ({}), rank {}: {}", progress[rank].event,
                            which.story[progress[rank].event].kind, rank, outcomes[rank].text)};
    return played;
  }
  // With several shard groups, a gather of one rank alone may meet a later gather of its group.
  // Then ranks wait for each other in different groups until the timeout.
  const bool shard_groups = segment.wrapper.text("strategy") == "hybrid";
  const bool alone = std::any_of(which.story.begin(), which.story.end(), [&](const Item& event) {
    return (event.kind == "evaluate" && event.has("rank")) || event.has("absent");
  });
  // MPI does not tell that a rank has ended: the others wait until the timeout.
  const bool over_mpi = segment.wrapper.text("backend") == "mpi";
  // Two wrappers have a group each: a rank that skips a backward waits in that of the other one.
  const bool other_group = which.wrapper.flag("twin") && segment.wrapper.kind == "fsdp" &&
                           std::any_of(which.story.begin(), which.story.end(),
                                       [](const Item& event) { return event.has("absent"); });
  const bool waits = (shard_groups && alone) || other_group;
  played.finding = judge(due, segment.begin, reached, outcomes, ended ? seconds : 0,
                         waits || over_mpi ? kTimeoutSeconds + 2 * kSlowSeconds : kSlowSeconds,
                         shard_groups || waits);
  return played;
}

std::optional<Finding> difference_in(const Case& which, const Segment& segment,
                                     const Played& played, Lockstep& lockstep) {
  for (size_t i = 0; i < played.seen.size(); ++i) {
    const auto number = segment.begin + i;
    const auto gap = lockstep.follow(segment.wrapper, number, played.seen[i]);
    if (gap.empty()) continue;
    return Finding{"difference",
                   fmt::format("event {} ({}), {}", number, which.story[number].kind, gap)};
  }
  return std::nullopt;
}

}  // namespace

Outcome outcome_of(const std::exception_ptr& error) {
  if (!error) return {};
  try {
    std::rethrow_exception(error);
  } catch (const Difference& e) {
    return {Outcome::Kind::difference, e.what()};
  } catch (const UsageError& e) {
    return {Outcome::Kind::usage, e.what()};
  } catch (const Error& e) {
    return {Outcome::Kind::broken, e.what()};
  } catch (const Sprung& e) {
    return {Outcome::Kind::own, e.what()};
  } catch (const std::exception& e) {
    return {Outcome::Kind::other, e.what()};
  }
}

/// What rounding took from parameters is part of a checkpoint, so training with "resume" has the
/// bits of training without. (What it took from gradients is not.)
std::optional<Finding> difference_by_resume(const Case& which, const Truth& truth) {
  const auto& wrapper = which.wrapper;
  const auto segments = segments_of(which);
  if (wrapper.kind != "zero" || !wrapper.has("wire_parameters") || wrapper.has("wire_gradients") ||
      segments.size() != 1)
    return std::nullopt;
  auto without = which;
  bool resumes = false;
  for (auto& event : without.story)
    if (event.kind == "resume") event.kind = (resumes = true, "nothing");
  if (!resumes) return std::nullopt;
  Carried carried;
  const auto with = run_segment(which, segments[0], truth, carried, true).seen;
  const auto expected = run_segment(without, segments[0], truth, carried, true).seen;
  for (size_t i = 0; i < std::min(with.size(), expected.size()); ++i)
    for (size_t rank = 0; rank < with[i].size(); ++rank) {
      const auto gap = difference(with[i][rank].record, expected[i][rank].record, 0);
      if (!gap.empty())
        return Finding{"difference", fmt::format("event {}, rank {}, with and without resumes: {}",
                                                 i, rank, gap)};
    }
  return std::nullopt;
}

std::optional<Finding> run_case(const Case& which) {
  const auto truth = plain_truth(which);
  std::optional<Lockstep> lockstep;
  if (rounds(which)) lockstep.emplace(which);
  Carried carried;
  for (const auto& segment : segments_of(which)) {
    Played played;
    for (int attempt = 0;; ++attempt) {
      auto copy = carried;
      played = run_segment(which, segment, truth, copy, lockstep.has_value());
      // A busy machine may be late once; the library is late each time.
      if (played.finding && played.finding->kind == "slow" && attempt < 2) continue;
      carried = std::move(copy);
      break;
    }
    if (lockstep) {
      if (const auto found = difference_in(which, segment, played, *lockstep)) return found;
    }
    if (played.finding || played.ended) return played.finding;
  }
  return difference_by_resume(which, truth);
}

}  // namespace tessera::fuzz
