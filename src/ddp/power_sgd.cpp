#include "tessera/step/power_sgd.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "comm/device/pinned_buffers.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kPowerSgd = "PowerSgd";

/// FNV-1a, which gives the same value on every machine.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

/// Makes the columns orthonormal by Gram–Schmidt, with two passes over each column. A column that
/// depends linearly on earlier ones becomes zero, or an arbitrary direction orthogonal to them.
void orthogonalize(const at::Tensor& matrix) {
  for (int64_t c = 0; c < matrix.size(1); ++c) {
    auto column = matrix.select(1, c);
    const auto before = matrix.narrow(1, 0, c);
    for (int pass = 0; pass < 2 && c > 0; ++pass) column.sub_(before.mv(before.t().mv(column)));
    auto norm = column.norm();
    column.div_(norm.masked_fill_(norm.eq(0), 1));
  }
}

/// `gradient` as a matrix, its first dimension against the others; half types as float32.
at::Tensor as_matrix(const at::Tensor& gradient) {
  const auto dtype = gradient.element_size() < static_cast<int64_t>(sizeof(float))
                         ? at::kFloat
                         : gradient.scalar_type();
  return gradient.reshape({gradient.size(0), -1}).to(dtype);
}

}  // namespace

void PowerSgdOptions::read(OptionReader& options) {
  options.read("rank", rank, "rank of the approximation", kAtLeastOne);
  options.read("start_iteration", start_iteration,
               "backward passes with exact means before the compression starts", kNotNegative);
  options.read("min_compression_rate", min_compression_rate,
               "smallest compression rate for which a tensor is compressed", kPositive);
  options.read("warm_start", warm_start,
               "an approximation starts from the previous one; false: from a random matrix");
  options.read("error_feedback", error_feedback,
               "the error of an approximation is added to the next gradient");
  options.read("seed", seed, "seed of the random matrices");
}

class PowerSgd::Impl {
 public:
  explicit Impl(PowerSgdOptions options) : options_(options) { check_options(kPowerSgd, options); }

  std::function<void()> start(ProcessGroup& group, const GradientBucket& bucket) {
    at::NoGradGuard no_grad;
    if (bucket.index == 0) ++iteration_;
    const double scale = 1.0 / group.size();
    if (iteration_ <= options_.start_iteration) {
      auto work = group.all_reduce_async(bucket.flat, scale);
      return [work]() mutable { work.wait(); };
    }
    auto pass = std::make_shared<Pass>();
    std::vector<at::Tensor> exact, left;
    for (size_t i = 0; i < bucket.names.size(); ++i) {
      if (compresses(bucket.gradients[i])) {
        pass->matrices.push_back(begin(bucket.names[i], bucket.gradients[i]));
        left.push_back(pass->matrices.back().p.reshape({-1}));
      } else {
        pass->exact.push_back(bucket.gradients[i]);
        exact.push_back(bucket.gradients[i].reshape({-1}));
      }
    }
    // P is summed and not averaged: orthogonalisation removes its scale.
    if (!left.empty()) pass->works.push_back(group.all_reduce_async(pass->left = at::cat(left)));
    if (!exact.empty())
      pass->works.push_back(group.all_reduce_async(pass->flat = at::cat(exact), scale));
    return [this, group, pass]() mutable { finish(group, *pass); };
  }

  State state_dict() const {
    State state{{"iteration", at::scalar_tensor(iteration_, at::kLong)}};
    for (const auto& [name, error] : errors_) state["error." + name] = error.cpu().clone();
    for (const auto& [name, q] : q_) state["q." + name] = q.cpu().clone();
    return state;
  }

  void load_state_dict(const State& state) {
    std::map<std::string, at::Tensor> errors, q;
    int64_t iteration = -1;
    for (const auto& [key, tensor] : state) {
      if (key == "iteration") iteration = tensor.item<int64_t>();
      else if (key.rfind("error.", 0) == 0) errors[key.substr(6)] = tensor.clone();
      else if (key.rfind("q.", 0) == 0) q[key.substr(2)] = tensor.clone();
      else
        throw UsageError(fmt::format(
            "{}.load_state_dict: unknown entry {}; expected iteration, error.NAME and q.NAME",
            kPowerSgd, key));
    }
    if (iteration < 0)
      throw UsageError(fmt::format("{}.load_state_dict: there is no entry iteration", kPowerSgd));
    iteration_ = iteration;
    errors_ = std::move(errors);
    q_ = std::move(q);
  }

 private:
  struct Matrix {
    std::string name;
    at::Tensor gradient;  // where the result goes
    at::Tensor matrix;    // this rank's gradient plus the error of the previous approximation
    at::Tensor p, q;
  };
  struct Pass {
    std::vector<Matrix> matrices;
    std::vector<at::Tensor> exact;
    at::Tensor left, flat;
    std::vector<Work> works;
  };

  int64_t rank_of(int64_t rows, int64_t columns) const {
    return std::min({options_.rank, rows, columns});
  }

  bool compresses(const at::Tensor& gradient) const {
    if (gradient.dim() < 2 || gradient.numel() == 0) return false;
    const int64_t rows = gradient.size(0), columns = gradient.numel() / rows;
    return static_cast<double>((rows + columns) * rank_of(rows, columns)) *
               options_.min_compression_rate <
           static_cast<double>(rows * columns);
  }

