#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#pragma GCC visibility push(default)
namespace tessera {

/// While alive, large CPU tensors that this thread makes are deferred: operators run and their
/// results are correct, but the memory is freed at once, and a log of the operators allows
/// computing the values again (the idea of torchdistx's deferred_init, here with real execution, so
/// that `.item()` and branches on values work). Scopes nest. Local.
///
/// Deferred are tensors of 64 KiB and more. docs/memory.md lists what the log cannot repeat, and
/// when nothing is deferred. `deferred_stats` counts what is computed at once instead.
class DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;

 private:
  bool outermost_;
};

/// `make()` within a DeferredScope: constructs a module, or anything that holds tensors, whose
/// tensors take no memory yet. The random state afterwards is that of eager construction.
///
///   auto net = tessera::deferred_init([&] { return Net(options); });
///   tessera::FullyShardedDataParallel fsdp(net, world);
///
/// The wrappers of this library compute the values when they are constructed:
/// FullyShardedDataParallel parameter by parameter, so that each rank keeps only its shards;
/// ZeroRedundancyOptimizer parameter by parameter into its buckets; DistributedDataParallel as
/// materialize() does. The bits are those of eager construction with the same seed. Code that reads
/// a deferred tensor by address gets its values, but the system does not (docs/memory.md): before
/// read or write of its memory call materialize(). Local.
template <class Make>
auto deferred_init(Make&& make) {
  const DeferredScope scope;
  return std::forward<Make>(make)();
}

/// True if the values of `tensor` are deferred. Thread-safe. Local.
bool is_deferred(const at::Tensor& tensor);

/// Computes the values of `tensor`'s storage, which has ordinary memory from then on. Nothing
/// happens if it is not deferred. Tensors that were computed from it stay deferred and keep their
/// values if it is written later. Thread-safe. Local.
void materialize(const at::Tensor& tensor);
/// The same for all parameters and buffers of `module`.
void materialize(torch::nn::Module& module);
template <class Net>
void materialize(torch::nn::ModuleHolder<Net>& module) {
  materialize(static_cast<torch::nn::Module&>(*module));
}

namespace detail {

/// If `tensor` is deferred, whole in its storage and contiguous: gives it the values that `load`
/// writes to a tensor of its shape and dtype, and computes nothing. `load` is called when the
/// values are needed, possibly never or several times, on any thread. Otherwise returns false and
/// does nothing. Thread-safe. Local.
bool load_later(const at::Tensor& tensor, std::function<void(at::Tensor)> load);

}  // namespace detail

/// Counters of this process since its start.
struct DeferredStats {
  uint64_t deferred = 0;       ///< Storages that were made deferred.
  uint64_t operators = 0;      ///< Operators in the logs.
  uint64_t replayed = 0;       ///< Operators that were run again to compute values.
  uint64_t computed = 0;       ///< Storages that could not be deferred, or not to the end.
  int64_t computed_bytes = 0;  ///< Their bytes.
};
DeferredStats deferred_stats();  ///< Thread-safe. Local.

}  // namespace tessera
#pragma GCC visibility pop
