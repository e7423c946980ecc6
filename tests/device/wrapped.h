#pragma once

#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "device/parity.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/join.h"
#include "tessera/local_sgd.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// A model in each wrapper, with its optimizer, on any device. Tests of state and of unequal data
// use them in the same way.

namespace tessera::on_device {

/// Uneven, whose inputs are centred by a buffer.
struct CentredImpl : torch::nn::Module {
  CentredImpl()
      : net(register_module("net", testing::Uneven())),
        mean(register_buffer("mean", torch::zeros({3}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto centred = x - mean;
    {
      const at::NoGradGuard no_grad;
      mean.mul_(0.5).add_(x.mean(0), 0.5);
    }
    return net(centred);
  }
  testing::Uneven net;
  at::Tensor mean;
};
TORCH_MODULE(Centred);

/// What a wrapper gives of itself, and takes. Empty: it has no such part.
struct State {
  ModuleStateDict model = {};         ///< On the CPU.
  OptimizerStateDict optimizer = {};  ///< On the CPU.
  LocalSgd::State outer = {};         ///< On the CPU.
  std::string archive = {};           ///< What torch::save() has written.
  std::vector<StateSlice> slices = {};

  /// All tensors but those of `archive`, by name.
  std::map<std::string, at::Tensor> tensors() const {
    auto result = on_the_cpu();
    for (const auto& slice : slices)
      for (const auto& [key, tensor] : slice.state.tensors)
        result["slice " + slice.parameter + " " + key] = tensor;
    return result;
  }
  std::map<std::string, at::Tensor> on_the_cpu() const {
    std::map<std::string, at::Tensor> result;
    for (const auto& [name, tensor] : model) result["model " + name] = tensor;
    for (const auto& [name, state] : optimizer.state)
      for (const auto& [key, tensor] : state.tensors)
        result["optimizer " + name + " " + key] = tensor;
    for (const auto& [name, tensor] : outer) result["outer " + name] = tensor;
    return result;
  }
};

/// A model with its wrapper and its optimizer.
class Wrapped {
 public:
  virtual ~Wrapped() = default;

  /// An iteration of the training loop.
  virtual void step(const at::Tensor& x) = 0;
  virtual State state() = 0;
  virtual void load(const State& state) = 0;
  virtual std::vector<std::reference_wrapper<Joinable>> joinables() { return {}; }
  /// An iteration on a rank without data. Empty: that of the joinables.
  virtual std::function<void()> shadow() { return {}; }

  // For LocalSgd.
  virtual std::vector<ParameterShard> shards() { return {}; }
  virtual void publish() {}
  /// Whether all ranks of a group hold equal shards.
  virtual bool has_replicas() const { return false; }
};
using MakeWrapped = std::function<std::unique_ptr<Wrapped>(const ProcessGroup&, at::Device)>;

template <class Type, class... Args>
MakeWrapped wrapped(Args... args) {
  return [args...](const ProcessGroup& group, at::Device where) {
    return std::make_unique<Type>(group, where, args...);
  };
}

inline at::Tensor loss_of_output(const at::Tensor& output) { return output.square().mean(); }

class Plain : public Wrapped {
 public:
  Plain(const ProcessGroup&, at::Device where)
      : net(model_on<Centred>(where)), optimizer(net->parameters(), momentum()) {}
  void step(const at::Tensor& x) override {
    optimizer.zero_grad();
    loss_of_output(forward(x)).backward();
    optimizer.step();
  }
  State state() override {
    return {state_dict(*net), state_dict(optimizer, named_parameters(*net))};
  }
  void load(const State& state) override {
    load_state_dict(*net, state.model);
    load_state_dict(optimizer, named_parameters(*net), state.optimizer);
  }
  std::vector<ParameterShard> shards() override { return parameter_shards(named_parameters(*net)); }
  bool has_replicas() const override { return true; }

 protected:
  virtual at::Tensor forward(const at::Tensor& x) { return net(x); }
  Centred net;
  torch::optim::SGD optimizer;
};

class InDdp : public Plain {
 public:
  InDdp(const ProcessGroup& group, at::Device where) : Plain(group, where), ddp_(net, group) {}
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {ddp_}; }
  std::function<void()> shadow() override {
    return [this] {
      optimizer.zero_grad();
      ddp_.shadow_backward();
      optimizer.step();
    };
  }

 protected:
  at::Tensor forward(const at::Tensor& x) override { return ddp_(x); }

 private:
  DistributedDataParallel<Centred> ddp_;
};

using ZeroOptions = ZeroRedundancyOptimizerOptions;
/// A fused optimizer would have kernels of its own on the CPU.
inline OptimizerFactory plain_sgd() { return optimizer_factory<torch::optim::SGD>(momentum()); }

/// Its state is gathered on every rank.
class InZero : public Wrapped {
 public:
  InZero(const ProcessGroup& group, at::Device where, ZeroOptions options = {})
      : net(model_on<Centred>(where)), zero(*net, group, plain_sgd(), options) {}
  void step(const at::Tensor& x) override {
    zero.zero_grad();
    loss_of_output(forward(x)).backward();
    zero.step();
  }
  State state() override {
    zero.consolidate_state_dict(-1);
    return {state_dict(*net), zero.state_dict()};
  }
  void load(const State& state) override {
    load_state_dict(*net, state.model);
    load_optimizer(state);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {zero}; }
  std::vector<ParameterShard> shards() override { return zero.shards(); }
  void publish() override { zero.gather_parameters(); }

