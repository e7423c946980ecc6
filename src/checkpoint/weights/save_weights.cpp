#include "tessera/save_weights.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>

#include <fmt/format.h>
#include <unistd.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

void make_weights_folder(const std::string& folder, int rank) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder, error)) {
    throw UsageError(fmt::format("safetensors: {}: rank {} cannot make the folder: {}", folder,
                                 rank, error ? error.message() : "a file has this name"));
  }
}

void remove_index(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    throw Error("safetensors: " + path + ": removing it failed: " + errno_text(errno));
}

void check_parts_seen(const fs::path& folder, const std::vector<WeightsPart>& parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    std::error_code error;
    if (!fs::exists(folder / parts[rank].file, error)) {
      throw UsageError(fmt::format(
          "safetensors: {}: rank {} wrote it, but rank 0 cannot see it; expected a folder that all "
          "ranks share, or a path without \"/\" at its end, a file that rank 0 writes alone",
          (folder / parts[rank].file).string(), rank));
    }
  }
}

void write_index(const std::string& path, const std::string& text) {
  AtomicFile file("safetensors", path);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

}  // namespace

bool is_weights_folder(const std::string& path) { return path.ends_with('/'); }

void write_weights(const std::vector<WeightsPart>& parts, int rank, const WholeTensor& whole,
                   const std::function<void(size_t i, const at::Tensor& tensor)>& write) {
  size_t rounds = 0;
  for (const auto& part : parts) rounds = std::max(rounds, part.tensors.size());
  for (size_t round = 0; round < rounds; ++round) {
    at::Tensor mine;
    for (size_t to = 0; to < parts.size(); ++to) {
      if (round >= parts[to].tensors.size()) continue;
      at::Tensor tensor = whole(parts[to].tensors[round], static_cast<int>(to));
      if (static_cast<int>(to) == rank) mine = std::move(tensor);
    }
    if (mine.defined()) write(parts[rank].tensors[round], mine);
  }
}

void save_weights(const ProcessGroup& group, const std::string& path,
                  const std::vector<SafetensorsSpec>& tensors, const WholeTensor& whole,
                  const SaveWeightsOptions& options) {
  const bool folder = is_weights_folder(path);
  const auto parts = divide_weights(tensors, folder ? group.size() : 1, options.rank0_from);
  const bool writes = group.rank() < static_cast<int>(parts.size());
  const std::string index = (fs::path(path) / kWeightsIndexName).string();
  std::unique_ptr<SafetensorsWriter> writer;
  agree(group, [&] {
    if (folder) make_weights_folder(path, group.rank());
    if (!writes) return;
    const auto& part = parts[group.rank()];
    std::vector<SafetensorsSpec> own;
    for (const size_t i : part.tensors) own.push_back(tensors[i]);
    writer = std::make_unique<SafetensorsWriter>(
        folder ? (fs::path(path) / part.file).string() : path, std::move(own), options.metadata);
  });
  // Every rank must take part in all gathers, so the first error waits until they are done.
  std::exception_ptr failure;
  write_weights(parts, group.rank(), whole, [&](size_t i, const at::Tensor& tensor) {
    if (failure) return;
    try {
      if (options.check) options.check(i, tensor);
      writer->write(tensors[i].name, tensor);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  agree(group, [&] {
    if (failure) std::rethrow_exception(failure);
    if (folder && group.rank() == 0) remove_index(index);
  });
  agree(group, [&] {
    if (writer) writer->commit();
  });
  agree(group, [&] {
    if (!folder || group.rank() != 0) return;
    check_parts_seen(path, parts);
    write_index(index, weights_index_text(tensors, parts));
  });
}

}  // namespace tessera
