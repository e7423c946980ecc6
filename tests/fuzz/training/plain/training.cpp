#include "fuzz/training/plain/training.h"

#include <algorithm>
#include <cmath>

#include <torch/nn.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "fuzz/training/story.h"
#include "tessera/optim/master_weights.h"

namespace tessera::fuzz {

namespace {

/// A program's own optimizer, whose step depends on the norm of a whole parameter's gradient.
class Normalized : public torch::optim::Optimizer {
 public:
  Normalized(std::vector<torch::optim::OptimizerParamGroup> groups, double lr)
      : Optimizer(std::move(groups), std::make_unique<torch::optim::SGDOptions>(lr)) {}
  at::Tensor step(LossClosure closure) override {
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode with_grad(true);
      loss = closure();
    }
    at::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        const auto& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        const double norm = gradient.to(at::kDouble).norm().item<double>();
        parameter.sub_(gradient, group.options().get_lr() / (1 + norm));
      }
    }
    return loss;
  }
};

}  // namespace

OptimizerFactory optimizer_of(const Case& which) {
  if (which.optimizer.kind == "LBFGS")
    return optimizer_factory<torch::optim::LBFGS>(
        torch::optim::LBFGSOptions(which.optimizer.real("lr", 0)).max_iter(4));
  if (which.optimizer.kind == "normalized") {
    const double lr = which.optimizer.real("lr", 0);
    return [lr](std::vector<torch::optim::OptimizerParamGroup> groups) {
      return std::make_unique<Normalized>(std::move(groups), lr);
    };
  }
  OptionMap options;
  for (const auto& [name, value] : which.optimizer.values)
    if (name == "amsgrad" || name == "nesterov" || name == "centered") options[name] = true;
    else if (name != "master_weights") options[name] = std::stod(value);
  auto factory = default_optimizers().factory(which.optimizer.kind, options);
  return which.optimizer.flag("master_weights") ? with_master_weights(factory) : factory;
}

double lr_of_second_group(const Case& which, const Item& wrapper) {
  return which.optimizer.real("lr", 0) * wrapper.real("second_lr", 1);
}

void scale_lr(torch::optim::Optimizer& optimizer, double factor) {
  for (auto& group : optimizer.param_groups())
    group.options().set_lr(group.options().get_lr() * factor);
}

namespace {

std::vector<at::Tensor> gradients_of(const NamedParameters& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& item : parameters) gradients.push_back(item.second.grad());
  return gradients;
}

/// All values except those of the parameters `local`.
void take_values(Net& net, const ModuleStateDict& values, const std::set<std::string>& local) {
  auto mixed = state_dict(net);
  for (size_t i = 0; i < mixed.size(); ++i)
    if (!local.count(mixed[i].first)) mixed[i] = values[i];
  load_state_dict(net, mixed);
}

}  // namespace

PlainTraining::PlainTraining(const Case& which, int first, int world)
    : which_(which), first_(first) {
  if (world == 0) world = which.world;
  std::vector<std::shared_ptr<Net>> nets;
  for (int rank = 0; rank < world; ++rank) {
    nets.push_back(Net::make(which, which.seed));
    const auto local = local_names(*nets[0], which.wrapper);
    if (rank == 0 || local.empty()) continue;
    nets[rank] = Net::make(which, which.seed + rank);
    take_values(*nets[rank], state_dict(*nets[0]), local);
  }
  start(which.wrapper, world, std::move(nets));
}

void PlainTraining::start(const Item& wrapper, int world, std::vector<std::shared_ptr<Net>> nets) {
  wrapper_ = wrapper;
  local_ = local_names(*nets[0], wrapper);
  const bool sharded = is("fsdp") || (is("zero") && wrapper.flag("shard_gradients"));
  reduce_ = sharded ? Reduce::into_shards : is("zero") ? Reduce::in_step : Reduce::after_backward;
  shard_gradients_.clear();
  replicas_.clear();
  cleared_ = true;
  const auto late = late_part_added_ ? -1 : wrapper.number("late_part", -1);
  for (int rank = 0; rank < world; ++rank) {
    Replica replica{nets[rank], named_parameters(*nets[rank]), nullptr};
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const auto& names : group_names(*replica.net, wrapper, late)) {
      std::vector<at::Tensor> tensors;
      for (const auto& item : replica.parameters)
        if (std::count(names.begin(), names.end(), item.first)) tensors.push_back(item.second);
      groups.emplace_back(tensors);
    }
    replica.optimizer = optimizer_of(which_)(groups);
    if (groups.size() == 2)
      replica.optimizer->param_groups()[1].options().set_lr(lr_of_second_group(which_, wrapper));
    replicas_.push_back(std::move(replica));
  }
}

