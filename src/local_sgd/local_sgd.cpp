#include "tessera/local_sgd.h"

#include <cmath>

#include <fmt/format.h>

#include "local_sgd/inner_join.h"
#include "local_sgd/outer_mean.h"
#include "local_sgd/parameters.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

constexpr const char* kLocalSgd = "LocalSgd";

void check_options(const LocalSgdOptions& options, int rank) {
  const auto component = fmt::format("{}: rank {}", kLocalSgd, rank);
  check_option(component, "sync_every", options.sync_every, kAtLeastOne);
  check_option(component, "lr", options.lr, kPositive);
  check_option(component, "momentum", options.momentum, kProbability);
}

std::vector<std::string> contract_of(const LocalSgdOptions& options) {
  return {
      fmt::format("sync_every = {}", options.sync_every),
      fmt::format("outer = {}", options.outer == OuterOptimizer::average ? "average" : "nesterov"),
      fmt::format("lr = {}", options.lr),
      fmt::format("momentum = {}", options.momentum),
      fmt::format("wire = {}", options.wire == OuterWire::int8 ? "int8" : "float32"),
      fmt::format("overlap = {}", options.overlap == Overlap::background ? "background" : "none")};
}

}  // namespace

class LocalSgd::Impl {
 public:
  Impl(ProcessGroup outer, std::vector<ParameterShard> shards, LocalSgdOptions options,
       ProcessGroup replicas, std::function<void()> publish, std::function<void()> prepare)
      : outer_(std::move(outer)),
        options_(options),
        parameters_(std::move(shards), std::move(replicas), std::move(publish), std::move(prepare)),
        mean_(outer_, options.wire) {
    parameters_.prepare();
    agree(outer_, [&] {
      check_options(options_, outer_.rank());
      parameters_.check(outer_.rank());
      parameters_.measure();
    });
    auto contract = contract_of(options_);
    for (auto& line : parameters_.contract()) contract.push_back(std::move(line));
    outer_.check_contract(kLocalSgd, contract);
    anchor_ = parameters_.part();
    outer_.broadcast(anchor_, 0, "LocalSgd: first parameters");
    parameters_.write(anchor_);
    if (options_.outer == OuterOptimizer::nesterov) momentum_ = at::zeros_like(anchor_);
    if (options_.wire == OuterWire::int8)
      mean_.residual = at::zeros_like(anchor_, anchor_.options().dtype(at::kFloat));
  }

  void step() {
    check_usable("step()");
    ++steps_;
    if (steps_ % options_.sync_every != 0) return;
    prepared(
        [&] { options_.overlap == Overlap::background ? exchange_in_background() : exchange(); });
  }

  void synchronize() {
    check_usable("synchronize()");
    prepared([&] {
      if (mean_.under_way()) apply_pending();
      if (synchronized_at_ != steps_) exchange();
    });
  }

  State state_dict() {
    check_usable("state_dict()");
    State state{{"steps", at::scalar_tensor(steps_, at::kLong)},
                {"synchronizations", at::scalar_tensor(synchronizations_, at::kLong)}};
    guarded([&] {
      for (const auto& [name, tensor] : tensors(mean_.under_way()))
        state[name] = tensor.cpu().clone();
    });
    return state;
  }

  void load_state_dict(const State& state) {
    check_usable("load_state_dict()");
    const bool under_way = state.count("pending") > 0;
    State expected = tensors(false);
    if (under_way) expected["pending"] = expected["start"] = anchor_;
    expected["steps"] = expected["synchronizations"] = at::zeros({}, at::kLong);
    check_entries(state, expected);
    const auto take = [&](const char* name) {
      return state.at(name).to(expected.at(name).options(), false, /*copy=*/true);
    };
    anchor_ = take("anchor");
    if (momentum_.defined()) momentum_ = take("momentum");
    if (mean_.residual.defined()) mean_.residual = take("residual");
    start_ = under_way ? take("start") : at::Tensor();
    mean_.restore(under_way ? take("pending") : at::Tensor());
    steps_ = state.at("steps").item<int64_t>();
    synchronized_at_ = steps_ > 0 && steps_ % options_.sync_every == 0 ? steps_ : -1;
    synchronizations_ = state.at("synchronizations").item<int64_t>();
  }

  const ProcessGroup& outer() const { return outer_; }
  std::vector<ElementRange> ranges() const { return parameters_.ranges(); }
  int64_t steps() const { return steps_; }
  int64_t synchronizations() const { return synchronizations_; }

 private:
  /// After a failed collective the ranks may disagree about everything.
  void check_usable(const char* call) const {
    if (failure_.empty()) return;
    throw UsageError(fmt::format("{}: rank {}: {} after a failure: {}; expected a new {}",
                                 kLocalSgd, outer_.rank(), call, failure_, kLocalSgd));
  }

  /// Runs `call`, which reads or writes the shards.
  template <class Call>
  void prepared(const Call& call) {
    guarded([&] {
      parameters_.prepare();
      const std::string changed = parameters_.changed(outer_.rank());
      if (!changed.empty()) outer_.fail(changed);
      call();
    });
  }

