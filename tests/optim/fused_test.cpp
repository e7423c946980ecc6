#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "optim/kernels.h"
#include "optim/plain_math.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int64_t kSizes[] = {0, 1, 7, 9, 1000, 4099};

std::vector<at::Tensor> make_params(at::ScalarType dtype) {
  torch::manual_seed(1);
  std::vector<at::Tensor> params;
  for (const int64_t n : kSizes) params.push_back(torch::randn({n}, dtype).requires_grad_());
  // Strides of channels-last, of a transposed matrix, and of every second column (not dense).
  params.push_back(torch::randn({2, 3, 4, 5}, dtype)
                       .contiguous(at::MemoryFormat::ChannelsLast)
                       .requires_grad_());
  params.push_back(torch::randn({6, 11}, dtype).t().requires_grad_());
  params.push_back(torch::randn({5, 14}, dtype).slice(1, 0, 14, 2).requires_grad_());
  return params;
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> all;
  for (const auto& p : params)
    all.push_back(p.detach().clone(at::MemoryFormat::Preserve).requires_grad_());
  return all;
}

void set_gradients(std::vector<at::Tensor>& params, int step) {
  torch::manual_seed(100 + step);
  for (auto& p : params) {
    p.mutable_grad() =
        torch::randn(p.sizes(), p.scalar_type());  // contiguous, whatever the parameter is
  }
}

bool equal_bits(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

// The worst error after 100 steps, in units of `rtol * |plain| + rtol`.
double worst_error(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& plain) {
  double worst = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].numel() > 0) {
      const auto a = ours[i].detach().to(at::kDouble), b = plain[i].detach().to(at::kDouble);
      worst = std::max(worst, ((a - b).abs() / (b.abs() + 1)).max().item<double>());
    }
  }
  return worst;
}

template <class Fused, class Plain, class Options>
void compare(const Options& options) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto ours = make_params(dtype), plain = copies(ours);
    Fused fused(ours, options);
    Plain reference(plain, options);
    for (int step = 0; step < 100; ++step) {
      set_gradients(ours, step);
      set_gradients(plain, step);
      fused.step();
      reference.step();
    }
    EXPECT_LT(worst_error(ours, plain), dtype == at::kFloat ? 2e-6 : 2e-14);
    EXPECT_GT(worst_error(ours, make_params(dtype)), 1e-2);
  }
}

TEST(FusedAdam, FollowsLibtorchWithEveryOption) {
  for (const bool amsgrad : {false, true}) {
    for (const double decay : {0.0, 0.1}) {
      for (const double eps : {1e-8, 1e-3}) {
        SCOPED_TRACE(c10::str("amsgrad ", amsgrad, " decay ", decay, " eps ", eps));
        compare<FusedAdam, torch::optim::Adam>(
            AdamOptions(1e-2).amsgrad(amsgrad).weight_decay(decay).eps(eps).betas({0.8, 0.95}));
        compare<FusedAdamW, torch::optim::AdamW>(
            AdamWOptions(1e-2).amsgrad(amsgrad).weight_decay(decay).eps(eps).betas({0.8, 0.95}));
      }
    }
  }
}

TEST(FusedSGD, FollowsLibtorchWithEveryOption) {
  for (const double decay : {0.0, 0.1}) {
    SCOPED_TRACE(c10::str("decay ", decay));
    compare<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).weight_decay(decay));
    compare<FusedSGD, torch::optim::SGD>(SGDOptions(1e-2).weight_decay(decay).momentum(0.9));
    compare<FusedSGD, torch::optim::SGD>(
        SGDOptions(1e-2).weight_decay(decay).momentum(0.9).dampening(0.3));
    compare<FusedSGD, torch::optim::SGD>(
        SGDOptions(1e-2).weight_decay(decay).momentum(0.9).nesterov(true));
  }
}

TEST(FusedOptimizer, StateHasOnlyTheTensorsThatTheOptionsNeed) {
  auto params = make_params(at::kFloat);
  set_gradients(params, 0);
  FusedSGD sgd(params, SGDOptions(0.1));
  sgd.step();
  EXPECT_TRUE(sgd.state().empty());
  FusedAdam adam(params, AdamOptions(0.1));
  adam.step();
  const auto state = get_state(adam, params[4]).value();
  EXPECT_EQ(state.tensors.size(), 2U);
  EXPECT_EQ(std::get<int64_t>(state.scalars.at("step")), 1);
}

