#include <bit>
#include <cstring>

#include "data/expand_paths.h"
#include "data/mapped_file.h"
#include "tessera/data/token_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little,
              "llm.c's token files are little-endian and used in place");

constexpr int64_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;

[[noreturn]] void refuse_tokens(const std::string& path, const std::string& reason) {
  throw UsageError("TokenBin: " + path + ": " + reason);
}

Tokens open_tokens(const std::string& path, int64_t vocab_size) {
  const MappedFile file = map_file("TokenBin", path);
  if (file.size < kHeaderBytes) {
    refuse_tokens(path, "has " + std::to_string(file.size) + " bytes, fewer than the header's " +
                            std::to_string(kHeaderBytes));
  }
  int32_t header[3];
  std::memcpy(header, file.data.get(), sizeof header);
  check_mapped(file.data.get());
  if (header[0] != kMagic) {
    refuse_tokens(path, "begins with " + std::to_string(header[0]) +
                            ", expected the magic number " + std::to_string(kMagic));
  }
  if (header[1] != kVersion) {
    refuse_tokens(
        path, "version " + std::to_string(header[1]) + ", expected " + std::to_string(kVersion));
  }
  const int64_t count = header[2];
  if (count < 0 || kHeaderBytes + 2 * count != file.size) {
    refuse_tokens(path, "the header says " + std::to_string(count) + " tokens, which makes " +
                            std::to_string(kHeaderBytes + 2 * count) + " bytes; the file has " +
                            std::to_string(file.size));
  }
  if (count == 0) refuse_tokens(path, "holds no tokens");
  Tokens tokens(file.data, file.data.get() + kHeaderBytes, count, 2, "TokenBin: " + path);
  if (vocab_size > 0) tokens.require_below(vocab_size);
  return tokens;
}

Tokens open_all(const std::string& option, const std::vector<std::string>& paths,
                int64_t vocab_size) {
  std::vector<Tokens> parts;
  for (const std::string& file : expand_paths("TokenBin", option, paths))
    parts.push_back(open_tokens(file, vocab_size));
  return parts.size() == 1 ? parts.front() : Tokens::joined(parts, "TokenBin: " + listed(paths));
}

}  // namespace

TokenData TokenBin::load() const {
  TokenData data;
  data.train = open_all("path", paths, vocab_size);
  if (!val_paths.empty()) data.val = open_all("val_path", val_paths, vocab_size);
  return data;
}

}  // namespace tessera
