#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/pickle/allowed_names.h"
#include "checkpoint/pickle/pickle_values.h"

// The meaning of the values of a pickle of torch.save: tensors by name, and dicts within dicts.
// Does not use libtorch, so that it can be fuzzed at full speed.

namespace tessera::pickle {

/// A tensor of the pickle: a view of a storage.
struct TorchTensor {
  std::string name;
  DtypeName dtype;
  std::vector<int64_t> shape, strides;
  int64_t offset = 0;   // of the first element in the storage, in elements
  int64_t numel = 0;    // elements of the tensor
  int64_t extent = 0;   // elements of the storage from the first to the last one that is used
  std::string storage;  // its key
  uint64_t storage_bytes = 0;

  bool contiguous() const;  // elements are in row-major order, without gaps
};

/// Reads the tensor `value`. Throws UsageError, which begins with `where` and names the tensor, for
/// sizes that overflow, views that leave the storage, and views that repeat elements until they
/// take more than 1 MiB.
TorchTensor tensor_of(const std::string& where, const std::string& name, const Values& values,
                      const Value& value);

/// The dict at `path`: keys, divided by "/"; empty: the root. Throws UsageError with the dicts that
/// are there.
Value dict_at(const std::string& where, const Values& values, const std::string& path);

/// The dict of the weights. With an empty `path` it is the root, or the only dict in the root that
/// has tensors and is not an optimizer's state. Throws UsageError with the existing dicts.
Value weights_at(const std::string& where, const Values& values, const std::string& path);

/// The tensors of `dict` and of the dicts, lists and tuples in it; names are joined by dots. Other
/// values are left out. Throws UsageError for foreign values with tensors in them, for foreign
/// values without any tensors beside them, for repeated names, cycles, values that are nested
/// deeper than 32, and above limits that no model reaches: 200,000 tensors, 1,000,000 dimensions,
/// and names of 16 MiB (or of 1 MiB and 8 times the pickle's bytes, if less) in all.
std::vector<TorchTensor> tensors_in(const std::string& where, const Values& values,
                                    const Value& dict);

/// True if `value` is what the state_dict() of a torch.optim optimizer returns.
bool is_optimizer_state(const Values& values, const Value& value);

/// "values of "argparse.Namespace", "set", which Tessera does not run or read".
std::string foreign_text(const Values& values);

/// "dict", "tensor", for messages.
std::string kind_name(Kind kind);

}  // namespace tessera::pickle
