// How plain training averages gradients and buffers over its replicas.

#include <algorithm>
#include <cmath>

#include <torch/nn.h>

#include "fuzz/training/plain/training.h"
#include "fuzz/training/story.h"

namespace tessera::fuzz {

at::Tensor tree_sum(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return tensors[0];
  size_t left = 1;
  while (2 * left < tensors.size()) left *= 2;
  const auto middle = tensors.begin() + static_cast<std::ptrdiff_t>(left);
  const auto a = tree_sum({tensors.begin(), middle}), b = tree_sum({middle, tensors.end()});
  return a.defined() && b.defined() ? a + b : a.defined() ? a : b;
}

namespace {

/// Module::zero_grad() leaves gradients of zero; libtorch 2 makes them undefined.
bool zero_grad_keeps_zeros() {
  at::AutoGradMode with_grad(true);
  torch::nn::PReLU module;
  module(torch::ones({1})).sum().backward();
  module->zero_grad();
  return module->weight.grad().defined();
}

bool sixteen_bits(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

std::vector<at::Tensor> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

}  // namespace

/// A step of LBFGS, whose closure has the mean of the replicas' losses and gradients.
void PlainTraining::minimize(const Item& event, int number, std::vector<Record>& records) {
  const auto ranks = all_ranks();
  const auto copy_parameters = [&] {
    for (int rank = 1; rank < world(); ++rank)
      for (size_t i = 0; i < replicas_[rank].parameters.size(); ++i)
        replicas_[rank].parameters[i].second.copy_(replicas_[0].parameters[i].second);
  };
  bool first = true;
  replicas_[0].optimizer->step([&] {
    at::NoGradGuard no_grad;
    copy_parameters();
    zero_grad();
    std::vector<at::Tensor> losses;
    for (const int rank : ranks) {
      at::AutoGradMode with_grad(true);
      const auto loss = replica_loss(event, number, 0, rank, 1);
      losses.push_back(loss.detach());
      if (first)
        records[rank].emplace_back("loss 0", losses.back().to(dtype_of(which_), false, true));
      backward(rank, loss);
    }
    first = false;
    set_gradients(average(ranks, scale_of(world())));
    return tree_sum(losses) * (1.0 / world());
  });
  copy_parameters();
  zero_grad();
  sync_buffers(ranks);
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
  // A backward that reduces nothing, as one to inputs alone, is local.
  const auto& parameters = replicas_[0].parameters;
  const bool reduces = std::any_of(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return parameter.second.requires_grad();
  });
  if (!reduces) return;
  sync_buffers(active);
}

std::vector<at::Tensor> PlainTraining::average(const std::vector<int>& active, double scale) const {
  std::vector<at::Tensor> means;
  for (size_t i = 0; i < replicas_[0].parameters.size(); ++i) {
    const auto& [name, parameter] = replicas_[0].parameters[i];
    const auto own = as_pairs(parameter.detach()).scalar_type(), sent = sent_dtype(own);
    const bool compressed = wrapper_.has("hook");
    std::vector<at::Tensor> of_ranks(replicas_.size());
    for (const int rank : active) {
      auto gradient = as_pairs(replicas_[rank].parameters[i].second.grad());
      if (!gradient.defined() || local_.count(name)) continue;
      if (compressed) gradient = (gradient * (1.0 / world())).to(sent);
      of_ranks[rank] = sixteen_bits(sent) ? gradient.to(at::kFloat) : gradient.clone();
    }
    at::Tensor sum = tree_sum(of_ranks);
    // A sum of 16-bit numbers is rounded, then scaled. A hook's result is a mean over all ranks.
    const double factor = compressed ? scale * world() : scale;
    if (sum.defined()) sum = sum.to(sent).to(own);
    if (sum.defined() && factor != 1) sum = sum * factor;
    means.push_back(sum.defined() && parameter.is_complex() ? at::view_as_complex(sum) : sum);
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

bool PlainTraining::finite_gradients() const {
  for (const auto& replica : replicas_)
    for (const auto& item : replica.parameters)
      if (item.second.grad().defined() && !item.second.grad().isfinite().all().item<bool>())
        return false;
  return true;
}

/// The norms that the event asks for, of the gradients as they are now.
void PlainTraining::add_norms(const Item& event, std::vector<Record>& records) const {
  for (size_t rank = 0; rank < replicas_.size(); ++rank) {
    const auto norm = [&](double p) {
      std::vector<at::Tensor> norms{at::zeros({}, at::kDouble)};
      for (const auto& parameter : parameters_of(*replicas_[rank].optimizer))
        if (parameter.grad().defined() && parameter.numel() > 0)
          norms.push_back(parameter.grad().abs().to(at::kDouble).norm(p));
      return at::stack(norms).norm(p).item<double>();
    };
    if (event.has("norm_of")) add_number(records[rank], "norm", norm(norm_type(event)));
    if (shows_norm_of_step(wrapper_, event)) add_number(records[rank], "norm of step", norm(2));
  }
}

double PlainTraining::clip(const Item& event) {
  double norm = 0;
  for (auto& replica : replicas_) {
    double squares = 0;
    for (const auto& parameter : parameters_of(*replica.optimizer)) {
      auto gradient = as_pairs(parameter.grad());
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
