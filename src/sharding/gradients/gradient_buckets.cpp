#include "sharding/gradients/gradient_buckets.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "sharding/detection/detection.h"

namespace tessera::sharding {
namespace {

/// [Note: gradients with a graph] backward() with create_graph stores gradients that can be
/// differentiated. Such a gradient keeps its own memory: a later backward through it needs its
/// values when windows hold other gradients. It gets the reduced value in place, which keeps its
/// graph: the derivative of the reduced value flows into this rank's own part. Where all ranks
/// compute the same function of the reduced gradients, the mean of these derivatives is the
/// derivative of that function.
bool keeps_graph(const at::Tensor& gradient) {
  return gradient.defined() && gradient.requires_grad();
}

}  // namespace

GradientBuckets::GradientBuckets(std::string component, int rank,
                                 std::vector<NamedTensor> parameters, bool as_views,
                                 std::function<void()> refuse_own_norm, bool in_background)
    : component_(std::move(component)),
      rank_(rank),
      parameters_(std::move(parameters)),
      as_views_(as_views) {
  if (refuse_own_norm && start_detection_for(component_.c_str(), rank_, "gradients",
                                             "the error of clipping by one rank's norm")) {
    norms_ =
        std::make_unique<LocalNorms>(std::move(refuse_own_norm), [this] { return gradients(); });
  }
  if (in_background) arriving_ = std::make_unique<ArrivingPages>();
}

GradientBuckets::~GradientBuckets() {
  if (arriving_) arriving_->release();
}

void GradientBuckets::set(std::vector<Bucket> buckets) {
  where_.assign(parameters_.size(), {});
  for (size_t b = 0; b < buckets.size(); ++b)
    for (size_t m = 0; m < buckets[b].members.size(); ++m) where_[buckets[b].members[m]] = {b, m};
  std::swap(buckets_, buckets);
  homes_.clear();
  pages_.resize(buckets_.size());
  for (size_t b = 0; b < buckets_.size(); ++b) pages_[b] = put_on_page(b, buckets_[b]);
  placed_gradient_.assign(parameters_.size(), 0);
  std::vector<at::Tensor> windows(parameters_.size());
  for (size_t i = 0; as_views_ && i < parameters_.size(); ++i) {
    windows[i] = window(i);
    auto& grad = gradient(i);
    if (!grad.defined() || grad.is_sparse()) continue;
    ensure_memory(buckets_[where_[i].bucket].flat);
    windows[i].copy_(grad);
    if (!keeps_graph(grad)) grad = windows[i];
  }
  placement_.set_windows(tensors(), windows);
}

/// The views of the bucket become views of a page, if pages have an owner.
std::unique_ptr<Page> GradientBuckets::put_on_page(size_t b, Bucket& bucket) {
  if (!norms_ && !arriving_) return nullptr;
  const NoDetection no_detection;
  std::unique_ptr<Page> page;
  if (arriving_) {
    page = arriving_->make_page(bucket.flat);
  } else {
    page = std::make_unique<Page>(norms_.get(), b, bucket.flat.numel(), bucket.flat.options(),
                                  std::string());
    page->attach(bucket.flat);
  }
  bucket.views = make_bucket(bucket.members, bucket.layout, page->flat(), tensors()).views;
  return page;
}

std::set<LocalNorms::Gradient> GradientBuckets::gradients() {
  std::set<LocalNorms::Gradient> result;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& grad = gradient(i);
    if (grad.defined() && same_memory(grad, window(i)))
      result.emplace(where_[i].bucket, window(i).storage_offset());
  }
  return result;
}

void GradientBuckets::begin_backward() {
  if (norms_) norms_->reset();
  placement_.begin();
}

std::vector<at::Tensor> GradientBuckets::tensors() const {
  std::vector<at::Tensor> all;
  for (const auto& parameter : parameters_) all.push_back(parameter.tensor);
  return all;
}

std::vector<size_t> GradientBuckets::buckets_of_parameters() const {
  std::vector<size_t> buckets;
  for (const auto& place : where_) buckets.push_back(place.bucket);
  return buckets;
}

const at::Tensor& GradientBuckets::window(size_t i) const {
  return buckets_[where_[i].bucket].views[where_[i].member];
}

const at::Tensor& GradientBuckets::writable_window(size_t i) {
  if (holds_other_tensor(i)) displace(where_[i].bucket);
  ensure_memory(buckets_[where_[i].bucket].flat);
  return window(i);
}

bool GradientBuckets::holds_other_tensor(size_t i) const {
  return !placed_gradient_[i] && !homes_.contains(where_[i].bucket) && placement_.occupied(i);
}

void GradientBuckets::store(size_t i, const at::Tensor& computed, bool copy) {
  auto& grad = gradient(i);
  if (!grad.defined()) return;
  grad = dense_gradient(component_, parameters_[i].name, grad, rank_);
  placement_.arrived(i, grad);
  if (!is_cleared(i, computed)) stale_ = i;
  if (!as_views_) {
    if (copy) place(grad, window(i));
    return;
  }
  if (keeps_graph(grad)) {
    place(grad, writable_window(i));
    return;
  }
  if (same_memory(grad, window(i)))
    if (holds_other_tensor(i) && !held_by_autograd(grad, computed)) displace(where_[i].bucket);
    else placed_gradient_[i] = true;
  else place(grad, writable_window(i));
  grad = window(i);
}

