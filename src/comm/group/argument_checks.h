#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/group/process_group_impl.h"

namespace tessera {

// Checks of the arguments of ProcessGroup.<method>. Each throws UsageError.

/// Throws "ProcessGroup.<method>: rank R: <problem>" unless `condition`.
void require(bool condition, const ProcessGroup::Impl& impl, const char* method,
             const std::string& problem);
void check_root(const ProcessGroup::Impl& impl, const char* method, int root);
/// A dense tensor on a device whose tensors the group moves.
void check_tensor(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor);
/// And of a dtype that has sums, and products with `scale`.
void check_sum(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor,
               double scale = 1);
/// Tensors without common memory.
void check_apart(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& output,
                 const at::Tensor& input);
/// Values that travel encoded between hosts.
void check_wire(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor);
/// One count for each rank, which add up to the elements of a flat tensor.
void check_counts(const ProcessGroup::Impl& impl, const char* method, const char* name,
                  const std::vector<int64_t>& counts, const at::Tensor& tensor);

}  // namespace tessera
