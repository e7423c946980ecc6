#include "optim/named_values.h"

#include <algorithm>

#include <torch/serialize.h>

#include "tessera/error.h"

namespace tessera::optim {

namespace {

// InputArchive has no constructor from an OutputArchive, so the archive is written to bytes and
// read again.
torch::serialize::InputArchive reopen(const torch::serialize::OutputArchive& archive) {
  std::string bytes;
  const_cast<torch::serialize::OutputArchive&>(archive).save_to(
      [&bytes](const void* data, size_t size) {
        bytes.append(static_cast<const char*>(data), size);
        return size;
      });
  torch::serialize::InputArchive reopened;
  reopened.load_from(bytes.data(), bytes.size());
  return reopened;
}

// An archive has the names in code, between quotes, which libtorch compiles when it reads it. Names
// come from files, and a name that ends the quotes could add code that runs.
void check_name(const std::string& name) {
  const bool ends = std::any_of(name.begin(), name.end(), [](unsigned char c) {
    return c < ' ' || c == '"' || c == '\'' || c == '\\';
  });
  if (ends)
    throw UsageError(
        "a name has quotes, backslashes or control characters; expected one without: " + name);
}

}  // namespace

NamedValues read_archive(const torch::serialize::OutputArchive& archive) {
  auto reopened = reopen(archive);
  NamedValues values;
  for (const auto& key : reopened.keys()) reopened.read(key, values[key]);
  return values;
}

torch::serialize::InputArchive make_archive(const NamedValues& values) {
  torch::serialize::OutputArchive archive;
  for (const auto& [key, value] : values) {
    check_name(key);
    archive.write(key, value);
  }
  return reopen(archive);
}

}  // namespace tessera::optim