TEST(FusedOptimizer, SkipsParametersWithoutGradientAndReturnsTheLoss) {
  auto p = torch::ones({4}).requires_grad_(), q = torch::ones({4}).requires_grad_();
  FusedAdamW optimizer({p, q}, AdamWOptions(0.1));
  const auto loss = optimizer.step([&] {
    const auto l = (p * p).sum();
    l.backward();
    return l;
  });
  EXPECT_EQ(loss.item<float>(), 4);
  EXPECT_FALSE(at::allclose(p, torch::ones({4})));
  EXPECT_TRUE(at::equal(q, torch::ones({4})));
  EXPECT_FALSE(get_state(optimizer, q).has_value());
}

TEST(FusedOptimizer, RefusesSparseGradients) {
  auto p = torch::ones({4}).requires_grad_(), q = torch::ones({4}).requires_grad_();
  p.mutable_grad() = torch::ones({4});
  FusedSGD optimizer({p, q}, SGDOptions(0.1));
  q.mutable_grad() = torch::ones({4}).to_sparse();
  EXPECT_THROW(optimizer.step(), UsageError);
  EXPECT_TRUE(at::equal(p, torch::ones({4}))) << "nothing is updated";
}

TEST(FusedOptimizer, AutogradSeesAnInPlaceChange) {
  auto p = torch::ones({4}).requires_grad_();
  p.mutable_grad() = torch::ones({4});
  FusedAdam optimizer(std::vector<at::Tensor>{p}, AdamOptions(0.1));
  const auto before = p._version();
  optimizer.step();
  EXPECT_GT(p._version(), before);
}

// Everything below is bit by bit.

template <class Fused, class Options>
void compare_ranges(const Options& options, float scale) {
  const int64_t n = 4099;
  torch::manual_seed(2);
  auto whole = torch::randn({n}).requires_grad_();
  auto parts = whole.detach().clone().requires_grad_();
  Fused by_step(std::vector<at::Tensor>{whole}, options),
      by_range(std::vector<at::Tensor>{parts}, options);
  for (int step = 0; step < 5; ++step) {
    auto grad = torch::randn({n});
    whole.mutable_grad() = grad * scale;
    by_step.step();
    auto copy = torch::full({n}, 7.0F);
    const auto update = by_range.begin_update(parts);
    // Back to front, of uneven and tiny lengths, so that elements move between vector body and
    // tail.
    int64_t end = n;
    for (int64_t length = 1; end > 0; length = length * 2 + 1) {
      const int64_t begin = std::max<int64_t>(0, end - length);
      by_range.update_range(update, begin, grad.data_ptr<float>() + begin, end - begin, scale,
                            copy.data_ptr<float>() + begin);
      end = begin;
    }
    ASSERT_TRUE(equal_bits(whole, parts)) << "step " << step;
    ASSERT_TRUE(equal_bits(copy, parts)) << "step " << step;
  }
  const auto a = get_state(by_step, whole), b = get_state(by_range, parts);
  ASSERT_EQ(a.has_value(), b.has_value());
  if (a) {
    EXPECT_EQ(a->scalars, b->scalars);
    for (const auto& [name, tensor] : a->tensors)
      EXPECT_TRUE(equal_bits(tensor, b->tensors.at(name))) << name;
  }
}

TEST(BitIdentity, RangesEqualStep) {
  for (const float scale : {1.0F, 0.25F, 1.0F / 3}) {
    for (const bool amsgrad : {false, true}) {
      compare_ranges<FusedAdam>(AdamOptions(1e-2).amsgrad(amsgrad).weight_decay(0.1), scale);
      compare_ranges<FusedAdam>(AdamOptions(1e-2).amsgrad(amsgrad), scale);
      compare_ranges<FusedAdamW>(AdamWOptions(1e-2).amsgrad(amsgrad).weight_decay(0.1), scale);
    }
    compare_ranges<FusedSGD>(SGDOptions(1e-2), scale);
    compare_ranges<FusedSGD>(SGDOptions(1e-2).momentum(0.9).weight_decay(0.1), scale);
    compare_ranges<FusedSGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true), scale);
  }
}

std::vector<at::Tensor> train(int64_t n, const std::vector<int64_t>& cuts) {
  torch::manual_seed(3);
  const auto all = torch::randn({n});
  std::vector<at::Tensor> params;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    params.push_back(all.slice(0, cuts[i], cuts[i + 1]).clone().requires_grad_());
  FusedAdamW optimizer(params, AdamWOptions(1e-2).weight_decay(0.1));
  for (int step = 0; step < 3; ++step) {
    const auto grad = torch::randn({n});
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      params[i].mutable_grad() = grad.slice(0, cuts[i], cuts[i + 1]);
    optimizer.step();
  }
  return params;
}

