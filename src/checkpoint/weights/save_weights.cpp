#include "tessera/save_weights.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>

#include <fmt/format.h>

#include "checkpoint/weights/part_writers.h"
#include "checkpoint/weights/weights_folder.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

void check_parts_seen(const fs::path& folder, const std::vector<WeightsPart>& parts) {
  for (const auto& part : parts) {
    std::error_code error;
    if (!fs::exists(folder / part.file, error)) {
      throw UsageError(fmt::format(
          "weights: {}: rank {} wrote it, but rank 0 cannot see it; expected a folder that all "
          "ranks share, or a path without \"/\" at its end, a file that rank 0 writes alone",
          (folder / part.file).string(), part.rank));
    }
  }
}

}  // namespace

bool is_weights_folder(const std::string& path) { return path.ends_with('/'); }

void write_weights(const std::vector<WeightsPart>& parts, int rank, const WholeTensor& whole,
                   const std::function<void(size_t i, const at::Tensor& tensor)>& write) {
  std::map<int, std::vector<size_t>> tensors;  // by rank
  size_t rounds = 0;
  for (const auto& part : parts) {
    auto& list = tensors[part.rank];
    list.insert(list.end(), part.tensors.begin(), part.tensors.end());
    rounds = std::max(rounds, list.size());
  }
  for (size_t round = 0; round < rounds; ++round) {
    at::Tensor mine;
    for (const auto& [to, list] : tensors) {
      if (round >= list.size()) continue;
      at::Tensor tensor = whole(list[round], to);
      if (to == rank) mine = std::move(tensor);
    }
    if (mine.defined()) write(tensors[rank][round], mine);
  }
}

void save_weights(const ProcessGroup& group, const std::string& path,
                  const std::vector<SafetensorsSpec>& tensors, const WholeTensor& whole,
                  const SaveWeightsOptions& options) {
  const bool folder = is_weights_folder(path);
  auto parts =
      folder ? divide_weights(tensors, group.size(), options.rank0_from, options.max_shard_bytes)
             : divide_weights(tensors, 1, options.rank0_from);
  PartWriters writers(path, tensors, options.metadata);
  if (folder) {
    std::string tag;
    agree(group, [&] { tag = make_weights_folder(path, parts); });
    name_parts(parts, ProcessGroup(group).broadcast_bytes(tag, 0));
  }
  agree(group, [&] {
    for (const auto& part : parts)
      if (part.rank == group.rank()) writers.begin(part);
  });
  // Every rank must take part in all gathers, so the first error waits until they are done.
  std::exception_ptr failure;
  write_weights(parts, group.rank(), whole, [&](size_t i, const at::Tensor& tensor) {
    if (failure) return;
    try {
      if (options.check) options.check(i, tensor);
      writers.write(i, tensor);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  agree(group, [&] {
    if (failure) std::rethrow_exception(failure);
  });
  agree(group, [&] { writers.commit(); });
  agree(group, [&] {
    if (!folder || group.rank() != 0) return;
    check_parts_seen(path, parts);
    finish_weights_folder(path, parts, weights_index_text(tensors, parts));
  });
}

}  // namespace tessera
