#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "comm/base/comm_stream.h"
#include "comm/base/world.h"
#include "comm/execution/queue.h"
#include "tessera/error.h"

namespace tessera::comm {

/// A collective that ends with a point on the group's stream, after what `host` does for it.
class StreamWork : public Work::State {
 public:
  /// `*end` is set when `host` is done, and null after an error.
  StreamWork(const CommStream& stream, Work host, std::shared_ptr<CommStream::Mark> end)
      : stream_(stream), host_(std::move(host)), end_(std::move(end)) {}
  void wait() override {
    host_.wait();
    stream_.join(*end_);
  }
  bool done() override { return host_.done() && (!*end_ || (*end_)->query()); }

 private:
  CommStream stream_;
  Work host_;
  std::shared_ptr<CommStream::Mark> end_;
};

/// The stream of a group's collectives on its device. The first use makes it.
class GroupStream {
 public:
  /// Throws UsageError if a tensor is on another device than earlier ones.
  const CommStream& of(const World& world, const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      if (!stream_) stream_.emplace(tensor.device());
      if (tensor.device() == stream_->device()) continue;
      throw UsageError(fmt::format(
          "ProcessGroup: rank {} of {}: the tensor is on {}, and earlier ones of this group were "
          "on {}; expected one device for each rank",
          world.rank, world.size, tensor.device().str(), stream_->device().str()));
    }
    return *stream_;
  }

 private:
  std::optional<CommStream> stream_;
};

}  // namespace tessera::comm
