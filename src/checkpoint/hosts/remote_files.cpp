#include "checkpoint/hosts/remote_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <numeric>

#include <fmt/format.h>

#include "checkpoint/hosts/scoped_timeout.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::store {
namespace {

constexpr size_t kWindow = size_t{16} << 20;
constexpr size_t kSmallestWindow = size_t{64} << 10;
constexpr const char* kTag = "reading files of other hosts";
/// The status that a server sends before the bytes: 0, an errno, or this for a file that ends too
/// early.
constexpr uint8_t kCutShort = 255;

}  // namespace

RemoteFiles::RemoteFiles(ProcessGroup group, std::vector<std::vector<int>> holders,
                         ReadLocal read_local)
    : FileSource(std::move(group)),
      holders_(std::move(holders)),
      read_local_(std::move(read_local)) {}

bool RemoteFiles::here(size_t file) const {
  return std::binary_search(holders_[file].begin(), holders_[file].end(), group_.rank());
}

FileSource::Place RemoteFiles::place(size_t file, int rank, int ranks) const {
  if (ranks == 1) return {0, 1};  // it reads all files of this host
  const auto& holders = holders_[file];
  const auto found = std::find(holders.begin(), holders.end(), rank);
  return {static_cast<int>(found - holders.begin()), static_cast<int>(holders.size())};
}

int RemoteFiles::server(size_t file, int reader) const {
  return holders_[file][static_cast<size_t>(reader) % holders_[file].size()];
}

void RemoteFiles::together(const std::function<void()>& body) {
  const ScopedTimeout timeout(group_, std::chrono::minutes(30));
  agree(group_, [&] {
    std::exception_ptr failure;
    open_ = true;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    open_ = false;
    const bool broken = failure && [&] {
      try {
        std::rethrow_exception(failure);
      } catch (const BrokenWorldError&) {
        return true;
      } catch (...) {
        return false;
      }
    }();
    while (!broken && round(nullptr, nullptr)) {
    }
    if (failure) std::rethrow_exception(failure);
  });
}

void RemoteFiles::read(size_t file, void* to, size_t count, uint64_t offset) {
  if (!open_) {
    throw UsageError(
        fmt::format("the file is on the host of rank {}; expected the call within read_together()",
                    holders_[file].front()));
  }
  const size_t window = std::max(kSmallestWindow, kWindow / static_cast<size_t>(group_.size()));
  for (size_t done = 0; done < count;) {
    const Request request{file, offset + done, std::min(window, count - done)};
    round(&request, static_cast<char*>(to) + done);
    done += request.count;
  }
}

/// Serves one request of every rank. Returns false if no rank had one.
bool RemoteFiles::round(const Request* mine, char* to) {
  const auto texts = group_.all_gather_bytes(
      mine == nullptr ? "" : std::string(reinterpret_cast<const char*>(mine), sizeof *mine), kTag);
  if (std::all_of(texts.begin(), texts.end(), [](const auto& text) { return text.empty(); }))
    return false;
  const auto ranks = texts.size();
  std::vector<int64_t> send(ranks, 0), receive(ranks, 0);
  std::vector<Request> requests(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (texts[rank].empty()) continue;
    std::memcpy(&requests[rank], texts[rank].data(), sizeof(Request));
    if (server(requests[rank].file, static_cast<int>(rank)) == group_.rank())
      send[rank] = static_cast<int64_t>(requests[rank].count) + 1;
  }
  int from = -1;
  if (mine != nullptr) {
    from = server(mine->file, group_.rank());
    receive[from] = static_cast<int64_t>(mine->count) + 1;
  }
  const auto bytes = [](const std::vector<int64_t>& counts) {
    return at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, at::kByte);
  };
  at::Tensor out = bytes(send);
  auto* next = out.data_ptr<uint8_t>();
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (send[rank] == 0) continue;
    const auto& request = requests[rank];
    const int64_t got = read_local_(request.file, next + 1, request.count, request.offset);
    *next = got < 0                                     ? static_cast<uint8_t>(errno)
            : got < static_cast<int64_t>(request.count) ? kCutShort
                                                        : 0;
    next += send[rank];
  }
  at::Tensor in = bytes(receive).to(group_.control_device());
  group_.all_to_all(in, out.to(group_.control_device()), receive, send, kTag);
  if (mine == nullptr) return true;
  const at::Tensor got = in.cpu();
  const auto* data = got.data_ptr<uint8_t>();
  if (*data != 0) {
    throw Error(fmt::format("reading {} bytes at offset {} on rank {} failed: {}", mine->count,
                            mine->offset, from,
                            *data == kCutShort ? "the file was cut short" : errno_text(*data)));
  }
  std::memcpy(to, data + 1, mine->count);
  return true;
}

}  // namespace tessera::store
