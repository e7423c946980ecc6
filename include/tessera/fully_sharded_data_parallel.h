#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "tessera/detail/tensors_in.h"
#include "tessera/join.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/partition.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/no_sync.h"
#include "tessera/wrap_policy.h"

namespace tessera {

enum class ShardingStrategy {
  full_shard,  ///< ZeRO stage 3: parameters, gradients and optimizer state are sharded; a unit is
               ///< gathered when it is used.
  shard_grad_op,  ///< Stage 2: as full_shard, but gathered parameters stay from forward until
                  ///< backward has used them.
  no_shard,       ///< DistributedDataParallel: every rank has everything.
  hybrid_shard,   ///< Sharded inside groups of `shard_group_size` ranks, replicated across them.
};

enum class BackwardPrefetch {
  pre,   ///< The next unit of backward is gathered before the current one's gradients are computed.
  post,  ///< … after they were computed.
  none,
};

/// How the use of a parameter is noticed.
enum class ParameterDetection {
  automatic,     ///< The dispatch key, or RecordFunction where somebody else has taken the key.
  dispatch_key,  ///< A boxed fallback on a spare dispatch key that only sharded parameters carry.
  record_function,  ///< A global at::RecordFunction callback. Slower; a stray touch ends in
                    ///< libtorch's error instead of ours.
};

/// Data types while the model runs; unset: the parameters' own. What the optimizer sees keeps its
/// own dtype.
struct MixedPrecision {
  /// Of gathered parameters and of the computation. Batch norms compute in the dtype of their
  /// buffers instead, where it is another: libtorch mixes the two in one direction only, and
  /// running statistics want their digits.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype =
      {};  ///< In which gradients accumulate and are reduced. Unset: param_dtype.
  std::optional<at::ScalarType> buffer_dtype =
      {};  ///< Floating-point buffers are converted at construction.
  /// Floating-point tensors given to forward become param_dtype, in vectors, maps, optionals and
  /// tuples too. Forward then gets copies.
  bool cast_forward_inputs = true;
  /// A forward of a module in evaluation mode (eval()) computes in the parameters' own dtype, with
  /// buffers in theirs, and leaves inputs as they are.
  bool full_precision_in_eval = false;
};

struct FullyShardedDataParallelOptions {
  WrapPolicy wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  /// Who holds what of a unit. flat: equal runs of elements, for element-wise optimizers. whole,
  /// first_fit: each parameter on one rank, in its shape, for optimizers that look at a whole one
  /// (at norms, rows, shapes); a rank then holds at least the largest parameter it was dealt.
  Partition partition = Partition::flat;
  /// hybrid_shard: ranks that share one copy; must divide the world size. 0: the ranks of a host,
  /// which must be consecutive and equally many on every host (else UsageError on every rank).
  int shard_group_size = 0;
  /// A budget in bytes for gathered parameters besides the root's. Within it units stay, and the
  /// one whose next use is farthest goes first (Belady's rule, over the order of the last step). 0:
  /// the two largest units. Reaching for more than fits exceeds it for that operator.
  int64_t resident_bytes = 0;
  /// False: no unit is released in forward, whatever the budget. Implied by shard_grad_op.
  bool reshard_after_forward = true;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  bool forward_prefetch =
      false;  ///< The next unit of forward is gathered while the current one computes.
  MixedPrecision mixed_precision = {};
  bool cpu_offload = false;  ///< Shards, and so gradients and optimizer, live on the CPU. Without
                             ///< effect for a model on the CPU.
  bool sync_module_states =
      true;  ///< Rank 0's parameters and buffers are given to all at construction.
  std::vector<std::string> ignored_modules =
      {};  ///< Names; their parameters stay untouched: not sharded, not reduced.
  std::vector<std::string> ignored_parameters = {};  ///< Names.
  ParameterDetection detection = ParameterDetection::automatic;
};

/// One line of the table of units.
struct FsdpUnit {
  std::string name;                     ///< Path of its module; "" for the root.
  std::vector<std::string> parameters;  ///< Names from the root.
  int64_t numel = 0;
  int64_t sharded_bytes = 0;   ///< On this rank, always.
  int64_t gathered_bytes = 0;  ///< While it is gathered.
  int64_t padding_bytes =
      0;  ///< Of the flat buffers: always 0, shards of a unit differ by size instead.
};

/// What happened on this rank since construction or reset_stats().
struct FsdpStats {
  uint64_t gathers_forward = 0;   ///< Units gathered for forward …
  uint64_t gathers_backward = 0;  ///< … and for backward.
  uint64_t reductions = 0;        ///< Units whose gradients were reduced.
  uint64_t prefetches = 0;        ///< Of the gathers: those begun before the first use.
  int64_t gathered_bytes = 0;     ///< Now. (Not reset.)
  int64_t peak_gathered_bytes = 0;
  int64_t gradient_bytes = 0;  ///< Unsharded gradients in flight, now. (Not reset.)
  int64_t peak_gradient_bytes = 0;
  int64_t peak_bytes = 0;  ///< Of both together.
};

namespace fsdp {
class ShardedModule;
}

namespace detail {

/// What does not depend on the model's type.
class FullySharded {
 public:
  FullySharded(torch::nn::Module& module, ProcessGroup group,
               FullyShardedDataParallelOptions options);
  ~FullySharded();

