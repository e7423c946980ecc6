// The kinds of wrappers.

#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>

#include "fuzz/training/plain/training.h"
#include "fuzz/training/story.h"
#include "fuzz/training/subject.h"
#include "fuzz/training/wire.h"
#include "tessera/detail/trainer_access.h"
#include "tessera/tessera.h"

namespace tessera::fuzz {
namespace {

Partition partition(const Item& wrapper) {
  const auto name = wrapper.text("partition", "flat");
  return name == "whole"       ? Partition::whole
         : name == "first_fit" ? Partition::first_fit
                               : Partition::flat;
}

/// The parameters of each group.
std::vector<NamedParameters> grouped(Net& net, const Item& wrapper,
                                     const NamedParameters& parameters) {
  std::vector<NamedParameters> groups;
  for (const auto& names : group_names(net, wrapper, wrapper.number("late_part", -1))) {
    groups.emplace_back();
    for (const auto& item : parameters)
      if (std::count(names.begin(), names.end(), item.first)) groups.back().push_back(item);
  }
  return groups;
}

std::unique_ptr<torch::optim::Optimizer> plain_optimizer(const Case& which, Net& net,
                                                         const Item& wrapper,
                                                         const NamedParameters& parameters) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : grouped(net, wrapper, parameters)) {
    std::vector<at::Tensor> tensors;
    for (const auto& item : group) tensors.push_back(item.second);
    groups.emplace_back(tensors);
  }
  auto optimizer = optimizer_of(which)(groups);
  if (groups.size() == 2)
    optimizer->param_groups()[1].options().set_lr(lr_of_second_group(which, wrapper));
  return optimizer;
}

/// The parameters that are in no group yet.
NamedParameters late_part(Net& net, const Item& wrapper) {
  std::set<std::string> early;
  for (const auto& names : group_names(net, wrapper, wrapper.number("late_part", -1)))
    early.insert(names.begin(), names.end());
  NamedParameters late;
  for (const auto& item : named_parameters(net))
    if (!early.count(item.first)) late.push_back(item);
  return late;
}

/// Options of the next group of a list that is being made.
OptionMap group_options(const Case& which, const Item& wrapper, size_t number) {
  if (number != 1 || !wrapper.has("second_lr")) return {};
  return {{"lr", lr_of_second_group(which, wrapper)}};
}

std::vector<std::string> ignored_names(Net& net, const Item& wrapper) {
  const auto names = local_names(net, wrapper);
  return {names.begin(), names.end()};
}

Overlap overlap(const Item& wrapper) {
  const auto name = wrapper.text("overlap");
  return name == "none"         ? Overlap::none
         : name == "background" ? Overlap::background
                                : Overlap::backward;
}

DistributedDataParallelOptions ddp_options(Net& net, const Item& wrapper) {
  DistributedDataParallelOptions options;
  options.first_bucket_mb = wrapper.real("first_bucket_mb", options.first_bucket_mb);
  options.bucket_cap_mb = wrapper.real("bucket_cap_mb", 25);
  options.buffers = wrapper.flag("keep_buffers") ? BufferSync::none : buffer_rule(wrapper);
  options.find_unused_parameters = wrapper.flag("find_unused");
  options.static_graph = wrapper.flag("static_graph");
  options.overlap = overlap(wrapper);
  options.parameters_to_ignore = ignored_names(net, wrapper);
  options.wire = wire_of(wrapper);
  // ZeroRedundancyOptimizer beside it gathers them.
  if (wrapper.kind == "ddp_zero") options.wire.parameters = WireFormat::float32;
  const auto hook = wrapper.text("hook");
  if (hook == "fp16") options.comm_hook = fp16_compress_hook();
  if (hook == "bf16") options.comm_hook = bf16_compress_hook();
  return options;
}

using Ddp = DistributedDataParallel<std::shared_ptr<Net>>;

class DdpSubject : public Subject {
 public:
  DdpSubject(const Case& which, const Item& wrapper, std::shared_ptr<Net> net,
             const ProcessGroup& group)
      : Subject(net),
        ddp_(net, group, ddp_options(*net, wrapper)),
        optimizer_(plain_optimizer(which, *net, wrapper, named_parameters(*net))) {}
  at::Tensor forward(const Batch& batch) override { return ddp_(batch); }
  NoSync no_sync() override { return ddp_.no_sync(); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {ddp_}; }