 protected:
  virtual at::Tensor forward(const at::Tensor& x) { return net(x); }
  virtual void load_optimizer(const State& state) { zero.load_state_dict(state.optimizer); }
  Centred net;
  ZeroRedundancyOptimizer zero;
};

/// Each rank's part of the state stays where it is.
class InZeroBySlices : public InZero {
 public:
  using InZero::InZero;
  State state() override { return {.model = state_dict(*net), .slices = zero.state_slices()}; }

 protected:
  void load_optimizer(const State& state) override { zero.load_state_slices(state.slices); }
};

/// The state goes through torch::save() and torch::load().
class InZeroByArchive : public InZero {
 public:
  using InZero::InZero;
  State state() override {
    auto result = InZero::state();
    std::ostringstream text;
    torch::save(static_cast<torch::optim::Optimizer&>(zero), text);
    result.archive = text.str();
    return result;
  }

 protected:
  void load_optimizer(const State& state) override {
    std::istringstream text(state.archive);
    torch::load(static_cast<torch::optim::Optimizer&>(zero), text);
  }
};

/// The gradients come from DistributedDataParallel.
class InDdpWithZero : public InZero {
 public:
  InDdpWithZero(const ProcessGroup& group, at::Device where)
      : InZero(group, where, {.reduce_gradients = false}), ddp_(net, group) {}
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {ddp_, zero}; }

 protected:
  at::Tensor forward(const at::Tensor& x) override { return ddp_(x); }

 private:
  DistributedDataParallel<Centred> ddp_;
};

class InDistributedOptimizer : public Wrapped {
 public:
  InDistributedOptimizer(const ProcessGroup& group, at::Device where,
                         DistributedOptimizerOptions options)
      : net_(model_on<Centred>(where)), optimizer_(*net_, group, plain_sgd(), options) {}
  void step(const at::Tensor& x) override {
    optimizer_.zero_grad();
    optimizer_.backward(loss_of_output(net_(x)));
    optimizer_.step();
  }
  State state() override { return {state_dict(*net_), optimizer_.state_dict()}; }
  void load(const State& state) override {
    load_state_dict(*net_, state.model);
    optimizer_.load_state_dict(state.optimizer);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {optimizer_}; }

 private:
  Centred net_;
  DistributedOptimizer optimizer_;
};

inline DistributedOptimizerOptions means(bool packed = false) {
  return {.reduce_method = "mean", .param_pack = packed, .param_pack_thd = 20};
}

/// Its state is gathered on every rank.
class InFsdp : public Wrapped {
 public:
  InFsdp(const ProcessGroup& group, at::Device where, bool cpu_offload = false)
      : net(model_on<Centred>(where)),
        fsdp(net, group, options(cpu_offload)),
        optimizer(fsdp.parameters(), momentum()) {
    fsdp.set_shadow_step([this] {
      optimizer.zero_grad();
      fsdp.shadow_backward();
      optimizer.step();
    });
  }
  void step(const at::Tensor& x) override {
    backward(x);
    optimizer.step();
  }
  void backward(const at::Tensor& x) {
    optimizer.zero_grad();
    loss_of_output(fsdp(x)).backward();
  }
  State state() override { return {fsdp.state_dict(-1), fsdp.optim_state_dict(optimizer, -1)}; }
  void load(const State& state) override {
    fsdp.load_state_dict(state.model);
    fsdp.load_optim_state_dict(optimizer, state.optimizer);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {fsdp}; }
  std::vector<ParameterShard> shards() override { return fsdp.shards(); }

  Centred net;
  FullyShardedDataParallel<Centred> fsdp;
  torch::optim::SGD optimizer;

 private:
  static FullyShardedDataParallelOptions options(bool cpu_offload) {
    auto result = by_layer();
    result.cpu_offload = cpu_offload;
    return result;
  }
};

/// Each rank's part of the optimizer's state stays where it is.
class InFsdpBySlices : public InFsdp {
 public:
  using InFsdp::InFsdp;
  State state() override {
    return {.model = fsdp.state_dict(-1), .slices = state_slices(optimizer, fsdp.shards())};
  }
  void load(const State& state) override {
    fsdp.load_state_dict(state.model);
    load_state_slices(optimizer, fsdp.shards(), state.slices);
  }
};

/// Groups of `group_size` ranks with another wrapper, which are synchronised every two steps. 0: of
/// one rank, without a wrapper.
class InLocalSgd : public Wrapped {
 public:
  InLocalSgd(const ProcessGroup& world, at::Device where, LocalSgdOptions options,
             const MakeWrapped& make = wrapped<Plain>(), int group_size = 0)
      : groups_(divide(world, group_size)),
        inner_(make(groups_.inner, where)),
        local_(groups_.outer, inner_->shards(), every_two(options),
               inner_->has_replicas() ? groups_.inner : ProcessGroup(),
               [this] { inner_->publish(); }) {
    if (group_size > 0) local_.set_join(world, inner_->joinables(), inner_->shadow());
  }
  void step(const at::Tensor& x) override {
    inner_->step(x);
    local_.step();
  }
  State state() override {
    auto result = inner_->state();
    result.outer = local_.state_dict();
    return result;
  }
  void load(const State& state) override {
    inner_->load(state);
    local_.load_state_dict(state.outer);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {local_}; }

 private:
  static LocalSgdGroups divide(ProcessGroup world, int group_size) {
    if (group_size > 0) return local_sgd_groups(world, group_size);
    return {ProcessGroup(), world};
  }
  static LocalSgdOptions every_two(LocalSgdOptions options) {
    options.sync_every = 2;
    return options;
  }

  LocalSgdGroups groups_;
  std::unique_ptr<Wrapped> inner_;
  LocalSgd local_;
};

}  // namespace tessera::on_device