  void begin_forward();
  void end_forward(bool threw);

  fsdp::ShardedModule& core() const { return *core_; }

 private:
  std::shared_ptr<fsdp::ShardedModule> core_;
};

class ForwardScope {
 public:
  explicit ForwardScope(FullySharded& core) : core_(core), exceptions_(std::uncaught_exceptions()) {
    core_.begin_forward();
  }
  ~ForwardScope() noexcept(false) { core_.end_forward(std::uncaught_exceptions() > exceptions_); }
  ForwardScope(const ForwardScope&) = delete;

 private:
  FullySharded& core_;
  int exceptions_;
};

}  // namespace detail

/// While alive, parameters are whole and may be read anywhere; see
/// FullyShardedDataParallel::summon_full_params.
class FullParams {
 public:
  FullParams(std::shared_ptr<fsdp::ShardedModule> core, const std::string& prefix, bool writeback,
             bool rank0_only);
  ~FullParams() noexcept(false);
  FullParams(const FullParams&) = delete;

 private:
  std::shared_ptr<fsdp::ShardedModule> core_;
  std::vector<size_t> units_;
  bool writeback_;
  int exceptions_;
};

/// What FullyShardedDataParallel offers besides running its module.
class FullyShardedDataParallelBase : public Joinable {
 public:
  using Options = FullyShardedDataParallelOptions;

  /// This rank's shards, one for each parameter of the module that is not ignored, in its order, of
  /// the parameter's dtype: one-dimensional, possibly empty; in the parameter's shape, or empty,
  /// where `partition` keeps parameters whole or a shard group is one rank. What the optimizer
  /// gets; their `.grad` is the mean over ranks. See check_optimizer(). Local.
  std::vector<at::Tensor> parameters() const;
  /// With the parameters' own names.
  NamedParameters named_parameters() const;

  /// UsageError for an optimizer that would be silently wrong on these shards: one that is not
  /// element-wise, where they are runs of elements; LBFGS, which looks at all parameters at once,
  /// wherever they are dealt to ranks. Local.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;

  /// Scales the gradients so that their p-norm over all ranks (2, 1, infinity or any p > 0) is at
  /// most `max_norm`; returns the norm before. Without gradients 0, and a warning. Collective.
  double clip_grad_norm_(double max_norm, double norm_type = 2);
  double grad_norm(double norm_type = 2);  ///< Collective.
  /// Limits every element of the gradients to [-clip_value, clip_value]; NaNs stay. They are
  /// averages already, so each rank limits its own. After backward; before or after
  /// clip_grad_norm_. UsageError for a clip_value that is negative or no number. Local.
  void clip_grad_value_(double clip_value);

