#include "fuzz/training/story.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include <fmt/format.h>

#include "fuzz/training/expectation.h"
#include "fuzz/training/plain/groups.h"
#include "fuzz/training/plain/training.h"
#include "fuzz/training/subject.h"
#include "harness/ranks.h"
#include "harness/temporary_folder.h"
#include "tessera/memory/deferred_init.h"

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
  options.in_background = wrapper.flag("outer_background");
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

/// A run of events with one world and one wrapper.
struct Segment {
  int world = 0;
  Item wrapper;
  size_t begin = 0, end = 0;  ///< Events of the story.
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

Truth plain_truth(const Case& which) {
  Truth truth;
  PlainGroups plain(which);
  for (size_t i = 0; i < which.story.size(); ++i) {
    try {
      truth.records.push_back(plain.play(which.story[i], static_cast<int>(i)));
    } catch (const std::exception& error) {
      truth.thrown = error.what();
      return truth;
    }
  }
  return truth;
}

/// What goes from one segment to the next.
struct Carried {
  ModuleStateDict weights;
  OptimizerStateDict state;
  double lr = 0;
  std::shared_ptr<testing::TemporaryFolder> folder;  ///< With a checkpoint, if the "move" says so.
};

/// One rank's part of a segment.
class Player {
 public:
  Player(const Case& which, const Segment& segment, ProcessGroup group, const Carried& carried)
      : which_(which), segment_(segment), group_(std::move(group)), carried_(carried) {
    const auto& wrapper = segment.wrapper;
    const bool loads = segment.begin < segment.end && which.story[segment.begin].kind == "move";
    // Ranks begin with different weights where the wrapper broadcasts rank 0's.
    const bool broadcasts = !wrapper.has("late_part") && !wrapper.flag("no_broadcast") &&
                            wrapper.number("bcast_period", 0) >= 0;
    ProcessGroup inner = group_;
    const int groups = groups_apart(wrapper);
    if (groups > 1) {
      apart_.emplace(local_sgd_groups(group_, group_.size() / groups));
      inner = apart_->inner;
    }
    const auto seed = which.seed + (loads ? 77 : 0) + (broadcasts || loads ? inner.rank() : 0);
    const auto make = [&] { return Net::make(which, seed); };
    subject_ = make_subject(which, wrapper, wrapper.flag("deferred") ? deferred_init(make) : make(),
                            inner);
    if (apart_) local_sgd_ = subject_->make_local_sgd(*apart_, local_sgd_options(wrapper));
    if (loads) load();
  }

  Record play(const Item& event, int number) {
    Record record;
    const auto& kind = event.kind;
    if (kind == "step") {
      train(event, number, record);
      if (local_sgd_) {
        subject_->settle();
        local_sgd_->step();
      }
    } else if (kind == "join") join_event(event, number);
    else if (kind == "evaluate") evaluate(event, number, record);
    else if (kind == "freeze" || kind == "thaw") set_trainable(event, kind == "thaw");
    else if (kind == "write") write(event);
    else if (kind == "lr") change_lr(event);
    else if (kind == "add_group") subject_->add_late_part();
    else if (kind == "to_dtype") subject_->net().to(other_dtype());
    add_weights(record, subject_->weights());
    if (event.flag("state")) add_state(record, subject_->optimizer_state());
    return record;
  }

  Carried carry(std::shared_ptr<testing::TemporaryFolder> folder) {
    if (folder) subject_->save(folder->path(), group_);
    const double lr = subject_->optimizer().param_groups().front().options().get_lr();
    return {subject_->weights(), subject_->optimizer_state(), lr, std::move(folder)};
  }
  void barrier() { group_.barrier(); }

 private:
  /// Takes what the segment before has left.
  void load() {
    if (!carried_.folder) return subject_->load(carried_.weights, carried_.state);
    subject_->load(carried_.folder->path());
    for (auto& group : subject_->optimizer().param_groups()) group.options().set_lr(carried_.lr);
  }

