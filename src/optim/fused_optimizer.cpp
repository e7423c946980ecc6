#include "tessera/optim/fused_optimizer.h"

#include <ATen/Parallel.h>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "optim/fused_base.h"
#include "optim/late_updates.h"

namespace tessera {

namespace {

// Updating fewer elements takes less time than starting a thread.
constexpr int64_t kElementsPerThread = int64_t{1} << 18;

bool is_fused_dtype(const at::Tensor& param) {
  return param.device().is_cpu() && param.layout() == at::kStrided &&
         (param.scalar_type() == at::kFloat || param.scalar_type() == at::kDouble);
}

// The gradient in the memory layout of `values`.
at::Tensor match_gradient(const at::Tensor& grad, const at::Tensor& values) {
  if (grad.scalar_type() == values.scalar_type() && grad.device() == values.device() &&
      grad.strides() == values.strides() && !grad.is_neg())
    return grad;
  return at::empty_like(values).copy_(grad);
}

// A gradient that other ranks' values are still added to has no memory, until an operator takes it:
// see [Note: pages that arrive in the background]. A placeholder has none either, and is not dense.
bool is_arriving(const at::Tensor& grad) {
  return grad.has_storage() && grad.numel() > 0 && grad.is_non_overlapping_and_dense() &&
         compat::unchecked_data_ptr(grad.storage().unsafeGetStorageImpl()).get() == nullptr;
}

// True if a gradient is arriving. UsageError for a sparse one.
bool any_is_arriving(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  bool any = false;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& params = groups[g].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const auto& grad = params[i].grad();
      any |= grad.defined() && is_arriving(grad);
      if (grad.defined() && grad.layout() != at::kStrided)
        throw UsageError("fused optimizer: parameter " + std::to_string(i) + " of group " +
                         std::to_string(g) + " has a sparse gradient, expected a dense one");
    }
  }
  return any;
}

// Updates elements [begin, end) of the concatenation of all jobs.
void run_span(const std::vector<optim::Job>& jobs, int64_t begin, int64_t end) {
  int64_t start = 0;
  for (const auto& job : jobs) {
    const int64_t from = std::max(begin, start), to = std::min(end, start + job.update.numel);
    if (from < to) {
      const auto* grad =
          static_cast<const char*>(job.grad.data_ptr()) + (from - start) * job.grad.element_size();
      job.update.kernel(job.update, from - start, grad, to - from, 1.0, nullptr);
    }
    start += job.update.numel;
  }
}

// Zeros in the memory layout of `values`. They live as long as the optimizer, so large ones get a
// mapping of their own; on the heap they would fragment the memory that is allocated in every step.
// Huge pages are requested: with several streams through memory, 4 KiB pages cost a few percent,
// and the first access is cheaper.
at::Tensor new_state(const at::Tensor& values) {
#ifdef __linux__
  constexpr size_t kLargePage = size_t{1} << 21, kLarge = size_t{1} << 20;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = (values.nbytes() + page - 1) / page * page;
  if (values.device().is_cpu() && bytes >= kLarge) {
    // Maps one huge page more than needed, so that the buffer can start at a multiple of its size,
    // and unmaps the rest before and after it.
    void* const room = mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room != MAP_FAILED) {
      const size_t before = -reinterpret_cast<uintptr_t>(room) & (kLargePage - 1);
      auto* const start = static_cast<char*>(room) + before;
      if (before > 0) munmap(room, before);
      munmap(start + bytes, kLargePage - before);
      madvise(start, bytes, MADV_HUGEPAGE);  // only a hint: failure is ignored
      return at::from_blob(
          start, values.sizes(), values.strides(), [bytes](void* memory) { munmap(memory, bytes); },
          values.options().requires_grad(false));
    }
  }
#endif
  return at::zeros_like(values);
}

}  // namespace

void* optim::match_state(const char* name, at::Tensor& state, const at::Tensor& values) {
  if (!state.defined()) {
    state = new_state(values);
  } else if (state.sizes() != values.sizes()) {
    throw UsageError(std::string("fused optimizer: state ") + name + " has sizes " +
                     c10::str(state.sizes()) + ", expected those of its parameter, " +
                     c10::str(values.sizes()));
  } else if (state.scalar_type() != values.scalar_type() || state.strides() != values.strides() ||
             state.device() != values.device() || state.is_neg()) {
    state = at::empty_like(values).copy_(state);
  }
  return state.data_ptr();
}

