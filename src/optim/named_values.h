#pragma once

#include <map>
#include <optional>
#include <string>

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>
#include <torch/serialize/archive.h>

// User-defined states and options as named values, through their `serialize` functions and an
// archive in memory. Text from a file or another process enters the archive only as plain names.

namespace tessera::optim {

using NamedValues = std::map<std::string, c10::IValue>;

NamedValues read_archive(const torch::serialize::OutputArchive& archive);
torch::serialize::InputArchive make_archive(const NamedValues& values);

/// No value when the type does not implement `serialize`.
template <class Serializable>
std::optional<NamedValues> to_values(const Serializable& object) {
  torch::serialize::OutputArchive archive;
  try {
    object.serialize(archive);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return read_archive(archive);
}

/// Throws c10::Error when the type does not implement `serialize` or cannot read `values`.
template <class Serializable>
void from_values(const NamedValues& values, Serializable& object) {
  auto archive = make_archive(values);
  object.serialize(archive);
}

}  // namespace tessera::optim
