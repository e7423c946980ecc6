#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/detail/default_group.h"
#include "tessera/detail/tensors_in.h"
#include "tessera/join.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/partition.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/clip_grad.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/overlap.h"
#include "tessera/step/step_end.h"
#include "tessera/weights/weights.h"
#include "tessera/wrap_policy.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The state that is sharded, and the ranks that share it. The table in docs/fsdp.md has more.
enum class ShardingStrategy {
  full_shard,     ///< ZeRO stage 3: parameters, gradients and optimizer state.
  shard_grad_op,  ///< As full_shard, but gathered parameters stay from forward until backward.
  no_shard,       ///< As DistributedDataParallel: every rank holds everything.
  hybrid_shard,   ///< full_shard within groups of `shard_group_size` ranks, which are replicas.
};

/// The time at which the next unit of backward is gathered.
enum class BackwardPrefetch {
  pre,   ///< Before the gradients of the current unit are computed.
  post,  ///< After the gradients of the current unit were computed.
  none,  ///< At its first use by an operator.
};

/// Data types in which the model runs: see docs/fsdp.md. The shards, which the optimizer updates,
/// always keep the parameters' own dtype.
struct MixedPrecision {
  /// Of gathered parameters and of the computation. Unset: the parameters' own. Parameters of batch
  /// norms have the dtype of the layer's buffers instead.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};  ///< Of gradients. Unset: param_dtype.
  std::optional<at::ScalarType> buffer_dtype = {};  ///< Of floating-point buffers.
  /// Converts floating-point tensors among the arguments of forward to param_dtype, in copies.
  bool cast_forward_inputs = true;
  /// In evaluation mode (eval()) forward computes in the parameters' own dtype.
  bool full_precision_in_eval = false;
};

/// Options of FullyShardedDataParallel. Must be the same on all ranks.
struct FullyShardedDataParallelOptions {
  /// Which modules become units, the groups of parameters that are gathered together. Unset: one
  /// unit, the root, holds all parameters.
  WrapPolicy wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  /// flat: each rank has an equal range of a unit's elements, for element-wise optimizers. whole,
  /// first_fit: whole parameters, for optimizers that need them.
  Partition partition = Partition::flat;
  /// Ranks in a shard group of hybrid_shard; must divide the world size. 0: the ranks of a host,
  /// which must be consecutive and equally many on every host.
  int shard_group_size = 0;
  /// Budget in bytes for gathered parameters without the root's. 0: the two largest units, or the
  /// three largest where ranks of a shard group are on several hosts.
  int64_t resident_bytes = 0;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  /// none: a unit is gathered at its first use, and backward_prefetch has no effect. background:
  /// the gradients of shards may arrive after backward() has returned.
  Overlap overlap = Overlap::backward;
  MixedPrecision mixed_precision = {};
  /// Keeps shards, gradients and optimizer state on the CPU. No effect for a model on the CPU.
  bool cpu_offload = false;
  /// The device of this rank on which the model runs. Parameters, deferred ones too, and buffers
  /// move there unit by unit: see "Memory" in docs/gpu.md. Unset: the parameters' device.
  std::optional<at::Device> device = {};
  /// Copies the parameters and buffers of rank 0 to all ranks at construction.
  bool sync_module_states = true;
  /// The rule by which all ranks get the same buffers at the end of each backward that reduces.
  BufferSync buffers = BufferSync::broadcast;
  /// Names of modules and of parameters that are neither sharded nor reduced nor broadcast, and not
  /// in parameters(): the caller trains them or freezes them. State dicts contain them.
  std::vector<std::string> ignored_states = {};
  /// The format of gradients and gathered parameters between hosts. The shards stay exact.
  WireOptions wire = {};
};

/// One line of the table of units.
struct FsdpUnit {
  std::string name;                     ///< Path of the unit's module; "" for the root.
  std::vector<std::string> parameters;  ///< Full names.
  int64_t numel = 0;                    ///< Elements of the whole unit.
  int64_t sharded_bytes = 0;            ///< Bytes of this rank's shards; always held.
  int64_t gathered_bytes = 0;           ///< Bytes of the unit while it is gathered.
};

