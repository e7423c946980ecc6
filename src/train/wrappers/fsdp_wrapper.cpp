#include <cmath>
#include <set>

#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/train/registries.h"
#include "train/config/read_component.h"
#include "train/wrappers/called_module.h"
#include "train/wrappers/wrapper_functions.h"

namespace tessera::train {
namespace {

/// Every rank has its shards of parameters, gradients and optimizer state. A unit has whole
/// parameters only while it is used.
class FsdpWrapper : public ModelWrapper {
 public:
  FsdpWrapper(WrapperContext context, const FullyShardedDataParallelOptions& options,
              const std::optional<Overlap>& overlap)
      : ModelWrapper(std::move(context.model), std::move(context.preprocessor),
                     std::move(context.group)),
        groups_(context.optimizer.groups(*model_.module)),
        fsdp_(CalledModule{model_.module}, group_, with_overlap(options, overlap, group_)) {
    std::map<std::string, at::Tensor> named;
    for (const auto& [name, shard] : fsdp_.named_parameters()) {
      named[name] = shard;
      sharded_.insert(name);
    }
    std::vector<std::pair<std::vector<at::Tensor>, OptionMap>> groups;
    for (const auto& group : groups_) {
      auto& tensors = groups.emplace_back(std::vector<at::Tensor>(), group.options).first;
      for (const auto& [name, parameter] : group.parameters) {
        if (const auto found = named.find(name); found != named.end()) {
          tensors.push_back(found->second);
          trained_.push_back(found->second);
        } else if (parameter.requires_grad()) {
          throw UsageError(
              "FullyShardedDataParallel: ignored_states contains " + name +
              ", which would not be trained; expected model.freeze to contain it too, or neither");
        }
      }
    }
    groups_.clear();
    buffers_are_equal_ = options.buffers != BufferSync::none;
    optimizer_ = make_optimizer(context.optimizer, groups);
    fsdp_.check_optimizer(*optimizer_);
  }

  at::Tensor call(const std::function<at::Tensor()>& function) override { return fsdp_(function); }
  Batch cast(Batch batch) const override {
    batch.inputs = fsdp_.cast_input(batch.inputs);
    return batch;
  }
  void shadow_backward() override { fsdp_.shadow_backward(); }
  Joinable* joinable() override { return &fsdp_; }
  std::unique_ptr<NoSync> no_sync() override {
    return std::unique_ptr<NoSync>(new NoSync(fsdp_.no_sync()));
  }

  std::vector<at::Tensor> gradients() override {
    std::vector<at::Tensor> result;
    for (const auto& shard : trained_)
      if (shard.grad().defined()) result.push_back(shard.grad());
    return result;
  }

  double update(const GradientRules& rules) override {
    const double norm = fsdp_.clip_grad_norm_(rules.clip_norm.value_or(INFINITY), rules.norm_type);
    if (rules.allow(norm)) {
      if (rules.clip_value) fsdp_.clip_grad_value_(*rules.clip_value);
      optimizer_->step();
    }
    for (auto& shard : trained_) shard.mutable_grad() = at::Tensor();
    return norm;
  }
  /// Also those of no_sync().
  void drop_gradients() override { fsdp_.zero_grad(); }
  void end_step(StepEnd end) override { fsdp_.end_step(end); }
  void wait() override { fsdp_.wait(); }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<ParameterShard> shards() override { return fsdp_.shards(); }
  std::vector<ParameterShard> loaded_shards() override {
    auto result = fsdp_.shards(true);
    for (const auto& [name, parameter] : named_parameters(*model_.module))
      if (sharded_.count(name) == 0) result.push_back(whole_shard(name, parameter));
    return result;
  }
  void publish_shards() override {}
  std::vector<StateSlice> state_slices() override {
    return tessera::state_slices(*optimizer_, fsdp_.shards());
  }
  void load_state_slices(std::vector<StateSlice>&& slices) override {
    tessera::load_state_slices(*optimizer_, fsdp_.shards(), std::move(slices));
  }
  OptimizerStateDict optimizer_state_dict() override { return fsdp_.optim_state_dict(*optimizer_); }
  void load_optimizer_state_dict(const OptimizerStateDict& dict) override {
    fsdp_.load_optim_state_dict(*optimizer_, dict);
  }
  std::vector<size_t> saved_shards() override {
    return fsdp_.first_replica() ? ModelWrapper::saved_shards() : std::vector<size_t>();
  }