std::vector<int> PlainTraining::all_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world(); ++rank) ranks.push_back(rank);
  return ranks;
}

std::vector<Record> PlainTraining::play(const Item& event, int number) {
  std::vector<Record> records(world());
  const auto& kind = event.kind;
  at::NoGradGuard no_grad;
  for (auto& replica : replicas_) replica.copies.clear();
  if (kind == "step") {
    train(event, number, records);
  } else if (kind == "join") {
    join(event, number);
  } else if (kind == "evaluate") {
    evaluate(event, number, records);
  } else if (kind == "freeze" || kind == "thaw") {
    set_trainable(event.number("part"), kind == "thaw");
  } else if (kind == "write") {
    for (auto& replica : replicas_)
      for (auto& parameter : replica.net->part(event.number("part")).parameters())
        parameter.mul_(0.5);
    // with_shared_write() broadcasts buffers.
    for (int rank = 1; wrapper_.flag("share_parameters") && rank < world(); ++rank)
      for (size_t i = 0; i < replicas_[0].net->buffers().size(); ++i)
        replicas_[rank].net->buffers()[i].copy_(replicas_[0].net->buffers()[i]);
  } else if (kind == "lr") {
    for (auto& replica : replicas_) scale_lr(*replica.optimizer, event.real("factor", 0.5));
  } else if (kind == "add_group") {
    add_group();
  } else if (kind == "move") {
    move(event);
  } else if (kind == "to_dtype") {
    for (auto& replica : replicas_)
      replica.net->to(dtype_of(which_) == at::kFloat ? at::kDouble : at::kFloat);
  }
  records.resize(world());  // "move" changes it
  return records;
}

void PlainTraining::set_trainable(int part, bool on) {
  for (auto& replica : replicas_)
    for (auto& parameter : replica.net->part(part).parameters()) parameter.requires_grad_(on);
}

void PlainTraining::add_results(const Item& event, std::vector<Record>& records) const {
  at::NoGradGuard no_grad;
  for (int rank = 0; rank < world(); ++rank) {
    if (!event.flag("quiet")) add_weights(records[rank], state_dict(*replicas_[rank].net));
    if (event.flag("state"))
      add_state(records[rank], state_dict(*replicas_[rank].optimizer, replicas_[rank].parameters));
  }
}

void PlainTraining::adopt(int rank, const ModuleStateDict& weights,
                          const std::optional<OptimizerStateDict>& state) {
  auto& replica = replicas_[rank];
  load_state_dict(*replica.net, weights);
  if (!state) return;
  auto loaded = state_dict(*replica.optimizer, replica.parameters);
  loaded.state = state->state;
  load_state_dict(*replica.optimizer, replica.parameters, loaded);
}

at::Tensor PlainTraining::replica_loss(const Item& event, int number, int micro, int rank,
                                       int micros) {
  auto& net = computing(rank);
  return forward_loss([&](const Batch& batch) { return net.forward(batch); }, net, event, which_,
                      number, micro, first_ + rank, micros);
}

/// The replica, or a new copy of it in the dtype in which the wrapper computes.
Net& PlainTraining::computing(int rank) {
  auto& replica = replicas_[rank];
  if (!wrapper_.has("mixed")) return *replica.net;
  auto copy = Net::make(which_, which_.seed);
  copy->to(at::kBFloat16);
  load_state_dict(*copy, state_dict(*replica.net));
  copy->train(replica.net->is_training());
  copy->trap = replica.net->trap;
  const auto parameters = named_parameters(*copy);
  for (size_t i = 0; i < parameters.size(); ++i)
    at::Tensor(parameters[i].second).requires_grad_(replica.parameters[i].second.requires_grad());
  replica.copies.push_back(std::move(copy));
  return *replica.copies.back();
}

