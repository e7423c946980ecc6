#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <torch/types.h>

#include "deferred/mapping.h"

namespace tessera::deferred {

struct Operation;

/// The memory of one storage. Its contents after operation i of `log` are version i + 1; version 0
/// is zeros.
struct Region {
  enum class State {
    fresh,     ///< No operator has written to it.
    present,   ///< The pages have the contents of the last version.
    absent,    ///< The pages were returned to the system, and any access is a fault.
    ordinary,  ///< Ordinary memory from now on; the log describes earlier contents.
  };

  explicit Region(size_t bytes) : mapping(bytes) {}

  struct Step {
    std::shared_ptr<Operation> operation;
    bool overwrites;                                ///< The contents before do not matter.
    std::function<void(const Mapping&)> load = {};  ///< In place of an operation.
  };

  Mapping mapping;
  std::vector<Step> log;
  State state = State::fresh;
  std::thread::id maker = std::this_thread::get_id();
  size_t version() const { return log.size(); }
};

/// The memory of a tensor within a region.
struct Extent {
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset;  ///< In elements.

  explicit Extent(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        offset(tensor.storage_offset()) {}
  at::Tensor in(const Mapping& mapping) const;
};

/// A tensor among the arguments of an operation.
struct Argument {
  bool written = false;          ///< In the region that the operation writes to.
  std::shared_ptr<Region> read;  ///< In another region, at `version`.
  size_t version = 0;
  std::optional<Extent> extent;  ///< Its place in the region.
  at::Tensor value;              ///< A copy if it is in no region.
};

struct Result {
  size_t index;  ///< Among the operator's results.
  std::weak_ptr<Region> region;
  Extent extent;
};

/// An operator with everything that is needed to run it again. It writes to at most one region.
struct Operation {
  c10::OperatorHandle op;
  torch::jit::Stack stack = {};  ///< The arguments; tensors are undefined and in `arguments`.
  std::vector<Argument> arguments = {};
  std::vector<Result> results = {};
  std::optional<size_t> generator = {};  ///< The argument that is a generator …
  at::Tensor generator_state = {};       ///< … and its state before the run.
};

/// Calls `f` for each tensor of `value` and returns `value` with the results.
template <class F>
c10::IValue replace_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (!value.isList()) return value;
  const auto list = value.toList();
  c10::impl::GenericList result(list.elementType());
  for (size_t i = 0; i < list.size(); ++i) {
    const c10::IValue item = list.get(i);
    result.push_back(item.isTensor() ? c10::IValue(f(item.toTensor())) : item);
  }
  return result;
}

}  // namespace tessera::deferred
