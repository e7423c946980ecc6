#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/wire_codec.h"
#include "sharding/gradients/lanes.h"
#include "sharding/named_tensor.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// The groups in which a wrapper reduces its gradients, and the error feedback of each bucket if
/// they travel encoded between hosts.
class GradientWire {
 public:
  explicit GradientWire(Lanes lanes) : lanes_(std::move(lanes)) {}

  /// The group of reduction number `turn`.
  const ProcessGroup& group(size_t turn = 0) const { return lanes_.group(turn); }
  /// For the collective of bucket `b` that is started while the scope lives.
  comm::WireFeedbackScope scope(size_t b) {
    auto& feedback = feedback_[b];
    if (!feedback) feedback = std::make_shared<comm::WireFeedback>();
    return comm::WireFeedbackScope(feedback);
  }
  /// The collectives of bucket `b`, or of all buckets, are complete. Local.
  void commit(size_t b) {
    if (const auto found = feedback_.find(b); found != feedback_.end()) found->second->commit();
  }
  void commit() {
    for (auto& [bucket, feedback] : feedback_) feedback->commit();
  }
  /// True: a step has used the gradients reduced since the last call; false: dropped them. Local.
  void end_step(bool used) {
    for (auto& [bucket, feedback] : feedback_) used ? feedback->accept() : feedback->discard();
  }
  /// The gradients that are reduced from now on are `factor` times as large. Local.
  void rescale(double factor) {
    for (auto& [bucket, feedback] : feedback_) feedback->rescale(factor);
  }
  /// The buckets have been replaced. Local; no collective is under way.
  void reset() { feedback_.clear(); }
  /// Bytes of error feedback on this rank.
  int64_t bytes() const {
    int64_t total = 0;
    for (const auto& [bucket, feedback] : feedback_) total += feedback->bytes();
    return total;
  }

 private:
  Lanes lanes_;
  std::map<size_t, std::shared_ptr<comm::WireFeedback>> feedback_;
};

/// UsageError, naming the first parameter, if `parameters` have a dtype that cannot travel encoded.
void check_wire_dtypes(const std::string& component, int rank, const WireOptions& wire,
                       const std::vector<NamedTensor>& parameters);
/// UsageError, naming end_step(), unless `factor` is finite and > 0.
void check_scale_change(const std::string& component, int rank, double factor);
/// UsageError if option wire.parameters is set in a wrapper that gathers none.
void refuse_parameter_wire(const std::string& component, int rank, const WireOptions& wire);

}  // namespace tessera::sharding