/// Counters of this rank since construction or reset_stats().
struct FsdpStats {
  uint64_t gathers_forward = 0;     ///< Units gathered for forward.
  uint64_t gathers_backward = 0;    ///< Units gathered for backward.
  uint64_t reductions = 0;          ///< Units whose gradients were reduced.
  uint64_t gradients_in_place = 0;  ///< Gradients that were computed in their unit's flat buffer.
  uint64_t gradients_copied = 0;    ///< Gradients that were copied or added to it.
  uint64_t prefetches = 0;          ///< Gathers that began before the first use of the unit.
  int64_t gathered_bytes = 0;       ///< Gathered parameters at present; not reset.
  int64_t peak_gathered_bytes = 0;  ///< Maximum of gathered_bytes.
  int64_t gradient_bytes = 0;       ///< Unsharded gradients at present; not reset.
  int64_t peak_gradient_bytes = 0;  ///< Maximum of gradient_bytes.
  int64_t peak_bytes = 0;           ///< Maximum of the sum of both.
};

namespace fsdp {
class [[gnu::visibility("hidden")]] ShardedModule;
}

namespace detail {

/// The forward of a sharded module. Collective. Without end() the destructor abandons it, locally.
class ForwardScope {
 public:
  explicit ForwardScope(fsdp::ShardedModule& sharded);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  void end();
  /// The result of `forward`, which ends in this scope.
  template <class Forward>
  decltype(auto) run(Forward&& forward) {
    try {
      if constexpr (std::is_void_v<decltype(forward())>) {
        forward();
        end();
      } else {
        decltype(auto) result = forward();
        end();
        return result;
      }
    } catch (const c10::Error& error) {
      explain(error);
      throw;
    }
  }

 private:
  /// Throws a UsageError instead of `error` if an option of the wrapper has caused it.
  void explain(const c10::Error& error) const;
  fsdp::ShardedModule& sharded_;
  bool ended_ = false;
};

}  // namespace detail

/// Until end(), parameters are whole and may be read anywhere. See
/// FullyShardedDataParallel::summon_full_params().
class FullParams {
 public:
  FullParams(std::shared_ptr<fsdp::ShardedModule> sharded, const std::string& prefix,
             bool writeback, bool rank0_only);
  /// Calls end() unless it was called. If an exception unwinds the scope, it writes nothing back,
  /// calls no collective and does not throw.
  ~FullParams() noexcept(false);
  FullParams(const FullParams&) = delete;

  /// Ends the scope: with `writeback` each rank copies its part of the values to its shards, also
  /// of replaced parameters (set_data). UsageError on all ranks, with nothing copied, if a
  /// parameter of any rank has another shape. A second call does nothing. Collective with
  /// `writeback`, otherwise local.
  void end();

 private:
  std::shared_ptr<fsdp::ShardedModule> sharded_;
  std::vector<size_t> units_;
  bool writeback_, ended_ = false;
  int exceptions_;
};

/// The part that does not depend on the module's type.
class FullyShardedDataParallelBase : public Joinable {
 public:
  using Options = FullyShardedDataParallelOptions;
  FullyShardedDataParallelBase(FullyShardedDataParallelBase&&) = default;
  FullyShardedDataParallelBase& operator=(FullyShardedDataParallelBase&&) = default;

  /// This rank's shards, for the optimizer: one tensor for each parameter of the module that is not
  /// ignored, in the module's order, of the parameter's dtype. A shard is one-dimensional and may
  /// be empty; where parameters stay whole it has the parameter's shape or is empty. After backward
  /// `.grad` is the mean over ranks, plus the gradients of terms of the loss over the shards. Hooks
  /// on shards (register_hook) get, and may replace, this rank's part of the mean of each backward.
  /// Values of set_data() are used from the next forward on. Local.
  std::vector<at::Tensor> parameters() const;
  /// The same shards with the parameters' names. Local.
  NamedParameters named_parameters() const;

  /// Throws UsageError if `optimizer` would compute wrong results on these shards: one that is not
  /// element-wise on ranges of elements, or LBFGS on a part of the parameters. Local.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;

  /// Scales the gradients so that their p-norm over all ranks is at most `max_norm`, and returns
  /// the norm before scaling. With infinity nothing is scaled. `norm_type`: 2, 1, infinity or any
  /// p > 0. Without gradients it returns 0 and logs a warning. Collective.
  GradNorm clip_grad_norm_(double max_norm, double norm_type = 2);
  /// Limits every element of the gradients to [-clip_value, clip_value]; NaNs stay. UsageError if
  /// clip_value is negative or NaN. Local.
  void clip_grad_value_(double clip_value);

