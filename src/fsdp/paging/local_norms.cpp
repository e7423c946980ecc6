#include "fsdp/paging/local_norms.h"

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::fsdp {

void LocalNorms::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  const Gradient gradient{uses[0].page->index(), uses[0].offset};
  // The infinity norm is abs() and then max().
  if (op == "aten::norm" || op == "aten::linalg_vector_norm" || op == "aten::abs") {
    // An empty shard begins where the next shard begins.
    const bool again = normed_.count(gradient) > 0 && gradient != last_;
    if (again) normed_.clear();  // for example clipping after a log of all norms
    normed_.insert(gradient);
    last_ = gradient;
    return;
  }
  const bool clips = op == "aten::mul_" && uses[0].written && uses[0].overload == "Tensor" &&
                     !normed_.empty() && normed_ == all_();
  normed_.clear();
  if (!clips) return;
  throw UsageError(fmt::format(
      "{}: the gradients of the shards are scaled by a norm of this rank's elements only "
      "(torch::nn::utils::clip_grad_norm_ over fsdp.parameters()?); expected "
      "fsdp.clip_grad_norm_(…), whose norm is that of all ranks",
      prefix_));
}

}  // namespace tessera::fsdp
