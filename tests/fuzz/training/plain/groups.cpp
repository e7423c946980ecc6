#include "fuzz/training/plain/groups.h"

#include "fuzz/training/story.h"

namespace tessera::fuzz {
namespace {

using Tensors = std::vector<at::Tensor>;

template <class Operation>
Tensors each(const Tensors& a, const Tensors& b, const Operation& operation) {
  Tensors result;
  for (size_t i = 0; i < a.size(); ++i) result.push_back(operation(a[i], b[i]));
  return result;
}

Tensors minus(const Tensors& a, const Tensors& b) {
  return each(a, b, [](const auto& x, const auto& y) { return x - y; });
}

Tensors plus(const Tensors& a, const Tensors& b) {
  return each(a, b, [](const auto& x, const auto& y) { return x + y; });
}

}  // namespace

PlainGroups::PlainGroups(const Case& which) : options_(local_sgd_options(which.wrapper)) {
  const int count = groups_apart(which.wrapper), ranks = which.world / count;
  for (int group = 0; group < count; ++group)
    groups_.push_back(std::make_unique<PlainTraining>(which, group * ranks, ranks));
  if (count == 1) return;
  anchor_ = values(0);
  for (const auto& tensor : anchor_) momentum_.push_back(at::zeros_like(tensor));
}

std::vector<Record> PlainGroups::play(const Item& event, int number) {
  std::vector<std::vector<Record>> of_groups;
  for (auto& group : groups_) of_groups.push_back(group->play(event, number));
  if (groups_.size() > 1 && event.kind == "step" && ++steps_ % options_.sync_every == 0)
    synchronize();
  std::vector<Record> all;
  for (size_t group = 0; group < groups_.size(); ++group) {
    groups_[group]->add_results(event, of_groups[group]);
    for (auto& record : of_groups[group]) all.push_back(std::move(record));
  }
  return all;
}

Tensors PlainGroups::values(size_t group) const {
  Tensors result;
  for (const auto& item : groups_[group]->parameters(0))
    result.push_back(item.second.detach().clone());
  return result;
}

void PlainGroups::write(size_t group, const Tensors& values) {
  at::NoGradGuard no_grad;
  for (int rank = 0; rank < groups_[group]->world(); ++rank) {
    const auto& parameters = groups_[group]->parameters(rank);
    for (size_t i = 0; i < values.size(); ++i) parameters[i].second.detach().copy_(values[i]);
  }
}

Tensors PlainGroups::mean(const std::vector<Tensors>& of_groups) const {
  Tensors result;
  for (size_t i = 0; i < anchor_.size(); ++i) {
    Tensors parts;
    for (const auto& tensors : of_groups) parts.push_back(tensors[i]);
    result.push_back(tree_sum(parts) * (1.0 / static_cast<double>(groups_.size())));
  }
  return result;
}

void PlainGroups::update_anchor(const Tensors& mean) {
  if (options_.outer == OuterOptimizer::average) {
    anchor_ = minus(anchor_, mean);
    return;
  }
  for (size_t i = 0; i < anchor_.size(); ++i) {
    momentum_[i] = momentum_[i] * options_.momentum + mean[i];
    anchor_[i] = anchor_[i] - (mean[i] + momentum_[i] * options_.momentum) * options_.lr;
  }
}

void PlainGroups::synchronize() {
  at::NoGradGuard no_grad;
  std::vector<Tensors> now, differences;
  for (size_t group = 0; group < groups_.size(); ++group) now.push_back(values(group));
  if (options_.overlap != Overlap::background) {
    if (options_.outer == OuterOptimizer::average) {
      anchor_ = mean(now);
    } else {
      for (const auto& own : now) differences.push_back(minus(anchor_, own));
      update_anchor(mean(differences));
    }
    for (size_t group = 0; group < groups_.size(); ++group) write(group, anchor_);
    return;
  }
  if (!pending_.empty()) {
    update_anchor(pending_);
    for (size_t group = 0; group < groups_.size(); ++group) {
      now[group] = plus(anchor_, minus(now[group], starts_[group]));
      write(group, now[group]);
    }
  }
  for (const auto& own : now) differences.push_back(minus(anchor_, own));
  pending_ = mean(differences);
  starts_ = now;
}

}  // namespace tessera::fuzz