  /// The trainable shards of parameters(), in order, without empty ones, for state_slices() and
  /// load_state_slices(). Values written to them outside of forward and backward are used from the
  /// next forward on; equal shards of several groups need equal values. `frozen_too`: adds the
  /// shards of frozen parameters. Local.
  std::vector<ParameterShard> shards(bool frozen_too = false) const;
  /// True on ranks of the first shard group, which together hold each element of the model exactly
  /// once and write it to disk. Local.
  bool first_replica() const;

  /// Gathers the units with parameters in the module at path `prefix` until the end of the returned
  /// object. With `writeback`, each rank then copies its part of the values to its shards. With
  /// `rank0_only`, the other ranks make the same calls but do not keep the values; `writeback` must
  /// then be false. Outside of forward and backward. Collective.
  [[nodiscard]] FullParams summon_full_params(const std::string& prefix = "", bool writeback = true,
                                              bool rank0_only = false);

  /// While the returned object is alive, backward passes reduce nothing and keep whole gradients in
  /// memory. The next backward after it reduces the sum. Local, but all ranks must do the same.
  [[nodiscard]] NoSync no_sync();
  /// Clears the gradients of all shards. Unlike an optimizer's zero_grad(), it also clears those of
  /// no_sync() that no backward has reduced yet. Outside of forward and backward. Local, but all
  /// ranks must do the same.
  void zero_grad(bool set_to_none = true);

  /// For loops that drop the gradients of some backwards or scale the loss, with wire.gradients:
  /// call it after every step. Without any call, gradients count as used. UsageError within forward
  /// or backward, and for an impossible scale. Local. All ranks make the same calls.
  void end_step(StepEnd end);

  /// Blocks until the gradients of the shards have arrived, for code that uses them without an
  /// operator (data_ptr()). Error of a failed reduction. Local.
  void wait();

  /// Whole parameters and buffers by name, on the CPU of rank `to` (on all ranks if to < 0; empty
  /// on the others), in their own dtypes at construction. Parameters are gathered one by one.
  /// Buffers and ignored parameters are those of rank `to` (for to < 0, of each rank). Collective.
  std::vector<std::pair<std::string, at::Tensor>> state_dict(int to = 0);
  /// One parameter of state_dict(). UsageError if no sharded parameter has this name. Collective.
  at::Tensor full_parameter(const std::string& name, int to = 0);
  /// Writes state_dict() with save_weights(). `path`: one file, which rank 0 writes, or, if it ends
  /// in "/", a folder to which each rank writes its part. Collective.
  void save_state_dict(const std::string& path);
  /// Each rank copies its part of `state`. UsageError on all ranks for another shape, other sharded
  /// values than on rank 0, or names that do not match, which are returned if not `strict`.
  UnmatchedNames load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state,
                                 bool strict = true);
  /// The same from weights that every rank can read: see Weights. Both are collective.
  UnmatchedNames load_state_dict(const std::string& path, bool strict = true);

  /// Writes the checkpoint `folder`/step-00000000 in one rename: each rank of the first replica its
  /// shards, rank 0 also the unsharded tensors. No other writer may use `folder`. It loads at any
  /// world size and with any strategy: see docs/checkpoints.md. Collective.
  void save_sharded_state_dict(const std::string& folder);
  /// Reads it. The model changes only when all ranks have read everything, into a second copy of
  /// their shards. `strict` and errors as load_state_dict(). Collective.
  UnmatchedNames load_sharded_state_dict(const std::string& folder, bool strict = true);

  /// State of `optimizer`, which must have been made over parameters(), whole and by name, on rank
  /// `to` (on all ranks if to < 0). All wrappers use this format. Collective.
  OptimizerStateDict optim_state_dict(const torch::optim::Optimizer& optimizer, int to = 0);
  /// Takes this rank's part of `dict`, which is the same on all ranks. Local.
  void load_optim_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                             bool strict = true);

  /// For join(): the calls of a rank without data in an iteration of the others, such as
  /// shadow_backward(), then clipping, step and zero_grad() as they do. Local.
  void set_shadow_step(std::function<void()> step);
  /// On a rank without data: makes the collectives of one forward and backward of the others,
  /// including earlier passes under no_sync(), with gradients of zero. Not for forwards without
  /// gradients. Collective.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  /// Copies the buffers of `last_active_rank` to all ranks. Shards are up to date on all ranks.
  void finish_join(int last_active_rank) override;

  /// Converts a floating-point tensor to param_dtype if mixed_precision converts inputs. For
  /// tensors that forward uses and that are not its arguments. Local.
  at::Tensor cast_input(const at::Tensor& input) const;
  /// True if cast_input() may convert anything in the model's present mode. Local.
  bool casts_inputs() const;

  std::vector<FsdpUnit> units() const;  ///< Local.
  std::string table() const;            ///< The units as a text table. Local.
  const FsdpStats& stats() const;       ///< Local.
  void reset_stats();                   ///< Local.
  /// Bytes of shards and of sharded gradients on this rank.
  struct Memory {
    int64_t parameters = 0, gradients = 0;
  };
  Memory memory() const;  ///< Local.
  const ProcessGroup& group() const;
  const Options& options() const;

 protected:
  FullyShardedDataParallelBase(torch::nn::Module& module, ProcessGroup group, Options options);
  std::shared_ptr<fsdp::ShardedModule> sharded_;
};

