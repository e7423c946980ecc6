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
#include "tessera/wrap_policy.h"

namespace tessera {

/// The state that is sharded, and the ranks that share it.
enum class ShardingStrategy {
  /// ZeRO stage 3: parameters, gradients and optimizer state are sharded. A unit is gathered when
  /// an operator uses it and released when the memory budget requires it.
  full_shard,
  /// ZeRO stage 2: as full_shard, but gathered parameters stay from forward until backward has used
  /// them.
  shard_grad_op,
  /// As DistributedDataParallel: every rank holds all parameters, gradients and optimizer state.
  no_shard,
  /// Sharded within groups of `shard_group_size` ranks, replicated across the groups.
  hybrid_shard,
};

/// When the next unit of backward is gathered.
enum class BackwardPrefetch {
  pre,   ///< Before the gradients of the current unit are computed.
  post,  ///< After the gradients of the current unit were computed.
  none,  ///< When an operator uses it.
};

/// Data types in which the model runs. An unset dtype means the parameters' own. The shards, which
/// the optimizer updates, always keep the parameters' own dtype.
struct MixedPrecision {
  /// Dtype of gathered parameters and of the computation. Parameters of batch norms are gathered in
  /// the dtype of the layer's buffers instead if that differs: libtorch mixes the two dtypes in one
  /// direction only, and running statistics need the precision.
  std::optional<at::ScalarType> param_dtype = {};
  /// Dtype in which gradients are accumulated and reduced. Unset: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Floating-point buffers are converted to this dtype at construction.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// Converts floating-point tensors among the arguments of forward to param_dtype, also inside
  /// vectors, maps, optionals and tuples. Forward then gets copies of these arguments.
  bool cast_forward_inputs = true;
  /// While the module is in evaluation mode (eval()), forward computes in the parameters' own
  /// dtype, buffers have their own dtype, and inputs are not converted.
  bool full_precision_in_eval = false;
};

/// Options of FullyShardedDataParallel. Must be the same on all ranks.
struct FullyShardedDataParallelOptions {
  /// Which modules become units, the groups of parameters that are gathered together. Unset: one
  /// unit, the root, holds all parameters.
  WrapPolicy wrap_policy = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::full_shard;
  /// How a unit is divided among the ranks of its shard group. flat: ranges of equal size, for
  /// element-wise optimizers. whole, first_fit: each parameter on one rank, in its shape, for
  /// optimizers that need all of a parameter (its norm, rows or shape). A rank then holds at least
  /// the largest parameter that it was assigned.
  Partition partition = Partition::flat;
  /// Ranks in a shard group of hybrid_shard; must divide the world size. 0: the ranks of a host,
  /// which must be consecutive and equally many on every host; otherwise a UsageError on every
  /// rank.
  int shard_group_size = 0;
  /// Budget in bytes for gathered parameters, not counting the root's. Units stay gathered within
  /// the budget. Beyond it, the unit whose next use is farthest is released first (Belady's rule,
  /// with the order of use of the last step). 0: the size of the two largest units, or of the three
  /// largest where ranks of a shard group are on several hosts. An operator that needs more units
  /// than fit exceeds the budget while it runs.
  int64_t resident_bytes = 0;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  /// none: a unit is gathered where it is needed, whatever backward_prefetch is, and reduced before
  /// backward goes on. Otherwise the next unit is gathered while the current one computes, where
  /// ranks of a shard group are on several hosts the next two, and reductions run beside backward.
  /// background: the gradients of shards may arrive after backward() has returned.
  Overlap overlap = Overlap::backward;
  MixedPrecision mixed_precision = {};
  /// Keeps shards, and with them gradients and optimizer state, on the CPU. No effect for a model
  /// on the CPU.
  bool cpu_offload = false;
  /// Copies the parameters and buffers of rank 0 to all ranks at construction.
  bool sync_module_states = true;
  /// How buffers become the same on all ranks at the end of each backward that reduces.
  BufferSync buffers = BufferSync::broadcast;
  /// Names of modules whose parameters are left alone: neither sharded nor reduced nor broadcast.
  /// They are not in parameters(), so the caller trains them or freezes them; a warning at
  /// construction names those that are not frozen. State dicts contain them.
  std::vector<std::string> ignored_modules = {};
  /// Names of parameters that are left alone in the same way.
  std::vector<std::string> ignored_parameters = {};
  /// How gradients and gathered parameters travel between hosts. The shards stay exact; what
  /// forward and backward compute with is rounded, on every rank alike. summon_full_params() and
  /// state dicts are exact.
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
class ShardedModule;
}

namespace detail {

/// Marks the forward of a sharded module. Constructor and end() are collective. The destructor is
/// local: without end() the forward is abandoned.
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
  /// Calls end() unless it was called. If an exception unwinds the scope, the destructor only
  /// releases the whole values on this rank: it writes nothing back, calls no collective and does
  /// not throw.
  ~FullParams() noexcept(false);
  FullParams(const FullParams&) = delete;

