#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torch/autograd.h>

#include "fuzz/training/model/net.h"
#include "fuzz/training/record.h"
#include "tessera/local_sgd.h"
#include "tessera/step/buffer_sync.h"

namespace tessera::fuzz {

// The meaning of events that plain training and the wrappers share.

constexpr double kMaxNorm = 0.3;

/// The loss of one forward, divided by `micros`. `forward` runs the model, through a wrapper or
/// not.
template <class Forward>
at::Tensor forward_loss(const Forward& forward, const Net& net, const Item& event,
                        const Case& which, int number, int micro, int rank, int micros) {
  auto batch = make_batch(which.seed, number, micro, rank, dtype_of(which));
  if (event.number("nan", -1) == rank) batch.x.view({-1})[0] = std::nan("");
  const auto branch = event.text("branch", "all");
  batch.branch = branch == "all" || (branch == "rank0" && rank == 0) ||
                 (branch == "turns" && (number + micro) % 2 == 1);
  batch.expert = branch == "own"                 ? rank + number
                 : branch == "turns"             ? number + micro
                 : branch == "rank0" && rank > 0 ? 1
                                                 : 0;
  const bool penalty = event.flag("penalty");
  if (penalty) batch.x.requires_grad_();
  auto loss = net.loss(forward(batch), batch);
  if (penalty) {
    const auto slope = torch::autograd::grad({loss}, {batch.x}, {}, true, true)[0];
    loss = loss + slope.square().sum();
  }
  return loss / micros;
}

/// The p of the norm that an event with "norm_of" measures.
double norm_type(const Item& event);

/// Whether the norm of a step's gradients that the wrapper knows afterwards is compared.
bool shows_norm_of_step(const Item& wrapper, const Item& event);

/// The case of a second model that trains beside that of `which` ("twin").
Case twin_of(const Case& which);

/// What an event with a "trap" sets.
Trap trap_of(const Item& event);

/// The names of the parameters of each parameter group. `late`: number of the part whose parameters
/// are added later, or -1.
std::vector<std::vector<std::string>> group_names(Net& net, const Item& wrapper, int late);

/// The names of the parameters that each rank trains for itself: those of the "ignored" part, and
/// of a second group of DistributedOptimizer that is not synchronized ("local_group").
std::set<std::string> local_names(Net& net, const Item& wrapper);

BufferSync buffer_rule(const Item& wrapper);

/// Number of batches of a rank in a "join".
int batches_in_join(const Item& event, int rank);

/// The number of groups that train apart ("local_sgd"), and how they are synchronised.
int groups_apart(const Item& wrapper);
LocalSgdOptions local_sgd_options(const Item& wrapper);

/// The wrapper with which training goes on after a "move".
Item wrapper_after(const Item& event, const Item& before);

/// What is wrong with a case.
struct Finding {
  /// "difference": other numbers than plain training. "error": an error where none is due.
  /// "no error": none where one is due. "classes": not every rank has the error that is due.
  /// "slow": not within the time. "hang", "crash": see the worker.
  std::string kind;
  std::string text;
};

/// Runs a case on threads of this process. No value: all is as it must be.
std::optional<Finding> run_case(const Case& which);

}  // namespace tessera::fuzz