 private:
  Ddp ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

ZeroRedundancyOptimizerOptions zero_options(const Item& wrapper) {
  ZeroRedundancyOptimizerOptions options;
  options.partition = partition(wrapper);
  options.parameters_as_bucket_view = !wrapper.flag("no_bucket_view");
  options.bucket_cap_mb = wrapper.real("bucket_cap_mb", options.bucket_cap_mb);
  options.broadcast_parameters = !wrapper.flag("no_broadcast");
  options.buffers = buffer_rule(wrapper);
  options.overlap = overlap(wrapper);
  options.shard_gradients = wrapper.flag("shard_gradients");
  options.share_parameters = wrapper.flag("share_parameters");
  options.wire = wire_of(wrapper);
  if (wrapper.kind == "ddp_zero") options.wire.gradients = WireFormat::float32;
  if (wrapper.flag("no_reduce")) options.reduce_gradients = false;
  return options;
}

class ZeroSubject : public Subject {
 public:
  ZeroSubject(const Case& which, const Item& wrapper, std::shared_ptr<Net> net,
              const ProcessGroup& group)
      : Subject(net), wrapper_(wrapper) {
    if (wrapper.kind == "ddp_zero") ddp_.emplace(net, group, ddp_options(*net, wrapper));
    const bool groups = wrapper.has("groups") || wrapper.has("late_part");
    if (!groups) {
      zero_ = std::make_unique<ZeroRedundancyOptimizer>(*net, group, optimizer_of(which),
                                                        zero_options(wrapper));
      use_as_the_trainer();
      return;
    }
    std::vector<ZeroRedundancyOptimizer::Group> list;
    for (auto& each : grouped(*net, wrapper, named_parameters(*net)))
      list.push_back({each, group_options(which, wrapper, list.size())});
    zero_ = std::make_unique<ZeroRedundancyOptimizer>(list, group, optimizer_of(which),
                                                      zero_options(wrapper));
    use_as_the_trainer();
    zero_->track_buffers(*net);
  }
  at::Tensor forward(const Batch& batch) override {
    return ddp_ ? (*ddp_)(batch) : net_->forward(batch);
  }
  NoSync no_sync() override { return ddp_ ? ddp_->no_sync() : zero_->no_sync(); }
  double clip_norm(double max_norm, double norm_type) override {
    return zero_->clip_grad_norm_(max_norm, norm_type);
  }
  void clip_value() override { zero_->clip_grad_value_(0.05); }
  std::vector<at::Tensor> trained() override {
    if (!wrapper_.flag("shard_gradients")) return Subject::trained();
    std::vector<at::Tensor> tensors;
    for (const auto& shard : zero_->shards()) tensors.push_back(shard.tensor);
    return tensors;
  }
  double norm_of_step() override { return zero::TrainerAccess::last_norm(*zero_); }
  void step(const Closure& closure) override { zero_->step(closure); }
  void zero_grad(bool set_to_none) override {
    zero_->zero_grad(set_to_none);
    if (wrapper_.has("late_part")) Subject::zero_grad(set_to_none);  // also those that come later
  }
  torch::optim::Optimizer& optimizer() override { return *zero_; }
  std::vector<std::reference_wrapper<Joinable>> joinables() override {
    if (ddp_) return {*ddp_, *zero_};
    return {*zero_};
  }
  OptimizerStateDict optimizer_state() override {
    zero_->consolidate_state_dict(-1);
    return zero_->state_dict();
  }
  std::vector<ParameterShard> shards() override { return zero_->shards(); }
  /// With the state of parameters that have been frozen since construction.
  std::vector<ParameterShard> state_shards() override {
    auto result = shards();
    for (const auto& [name, parameter] : named_parameters(net()))
      if (!parameter.requires_grad() && parameter.numel() > 0)
        result.push_back(whole_shard(name, parameter));
    return result;
  }
  std::vector<StateSlice> state_slices() override { return zero_->state_slices(); }
  void load_state_slices(const std::vector<StateSlice>& slices) override {
    zero_->load_state_slices(slices);
  }
  void load_weights(const ModuleStateDict& weights) override {
    change([&] { Subject::load_weights(weights); });
  }
  bool saves_shards(int /*rank*/) override { return true; }
  bool is_replicated() override { return false; }
  void settle() override { zero_->wait(); }
  void change(const std::function<void()>& change) override { zero_->with_shared_write(change); }
  void publish() override { zero_->gather_parameters(); }
  void prepare() override { zero_->wait_for_readers(); }
  void load(const ModuleStateDict& weights, const OptimizerStateDict& state) override {
    load_weights(weights);
    zero_->load_state_dict(state);
  }
  void add_late_part() override { zero_->add_param_group({late_part(*net_, wrapper_), {}}); }