  /// The trainable ones of parameters(), in order; empty shards are left out. With state_slices()
  /// and load_state_slices(): the state of an optimizer over them. What is written into them
  /// outside of forward and backward counts from the next forward on. Ranks at the same place of
  /// different shard groups (no_shard, hybrid_shard) hold equal shards, and must be given equal
  /// values. Local.
  std::vector<ParameterShard> shards() const;
  /// Whether this rank is in the first shard group: these ranks have each element of the model once
  /// between them, and are those that write. Local.
  bool first_replica() const;

  /// Gathers all units (those under `prefix`) until the returned object goes. With `writeback`,
  /// what was written then goes to the shards, each rank its part. `rank0_only`: other ranks take
  /// part but do not keep the values (no writeback then). Outside forward and backward. Collective,
  /// both ends.
  [[nodiscard]] FullParams summon_full_params(const std::string& prefix = "", bool writeback = true,
                                              bool rank0_only = false);

  /// While alive, backward passes accumulate unsharded gradients and reduce nothing; the next one
  /// outside reduces the sum. Local, on all ranks alike. Without it each backward reduces into the
  /// shards, which costs traffic and no memory.
  [[nodiscard]] NoSync no_sync();
  /// Clears the gradients of all shards, and what no_sync() has accumulated and nothing has reduced
  /// yet, which an optimizer's zero_grad() does not know. Outside of forward and backward; local,
  /// on all ranks alike.
  void zero_grad(bool set_to_none = true);

  /// Parameters and buffers, whole, by name, on the CPU of rank `to` (all for to < 0; empty
  /// elsewhere), in the parameters' own dtype. Gathered one by one: peak extra memory on other
  /// ranks is the largest tensor. Buffers are rank `to`'s own. Collective.
  std::vector<std::pair<std::string, at::Tensor>> state_dict(int to = 0);
  /// One parameter of it. UsageError for a name that is not sharded here. Collective.
  at::Tensor full_parameter(const std::string& name, int to = 0);
  /// The same, streamed into a safetensors file by rank 0. Collective.
  void save_state_dict(const std::string& path);
  /// Each rank takes its shards. Every parameter must be there with its shape, and nothing else:
  /// UsageError on all ranks. Collective.
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);
  void load_state_dict(const std::string& path);  ///< A safetensors file that every rank can read.

  /// Each rank its shards, in `folder`/rank-RRRRR-of-WWWWW.safetensors, and index.json with the
  /// layout. Loads at any world size. Collective.
  void save_sharded_state_dict(const std::string& folder);
  void load_sharded_state_dict(const std::string& folder);

  /// State of `optimizer`, which was made over parameters(), whole and by name, on rank `to` (all
  /// for to < 0). As ZeroRedundancyOptimizer's and the plain optimizer's. Collective.
  OptimizerStateDict optim_state_dict(const torch::optim::Optimizer& optimizer, int to = 0);
  /// Takes this rank's part of `dict`, the same on all ranks.
  void load_optim_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict);

  /// For join(): what a rank without data does in an iteration of the others, with
  /// shadow_backward() where they have forward and backward, and then whatever they do with the
  /// shards and their gradients: clip_grad_norm_(), optimizer.step(), zero_grad(). Without it
  /// shadow_step() is a UsageError, for this rank's shards would stay behind. Local.
  void set_shadow_step(std::function<void()> step);
  /// The collectives of one forward and backward of the others (those under no_sync before it too),
  /// on a rank without data; its gradients count as zero, and its shards get the mean. Not of
  /// forward passes without gradients. Collective.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank)
      override;  ///< Buffers become those of `last_active_rank`; shards are current everywhere.

  /// As forward gets it: floating point becomes param_dtype where mixed_precision says so. Within a
  /// forward, for what is not among its own arguments. Local.
  at::Tensor cast_input(const at::Tensor& input) const;
  bool casts_inputs()
      const;  ///< Whether it may change anything, as the model is at the moment. Local.

  std::vector<FsdpUnit> units() const;  ///< Local.
  std::string table() const;            ///< Of units, as text. Local.
  const FsdpStats& stats() const;       ///< Local.
  void reset_stats();
  /// Bytes of shards and sharded gradients on this rank. Local.
  struct Memory {
    int64_t parameters = 0, gradients = 0;
  };
  Memory memory() const;
  const ProcessGroup& group() const;
  const Options& options() const;

 protected:
  explicit FullyShardedDataParallelBase(std::unique_ptr<detail::FullySharded> core)
      : core_(std::move(core)) {}
  std::unique_ptr<detail::FullySharded> core_;
};

