#pragma once

#include <string>
#include <vector>

#include "comm/base/flat_tensor.h"
#include "comm/group/process_group_impl.h"

namespace tessera {

// One function for each collective of ProcessGroup on one tensor. It checks the arguments, counts
// the traffic, and returns the call. In a group of one rank, where no call is run, it computes what
// a sum of one rank needs.

using comm::Counts;

/// The elements of memory that `tensor` has, each once, so that the tensor can be written: without
/// the dimensions along which it was expanded.
at::Tensor without_repeats(at::Tensor tensor);
uint64_t bytes_of(const at::Tensor& tensor);
comm::OpHeader header_of(comm::Op op, const at::Tensor& tensor, int root = -1);

comm::Call all_reduce_call(ProcessGroup::Impl& impl, at::Tensor tensor, double scale,
                           const std::string& tag);
comm::Call reduce_call(ProcessGroup::Impl& impl, at::Tensor tensor, int root,
                       const std::string& tag);
comm::Call broadcast_call(ProcessGroup::Impl& impl, at::Tensor tensor, int root,
                          const std::string& tag);
comm::Call all_gather_call(ProcessGroup::Impl& impl, const at::Tensor& flat, const Counts& counts,
                           const std::string& tag);
/// `consume`: null writes this rank's sums to its segment of `flat`.
comm::Call reduce_scatter_call(ProcessGroup::Impl& impl, const at::Tensor& flat,
                               const Counts& counts, double scale, ProcessGroup::ConsumeRun consume,
                               const std::string& tag);
/// Writes this rank's sums to `output`.
comm::Call reduce_scatter_into_call(ProcessGroup::Impl& impl, const at::Tensor& flat,
                                    const Counts& counts, const at::Tensor& output, double scale,
                                    const std::string& tag);

}  // namespace tessera