  template <class Call>
  void guarded(const Call& call) {
    const at::NoGradGuard no_grad;
    try {
      call();
    } catch (const std::exception& error) {
      failure_ = message_of(error);
      throw;
    }
  }

  void check_entries(const State& state, const State& expected) const {
    const auto refuse = [&](const std::string& what) {
      throw UsageError(
          fmt::format("{}.load_state_dict: rank {}: {}", kLocalSgd, outer_.rank(), what));
    };
    for (const auto& [name, tensor] : expected) {
      const auto found = state.find(name);
      if (found == state.end()) refuse(fmt::format("there is no entry {}", name));
      const auto& given = found->second;
      if (!given.defined() || given.numel() != tensor.numel()) {
        refuse(fmt::format("entry {} has {} elements; expected {}", name,
                           given.defined() ? given.numel() : 0, tensor.numel()));
      }
    }
    for (const auto& [name, tensor] : state)
      if (expected.count(name) == 0)
        refuse(fmt::format("unknown entry {}; the options may differ", name));
  }

  State tensors(bool with_pending) {
    State result{{"anchor", anchor_}};
    if (momentum_.defined()) result["momentum"] = momentum_;
    if (mean_.residual.defined()) result["residual"] = mean_.residual;
    if (with_pending) {
      result["pending"] = mean_.peek();
      result["start"] = start_;
    }
    return result;
  }

  void update_anchor(const at::Tensor& gradient) {
    if (options_.outer == OuterOptimizer::average) {
      anchor_ = anchor_ - gradient;
      return;
    }
    momentum_.mul_(options_.momentum).add_(gradient);
    // Not gradient.add(momentum_, …): libtorch fuses that for all but the last elements of a
    // tensor, and the bits would depend on how the parameters are divided over ranks.
    at::Tensor step = momentum_ * options_.momentum;
    step.add_(gradient).mul_(options_.lr);
    anchor_ = anchor_ - step;
  }

  void begin_exchange() {
    ++synchronizations_;
    synchronized_at_ = steps_;
  }

  void exchange() {
    begin_exchange();
    const at::Tensor now = parameters_.part();
    if (options_.outer == OuterOptimizer::average && options_.wire == OuterWire::float32) {
      mean_.start(now);  // the mean of the parameters themselves has one rounding less
      anchor_ = mean_.finish();
    } else {
      mean_.start(anchor_ - now);
      update_anchor(mean_.finish());
    }
    parameters_.write(anchor_);
  }

  /// The parameters become the new anchor plus this rank's progress since the difference was taken.
  void apply_pending() {
    const at::Tensor progress = parameters_.part() - start_;
    update_anchor(mean_.finish());
    start_ = at::Tensor();
    parameters_.write(anchor_ + progress);
  }

  void exchange_in_background() {
    begin_exchange();
    if (mean_.under_way()) apply_pending();
    start_ = parameters_.part();
    mean_.start(anchor_ - start_);
  }

  ProcessGroup outer_;
  LocalSgdOptions options_;
  local_sgd::Parameters parameters_;
  local_sgd::OuterMean mean_;
  at::Tensor anchor_, momentum_;
  at::Tensor start_;  // the parameters from which the difference under way was taken
  int64_t steps_ = 0, synchronizations_ = 0;
  int64_t synchronized_at_ = -1;  // steps_ at the last synchronisation
  std::string failure_;
};

LocalSgd::LocalSgd(ProcessGroup outer, std::vector<ParameterShard> shards, LocalSgdOptions options,
                   ProcessGroup replicas, std::function<void()> publish,
                   std::function<void()> prepare)
    : impl_(std::make_unique<Impl>(std::move(outer), std::move(shards), options,
                                   std::move(replicas), std::move(publish), std::move(prepare))) {}
LocalSgd::~LocalSgd() = default;

void LocalSgd::step() { impl_->step(); }
void LocalSgd::synchronize() { impl_->synchronize(); }
int64_t LocalSgd::steps() const { return impl_->steps(); }
int64_t LocalSgd::synchronizations() const { return impl_->synchronizations(); }
LocalSgd::State LocalSgd::state_dict() { return impl_->state_dict(); }
void LocalSgd::load_state_dict(const State& state) { impl_->load_state_dict(state); }
std::vector<ElementRange> LocalSgd::state_ranges() const { return impl_->ranges(); }

void LocalSgd::set_join(ProcessGroup world, std::vector<std::reference_wrapper<Joinable>> inner,
                        std::function<void()> shadow) {
  join_ = std::make_unique<InnerJoin>(std::move(world), std::move(inner), std::move(shadow));
}
ProcessGroup LocalSgd::join_group() const { return join_ ? join_->world() : impl_->outer(); }
void LocalSgd::on_join_iteration(const JoinIteration& iteration) {
  if (join_) join_->on_join_iteration(iteration);
}
void LocalSgd::shadow_step() {
  if (join_) join_->shadow_step();
  step();
}
void LocalSgd::finish_join(int /*last_active_rank*/) {
  if (join_) join_->finish_join();
}

}  // namespace tessera
