#include <cmath>
#include <optional>

#include "tessera/detail/trainer_access.h"
#include "tessera/module_state_dict.h"
#include "tessera/step/nonfinite.h"
#include "tessera/train/registries.h"
#include "tessera/zero_redundancy_optimizer.h"
#include "train/wrappers/wrapper_functions.h"

namespace tessera::train {
namespace {

std::vector<ZeroRedundancyOptimizer::Group> zero_groups(const OptimizerPlan& plan,
                                                        const torch::nn::Module& module) {
  std::vector<ZeroRedundancyOptimizer::Group> groups;
  for (const auto& group : plan.groups(module, true))
    groups.push_back({group.parameters, group.options});
  return groups;
}

/// Each rank has the optimizer state of its shards; step() reduces the gradients, updates the
/// shards and gathers the parameters in one pass.
class ZeroWrapper : public ModelWrapper {
 public:
  ZeroWrapper(WrapperContext context, const ZeroRedundancyOptimizerOptions& options,
              const std::optional<Overlap>& overlap)
      : ModelWrapper(std::move(context.model), std::move(context.preprocessor),
                     std::move(context.group)),
        optimizer_(*model_.module, zero_groups(context.optimizer, *model_.module), group_,
                   context.optimizer.factory(), with_overlap(options, overlap, group_)) {
    zero::TrainerAccess::use_up_gradients(optimizer_);  // update() clears them
    buffers_are_equal_ = options.buffers != BufferSync::none;
  }

  void shadow_backward() override { optimizer_.shadow_backward(); }
  /// With shard_gradients every backward reduces, so that no bucket keeps its memory.
  std::unique_ptr<NoSync> no_sync() override {
    if (shards_gradients()) return nullptr;
    return std::unique_ptr<NoSync>(new NoSync(optimizer_.no_sync()));
  }

  std::vector<at::Tensor> gradients() override {
    std::vector<at::Tensor> result;
    for (const auto& shard :
         shards_gradients() ? optimizer_.shards() : std::vector<ParameterShard>())
      if (shard.tensor.grad().defined()) result.push_back(shard.tensor.grad());
    if (shards_gradients()) return result;  // `.grad` of the parameters are placeholders
    for (const auto& group : optimizer_.param_groups()) {
      for (const auto& parameter : group.params())
        if (parameter.grad().defined()) result.push_back(parameter.grad());
    }
    return result;
  }

  double update(const GradientRules& rules) override {
    // The pass of the update computes the 2-norm, but only when it ends. With shard_gradients the
    // mean exists before the update; a search for the origin needs the parameters.
    const bool gives_up = rules.nonfinite == NonfiniteNorm::give_up && !shards_gradients();
    const bool norm_first = rules.clip_norm || rules.clip_value || rules.norm_type != 2 ||
                            !(gives_up || rules.nonfinite == NonfiniteNorm::update);
    track(!norm_first);
    double norm = 0;
    if (norm_first) {
      norm = optimizer_.clip_grad_norm_(rules.clip_norm.value_or(INFINITY), rules.norm_type);
      if (!rules.allow(norm)) {
        note_nonfinite_gradient();
        optimizer_.zero_grad();
        return norm;
      }
      if (rules.clip_value) optimizer_.clip_grad_value_(*rules.clip_value);
    }
    optimizer_.step();
    if (!norm_first) {
      norm = zero::TrainerAccess::last_norm(optimizer_);
      if (!std::isfinite(norm) && gives_up) note_nonfinite_gradient();
    }
    optimizer_.zero_grad();
    return norm;
  }
  NonfiniteGradient find_nonfinite_gradient(const std::vector<Batch>& parts) override {
    return shards_gradients() ? ModelWrapper::find_nonfinite_gradient(parts) : origin_;
  }
  void drop_gradients() override { optimizer_.zero_grad(); }
  void end_step(StepEnd end) override { optimizer_.end_step(end); }

  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  Joinable* joinable() override { return &optimizer_; }

  void wait() override { optimizer_.wait(); }
  std::vector<ParameterShard> shards() override { return optimizer_.shards(); }
  std::vector<std::pair<std::string, at::Tensor>> replicas() override {
    auto result = named_parameters(*model_.module);
    add_buffers(result);
    return result;
  }
  std::vector<ParameterShard> loaded_shards() override {
    if (!optimizer_.options().share_parameters) return ModelWrapper::loaded_shards();
    auto result = shards();
    add_shared_frozen(result, *model_.module, group_);
    return result;
  }
  void before_shard_writes() override { optimizer_.wait_for_readers(); }
  void publish_shards() override { optimizer_.gather_parameters(); }
  std::vector<StateSlice> state_slices() override { return optimizer_.state_slices(); }
  void load_state_slices(std::vector<StateSlice>&& slices) override {
    optimizer_.load_state_slices(std::move(slices));
  }
  OptimizerStateDict optimizer_state_dict() override {
    optimizer_.consolidate_state_dict(0);
    return group_.rank() == 0 ? optimizer_.state_dict() : OptimizerStateDict{};
  }
  void load_optimizer_state_dict(const OptimizerStateDict& dict) override {
    optimizer_.load_state_dict(dict);
  }
  at::Tensor whole_parameter(const std::string& name, int /*to*/) override {
    return own_parameter(*model_.module, name);
  }

