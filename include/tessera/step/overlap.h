#pragma once

#pragma GCC visibility push(default)
namespace tessera {

/// The times at which communication runs beside computation. Results are bit-identical, except with
/// LocalSgd and where option wire rounds gradients, because its blocks depend on the buckets.
enum class Overlap {
  none,      ///< Never: each collective runs where its result is needed first. For comparison.
  backward,  ///< Within backward() and within step(). When a call returns, all of it is done.
  /// backward() and step() return earlier, and the first use of a tensor that has not arrived
  /// waits. Call wait() before code that uses data_ptr() of a parameter, gradient or state.
  background,
};

}  // namespace tessera
#pragma GCC visibility pop