  /// Ends the scope: with `writeback` each rank copies its part of the values to its shards, and
  /// the module's parameters are sharded again. A parameter that was replaced (set_data) is copied
  /// element by element, whatever its strides are. UsageError on all ranks, with nothing written
  /// on any of them, if a parameter of any rank has another shape than before (where a rank holds
  /// whole parameters, values that were written in place stay). A second call does nothing.
  /// Collective with `writeback`, otherwise local.
  void end();

 private:
  std::shared_ptr<fsdp::ShardedModule> sharded_;
  std::vector<size_t> units_;
  bool writeback_, ended_ = false;
  int exceptions_;
};

/// The part of FullyShardedDataParallel that does not depend on the module's type.
class FullyShardedDataParallelBase : public Joinable {
 public:
  using Options = FullyShardedDataParallelOptions;

  FullyShardedDataParallelBase(FullyShardedDataParallelBase&&) = default;
  FullyShardedDataParallelBase& operator=(FullyShardedDataParallelBase&&) = default;

  /// This rank's shards: one tensor for each parameter of the module that is not ignored, in the
  /// module's order, of the parameter's dtype. A shard is one-dimensional and may be empty. It has
  /// the parameter's shape, or is empty, if `partition` keeps parameters whole or if a shard group
  /// is one rank. Give these tensors to the optimizer; after backward their `.grad` is the mean
  /// over ranks, plus the gradients of terms of the loss over the shards themselves. Hooks on them
  /// (register_hook) get this rank's part of the mean of each backward, and may replace it. Values
  /// of set_data() are used from the next forward on. See check_optimizer(). Local.
  std::vector<at::Tensor> parameters() const;
  /// The same shards with the parameters' names. Local.
  NamedParameters named_parameters() const;

  /// Throws UsageError if `optimizer` would compute wrong results on these shards without an error:
  /// an optimizer that is not element-wise on shards that are ranges of elements, or LBFGS, which
  /// uses all parameters at once, if each rank holds only some of them. Local.
  void check_optimizer(const torch::optim::Optimizer& optimizer) const;

  /// Scales the gradients so that their p-norm over all ranks is at most `max_norm`, and returns
  /// the norm before scaling. With infinity nothing is scaled. `norm_type`: 2, 1, infinity or any
  /// p > 0. Without gradients it returns 0 and logs a warning. Collective.
  GradNorm clip_grad_norm_(double max_norm, double norm_type = 2);
  /// Limits every element of the gradients to [-clip_value, clip_value]; NaNs stay. The gradients
  /// are means over ranks already, so each rank limits its own. Call it after backward, before or
  /// after clip_grad_norm_(). UsageError if clip_value is negative or NaN. Local.
  void clip_grad_value_(double clip_value);

  /// The trainable shards of parameters(), in order, without empty ones. Together with
  /// state_slices() and load_state_slices() they give access to the state of an optimizer over
  /// them. Values written to them outside of forward and backward are used from the next forward
  /// on. Ranks at the same position of different shard groups (no_shard, hybrid_shard) hold equal
  /// shards and must write equal values. `frozen_too`: the shards of frozen parameters as well.
  /// Local.
  std::vector<ParameterShard> shards(bool frozen_too = false) const;
  /// True on ranks of the first shard group. These ranks together hold each element of the model
  /// exactly once, so they are the ranks that write it to disk. Local.
  bool first_replica() const;

