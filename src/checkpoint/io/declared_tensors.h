#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/safetensors.h"

namespace tessera {

/// The tensors that a writer of a file was told to expect: each is written once, as declared. All
/// errors are UsageErrors that begin with `where`.
class DeclaredTensors {
 public:
  /// Throws for a name that is given twice.
  DeclaredTensors(std::string where, std::vector<SafetensorsSpec> tensors);

  const std::vector<SafetensorsSpec>& specs() const { return specs_; }
  /// The number of a tensor that is to be written. Throws if it was not declared, was written, or
  /// has another dtype or shape.
  size_t check(const std::string& name, const at::Tensor& tensor) const;
  void mark_written(size_t number) { written_[number] = true; }
  /// Throws with the names of the tensors that were not written.
  void check_complete() const;

 private:
  std::string where_;
  std::vector<SafetensorsSpec> specs_;
  std::vector<bool> written_;
  std::unordered_map<std::string, size_t> index_;
};

/// Names, dtypes and shapes of `tensors`. Throws UsageError for undefined tensors.
std::vector<SafetensorsSpec> specs_of(
    const std::string& where, const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace tessera
