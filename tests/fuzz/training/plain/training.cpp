#include "fuzz/training/plain/training.h"

#include <algorithm>
#include <cmath>

#include <torch/nn.h>

#include "fuzz/training/story.h"
#include "tessera/optim/master_weights.h"

namespace tessera::fuzz {

OptimizerFactory optimizer_of(const Case& which) {
  OptionMap options;
  for (const auto& [name, value] : which.optimizer.values)
    if (name == "amsgrad" || name == "nesterov" || name == "centered") options[name] = true;
    else if (name != "master_weights") options[name] = std::stod(value);
  auto factory = default_optimizers().factory(which.optimizer.kind, options);
  return which.optimizer.flag("master_weights") ? with_master_weights(factory) : factory;
}

at::Tensor tree_sum(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return tensors[0];
  size_t left = 1;
  while (2 * left < tensors.size()) left *= 2;
  const auto middle = tensors.begin() + static_cast<std::ptrdiff_t>(left);
  const auto a = tree_sum({tensors.begin(), middle}), b = tree_sum({middle, tensors.end()});
  return a.defined() && b.defined() ? a + b : a.defined() ? a : b;
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

/// Module::zero_grad() leaves gradients of zero; libtorch 2 makes them undefined.
bool zero_grad_keeps_zeros() {
  at::AutoGradMode with_grad(true);
  torch::nn::PReLU module;
  module(torch::ones({1})).sum().backward();
  module->zero_grad();
  return module->weight.grad().defined();
}

bool sixteen_bits(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

/// All values except those of the parameters `local`.
void take_values(Net& net, const ModuleStateDict& values, const std::set<std::string>& local) {
  auto mixed = state_dict(net);
  for (size_t i = 0; i < mixed.size(); ++i)
    if (!local.count(mixed[i].first)) mixed[i] = values[i];
  load_state_dict(net, mixed);
}

std::vector<at::Tensor> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
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
    for (auto& replica : replicas_)
      for (auto& parameter : replica.net->part(event.number("part")).parameters())
        parameter.requires_grad_(kind == "thaw");
  } else if (kind == "write") {
    for (auto& replica : replicas_)
      for (auto& parameter : replica.net->part(event.number("part")).parameters())
        parameter.mul_(0.5);
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

void PlainTraining::add_results(const Item& event, std::vector<Record>& records) const {
  at::NoGradGuard no_grad;
  for (int rank = 0; rank < world(); ++rank) {
    add_weights(records[rank], state_dict(*replicas_[rank].net));
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
}

void PlainTraining::train(const Item& event, int number, std::vector<Record>& records) {
  const int micros = event.number("micro", 1);
  const auto ranks = all_ranks();
  const int absent = event.number("absent", -1);
  const bool between = event.text("when") == "between";
  const bool after = event.text("when") == "after" && cleared_;
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
  }
  if (event.has("scaled")) scale_gradients(event.real("scaled", 1));
  std::vector<std::vector<at::Tensor>> own;
  for (auto& replica : replicas_) own.push_back(gradients_of(replica.parameters));
  finish_gradients(ranks, world());
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

void PlainTraining::sync_buffers(const std::vector<int>& active) {
  if (buffer_rule(wrapper_) == BufferSync::none) return;
  const auto buffers = [&](int rank) { return replicas_[rank].net->buffers(); };
  const auto count = buffers(0).size();
  for (size_t i = 0; i < count; ++i) {
    auto value = buffers(active.front())[i].clone();
    if (buffer_rule(wrapper_) == BufferSync::mean && at::isFloatingType(value.scalar_type())) {
      std::vector<at::Tensor> of_ranks(replicas_.size());
      const auto dtype = sixteen_bits(value.scalar_type()) ? at::kFloat : value.scalar_type();
      for (const int rank : active) of_ranks[rank] = buffers(rank)[i].to(dtype);
      value =
          tree_sum(of_ranks).to(value.scalar_type()) * (1.0 / static_cast<double>(active.size()));
    }
    at::AutoDispatchBelowADInplaceOrView keep_versions;
    for (int rank = 0; rank < world(); ++rank) buffers(rank)[i].copy_(value);
  }
}

void PlainTraining::before_forward(const std::vector<int>& active) {
  if (is("ddp") || is("ddp_zero")) sync_buffers(active);
}

void PlainTraining::after_backward(const std::vector<int>& active, double divisor) {
  if (reduce_ == Reduce::in_step) return;
  if (reduce_ == Reduce::after_backward) {
    set_gradients(average(active, scale_of(divisor)));
  } else {
    // The sum is scaled and added in one operation, unless shard groups are replicated.
    const auto strategy = wrapper_.text("strategy");
    const bool replicated = world() > 1 && (strategy == "none" || strategy == "hybrid");
    const double later = replicated ? 1 : scale_of(divisor);
    const auto means = average(active, replicated ? scale_of(divisor) : 1);
    shard_gradients_.resize(means.size());
    for (size_t i = 0; i < means.size(); ++i) {
      if (!means[i].defined()) continue;
      auto& sum = shard_gradients_[i];
      if (sum.defined()) sum.add_(means[i], later);
      else sum = means[i] * later;
    }
    for (auto& replica : replicas_)
      for (auto& item : replica.parameters) item.second.mutable_grad() = at::Tensor();
  }
  if (is("distributed_optimizer") || is("zero")) return;  // with the step
  // Under FSDP a backward that reduces nothing, as one to inputs alone, is local.
  const auto& parameters = replicas_[0].parameters;
  const bool reduces = std::any_of(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return parameter.second.requires_grad();
  });
  if (is("fsdp") && !reduces) return;
  sync_buffers(active);
}

std::vector<at::Tensor> PlainTraining::average(const std::vector<int>& active, double scale) const {
  std::vector<at::Tensor> means;
  for (size_t i = 0; i < replicas_[0].parameters.size(); ++i) {
    const auto& [name, parameter] = replicas_[0].parameters[i];
    const auto sent = sent_dtype(parameter.scalar_type());
    const bool compressed = wrapper_.has("hook");
    std::vector<at::Tensor> of_ranks(replicas_.size());
    for (const int rank : active) {
      auto gradient = replicas_[rank].parameters[i].second.grad();
      if (!gradient.defined() || local_.count(name)) continue;
      if (compressed) gradient = (gradient * (1.0 / world())).to(sent);
      of_ranks[rank] = sixteen_bits(sent) ? gradient.to(at::kFloat) : gradient.clone();
    }
    at::Tensor sum = tree_sum(of_ranks);
    // A sum of 16-bit numbers is rounded, then scaled. A hook's result is a mean over all ranks.
    const double factor = compressed ? scale * world() : scale;
    if (sum.defined()) sum = sum.to(sent).to(parameter.scalar_type());
    means.push_back(sum.defined() && factor != 1 ? sum * factor : sum);
  }
  return means;
}

at::ScalarType PlainTraining::sent_dtype(at::ScalarType own) const {
  const auto hook = wrapper_.text("hook");
  return hook == "fp16" ? at::kHalf : hook == "bf16" ? at::kBFloat16 : own;
}

double PlainTraining::scale_of(double divisor) const {
  return is("distributed_optimizer") && wrapper_.text("reduce") == "sum" ? 1 : 1 / divisor;
}

void PlainTraining::set_gradients(const std::vector<at::Tensor>& gradients) {
  for (auto& replica : replicas_)
    for (size_t i = 0; i < gradients.size(); ++i) {
      auto& [name, parameter] = replica.parameters[i];
      if (local_.count(name)) continue;
      parameter.mutable_grad() = gradients[i].defined() ? gradients[i].clone() : at::Tensor();
    }
}

void PlainTraining::finish_gradients(const std::vector<int>& active, double divisor) {
  if (reduce_ == Reduce::in_step) set_gradients(average(active, scale_of(divisor)));
  else if (reduce_ == Reduce::into_shards) set_gradients(shard_gradients_);
}

void PlainTraining::scale_gradients(double factor) {
  for (auto& replica : replicas_)
    for (auto& item : replica.parameters)
      if (item.second.grad().defined()) item.second.mutable_grad().mul_(factor);
  for (auto& gradient : shard_gradients_)
    if (gradient.defined()) gradient.mul_(factor);
}

double PlainTraining::clip(const Item& event) {
  double norm = 0;
  for (auto& replica : replicas_) {
    double squares = 0;
    for (const auto& parameter : parameters_of(*replica.optimizer)) {
      auto gradient = parameter.grad();
      if (!gradient.defined() || gradient.numel() == 0) continue;
      if (event.text("clip") == "value") gradient.clamp_(-0.05, 0.05);
      else squares += gradient.to(at::kDouble).square().sum().item<double>();
    }
    if (event.text("clip") == "value") continue;
    norm = std::sqrt(squares);
    const double factor = kMaxNorm / (norm + 1e-6);
    if (factor >= 1) continue;  // NaN scales, as in libtorch
    for (const auto& parameter : parameters_of(*replica.optimizer)) {
      auto gradient = parameter.grad();
      if (gradient.defined()) gradient.mul_(factor);
    }
  }
  return norm;
}

void PlainTraining::clear(const Item& event) {
  if (event.text("zero") != "module") return zero_grad();
  for (auto& replica : replicas_) replica.net->zero_grad();
  for (auto& gradient : shard_gradients_)
    if (gradient.defined()) gradient = zero_grad_keeps_zeros() ? gradient.zero_() : at::Tensor();
}

void PlainTraining::zero_grad() {
  shard_gradients_.clear();
  for (auto& replica : replicas_)
    for (auto& item : replica.parameters) item.second.mutable_grad() = at::Tensor();
}

}  // namespace tessera::fuzz
