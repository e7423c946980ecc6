#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sharding/named_tensor.h"

namespace tessera::sharding {

/// The use that a wrapper makes of its parameters.
enum class Use {
  reduces_in_backward,  ///< Reduces their gradients over the ranks during backward.
  reduces_in_step,      ///< Reduces their gradients in step(), and updates them.
  updates,              ///< Updates them; another wrapper reduces the gradients.
  shards,               ///< Holds them in shards.
};

/// While the object lives, this process knows that a wrapper has these parameters. Two wrappers
/// then cannot reduce a gradient twice, and no wrapper takes parameters that have no memory of
/// their own. Thread-safe; all members are local.
class WrappedParameters {
 public:
  /// Has no parameters.
  WrappedParameters() = default;
  /// UsageError "<component>: rank R: parameter P …", with the remedy, if another wrapper has one
  /// of `parameters` and the two uses exclude each other, or was destroyed with its memory.
  WrappedParameters(const std::string& component, int rank, Use use,
                    const std::vector<NamedTensor>& parameters);

  /// The name of a wrapper that reduces the gradient of one of `parameters` during backward; "" if
  /// there is none.
  static std::string reducer_of(const std::vector<NamedTensor>& parameters);

  struct Entry;

 private:
  std::shared_ptr<Entry> entry_;
};

}  // namespace tessera::sharding