TEST(BitIdentity, ResultsDoNotDependOnRangesAndThreads) {
  const int64_t n = 1'100'003;
  const auto whole = train(n, {0, n});
  EXPECT_TRUE(equal_bits(at::cat(train(n, {0, 1, 8, 17, 333'337, 333'338, n})), whole[0]));
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  const auto threaded = train(n, {0, 5, 700'001, n});
  at::set_num_threads(threads);
  EXPECT_TRUE(equal_bits(at::cat(threaded), whole[0]));
}

TEST(BitIdentity, ResultsDoNotDependOnTheInstructionSet) {
  const auto fast = train(10'007, {0, 10'007});
  optim::allow_avx2(false);
  const auto any = train(10'007, {0, 10'007});
  optim::allow_avx2(true);
  EXPECT_TRUE(equal_bits(fast[0], any[0]));
}

TEST(BitIdentity, ResultsDoNotDependOnStrides) {
  torch::manual_seed(4);
  const auto start = torch::randn({6, 14}), grad = torch::randn({6, 7});
  auto sliced = start.clone().slice(1, 0, 14, 2).requires_grad_();
  auto dense = start.slice(1, 0, 14, 2).contiguous().requires_grad_();
  FusedAdam optimizer({sliced, dense}, AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    sliced.mutable_grad() = grad;
    dense.mutable_grad() = grad.t().contiguous().t();
    optimizer.step();
  }
  EXPECT_TRUE(equal_bits(sliced, dense));
}

TEST(FusedOptimizer, NegativeViewsHaveTheirValues) {
  const auto start = torch::arange(1, 6, at::kFloat), grad = torch::ones({5});
  auto by_gradient = start.clone().requires_grad_(), plain = start.clone().requires_grad_();
  const auto memory = -start;
  auto by_parameter = at::_neg_view(memory).detach().requires_grad_();
  ASSERT_TRUE(by_parameter.is_neg() && by_parameter.is_leaf());
  FusedSGD optimizer(std::vector<at::Tensor>{by_gradient, by_parameter, plain},
                     SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 2; ++step) {
    by_gradient.mutable_grad() = at::_neg_view(-grad);
    by_parameter.mutable_grad() = grad;
    plain.mutable_grad() = grad;
    optimizer.step();
  }
  EXPECT_TRUE(at::equal(by_gradient, plain));
  EXPECT_TRUE(at::equal(by_parameter.resolve_neg(), plain));
  EXPECT_FALSE(FusedOptimizer::supports_range(by_parameter));
}

TEST(RangeUpdate, SupportsOnlyDenseFloat32OnTheCpu) {
  EXPECT_TRUE(FusedOptimizer::supports_range(torch::zeros({3, 4})));
  EXPECT_FALSE(FusedOptimizer::supports_range(at::Tensor()));
  EXPECT_FALSE(FusedOptimizer::supports_range(torch::zeros({3, 4}).t()));
  EXPECT_FALSE(FusedOptimizer::supports_range(torch::zeros({3}, at::kDouble)));
  EXPECT_FALSE(FusedOptimizer::supports_range(torch::zeros({3}, at::kBFloat16)));
  FusedAdam optimizer(std::vector<at::Tensor>{torch::zeros({3})});
  EXPECT_THROW(optimizer.begin_update(torch::zeros({3})), UsageError);
}

TEST(FusedOptimizer, OtherDtypesUseTensorOperations) {
  torch::manual_seed(5);
  auto ours = torch::randn({33}).to(at::kBFloat16).requires_grad_(),
       plain = ours.detach().clone().requires_grad_();
  FusedAdamW fused(std::vector<at::Tensor>{ours}, AdamWOptions(1e-2).amsgrad(true));
  torch::optim::AdamW reference(std::vector<at::Tensor>{plain}, AdamWOptions(1e-2).amsgrad(true));
  auto sgd_ours = ours.detach().clone().requires_grad_(),
       sgd_plain = ours.detach().clone().requires_grad_();
  const auto sgd_options = SGDOptions(1e-2).momentum(0.9).nesterov(true).weight_decay(0.1);
  FusedSGD sgd(std::vector<at::Tensor>{sgd_ours}, sgd_options);
  torch::optim::SGD sgd_reference(std::vector<at::Tensor>{sgd_plain}, sgd_options);
  for (int step = 0; step < 5; ++step) {
    const auto grad = torch::randn({33}).to(at::kBFloat16);
    for (auto* p : {&ours, &plain, &sgd_ours, &sgd_plain}) p->mutable_grad() = grad;
    fused.step();
    reference.step();
    sgd.step();
    sgd_reference.step();
  }
  EXPECT_TRUE(equal_bits(ours, plain));
  EXPECT_TRUE(equal_bits(sgd_ours, sgd_plain));
}