  /// Gathers the units with parameters in the module at path `prefix` (all units for "") until
  /// FullParams::end() or the destruction of the returned object. With `writeback`, each rank then
  /// copies its part of the values to its shards. With `rank0_only`, the other ranks take part but
  /// do not keep the values; `writeback` must then be false. Call it outside of forward and
  /// backward. Collective, and with `writeback` its end is too.
  [[nodiscard]] FullParams summon_full_params(const std::string& prefix = "", bool writeback = true,
                                              bool rank0_only = false);

  /// While the returned object is alive, backward passes accumulate unsharded gradients and do not
  /// reduce them. The next backward after its destruction reduces the sum. Without no_sync() each
  /// backward reduces its gradients into the shards, which costs traffic but no memory. Local, but
  /// all ranks must do the same.
  [[nodiscard]] NoSync no_sync();
  /// Clears the gradients of all shards, and the gradients that no_sync() has accumulated and no
  /// backward has reduced yet; an optimizer's zero_grad() does not clear the latter. Call it
  /// outside of forward and backward. Local, but all ranks must do the same.
  void zero_grad(bool set_to_none = true);

  /// For loops that drop the gradients of some backwards or scale the loss, with wire.gradients:
  /// call it after every step and before the next backward. Without any call, gradients count as
  /// used. UsageError within forward or backward, and for an impossible scale. Local. All ranks
  /// make the same calls.
  void end_step(StepEnd end);

  /// With Overlap::background, for code that uses a gradient without an operator (data_ptr()):
  /// blocks until all gradients of the shards have arrived. Error of a reduction that failed.
  /// Local.
  void wait();

  /// Whole parameters and buffers by name, on the CPU of rank `to` (on all ranks if to < 0; empty
  /// on the others), in their own dtypes at construction. Parameters are gathered one by one, so
  /// the peak of extra memory on other ranks is the largest tensor. Buffers and ignored parameters
  /// are those of rank `to` (for to < 0, of each rank). Collective.
  std::vector<std::pair<std::string, at::Tensor>> state_dict(int to = 0);
  /// One parameter of state_dict(). UsageError if no sharded parameter has this name. Collective.
  at::Tensor full_parameter(const std::string& name, int to = 0);
  /// Writes state_dict() with save_weights(). `path` is one file, which rank 0 writes, or, if
  /// it ends in "/", a folder to which each rank writes its part. Collective.
  void save_state_dict(const std::string& path);
  /// Each rank copies its shards, all buffers and ignored parameters from `state`. `state` must
  /// contain every parameter and buffer with its shape, and nothing else: otherwise UsageError on
  /// all ranks. Collective.
  void load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state);
  /// The same from weights that every rank can read; see Weights for `path`. Each rank
  /// reads the elements of its shards alone where a parameter is contiguous. Collective.
  void load_state_dict(const std::string& path);

  /// Writes a checkpoint of the model to `folder`/step-00000000: each rank of the first replica
  /// writes its shards, rank 0 also writes the buffers and ignored parameters. The checkpoint is
  /// committed with one rename and replaces the one that was there. `folder` must not be in use by
  /// another writer. Format and guarantees: CheckpointStore and docs/checkpoints.md. Loads at any
  /// world size and with any strategy. UsageError on all ranks, with rank, path and reason.
  /// Collective.
  void save_sharded_state_dict(const std::string& folder);
  /// Reads what save_sharded_state_dict() has written. Checks all digests, then each rank reads the
  /// ranges of elements that it needs. The model changes only after all ranks have read everything;
  /// this takes memory for a second copy of this rank's shards. UsageError on all ranks for a
  /// missing or damaged file, and for parameters or buffers that do not match the module's.
  /// Collective.
  void load_sharded_state_dict(const std::string& folder);

