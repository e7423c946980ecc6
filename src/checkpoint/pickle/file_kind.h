#pragma once

#include <string>
#include <string_view>

// Recognises files of weights by their content, whatever their names are. Does not use libtorch.

namespace tessera {

enum class FileKind {
  safetensors,  // or a damaged one: 8 bytes of header size have no magic number
  zip,          // torch.save since PyTorch 1.6, torch.jit.save
  legacy,       // torch.save before PyTorch 1.6, or another tar archive
  json,         // an index
  foreign,      // see foreign_kind()
};

inline constexpr size_t kKindBytes = 512;

/// `begin`: the first kKindBytes bytes of the file, or all of a shorter one.
FileKind file_kind(std::string_view begin);

bool is_tar(std::string_view begin);

/// For a foreign file: its kind and its reader, as in "is a file of GGUF; …". Otherwise "".
std::string foreign_kind(std::string_view begin);

}  // namespace tessera