/// Two parameters, whose lists and single updates are to agree.
std::vector<optim::AdamTensors> adam_tensors() {
  torch::manual_seed(6);
  std::vector<optim::AdamTensors> all;
  for (const int64_t n : {50, 3})
    all.push_back({torch::randn({n}), torch::randn({n}), torch::randn({n}), torch::rand({n}),
                   torch::rand({n}), 4});
  return all;
}

void expect_adam_of_lists(const optim::AdamNumbers& numbers, bool fused) {
  const auto lists = adam_tensors(), plain = adam_tensors();
  optim::list_adam(lists, numbers, fused);
  for (size_t i = 0; i < plain.size(); ++i) {
    optim::plain_adam(plain[i], numbers);
    EXPECT_TRUE(at::allclose(lists[i].param, plain[i].param, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(lists[i].exp_avg, plain[i].exp_avg, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(lists[i].max_exp_avg_sq, plain[i].max_exp_avg_sq));
    EXPECT_TRUE(at::equal(lists[i].grad, plain[i].grad));
  }
}

void expect_sgd_of_lists(const torch::optim::SGDOptions& options, bool fused) {
  const auto lists = adam_tensors(), plain = adam_tensors();
  std::vector<at::Tensor> buffers(2), expected(2);
  for (int step = 0; step < 3; ++step) {
    std::vector<optim::SgdTensors> tensors;
    for (size_t i = 0; i < plain.size(); ++i) {
      tensors.push_back({lists[i].param, lists[i].grad, &buffers[i]});
      optim::plain_sgd(plain[i].param, plain[i].grad, expected[i], options);
    }
    optim::list_sgd(tensors, options, fused);
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(at::allclose(lists[i].param, plain[i].param, 1e-5, 1e-6));
    EXPECT_EQ(buffers[i].defined(), expected[i].defined());
    if (expected[i].defined()) EXPECT_TRUE(at::allclose(buffers[i], expected[i], 1e-5, 1e-6));
    EXPECT_TRUE(at::equal(lists[i].grad, plain[i].grad));
  }
}

void expect_updates_of_lists(bool fused) {
  for (const bool amsgrad : {false, true})
    for (const bool decoupled : {false, true})
      for (const double decay : {0.0, 0.1})
        expect_adam_of_lists({1e-2, 0.9, 0.99, 1e-8, decay, amsgrad, decoupled}, fused);
  using Options = torch::optim::SGDOptions;
  for (const double decay : {0.0, 0.1}) {
    expect_sgd_of_lists(Options(0.1).weight_decay(decay), fused);
    expect_sgd_of_lists(Options(0.1).weight_decay(decay).momentum(0.9).dampening(0.3), fused);
    expect_sgd_of_lists(Options(0.1).weight_decay(decay).momentum(0.9).nesterov(true), fused);
  }
}

TEST(FusedOptimizer, LibtorchsFusedKernelsAgreeWhereTheyExist) {
  if (compat::kHasFusedAdam) expect_updates_of_lists(true);
}

TEST(FusedOptimizer, UpdatesOfListsAgree) { expect_updates_of_lists(false); }

TEST(SumOfSquares, IsAccurateAndDeterministic) {
  torch::manual_seed(7);
  for (const int64_t n : {0, 1, 15, 16, 17, 4099}) {
    const auto x = torch::randn({n});
    const double expected = x.to(at::kDouble).square().sum().item<double>();
    const double ours = sum_of_squares(x.data_ptr<float>(), n);
    EXPECT_NEAR(ours, expected, 1e-12 * (expected + 1));
    optim::allow_avx2(false);
    EXPECT_EQ(sum_of_squares(x.data_ptr<float>(), n), ours);
    optim::allow_avx2(true);
  }
  const auto large = torch::full({3}, 1e30F);
  EXPECT_NEAR(sum_of_squares(large.data_ptr<float>(), 3) / 3e60, 1, 1e-6);
}

}  // namespace
}  // namespace tessera