  Matrix begin(const std::string& name, const at::Tensor& gradient) {
    Matrix result{name, gradient, as_matrix(gradient), {}, {}};
    auto& m = result.matrix;
    if (options_.error_feedback) {
      if (const auto error = errors_.find(name); error != errors_.end())
        m = m + error->second.to(m.options()).view_as(m);
    }
    result.q = first_guess(name, m);
    result.p = m.matmul(result.q);
    return result;
  }

  at::Tensor first_guess(const std::string& name, const at::Tensor& m) {
    const auto rank = rank_of(m.size(0), m.size(1));
    if (const auto last = q_.find(name);
        options_.warm_start && last != q_.end() && last->second.size(1) == rank) {
      const auto q = last->second.to(m.options());
      // After a gradient of zero, q has zero columns, from which no iteration can start.
      const auto good = q.norm(2, 0).gt(0).all();
      if (!good.is_cpu()) {  // the host does not wait for a device
        auto kept = q.clone().masked_fill_(good.eq(false), 0);
        return kept.add_(random_guess(name, m).masked_fill_(good, 0));
      }
      if (good.item<bool>()) return q;
    }
    return random_guess(name, m);
  }

  at::Tensor random_guess(const std::string& name, const at::Tensor& m) {
    const std::vector<int64_t> shape{m.size(1), rank_of(m.size(0), m.size(1))};
    const auto number = options_.warm_start ? 0 : static_cast<uint64_t>(iteration_);
    if (m.is_cpu()) return drawn(name, number, shape).to(m.scalar_type());
    if (!options_.warm_start) return to_device(drawn(name, number, shape), m);
    auto& guess = guesses_[name];  // the same in each step
    if (!guess.defined() || guess.sizes() != shape || guess.device() != m.device() ||
        guess.scalar_type() != m.scalar_type())
      guess = to_device(drawn(name, number, shape), m);
    return guess.clone();
  }

  at::Tensor drawn(const std::string& name, uint64_t number,
                   const std::vector<int64_t>& shape) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed ^ hash_of(name) ^
                                                              (number * 0x9E3779B97F4A7C15ull));
    return at::randn(shape, generator, at::TensorOptions().dtype(at::kFloat));
  }

  /// The host does not wait for the copy.
  at::Tensor to_device(const at::Tensor& drawn, const at::Tensor& like) {
    const auto pinned = pinned_.take(drawn.numel(), drawn).copy_(drawn.view({-1}));
    const auto there = at::empty(drawn.sizes(), drawn.options().device(like.device()));
    pinned_.send(pinned, there.view({-1}));
    pinned_.clear();
    return there.to(like.scalar_type());
  }

  void finish(ProcessGroup& group, Pass& pass) {
    at::NoGradGuard no_grad;
    for (auto& work : pass.works) work.wait();
    int64_t at = 0;
    for (const auto& gradient : pass.exact) {
      gradient.copy_(pass.flat.narrow(0, at, gradient.numel()).view(gradient.sizes()));
      at += gradient.numel();
    }
    at = 0;
    std::vector<at::Tensor> right;
    for (auto& matrix : pass.matrices) {
      matrix.p = pass.left.narrow(0, at, matrix.p.numel()).view(matrix.p.sizes());
      at += matrix.p.numel();
      orthogonalize(matrix.p);
      right.push_back(matrix.matrix.t().matmul(matrix.p).reshape({-1}));
    }
    if (right.empty()) return;
    const auto all = at::cat(right);
    group.all_reduce(all, 1.0 / group.size());
    at = 0;
    for (auto& matrix : pass.matrices) {
      const auto q = all.narrow(0, at, matrix.q.numel()).view(matrix.q.sizes());
      at += q.numel();
      store_result(matrix, q);
    }
  }

  void store_result(Matrix& matrix, const at::Tensor& q) {
    const auto mean = matrix.p.matmul(q.t());
    // Before the gradient is overwritten, because `matrix.matrix` may be a view of it.
    const auto error = matrix.matrix - mean;
    matrix.gradient.copy_(mean.view(matrix.gradient.sizes()));
    // An overflow on any rank reaches all ranks through q. It must not stay in the state.
    const auto finite = q.isfinite().all();
    if (finite.is_cpu() && !finite.item<bool>()) {
      errors_.erase(matrix.name);
      q_.erase(matrix.name);
      return;
    }
    // The host does not wait for a device: zeros there are as good as no state.
    const auto kept = [&](at::Tensor state) {
      if (!finite.is_cpu()) state.masked_fill_(finite.eq(false), 0);
      return state;
    };
    if (options_.error_feedback) errors_[matrix.name] = kept(error.view(matrix.gradient.sizes()));
    if (options_.warm_start) q_[matrix.name] = kept(q.clone());
  }

  PowerSgdOptions options_;
  int64_t iteration_ = 0;
  std::map<std::string, at::Tensor> errors_, q_;
  std::map<std::string, at::Tensor> guesses_;  // on a device, with warm_start
  comm::PinnedBuffers pinned_;
};

PowerSgd::PowerSgd(PowerSgdOptions options) : impl_(std::make_shared<Impl>(options)) {}

CommHook PowerSgd::hook() const {
  return [impl = impl_](ProcessGroup& group, const GradientBucket& bucket) {
    auto finish = impl->start(group, bucket);
    return [impl, finish] { finish(); };
  };
}

PowerSgd::State PowerSgd::state_dict() const { return impl_->state_dict(); }
void PowerSgd::load_state_dict(const State& state) { impl_->load_state_dict(state); }

}  // namespace tessera