 private:
  void use_as_the_trainer() {
    if (wrapper_.flag("in_place")) zero::TrainerAccess::use_up_gradients(*zero_);
    zero::TrainerAccess::track_norm(*zero_, wrapper_.flag("track_norm"));
  }

  Item wrapper_;
  std::optional<Ddp> ddp_;
  std::unique_ptr<ZeroRedundancyOptimizer> zero_;
};

class DistributedOptimizerSubject : public Subject {
 public:
  DistributedOptimizerSubject(const Case& which, const Item& wrapper, std::shared_ptr<Net> net,
                              const ProcessGroup& group)
      : Subject(net), wrapper_(wrapper), group_(group) {
    DistributedOptimizerOptions options;
    options.reduce_method = wrapper.text("reduce", "mean");
    options.bcast_period = wrapper.number("bcast_period", 0);
    options.param_pack = wrapper.flag("param_pack");
    options.param_pack_thd = wrapper.number("param_pack_thd", 10 << 20);
    options.overlap = overlap(wrapper);
    options.buffers = buffer_rule(wrapper);
    options.wire = wire_of(wrapper);
    if (!wrapper.has("groups") && !wrapper.has("late_part")) {
      distributed_ =
          std::make_unique<DistributedOptimizer>(*net, group, optimizer_of(which), options);
      return;
    }
    std::vector<DistributedOptimizer::Group> list;
    for (auto& each : grouped(*net, wrapper, named_parameters(*net))) {
      const bool local = wrapper.flag("local_group") && !list.empty();
      list.push_back(
          {each, group_options(which, wrapper, list.size()), local ? ProcessGroup() : group});
    }
    distributed_ = std::make_unique<DistributedOptimizer>(list, optimizer_of(which), options);
    distributed_->track_buffers(*net);
  }
  void backward(const at::Tensor& loss, bool retain) override {
    if (retain || wrapper_.flag("own_backward")) loss.backward({}, retain);
    else distributed_->backward(loss);
  }
  NoSync no_sync() override { return distributed_->no_sync(); }
  void step(const Closure& closure) override {
    distributed_->step(closure);
    for (size_t group = 0; group < distributed_->optimizer().param_groups().size(); ++group) {
      std::set<std::string> packed;
      for (const auto& pack : distributed_->packs(group))
        for (const auto& name : pack)
          if (!packed.insert(name).second) throw std::runtime_error(name + " is in two packs");
    }
  }
  void zero_grad(bool set_to_none) override {
    distributed_->zero_grad(set_to_none);
    if (wrapper_.has("late_part")) Subject::zero_grad(set_to_none);  // also those that come later
  }
  void add_late_part() override {
    distributed_->add_param_group({late_part(*net_, wrapper_), {}, group_});
  }
  torch::optim::Optimizer& optimizer() override { return distributed_->optimizer(); }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*distributed_}; }
  OptimizerStateDict optimizer_state() override { return distributed_->state_dict(); }
  void load(const ModuleStateDict& weights, const OptimizerStateDict& state) override {
    load_weights(weights);
    distributed_->load_state_dict(state);
  }

 private:
  Item wrapper_;
  ProcessGroup group_;
  std::unique_ptr<DistributedOptimizer> distributed_;
};