/// The gradients of the copies are added to those of the replica.
void PlainTraining::backward(int rank, const at::Tensor& loss, bool retain) {
  loss.backward({}, retain);
  at::NoGradGuard no_grad;
  auto& replica = replicas_[rank];
  for (const auto& copy : replica.copies) {
    const auto parameters = named_parameters(*copy);
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& own = parameters[i].second.mutable_grad();
      if (!own.defined()) continue;
      const auto& parameter = replica.parameters[i].second;
      auto& sum = parameter.mutable_grad();
      const auto gradient = own.to(parameter.scalar_type());
      sum = sum.defined() ? sum + gradient : gradient;
      own = at::Tensor();
    }
  }
  for (const auto& item : replica.parameters) {
    auto& gradient = item.second.mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
  }
}

void PlainTraining::train(const Item& event, int number, std::vector<Record>& records) {
  const int micros = event.number("micro", 1);
  const auto ranks = all_ranks();
  const int absent = event.number("absent", -1);
  const bool between = event.text("when") == "between";
  const bool after = event.text("when") == "after" && cleared_;
  if (which_.optimizer.kind == "LBFGS") return minimize(event, number, records);
  if (event.has("trap")) spring(event, number);
  std::vector<at::Tensor> kept;
  if (event.flag("kept_graph")) {
    before_forward(ranks);
    at::AutoGradMode with_grad(true);
    for (const int rank : ranks) kept.push_back(replica_loss(event, number, 9, rank, 1));
  }
  if (!after && !between && !event.flag("uncleared")) clear(event);
  for (int micro = 0; micro < micros; ++micro) {
    const bool sync = micro + 1 == micros || !event.flag("no_sync");
    if (sync) before_forward(ranks);
    std::vector<at::Tensor> losses;
    for (int rank = 0; rank < world(); ++rank) {
      at::AutoGradMode with_grad(true);
      losses.push_back(replica_loss(event, number, micro, rank, micros));
      records[rank].emplace_back("loss " + std::to_string(micro),
                                 losses.back().detach().to(dtype_of(which_), false, true));
    }
    if (between && micro == 0) clear(event);
    const int backwards = event.flag("retain") ? 2 : 1;
    for (int time = 0; time < backwards; ++time) {
      for (int rank = 0; rank < world(); ++rank)
        if (rank != absent) backward(rank, losses[rank], time + 1 < backwards);
      if (sync) after_backward(ranks, world());
    }
    if (event.has("replaced") && micro == 0) scale_gradients(event.real("replaced", 1));
  }
  if (event.has("thaws")) set_trainable(event.number("thaws"), true);
  if (event.has("scaled")) scale_gradients(event.real("scaled", 1));
  std::vector<std::vector<at::Tensor>> own;
  for (auto& replica : replicas_) own.push_back(gradients_of(replica.parameters));
  finish_gradients(ranks, world());
  if (event.has("scaler") && !finite_gradients()) {  // GradScaler skips the step
    zero_grad();
    cleared_ = true;
    return;
  }
  add_norms(event, records);
  if (event.has("clip")) {
    const double norm = clip(event);
    for (auto& record : records)
      if (event.text("clip") == "norm") add_number(record, "norm", norm);
  }
  // The gradients of shards stay as they were clipped.
  for (size_t i = 0; event.has("clip") && i < shard_gradients_.size(); ++i)
    if (shard_gradients_[i].defined())
      shard_gradients_[i] = replicas_[0].parameters[i].second.grad().clone();
  for (auto& replica : replicas_) replica.optimizer->step();
  if (reduce_ != Reduce::after_backward) {
    // `.grad` is each rank's own.
    for (int rank = 0; rank < world(); ++rank)
      for (size_t i = 0; i < own[rank].size(); ++i)
        replicas_[rank].parameters[i].second.mutable_grad() = own[rank][i];
  }
  cleared_ = after;
  if (after) clear(event);
  if (is("zero") || is("distributed_optimizer")) sync_buffers(ranks);
  if (kept.empty()) return;
  if (event.flag("then_evaluate")) evaluate(event, number, records);
  clear(event);
  for (const int rank : ranks) backward(rank, kept[rank]);
  after_backward(ranks, world());
  clear(event);
}

