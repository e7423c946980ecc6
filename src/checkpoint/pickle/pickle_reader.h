#pragma once

#include <string>

#include "checkpoint/pickle/pickle_values.h"

// Reads the pickles that torch.save writes. Nothing is imported or called: names in a pickle are
// only noted. Does not use libtorch, so that it can be fuzzed at full speed. The format: Python's
// Lib/pickletools.py.
//
// Reads dicts, lists, tuples, numbers, strings, bytes, None, collections.OrderedDict, torch.Size,
// torch._utils._rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter,
// _rebuild_parameter_with_state, torch's typed storages, torch.storage.UntypedStorage, torch's
// dtypes, and the modules of C++'s torch::save(), which become dicts of their attributes. All else
// becomes a value of Kind::foreign.

namespace tessera::pickle {

inline constexpr size_t kMaxPickleBytes = 16 << 20;

/// Takes time proportional to the pickle's bytes, and at most kMaxValueBytes (pickle_stack.h)
/// beside it. Throws UsageError, which begins with `where`. `pickle` may have other bytes behind
/// the pickle; Values::pickle contains the pickle's bytes alone. `tensor_ids`: a persistent id may
/// be a text, as PyTorch 0.1 wrote it. It stands for a tensor with only this text, in
/// Values::tensor_ids.
Values read_pickle(const std::string& where, std::string pickle, bool tensor_ids = false);

}  // namespace tessera::pickle
