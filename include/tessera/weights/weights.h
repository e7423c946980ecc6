#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/weights/tensor_source.h"

// Weights on disk, of any kind that Tessera reads. All functions are local.

#pragma GCC visibility push(default)
namespace tessera {

/// One rule for names: each match of `pattern` (a regular expression as in JavaScript) becomes
/// `replacement`, in which $1 is the first group. "^" and "$" are the ends of the name.
struct NameRule {
  std::string pattern, replacement;
};

struct WeightsOptions {
  /// The dict with the weights in a file of torch.save; see TorchFile.
  std::string key = {};
  /// Applied to every name, one rule after the other, each to the result of the one before.
  std::vector<NameRule> key_map = {};
};

/// Names of a model and of a file that have no counterpart.
struct UnmatchedNames {
  std::vector<std::string> missing;     ///< of the model; they keep their values
  std::vector<std::string> unexpected;  ///< of the file; they are not read
};

/// The tensor of a file for each parameter and buffer of a model.
struct WeightsMatch {
  /// Two tensors of the file that must have equal elements, such as a tied head and its embedding.
  struct Equal {
    std::string first;   ///< the one in `names`
    std::string second;  ///< not read otherwise
    std::string advice;  ///< the end of the error's message
  };
  /// By parameter or buffer, under all of its names: the tensor of the file.
  std::map<std::string, std::string> names;
  std::vector<Equal> equal = {};
  UnmatchedNames unmatched = {};
};

/// Weights opened for reading. The kind of each file is recognised by its content: safetensors,
/// torch.save, torch::save() of C++, or an index of several files in the form of Hugging Face.
/// Nothing of a file is run. Copies share the opened files.
class Weights : public TensorSource {
 public:
  /// `path`: a file, an index, or a folder that has model.safetensors,
  /// model.safetensors.index.json, weights.safetensors, pytorch_model.bin or
  /// pytorch_model.bin.index.json; the first of them is read. Throws UsageError as SafetensorsFile,
  /// TorchFile and parse_weights_index() do; if a file of the index is missing, or lacks a tensor
  /// that the index gives it; for files of other kinds, which it names; for a pattern that is no
  /// regular expression; and if two names become equal. Logs one line in three cases. (1) The index
  /// is wrong in another way: tensors of its files that it does not name are read too, and those
  /// that it gives to another file are read there. (2) A folder has an index beside the file that
  /// is read. (3) A file that the folder or the index names is a link that leads out of the folder.
  explicit Weights(const std::string& path, const WeightsOptions& options = {});

  const std::string& path() const override;
  /// File by file, under their new names.
  const std::vector<SafetensorsEntry>& entries() const override;
  bool contains(const std::string& name) const override;
  const SafetensorsEntry& info(const std::string& name) const override;
  at::ScalarType scalar_type(const std::string& name) const override;
  at::Tensor load(const std::string& name) const override;
  at::Tensor load_bytes(const std::string& name) const override;
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const override;
  /// Reads the whole tensor to `into`, of the same number of elements, and converts to its dtype.
  /// Without other memory if `into` is contiguous, on the CPU and of the file's dtype.
  void load_into(const std::string& name, at::Tensor into) const;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Throws UsageError if a pattern is no regular expression.
void check_key_map(const std::vector<NameRule>& rules);

}  // namespace tessera
#pragma GCC visibility pop