  MemoryUse memory() override {
    const auto memory = optimizer_.memory();
    return {memory.parameters, memory.gradients, memory.optimizer_state};
  }

  MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const override {
    MemoryUse use = ranks.front();
    if (optimizer_.options().share_parameters) {
      use.parameters = 0;
      for (const auto& parameter : model_.module->parameters())
        use.parameters += static_cast<int64_t>(parameter.nbytes());
    }
    use.gradients = use.parameters;
    use.optimizer_state = 0;
    for (const auto& rank : ranks) use.optimizer_state += rank.optimizer_state;
    return use;
  }
  MemoryUse formula(const MemoryUse& unsharded) const override {
    const int64_t ranks = group_.size();
    const bool shares = optimizer_.options().share_parameters && ranks > 1;
    return {unsharded.parameters / (shares ? group_.local_size() : 1),
            shards_gradients() ? unsharded.gradients / ranks : unsharded.gradients,
            unsharded.optimizer_state / ranks};
  }

 private:
  bool shards_gradients() const { return optimizer_.options().shard_gradients; }

  /// Switches the computation of the norm in the update's pass. The switch is collective, so it is
  /// called only when the value changes.
  void track(bool on) {
    if (on != tracked_) {
      zero::TrainerAccess::track_norm(optimizer_, on);
      tracked_ = on;
    }
  }

  /// Sets `origin_`. The reduction replaces a gradient by the mean within this rank's shards alone.
  /// So a rank that has NaN elsewhere is the origin. If there is none, the owner of the elements
  /// is.
  void note_nonfinite_gradient() {
    if (shards_gradients()) return;
    std::map<std::string, ElementRange> owned;
    for (const auto& shard : optimizer_.shards()) owned[shard.parameter] = shard;
    std::string own, reduced;
    for (const auto& [name, parameter] : named_parameters(*model_.module)) {
      at::Tensor gradient = parameter.grad();
      if (nonfinite_text(gradient).empty()) continue;
      if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
      const at::Tensor flags =
          at::isfinite(gradient.as_strided({gradient.numel()}, {1})).logical_not_();
      const auto found = owned.find(name);
      if (found != owned.end()) {
        const at::Tensor part = flags.narrow(0, found->second.begin, found->second.numel);
        if (reduced.empty() && part.any().item<bool>()) reduced = name;
        part.zero_();
      }
      if (own.empty() && flags.any().item<bool>()) own = name;
    }
    origin_ = {};
    for (const auto& names : {group_.all_gather_bytes(own, "own gradient that is not finite"),
                              group_.all_gather_bytes(reduced, "mean that is not finite")}) {
      for (size_t rank = 0; rank < names.size() && origin_.rank < 0; ++rank)
        if (!names[rank].empty()) origin_ = {static_cast<int>(rank), names[rank]};
    }
  }

  ZeroRedundancyOptimizer optimizer_;
  NonfiniteGradient origin_;
  bool tracked_ = false;
};

}  // namespace

WrapperPlan read_zero(OptionReader& options) {
  ZeroRedundancyOptimizerOptions zero;
  WrapperPlan plan;
  std::string optimizer_type;
  options.read_choice("optimizer_type", optimizer_type, registry::optimizers().names(),
                      "the optimizer, as in mmengine; instead of optimizer.type");
  options.read_enum("partition", zero.partition, partition_names(),
                    "how elements are assigned to ranks: equal parts, or whole parameters");
  std::optional<Overlap> overlap;
  read_overlap(options, overlap);
  options.read("shard_gradients", zero.shard_gradients,
               "give a bucket's memory back when backward has reduced it (ZeRO stage 2)");
  options.read("share_parameters", zero.share_parameters,
               "the ranks of a host have one copy of the parameters, in memory that they share");
  options.read("parameters_as_bucket_view", zero.parameters_as_bucket_view,
               "parameters are views of one buffer and are gathered in place");
  options.read("bucket_cap_mb", zero.bucket_cap_mb,
               "MiB of a bucket that is reduced within backward", kPositive);
  read_buffers(options, zero.buffers);
  read_wire(options, zero.wire, true);
  options.finish();
  plan.optimizer_type = optimizer_type;
  plan.make = [zero, overlap](WrapperContext context) {
    return std::make_unique<ZeroWrapper>(std::move(context), zero, overlap);
  };
  return plan;
}

}  // namespace tessera::train