/// A forward and backward on all ranks in which the user's code throws.
void PlainTraining::spring(const Item& event, int number) {
  before_forward(all_ranks());
  for (int rank = 0; rank < world(); ++rank) {
    auto& trap = replicas_[rank].net->trap;
    trap = trap_of(event);
    try {
      at::AutoGradMode with_grad(true);
      backward(rank, replica_loss(event, number, 0, rank, 1));
    } catch (const Sprung&) {
      replicas_[rank].copies.clear();
    }
    trap = Trap::nowhere;
  }
  clear(event);
}

void PlainTraining::join(const Item& event, int number) {
  int last = 0, first_end = 1 << 20, end = 0;
  for (int rank = 0; rank < world(); ++rank) {
    first_end = std::min(first_end, batches_in_join(event, rank));
    end = std::max(end, batches_in_join(event, rank));
  }
  for (int round = 0; round < end; ++round) {
    std::vector<int> active;
    for (int rank = 0; rank < world(); ++rank)
      if (batches_in_join(event, rank) > round) active.push_back(rank);
    last = active.front();
    zero_grad();
    before_forward(active);
    for (const int rank : active) {
      at::AutoGradMode with_grad(true);
      backward(rank, replica_loss(event, number, round, rank, 1));
    }
    const double divisor = event.flag("by_active") ? static_cast<double>(active.size()) : world();
    after_backward(active, divisor);
    finish_gradients(active, divisor);
    for (int rank = 0; rank < world(); ++rank) {
      // Under these, the optimizer of a rank without data does not step.
      const bool steps = !(is("ddp") && batches_in_join(event, rank) <= round);
      if (steps) replicas_[rank].optimizer->step();
    }
    if (is("zero") || is("distributed_optimizer")) sync_buffers(active);
  }
  zero_grad();
  cleared_ = true;
  if (first_end == end) return;
  const auto values = state_dict(*replicas_[last].net);
  for (auto& replica : replicas_) take_values(*replica.net, values, local_);
}

void PlainTraining::evaluate(const Item& event, int number, std::vector<Record>& records) {
  for (int rank = 0; rank < world(); ++rank) {
    if (event.number("rank", first_ + rank) != first_ + rank) continue;
    auto& net = *replicas_[rank].net;
    net.eval();
    const auto dtype = dtype_of(which_);
    const auto batch = make_batch(which_.seed, number, 0, first_ + rank, dtype);
    records[rank].emplace_back("output", computing(rank).forward(batch).to(dtype));
    net.train();
  }
}

void PlainTraining::add_group() {
  late_part_added_ = true;
  for (auto& replica : replicas_) {
    const auto late = group_names(*replica.net, wrapper_, wrapper_.number("late_part", -1));
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : replica.parameters) {
      const bool early = std::any_of(late.begin(), late.end(), [&name = name](const auto& names) {
        return std::count(names.begin(), names.end(), name) > 0;
      });
      if (!early) tensors.push_back(tensor);
    }
    replica.optimizer->add_param_group(torch::optim::OptimizerParamGroup(tensors));
  }
}

void PlainTraining::move(const Item& event) {
  const auto weights = state_dict(*replicas_[0].net);
  const auto state = state_dict(*replicas_[0].optimizer, replicas_[0].parameters);
  const double lr = replicas_[0].optimizer->param_groups().front().options().get_lr();
  const int target = event.number("world", world());
  std::vector<std::shared_ptr<Net>> nets;
  for (int rank = 0; rank < target; ++rank) {
    nets.push_back(Net::make(which_, which_.seed));
    load_state_dict(*nets.back(), weights);
  }
  start(wrapper_after(event, wrapper_), target, nets);
  for (auto& replica : replicas_) {
    auto loaded = state;
    // A checkpoint has the state of parameters, and neither groups nor options.
    if (event.flag("folder")) loaded = state_dict(*replica.optimizer, replica.parameters);
    loaded.state = state.state;
    load_state_dict(*replica.optimizer, replica.parameters, loaded);
    if (!event.flag("folder")) continue;
    for (auto& group : replica.optimizer->param_groups()) group.options().set_lr(lr);
  }
}

}  // namespace tessera::fuzz