  at::ScalarType other_dtype() const {
    return dtype_of(which_) == at::kFloat ? at::kDouble : at::kFloat;
  }

  at::Tensor loss(const Item& event, int number, int micro, int micros) {
    return forward_loss([&](const Batch& batch) { return subject_->forward(batch); },
                        subject_->net(), event, which_, number, micro, group_.rank(), micros);
  }

  void zero_grad(const Item& event) {
    if (event.text("zero") == "module") subject_->net().zero_grad();
    else subject_->zero_grad(true);
  }

  /// The first attempt at a step, in which the user's code throws.
  void spring(const Item& event, int number) {
    auto& net = subject_->net();
    net.trap = trap_of(event);
    const bool caught = event.number("trap_rank", -1) < 0;
    if (!caught && event.number("trap_rank") % group_.size() != group_.rank())
      net.trap = Trap::nowhere;
    try {
      subject_->backward(loss(event, number, 0, 1), false);
    } catch (const Sprung&) {
      net.trap = Trap::nowhere;
      if (!caught) throw;
    }
    zero_grad(event);
  }

  void train(const Item& event, int number, Record& record) {
    const bool between = event.text("when") == "between";
    const bool after = event.text("when") == "after" && cleared_;
    if (event.has("trap")) spring(event, number);
    at::Tensor kept;
    if (event.flag("kept_graph")) kept = loss(event, number, 9, 1);
    if (event.flag("closure")) {
      subject_->step([&] {
        zero_grad(event);
        auto value = loss(event, number, 0, 1);
        record.emplace_back("loss 0", value.detach().to(dtype_of(which_), false, true));
        subject_->backward(value, false);
        return value;
      });
    } else {
      if (!after && !between && !event.flag("uncleared")) zero_grad(event);
      gradients(event, number, between, record);
      if (event.text("clip") == "norm") add_number(record, "norm", subject_->clip_norm());
      if (event.text("clip") == "value") subject_->clip_value();
      subject_->step(nullptr);
    }
    cleared_ = after;
    if (after) zero_grad(event);
    if (kept.defined()) {
      if (event.flag("then_evaluate")) evaluate(event, number, record);
      zero_grad(event);
      subject_->backward(kept, false);
      zero_grad(event);
    }
  }

  void gradients(const Item& event, int number, bool clear_between, Record& record) {
    const int micros = event.number("micro", 1);
    for (int micro = 0; micro < micros; ++micro) {
      std::optional<NoSync> hold;
      if (micro + 1 < micros && event.flag("no_sync")) hold.emplace(subject_->no_sync());
      const auto value = loss(event, number, micro, micros);
      record.emplace_back("loss " + std::to_string(micro),
                          value.detach().to(dtype_of(which_), false, true));
      if (clear_between && micro == 0) zero_grad(event);
      if (event.number("absent", -1) == group_.rank()) continue;
      if (event.flag("retain")) subject_->backward(value, true);
      subject_->backward(value, false);
    }
  }

  void join_event(const Item& event, int number) {
    subject_->prepare_join([this] {
      subject_->step(nullptr);
      subject_->zero_grad(true);
    });
    subject_->zero_grad(true);
    JoinOptions options;
    options.divide_by_initial_world_size = !event.flag("by_active");
    join(subject_->joinables(), options, [&](JoinLoop& iteration) {
      for (int round = 0; round < batches_in_join(event, group_.rank()); ++round) {
        iteration.next();
        subject_->backward(loss(event, number, round, 1), false);
        subject_->step(nullptr);
        subject_->zero_grad(true);
      }
    });
    subject_->zero_grad(true);
    cleared_ = true;
  }

  void evaluate(const Item& event, int number, Record& record) {
    if (event.number("rank", group_.rank()) != group_.rank()) return;
    at::NoGradGuard no_grad;
    subject_->net().eval();
    const auto dtype = dtype_of(which_);
    const auto batch = make_batch(which_.seed, number, 0, group_.rank(), dtype);
    record.emplace_back("output", subject_->forward(batch).to(dtype));
    subject_->net().train();
  }