  std::shared_ptr<void> whole_on_rank0() override {
    return std::shared_ptr<FullParams>(new FullParams(fsdp_.summon_full_params("", false, true)));
  }
  at::Tensor whole_parameter(const std::string& name, int to) override {
    return sharded_.count(name) > 0 ? fsdp_.full_parameter(name, to)
                                    : own_parameter(*model_.module, name);
  }

  MemoryUse memory() override {
    const auto memory = fsdp_.memory();
    return {memory.parameters, memory.gradients, bytes_of(state_slices())};
  }

  MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const override {
    MemoryUse use;
    for (const auto& rank : ranks) {
      use.parameters += rank.parameters;
      use.gradients += rank.gradients;
      use.optimizer_state += rank.optimizer_state;
    }
    return use;
  }
  MemoryUse formula(const MemoryUse& unsharded) const override {
    const int ranks = group_.size();
    return {unsharded.parameters / ranks, unsharded.gradients / ranks,
            unsharded.optimizer_state / ranks};
  }

 private:
  std::vector<ParameterGroup>
      groups_;  // used until the optimizer exists; constructed before fsdp_ shards the parameters
  FullyShardedDataParallel<CalledModule> fsdp_;
  std::set<std::string> sharded_;  // names of the sharded parameters; all others are ignored
  std::vector<at::Tensor> trained_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

using Dtypes = std::vector<std::pair<std::string, at::ScalarType>>;

const Dtypes& dtypes() {
  static const Dtypes known{{"float32", at::kFloat},
                            {"float16", at::kHalf},
                            {"bfloat16", at::kBFloat16},
                            {"float64", at::kDouble}};
  return known;
}

}  // namespace

WrapperPlan read_fsdp(OptionReader& options) {
  FullyShardedDataParallelOptions fsdp;
  fsdp.wrap_policy = read_component(registry::wrap_policies(), options, "wrap_policy", "size_based",
                                    "which modules become units");
  options.read_enum("sharding_strategy", fsdp.sharding_strategy,
                    {{"full_shard", ShardingStrategy::full_shard},
                     {"shard_grad_op", ShardingStrategy::shard_grad_op},
                     {"no_shard", ShardingStrategy::no_shard},
                     {"hybrid_shard", ShardingStrategy::hybrid_shard}},
                    "which tensors are sharded");
  options.read_enum("partition", fsdp.partition, partition_names(),
                    "how the elements of a unit are assigned to ranks: equal parts, or whole "
                    "parameters for optimizers that need them");
  options.read("shard_group_size", fsdp.shard_group_size,
               "hybrid_shard: ranks per shard group; 0: those of one host", Range{0, 1e6});
  options.read("resident_bytes", fsdp.resident_bytes,
               "bytes of parameters that may stay gathered; 0: those of the two largest units, or "
               "of three on several hosts",
               kNotNegative);
  read_buffers(options, fsdp.buffers);
  read_wire(options, fsdp.wire, true);
  options.read_enum("backward_prefetch", fsdp.backward_prefetch,
                    {{"pre", BackwardPrefetch::pre},
                     {"post", BackwardPrefetch::post},
                     {"none", BackwardPrefetch::none}},
                    "when backward gathers the next unit");
  std::optional<Overlap> overlap;
  read_overlap(options, overlap);
  options.read("cpu_offload", fsdp.cpu_offload,
               "keep the shards of a model on a GPU in CPU memory");
  auto mixed = options.map("mixed_precision");
  mixed.read_optional_enum("param_dtype", fsdp.mixed_precision.param_dtype, dtypes(),
                           "dtype of gathered parameters and of computation");
  mixed.read_optional_enum("reduce_dtype", fsdp.mixed_precision.reduce_dtype, dtypes(),
                           "dtype of the gradient reduction");
  mixed.read_optional_enum("buffer_dtype", fsdp.mixed_precision.buffer_dtype, dtypes(),
                           "dtype of buffers");
  mixed.read("cast_forward_inputs", fsdp.mixed_precision.cast_forward_inputs,
             "cast floating-point inputs to param_dtype");
  mixed.read("full_precision_in_eval", fsdp.mixed_precision.full_precision_in_eval,
             "evaluate in the parameters' own dtype");
  mixed.finish();
  options.read("ignored_states", fsdp.ignored_states,
               "names of parameters that are not sharded, and of modules whose parameters are not");
  options.finish();
  WrapperPlan plan;
  plan.make = [fsdp, overlap](WrapperContext context) {
    return std::make_unique<FsdpWrapper>(std::move(context), fsdp, overlap);
  };
  return plan;
}

}  // namespace tessera::train