/// Shards parameters, gradients and optimizer state of any torch::nn::Module over the ranks (ZeRO
/// stage 3, Rajbhandari et al., 2020; PyTorch FSDP, Zhao et al., 2023).
///
///   Net net;
///   tessera::FullyShardedDataParallel fsdp(
///       net, world, {.wrap_policy = tessera::wrap_by_type<BlockImpl>()});
///   torch::optim::AdamW optimizer(fsdp.parameters(), 3e-4);
///   fsdp(x).sum().backward();
///   fsdp.clip_grad_norm_(1.0);
///   optimizer.step();
///   optimizer.zero_grad();
///
/// `Module`: a torch::nn::ModuleHolder, a shared_ptr to a module, or a pointer to one. Its
/// parameters become views of storage that has memory only while their unit is gathered: inside
/// fsdp(…) and backward, where each use of a parameter is detected. A use elsewhere is a UsageError
/// that names it. Give the optimizer fsdp.parameters(), not the module's. Construction, forward and
/// backward are collective, and all ranks must use the same units in the same order: a difference
/// is a UsageError that names the unit and the ranks. UsageError at construction for a parameter
/// whose memory something else uses, or that was made or is wrapped in InferenceMode, and for a
/// backward with create_graph. Memory of a rank, with P bytes of parameters and W ranks: (P +
/// gradients + optimizer state) / W, and while the model runs the root and the two largest units.
template <class Module>
class FullyShardedDataParallel : public FullyShardedDataParallelBase {
 public:
  explicit FullyShardedDataParallel(Module module, ProcessGroup group,
                                    FullyShardedDataParallelOptions options = {})
      : FullyShardedDataParallelBase(*module, std::move(group), std::move(options)),
        module_(std::move(module)) {}
  /// The same in default_process_group(). UsageError if there is none.
  explicit FullyShardedDataParallel(Module module, FullyShardedDataParallelOptions options = {})
      : FullyShardedDataParallel(std::move(module),
                                 detail::default_group_of("FullyShardedDataParallel"),
                                 std::move(options)) {}

  /// Runs the module's forward. Collective.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    detail::ForwardScope running(*sharded_);
    return running.run(
        [&]() -> decltype(auto) { return module_->forward(input(std::forward<Args>(args))...); });
  }
  /// The same. Collective.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  /// Runs `function(module)` as a forward, for other methods of the module. Collective.
  template <class Function>
  decltype(auto) call(Function&& function) {
    detail::ForwardScope running(*sharded_);
    return running.run(
        [&]() -> decltype(auto) { return std::forward<Function>(function)(module_); });
  }

  Module& module() { return module_; }
  /// For its members. Its parameters are whole only while it runs. Local.
  auto* operator->() { return &*module_; }
  /// Training or evaluation mode of the module. Local.
  void train(bool on = true) { (*module_).train(on); }
  void eval() { (*module_).eval(); }

 private:
  /// Holds the converted copy of an argument during the call.
  template <class Arg>
  using CastCopy = std::conditional_t<detail::holds_tensors<std::decay_t<Arg>>,
                                      std::optional<std::decay_t<Arg>>, std::nullptr_t>;

  /// The caller's own argument unless it is converted: forward may take any kind of reference.
  template <class Arg>
  Arg&& input(Arg&& arg, CastCopy<Arg>&& copy = {}) const {
    if constexpr (detail::holds_tensors<std::decay_t<Arg>>) {
      if (casts_inputs()) {
        copy.emplace(arg);
        detail::TensorsIn<std::decay_t<Arg>>::visit(
            *copy, [this](at::Tensor& tensor) { tensor = cast_input(tensor); });
        return static_cast<Arg&&>(*copy);
      }
    }
    return std::forward<Arg>(arg);
  }

  Module module_;
};

}  // namespace tessera
#pragma GCC visibility pop