  /// State of `optimizer`, which must have been made over parameters(), whole and by name, on rank
  /// `to` (on all ranks if to < 0). ZeroRedundancyOptimizer and plain optimizers use the same
  /// format. Collective.
  OptimizerStateDict optim_state_dict(const torch::optim::Optimizer& optimizer, int to = 0);
  /// Takes this rank's part of `dict`, which must be the same on all ranks. Local.
  void load_optim_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict);

  /// For join(): sets the function that a rank without data runs in an iteration of the other
  /// ranks. It must call shadow_backward() where they run forward and backward, and then make the
  /// same calls as they do on shards and gradients: clip_grad_norm_(), optimizer.step(),
  /// zero_grad(). Without it shadow_step() throws UsageError, because this rank's shards would not
  /// be updated. Local.
  void set_shadow_step(std::function<void()> step);
  /// On a rank without data: takes part in the collectives of one forward and backward of the other
  /// ranks, including the passes under no_sync() before it. The gradients of this rank count as
  /// zero, and its shards get the mean. Forward passes without gradients are not covered.
  /// Collective.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  /// Copies the buffers of `last_active_rank` to all ranks. Shards are up to date on all ranks.
  void finish_join(int last_active_rank) override;

  /// Converts a floating-point tensor to param_dtype if mixed_precision converts inputs. For use
  /// within forward, on tensors that are not arguments of it. Local.
  at::Tensor cast_input(const at::Tensor& input) const;
  /// Whether cast_input() may convert anything in the model's present mode. Local.
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
///   auto loss = fsdp(x).sum();
///   loss.backward();
///   fsdp.clip_grad_norm_(1.0);
///   optimizer.step();
///   optimizer.zero_grad();
///
/// `Module`: a torch::nn::ModuleHolder, a shared_ptr to a module, or a pointer to one. The module
/// itself is not changed and gets no wrappers inside: its parameters become views of the flat
/// storage of their unit, which has memory only while the unit is gathered. An operator that takes
/// a parameter is detected before it runs, and the unit is gathered. This works only while fsdp(…)
/// or a backward runs; elsewhere the use of a sharded parameter is a UsageError that names it. Give
/// the optimizer fsdp.parameters(), not the module's parameters. Construction, forward and backward
/// are collective. All ranks must use the same units in the same order: a difference is a
/// UsageError that names the unit and the ranks. Construction is a UsageError that names a
/// parameter whose memory something else uses, or that was made or is wrapped in InferenceMode. A
/// backward with create_graph is a UsageError: gradients with a graph are those of
/// torch::autograd::grad() over the module's parameters, of this rank's data.
/// Memory of a rank, with P bytes of parameters and W ranks: (P + gradients + optimizer state) / W,
/// and while the model runs the root and the two largest units.
template <class Module>
class FullyShardedDataParallel : public FullyShardedDataParallelBase {
 public:
  explicit FullyShardedDataParallel(Module module, ProcessGroup group,
                                    FullyShardedDataParallelOptions options = {})
      : FullyShardedDataParallelBase(*module, std::move(group), std::move(options)),
        module_(std::move(module)) {}

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

  /// Runs `function(module)` as a forward, for methods of the module other than forward.
  /// Collective.
  template <class Function>
  decltype(auto) call(Function&& function) {
    detail::ForwardScope running(*sharded_);
    return running.run(
        [&]() -> decltype(auto) { return std::forward<Function>(function)(module_); });
  }

  Module& module() { return module_; }
  /// The module itself, for its members. Its parameters are whole only while it runs: see
  /// parameters(), zero_grad() and clip_grad_norm_() of this class. Local.
  auto* operator->() { return &*module_; }
  /// Training or evaluation mode of the module. Local.
  void train(bool on = true) { (*module_).train(on); }
  void eval() { (*module_).eval(); }

 private:
  /// Holds the converted copy of an argument during the call.
  template <class Arg>
  using CastCopy = std::conditional_t<detail::holds_tensors<std::decay_t<Arg>>,
                                      std::optional<std::decay_t<Arg>>, std::nullptr_t>;

  /// Forwards the caller's argument unchanged unless it is converted, so that forward may take any
  /// kind of reference.
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