// Short-lived threads of our own: at::parallel_for is a template over OpenMP, which the caller's
// build may lack.
void optim::run_jobs(const std::vector<Job>& jobs) {
  int64_t total = 0;
  for (const auto& job : jobs) total += job.update.numel;
  const int64_t allowed = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t count =
      std::clamp<int64_t>(total / kElementsPerThread, 1, std::max<int64_t>(allowed, 1));
  const int64_t share = (total + count - 1) / count;
  std::vector<std::thread> threads;
  int64_t begin = share;
  try {
    for (; begin < total; begin += share) {
      threads.emplace_back(
          [&jobs, begin, end = std::min(total, begin + share)] { run_span(jobs, begin, end); });
    }
  } catch (const std::system_error&) {  // no more threads available: this thread does the rest
  }
  run_span(jobs, 0, std::min(share, total));
  run_span(jobs, begin, total);
  for (auto& thread : threads) thread.join();
}

bool FusedOptimizer::supports_range(const at::Tensor& param) {
  return param.defined() && param.layout() == at::kStrided && param.device().is_cpu() &&
         param.scalar_type() == at::kFloat && param.is_contiguous() && !param.is_neg();
}

RangeUpdate FusedOptimizer::begin_update(const at::Tensor& param) {
  if (!supports_range(param)) {
    throw UsageError(
        "FusedOptimizer::begin_update: the parameter must be a dense contiguous float32 CPU "
        "tensor");
  }
  for (const auto& group : param_groups_) {
    for (const auto& one : group.params()) {
      if (one.is_same(param)) {
        const at::NoGradGuard no_grad;
        param.unsafeGetTensorImpl()->bump_version();
        return prepare(param, param.detach(), group.options());
      }
    }
  }
  throw UsageError("FusedOptimizer::begin_update: the parameter is in no group of this optimizer");
}

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  std::vector<optim::Job> jobs;
  std::vector<std::pair<at::Tensor, at::Tensor>>
      copies;  // parameter, and the dense values that are updated instead
  std::map<optim::LateUpdates*, std::vector<at::Tensor>> late;  // parameters
  // Reverse is about the order in which backward produces gradients: the first ones have arrived
  // while later ones are on their way.
  const bool in_reverse = any_is_arriving(param_groups_);
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto& group = param_groups_[in_reverse ? param_groups_.size() - 1 - g : g];
    const auto& params = group.params();
    Gradients others;
    for (size_t i = 0; i < params.size(); ++i) {
      const auto& param = params[in_reverse ? params.size() - 1 - i : i];
      const auto& grad = param.grad();
      if (!grad.defined()) continue;
      if (is_arriving(grad)) {
        auto* const updates = optim::LateUpdates::of(param);
        if (updates && updates->can_follow(*this, param)) {
          late[updates].push_back(param);
          continue;
        }
        optim::run_jobs(std::exchange(jobs, {}));
        grad.detach();  // an operator: returns when the gradient has arrived
      }
      if (!is_fused_dtype(param)) {
        others.emplace_back(param, grad);
        continue;
      }
      at::Tensor values = param.detach();
      if (!values.is_non_overlapping_and_dense() || values.is_neg()) {
        values = values.resolve_neg().contiguous();
        copies.emplace_back(param, values);
      }
      param.unsafeGetTensorImpl()->bump_version();
      jobs.push_back({prepare(param, values, group.options()), match_gradient(grad, values)});
    }
    if (!others.empty()) plain_update(others, group.options());
  }
  optim::run_jobs(jobs);
  for (auto& [param, values] : copies) param.detach().copy_(values);
  for (const auto& [updates, parameters] : late) updates->follow(*this, parameters);
  if (!param_groups_.empty() && !param_groups_[0].params().empty())
    if (auto* const updates = optim::LateUpdates::of(param_groups_[0].params()[0]))
      updates->stepped();
  return loss;
}

double sum_of_squares(const float* x, int64_t n) { return optim::sum_of_squares(x, n); }

}  // namespace tessera