  void set_trainable(const Item& event, bool on) {
    for (auto& parameter : subject_->net().part(event.number("part")).parameters())
      parameter.requires_grad_(on);
  }

  void write(const Item& event) {
    subject_->change([&] {
      at::NoGradGuard no_grad;
      for (auto& parameter : subject_->net().part(event.number("part")).parameters())
        parameter.mul_(0.5);
    });
  }

  void change_lr(const Item& event) {
    if (event.number("rank", group_.rank()) != group_.rank()) return;
    scale_lr(subject_->optimizer(), event.real("factor", 0.5));
  }

  const Case& which_;
  const Segment& segment_;
  ProcessGroup group_;
  const Carried& carried_;
  std::unique_ptr<Subject> subject_;
  std::optional<LocalSgdGroups> apart_;  ///< Groups that train apart.
  std::unique_ptr<LocalSgd> local_sgd_;
  bool cleared_ = true;  ///< No gradient is left from an earlier step.
};

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
  options.check_results = wrapper.flag("check_results");
  return options;
}

std::vector<int> hosts_of(const Segment& segment) {
  std::vector<int> hosts;
  const auto text = segment.wrapper.text("hosts");
  for (int rank = 0; rank < segment.world && !text.empty(); ++rank)
    hosts.push_back(text[static_cast<size_t>(rank) % text.size()] - '0');
  return hosts;
}

/// Plays a segment and judges it. `carried` is read and written.
std::optional<Finding> run_segment(const Case& which, const Segment& segment, const Truth& truth,
                                   Carried& carried, bool& ended) {
  std::vector<Progress> progress(segment.world);
  const double tolerance = tolerance_of(which);
  const Carried before = carried;
  const bool stores = segment.end < which.story.size() && which.story[segment.end].flag("folder");
  const auto folder = stores ? std::make_shared<testing::TemporaryFolder>() : nullptr;
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
        Player player(which, segment, group, before);
        for (size_t i = segment.begin; i < segment.end; ++i) {
          mine.event = i;
          mine.begun = Clock::now();
          const auto record = player.play(which.story[i], static_cast<int>(i));
          if (i >= comparable) continue;
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
      group_options(segment.wrapper), hosts_of(segment));

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
  ended = reached < segment.end ||
          std::any_of(errors.begin(), errors.end(), [](const auto& e) { return e != nullptr; });
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (outcomes[rank].kind != Outcome::Kind::difference) continue;
    return Finding{"difference",
                   fmt::format("event {} ({}), rank {}: {}", progress[rank].event,
                               which.story[progress[rank].event].kind, rank, outcomes[rank].text)};
  }
  // With several shard groups, a gather of one rank alone may meet a later gather of its group.
  // Then ranks wait for each other in different groups until the timeout.
  const bool groups = segment.wrapper.text("strategy") == "hybrid";
  const bool alone = std::any_of(which.story.begin(), which.story.end(), [](const Item& event) {
    return event.kind == "evaluate" && event.has("rank");
  });
  return judge(due, segment.begin, reached, outcomes, ended ? seconds : 0,
               groups && alone ? kTimeoutSeconds + kSlowSeconds : kSlowSeconds, groups);
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

std::optional<Finding> run_case(const Case& which) {
  const auto truth = plain_truth(which);
  Carried carried;
  for (const auto& segment : segments_of(which)) {
    bool ended = false;
    for (int attempt = 0;; ++attempt) {
      auto copy = carried;
      auto finding = run_segment(which, segment, truth, copy, ended);
      // A busy machine may be late once; the library is late each time.
      if (finding && finding->kind == "slow" && attempt < 2) continue;
      if (finding) return finding;
      carried = std::move(copy);
      break;
    }
    if (ended) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace tessera::fuzz
