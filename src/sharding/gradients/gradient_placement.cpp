#include "sharding/gradients/gradient_placement.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/alignment.h>

#include "memory/placement_allocator.h"

namespace tessera::sharding {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);
// Allocations of one size that are followed in a backward; further ones are not predicted.
constexpr size_t kRequests = 1 << 16;
// Each misprediction costs the memory of a bucket and a copy of it. A graph that keeps changing is
// not predicted any more.
constexpr int kMaxMispredictions = 4;

bool fit(const at::Tensor& window) {
  return window.defined() && window.device().is_cpu() &&
         may_be_window(static_cast<int64_t>(reinterpret_cast<uintptr_t>(window.data_ptr())),
                       window.nbytes());
}

}  // namespace

class GradientPlacement::State : public memory::MemorySource {
 public:
  void set_windows(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& windows) {
    std::lock_guard lock(mutex_);
    parameters_ = std::move(parameters);
    excluded_.resize(parameters_.size(), 0);
    windows_.clear();
    for (const auto& window : windows) {
      windows_.push_back(fit(window) ? window : at::Tensor());
      if (windows_.back().defined()) requests_[window.nbytes()];
    }
    watching_ = false;
  }

  void follow(std::vector<at::Tensor> parameters) {
    std::lock_guard lock(mutex_);
    parameters_ = std::move(parameters);
    excluded_.resize(parameters_.size(), 0);
    windows_.assign(parameters_.size(), at::Tensor());
    for (const auto& parameter : parameters_)
      if (parameter.device().is_cpu() && parameter.nbytes() >= memory::kMinPlacementBytes)
        requests_[parameter.nbytes()];
    watching_ = false;
  }

  void set_window(size_t i, at::Tensor window) {
    std::lock_guard lock(mutex_);
    windows_[i] =
        fit(window) && requests_.contains(window.nbytes()) ? std::move(window) : at::Tensor();
  }

  /// False if there is no window to place gradients in.
  bool begin() {
    std::lock_guard lock(mutex_);
    if (requests_.empty() || mispredictions_ >= kMaxMispredictions) return false;
    for (auto& [bytes, requests] : requests_) {
      requests.at.clear();
      requests.became.clear();
    }
    return watching_ = true;
  }

  bool is_watching() {
    std::lock_guard lock(mutex_);
    return watching_;
  }

  at::DataPtr serve(size_t bytes, at::Allocator& heap) override {
    std::lock_guard lock(mutex_);
    const auto found = requests_.find(bytes);
    if (!watching_ || found == requests_.end() || found->second.at.size() >= kRequests)
      return heap.allocate(bytes);
    auto& requests = found->second;
    const size_t n = requests.at.size();
    at::DataPtr memory;
    if (n < requests.expected.size() && may_place(requests.expected[n], bytes))
      memory = memory::place_in(windows_[requests.expected[n]]);
    if (!memory) memory = heap.allocate(bytes);
    requests.at.push_back(memory.get());
    requests.became.push_back(kNone);
    return memory;
  }

  void arrived(size_t i, const at::Tensor& gradient) {
    std::lock_guard lock(mutex_);
    const auto& window = windows_[i];
    if (!watching_ || !window.defined() || gradient.layout() != at::kStrided ||
        gradient.sizes() != window.sizes() || gradient.strides() != window.strides())
      return;
    auto& requests = requests_.at(window.nbytes());
    const auto latest = std::find(requests.at.rbegin(), requests.at.rend(), gradient.data_ptr());
    if (latest != requests.at.rend()) requests.became[requests.at.rend() - latest - 1] = i;
  }

  /// The next backward is predicted from this one. A parameter without a gradient among this
  /// backward's allocations (it got none, or it was added in place) keeps its prediction.
  void end(bool learn) {
    std::lock_guard lock(mutex_);
    if (!std::exchange(watching_, false) || !learn) return;
    for (auto& [bytes, requests] : requests_) {
      auto& became = requests.became;
      std::vector<char> seen(windows_.size(), 0);
      for (const auto i : became)
        if (i != kNone) seen[i] = 1;
      became.resize(std::max(became.size(), requests.expected.size()), kNone);
      for (size_t n = 0; n < requests.expected.size(); ++n) {
        const auto before = requests.expected[n];
        if (became[n] == kNone && before != kNone && !seen[before]) became[n] = before;
      }
      requests.expected.swap(became);
    }
  }

  bool occupied(size_t i) const { return windows_[i].defined() && memory::is_placed(windows_[i]); }

  void exclude(const std::vector<size_t>& parameters) {
    std::lock_guard lock(mutex_);
    for (const auto i : parameters) excluded_[i] = true;
    ++mispredictions_;
  }

 private:
  /// Allocations of one size, in their order.
  struct Requests {
    std::vector<size_t> expected;  // prediction: the n-th becomes the gradient of this parameter
    std::vector<const void*> at;   // in the current backward: the address of the n-th
    std::vector<size_t> became;    // in the current backward: the parameter whose gradient it is
  };

  bool may_place(size_t i, size_t bytes) const {
    return i < windows_.size() && windows_[i].defined() && !excluded_[i] &&
           windows_[i].nbytes() == bytes && !parameters_[i].grad().defined();
  }

  std::mutex mutex_;
  std::vector<at::Tensor> parameters_, windows_;
  std::vector<char> excluded_;
  std::unordered_map<size_t, Requests> requests_;  // by size
  int mispredictions_ = 0;
  bool watching_ = false;
};

GradientPlacement::GradientPlacement() : state_(std::make_shared<State>()) {}
GradientPlacement::~GradientPlacement() = default;

void GradientPlacement::set_windows(std::vector<at::Tensor> parameters,
                                    const std::vector<at::Tensor>& windows) {
  state_->set_windows(std::move(parameters), windows);
}

void GradientPlacement::follow(std::vector<at::Tensor> parameters) {
  state_->follow(std::move(parameters));
}

void GradientPlacement::set_window(size_t i, at::Tensor window) {
  state_->set_window(i, std::move(window));
}

void GradientPlacement::begin() {
  const auto other = std::dynamic_pointer_cast<State>(memory::memory_source());
  if (other && other != state_ && other->is_watching())
    return;  // two reducers in one backward: the first predicts
  if (state_->begin() && other != state_) memory::set_memory_source(state_);
}

void GradientPlacement::arrived(size_t i, const at::Tensor& gradient) {
  state_->arrived(i, gradient);
}
void GradientPlacement::end(bool learn) { state_->end(learn); }
bool GradientPlacement::occupied(size_t i) const { return state_->occupied(i); }
void GradientPlacement::exclude(const std::vector<size_t>& parameters) {
  state_->exclude(parameters);
}

bool may_be_window(int64_t offset, size_t bytes) {
  return bytes >= memory::kMinPlacementBytes && offset % c10::gAlignment == 0;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.data_ptr() == b.data_ptr() && a.strides() == b.strides();
}

// Expected owners: `.grad`, `computed`, and the base of `computed` if it is a view. (If user code
// holds `computed`, autograd copies it into `.grad`; if it holds only an alias, autograd does not.)
bool held_by_autograd(const at::Tensor& grad, const at::Tensor& computed) {
  return computed.defined() && grad.storage().use_count() <= (computed.is_view() ? 3u : 2u);
}

}  // namespace tessera::sharding
