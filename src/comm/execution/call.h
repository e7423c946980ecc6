#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/transport.h"

namespace tessera::comm {

using Headers = std::vector<OpHeader>;

/// One collective, as one rank calls it.
struct Call {
  /// `headers`: the headers of all ranks, in rank order; empty when they were not compared (see
  /// ProcessGroupOptions::check_collectives).
  using Body = std::function<void(Transport& transport, const Headers& headers)>;

  OpHeader header;
  Body body;
  std::vector<at::Tensor> tensors = {};  ///< All tensors that `body` uses; they are on one device.
  std::string tag = {};                  ///< Its purpose, for messages.
  std::shared_ptr<WireFeedback> feedback = {};  ///< See Transport::set_feedback().
};

}  // namespace tessera::comm