/// Parameters, gradients and optimizer state sharded over the ranks (ZeRO stage 3, Rajbhandari et
/// al., 2020; PyTorch FSDP, Zhao et al., 2023), for any torch::nn::Module as it is.
///
///   Net net;
///   tessera::FullyShardedDataParallel fsdp(net, world, {.wrap_policy =
///   tessera::wrap_by_type<BlockImpl>()}); torch::optim::AdamW optimizer(fsdp.parameters(), 3e-4);
///   auto loss = fsdp(x).sum();  loss.backward();
///   fsdp.clip_grad_norm_(1.0);  optimizer.step();  optimizer.zero_grad();
///
/// `Module`: a torch::nn::ModuleHolder, a shared_ptr to a module, or a pointer to one. Its
/// parameters are then windows of their unit's flat storage, which has memory only while the unit
/// is gathered. An operator that takes one is noticed before it runs, and its unit gathered; there
/// is no change to the module, and no wrapper in it. Only while fsdp(…) or a backward runs:
/// elsewhere touching a sharded parameter is a UsageError that names it. Give the optimizer
/// fsdp.parameters(), not the module's. Construction, forward and backward are collective, and all
/// ranks must use the same units in the same order: a difference is a UsageError that names unit
/// and ranks. Memory per rank, P parameter bytes, W ranks: (P + gradients + optimizer state) / W,
/// and while running root + two largest units.
template <class Module>
class FullyShardedDataParallel : public FullyShardedDataParallelBase {
 public:
  explicit FullyShardedDataParallel(Module module, ProcessGroup group,
                                    FullyShardedDataParallelOptions options = {})
      : FullyShardedDataParallelBase(
            std::make_unique<detail::FullySharded>(*module, std::move(group), std::move(options))),
        module_(std::move(module)) {}

  /// The module's forward.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    detail::ForwardScope running(*core_);
    return module_->forward(input(std::forward<Args>(args))...);
  }

  /// Runs `function(module)` as the module's forward is run: for its other methods. Collective as
  /// forward is.
  template <class Function>
  decltype(auto) call(Function&& function) {
    detail::ForwardScope running(*core_);
    return std::forward<Function>(function)(module_);
  }

  Module& module() { return module_; }

 private:
  /// Where a cast copy of an argument lives as long as the call.
  template <class Arg>
  using Room = std::conditional_t<detail::holds_tensors<std::decay_t<Arg>>,
                                  std::optional<std::decay_t<Arg>>, std::nullptr_t>;

  /// The caller's own, so that forward may take it by any kind of reference.
  template <class Arg>
  Arg&& input(Arg&& arg, Room<Arg>&& room = {}) const {
    if constexpr (detail::holds_tensors<std::decay_t<Arg>>) {
      if (casts_inputs()) {
        room.emplace(arg);
        detail::TensorsIn<std::decay_t<Arg>>::visit(
            *room, [this](at::Tensor& tensor) { tensor = cast_input(tensor); });
        return static_cast<Arg&&>(*room);
      }
    }
    return std::forward<Arg>(arg);
  }

  Module module_;
};

}  // namespace tessera