FullyShardedDataParallelOptions fsdp_options(Net& net, const Item& wrapper) {
  FullyShardedDataParallelOptions options;
  const auto policy = wrapper.text("policy");
  if (policy == "blocks") options.wrap_policy = wrap_by_name({"b*", "last"});
  else if (policy == "leaves") options.wrap_policy = wrap_leaves();
  else if (policy == "size") options.wrap_policy = wrap_by_size(30);
  const auto strategy = wrapper.text("strategy", "full");
  if (strategy == "grad_op") options.sharding_strategy = ShardingStrategy::shard_grad_op;
  if (strategy == "none") options.sharding_strategy = ShardingStrategy::no_shard;
  if (strategy == "hybrid") {
    options.sharding_strategy = ShardingStrategy::hybrid_shard;
    options.shard_group_size = 2;
  }
  options.partition = partition(wrapper);
  options.resident_bytes = wrapper.number("resident_bytes", 0);
  const auto prefetch = wrapper.text("prefetch", "pre");
  options.backward_prefetch = prefetch == "post"   ? BackwardPrefetch::post
                              : prefetch == "none" ? BackwardPrefetch::none
                                                   : BackwardPrefetch::pre;
  options.overlap = overlap(wrapper);
  options.buffers = buffer_rule(wrapper);
  if (wrapper.has("mixed")) options.mixed_precision.param_dtype = at::kBFloat16;
  if (wrapper.text("mixed") == "sums_in_float") options.mixed_precision.reduce_dtype = at::kFloat;
  options.wire = wire_of(wrapper);
  options.ignored_states = ignored_names(net, wrapper);
  return options;
}

class FsdpSubject : public Subject {
 public:
  FsdpSubject(const Case& which, const Item& wrapper, std::shared_ptr<Net> net,
              const ProcessGroup& group)
      : Subject(net),
        fsdp_(net, group, fsdp_options(*net, wrapper)),
        whole_(wrapper.text("strategy") == "none"),
        optimizer_(plain_optimizer(which, *net, wrapper, fsdp_.named_parameters())) {
    fsdp_.check_optimizer(*optimizer_);
  }
  at::Tensor forward(const Batch& batch) override { return fsdp_(batch); }
  NoSync no_sync() override { return fsdp_.no_sync(); }
  double clip_norm(double max_norm, double norm_type) override {
    return fsdp_.clip_grad_norm_(max_norm, norm_type);
  }
  void clip_value() override { fsdp_.clip_grad_value_(0.05); }
  std::vector<at::Tensor> trained() override { return fsdp_.parameters(); }
  void zero_grad(bool set_to_none) override { fsdp_.zero_grad(set_to_none); }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {fsdp_}; }
  void prepare_join(const std::function<void()>& shadow) override {
    fsdp_.set_shadow_step([this, shadow] {
      fsdp_.shadow_backward();
      shadow();
    });
  }
  ModuleStateDict weights() override { return fsdp_.state_dict(-1); }
  void load_weights(const ModuleStateDict& weights) override { fsdp_.load_state_dict(weights); }
  std::vector<ParameterShard> shards() override { return fsdp_.shards(); }
  std::vector<ParameterShard> state_shards() override { return fsdp_.shards(true); }
  bool saves_shards(int /*rank*/) override { return fsdp_.first_replica(); }
  bool is_replicated() override { return whole_; }
  OptimizerStateDict optimizer_state() override { return fsdp_.optim_state_dict(*optimizer_, -1); }
  void load(const ModuleStateDict& weights, const OptimizerStateDict& state) override {
    load_weights(weights);
    fsdp_.load_optim_state_dict(*optimizer_, state);
  }
  void change(const std::function<void()>& change) override {
    const auto whole = fsdp_.summon_full_params();
    change();
  }

 private:
  FullyShardedDataParallel<std::shared_ptr<Net>> fsdp_;
  bool whole_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const Case& which, const Item& wrapper,
                                      std::shared_ptr<Net> net, const ProcessGroup& group) {
  const auto& kind = wrapper.kind;
  if (kind == "ddp") return std::make_unique<DdpSubject>(which, wrapper, net, group);
  if (kind == "zero" || kind == "ddp_zero")
    return std::make_unique<ZeroSubject>(which, wrapper, net, group);
  if (kind == "distributed_optimizer")
    return std::make_unique<DistributedOptimizerSubject>(which, wrapper, net, group);
  if (kind == "fsdp") return std::make_unique<FsdpSubject>(which, wrapper, net, group);
  throw std::invalid_argument("no wrapper is called " + kind);
}

}  // namespace tessera::fuzz