void GradientBuckets::store_late(size_t i) {
  auto& grad = gradient(i);
  if (same_memory(grad, window(i))) return;
  grad = dense_gradient(component_, parameters_[i].name, grad, rank_);
  place(grad, writable_window(i));
  if (as_views_ && !keeps_graph(grad)) grad = window(i);
}

void GradientBuckets::zero(size_t i) { writable_window(i).zero_(); }

void GradientBuckets::prepare(size_t b) {
  const auto& members = buckets_[b].members;
  if (std::any_of(members.begin(), members.end(), [&](size_t i) { return holds_other_tensor(i); }))
    displace(b);
}

void GradientBuckets::return_gradient(size_t i) {
  auto& grad = gradient(i);
  if (as_views_ && !keeps_graph(grad)) {
    grad = window(i);
    return;
  }
  if (!grad.defined()) grad = at::empty_like(window(i));
  // A function of a gradient with a graph may have been computed already.
  if (!keeps_graph(grad) || !at::equal(grad, window(i))) grad.copy_(window(i));
}

void GradientBuckets::arrives_with(size_t b, Work collective) {
  arriving_->begin(*pages_[b], buckets_[b].flat, std::move(collective));
}

void GradientBuckets::wait_for_arrivals() {
  if (arriving_) arriving_->wait_all();
}

void GradientBuckets::zero_grad(bool set_to_none) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& grad = gradient(i);
    if (!grad.defined()) continue;
    if (set_to_none) grad = at::Tensor();
    else grad.detach_().zero_();
  }
}

void GradientBuckets::forget(size_t b) {
  for (const auto i : buckets_[b].members) gradient(i) = at::Tensor();
}

/// Other tensors keep the bucket's memory, and the gradients move to private memory.
void GradientBuckets::displace(size_t b) {
  placement_.end(false);  // this backward differs from the last one
  auto& bucket = buckets_[b];
  // A window that counts as zero may have been zeroed before, so the new memory starts as zeros.
  auto own = make_bucket(bucket.members, bucket.layout, at::zeros_like(bucket.flat), tensors());
  own.lane = bucket.lane;
  auto page = put_on_page(b, own);
  std::vector<size_t> mispredicted;
  std::copy_if(bucket.members.begin(), bucket.members.end(), std::back_inserter(mispredicted),
               [&](size_t i) { return holds_other_tensor(i); });
  placement_.exclude(mispredicted);
  for (size_t m = 0; m < bucket.members.size(); ++m) {
    auto& grad = gradient(bucket.members[m]);
    if (!grad.defined() || !same_memory(grad, bucket.views[m])) continue;
    own.views[m].copy_(grad);
    if (!keeps_graph(grad)) grad = own.views[m];
  }
  homes_.emplace(
      b, Home{std::exchange(bucket, std::move(own)), std::exchange(pages_[b], std::move(page))});
}

void GradientBuckets::restore() {
  std::fill(placed_gradient_.begin(), placed_gradient_.end(), 0);
  for (auto entry = homes_.begin(); entry != homes_.end();) {
    auto& [b, home] = *entry;
    const bool in_use =
        std::any_of(home.bucket.members.begin(), home.bucket.members.end(), [&](size_t i) {
          const auto& grad = gradient(i);
          return (grad.defined() && same_memory(grad, window(i))) || placement_.occupied(i);
        });
    if (in_use) {
      ++entry;
      continue;
    }
    buckets_[b] = std::move(home.bucket);
    pages_[b] = std::move(home.page);
    entry = homes_.erase(entry);
  }
}

void GradientBuckets::mark_overwritten(size_t i) {
  const auto& grad = gradient(i);
  if (grad.defined()) overwritten_[i] = {grad, static_cast<uint32_t>(grad._version())};
}

std::string GradientBuckets::uncleared() {
  for (size_t i = 0; i < parameters_.size() && stale_ == kNone; ++i)
    if (!is_cleared(i, {})) stale_ = i;
  return stale_ == kNone ? "" : parameters_[std::exchange(stale_, kNone)].name;
}

/// Autograd adds `arrived` in place to a `.grad` that was not cleared, which changes its version by
/// one. A further change may be a clearing in place, or a write that keeps the values, as clipping
/// is. A clearing by reset makes a new tensor.
bool GradientBuckets::is_cleared(size_t i, const at::Tensor& arrived) {
  const auto found = overwritten_.find(i);
  if (found == overwritten_.end()) return true;
  const auto [before, version] = found->second;
  const auto& now = gradient(i);
  if (now.is_same(before)) {
    if (static_cast<uint32_t>(now._version()) <= version + (arrived.defined() ? 1 : 0))
      return false;
    auto rest = now;
    if (arrived.defined()) rest = now - (arrived.is_sparse() ? arrived.to_dense() : arrived);
    if (rest.ne(0).logical_and(rest.eq(rest)).any().item<bool>()) return false;  // not for NaN
  }
  overwritten_.erase(found);
  return true;
}

}  // namespace tessera::sharding
