#include "sharding/gradients/gradient_placement.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/alignment.h>

#include "memory/placement_allocator.h"

namespace tessera::sharding {
namespace {

constexpr size_t kNobody = static_cast<size_t>(-1);
// Of one size, a graph of more requests is followed no further.
constexpr size_t kRequests = 1 << 16;
// A graph that changes time and again is copied from: each surprise costs memory for a bucket and a
// copy of it.
constexpr int kMaxMispredictions = 4;

bool fit(const at::Tensor& window) {
  return window.defined() && window.device().is_cpu() &&
         window.nbytes() >= memory::kMinPlacementBytes &&
         reinterpret_cast<uintptr_t>(window.data_ptr()) % c10::gAlignment == 0;
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
    open_ = false;
  }

  /// False where there is nothing to lend, and nothing to learn.
  bool begin() {
    std::lock_guard lock(mutex_);
    if (requests_.empty() || mispredictions_ >= kMaxMispredictions) return false;
    for (auto& [bytes, requests] : requests_) {
      requests.at.clear();
      requests.became.clear();
    }
    return open_ = true;
  }

  bool open() {
    std::lock_guard lock(mutex_);
    return open_;
  }

  at::DataPtr serve(size_t bytes, at::Allocator& heap) override {
    std::lock_guard lock(mutex_);
    const auto found = requests_.find(bytes);
    if (!open_ || found == requests_.end() || found->second.at.size() >= kRequests)
      return heap.allocate(bytes);
    auto& requests = found->second;
    const size_t n = requests.at.size();
    at::DataPtr memory;
    if (n < requests.expected.size() && may_place(requests.expected[n], bytes))
      memory = memory::place_in(windows_[requests.expected[n]]);
    if (!memory) memory = heap.allocate(bytes);
    requests.at.push_back(memory.get());
    requests.became.push_back(kNobody);
    return memory;
  }

  void arrived(size_t i, const at::Tensor& gradient) {
    std::lock_guard lock(mutex_);
    const auto& window = windows_[i];
    if (!open_ || !window.defined() || gradient.layout() != at::kStrided ||
        gradient.sizes() != window.sizes() || gradient.strides() != window.strides())
      return;
    auto& requests = requests_.at(window.nbytes());
    const auto latest = std::find(requests.at.rbegin(), requests.at.rend(), gradient.data_ptr());
    if (latest != requests.at.rend()) requests.became[requests.at.rend() - latest - 1] = i;
  }

  /// What came of this backward's requests is expected of the next one's. A parameter whose
  /// gradient was none of them (nothing came, or it was added to what was there) is expected where
  /// it was.
  void end(bool learn) {
    std::lock_guard lock(mutex_);
    if (!std::exchange(open_, false) || !learn) return;
    for (auto& [bytes, requests] : requests_) {
      auto& became = requests.became;
      std::vector<char> met(windows_.size(), 0);
      for (const auto i : became) {
        if (i != kNobody) met[i] = 1;
      }
      became.resize(std::max(became.size(), requests.expected.size()), kNobody);
      for (size_t n = 0; n < requests.expected.size(); ++n) {
        const auto before = requests.expected[n];
        if (became[n] == kNobody && before != kNobody && !met[before]) became[n] = before;
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
  /// Of one size, in the order in which they came.
  struct Requests {
    std::vector<size_t> expected;  // the parameter whose gradient the n-th is for
    std::vector<const void*> at;   // in the backward under way, what the n-th got …
    std::vector<size_t> became;    // … and the parameter whose gradient it became
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
  bool open_ = false;
};

GradientPlacement::GradientPlacement() : state_(std::make_shared<State>()) {}
GradientPlacement::~GradientPlacement() = default;

void GradientPlacement::set_windows(std::vector<at::Tensor> parameters,
                                    const std::vector<at::Tensor>& windows) {
  state_->set_windows(std::move(parameters), windows);
}

void GradientPlacement::begin() {
  const auto other = std::dynamic_pointer_cast<State>(memory::memory_source());
  if (other && other != state_ && other->open()) return;  // two reducers in one backward: the first
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

}  // namespace tessera::sharding
