#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "tessera/safetensors.h"
#include "tessera/weights/tensor_source.h"

// Reads and writes the files of torch.save (.pt, .pth, .bin): a zip archive with a pickle and one
// record for each storage; also reads files of PyTorch before 1.6. The pickle is read by a reader
// of our own that runs nothing: it knows dicts, lists, tuples, numbers, strings, None, OrderedDict,
// tensors, parameters, storages, dtypes and sizes, and leaves out everything else. All functions
// are local.

#pragma GCC visibility push(default)
namespace tessera {

/// A file of torch.save opened for reading, or of torch::save() of C++. The constructor checks the
/// zip directory, the pickle and every tensor against the size of its storage; it takes at most
/// about 100 MB, and time proportional to the directory and the pickle.
class TorchFile : public TensorSource {
 public:
  /// `key` names the dict with the weights in a file that has several, such as "model" in
  /// {"model": …, "optimizer": …}; keys of dicts within dicts are divided by "/". Empty: the file's
  /// own dict, or the only dict in it that has tensors and is not an optimizer's state. Names in
  /// dicts and lists below it are joined by dots; values that are not tensors are left out, and
  /// objects of Python are named in the log. Throws UsageError with the file and the fault:
  /// TorchScript, tensors inside of other objects, files of a big-endian machine, archives and
  /// tensors whose sizes contradict each other, cycles.
  explicit TorchFile(const std::string& path, const std::string& key = "");
  ~TorchFile() override;
  TorchFile(TorchFile&&) noexcept;
  TorchFile& operator=(TorchFile&&) noexcept;

  const std::string& path() const override;
  /// In the order of the dict. The dtype is named as in safetensors; C128 and C32 are complex128
  /// and complex32. `begin` is 0.
  const std::vector<SafetensorsEntry>& entries() const override;
  bool contains(const std::string& name) const override;
  const SafetensorsEntry& info(const std::string& name) const override;
  at::ScalarType scalar_type(const std::string& name) const override;
  at::Tensor load(const std::string& name) const override;
  /// A slice of a tensor that is not stored in row-major order takes memory for the whole tensor.
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const override;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a file that torch.load(path, weights_only=True) reads as an OrderedDict of tensors,
/// tensor by tensor: it takes memory for one extra tensor. The rules are those of
/// SafetensorsWriter: any order, each name once, and `commit` replaces `path` in one step. For one
/// thread at a time.
class TorchFileWriter {
 public:
  /// Throws UsageError for names that are given twice or are not UTF-8.
  TorchFileWriter(const std::string& path, std::vector<SafetensorsSpec> tensors);
  ~TorchFileWriter();
  TorchFileWriter(const TorchFileWriter&) = delete;
  TorchFileWriter& operator=(const TorchFileWriter&) = delete;

  void write(const std::string& name, const at::Tensor& tensor);
  void commit();

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a whole file with a TorchFileWriter.
void save_torch_file(const std::string& path,
                     const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace tessera
#pragma GCC visibility pop
