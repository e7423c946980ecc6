#include "tessera/c.h"

#include <cmath>
#include <functional>

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "harness/ranks.h"
#include "tessera/detail/c_group.h"
#include "tessera/train/training_session.h"

// The C interface: the values of TrainingSession, and a code with a text for every mistake.

namespace tessera {
namespace {

const char* const kConfig =
    "model: {type: MLP, inputs: 3, outputs: 2, hidden: [5], seed: 3}\n"
    "loss: {type: mse}\n"
    "optimizer: {type: Adam, lr: 0.05}\n";
const char* const kWrappers[] = {"DistributedDataParallel", "ZeroRedundancyOptimizer",
                                 "DistributedOptimizer, reduce_method: mean",
                                 "FullyShardedDataParallel"};

std::string config_with(const std::string& wrapper) {
  return kConfig + ("parallel: {type: " + wrapper + "}\n");
}

/// An array over a tensor, which must live longer.
struct View {
  explicit View(const at::Tensor& tensor, int32_t dtype = TESSERA_FLOAT32)
      : kept(tensor),
        array{tensor.data_ptr(), dtype, static_cast<int32_t>(tensor.dim()), kept.sizes().data(),
              kept.strides().data()} {}
  at::Tensor kept;
  tessera_array array;
  operator const tessera_array*() const { return &array; }  // NOLINT
};

void expect_ok(int code) { EXPECT_EQ(code, TESSERA_OK) << tessera_last_error(); }

void expect_error(int code, int expected, const std::string& words) {
  EXPECT_EQ(code, expected);
  const std::string text = tessera_last_error();
  EXPECT_NE(text.find(words), std::string::npos) << text << "\nhas not: " << words;
}

struct Group {
  explicit Group(const ProcessGroup& group) : handle(detail::c_group(group)) {}
  ~Group() { tessera_group_free(handle); }
  tessera_group* handle;
};

struct Session {
  Session(const std::string& config, const ProcessGroup& ranks) : group(ranks) {
    expect_ok(tessera_session_create(config.c_str(), group.handle, &handle));
  }
  ~Session() { tessera_session_free(handle); }
  Group group;
  tessera_session* handle = nullptr;
};

at::Tensor inputs_of(int rank, int step) {
  return (at::arange((rank + 1) * 3, at::kFloat) + step).sin().view({rank + 1, 3});
}
at::Tensor targets_of(const at::Tensor& inputs) { return inputs.narrow(1, 0, 2).square(); }

TEST(CInterface, HasTheValuesOfTrainingSession) {
  for (const int world : {1, 2, 3, 4}) {
    for (const char* wrapper : kWrappers) {
      const std::string config = config_with(wrapper);
      testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
        Session c(config, group);
        TrainingSession session(parse_config(config), group);
        const bool empty = world > 1 && rank == world - 1;  // in the second step
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = inputs_of(rank, step), y = targets_of(x);
          const bool none = empty && step == 1;
          tessera_step done;
          expect_ok(none ? tessera_session_step(c.handle, nullptr, nullptr, &done)
                         : tessera_session_step(c.handle, View(x), View(y), &done));
          const auto expected = none ? session.step(at::Tensor()) : session.step(x, y);
          EXPECT_EQ(done.loss, expected.loss);
          EXPECT_EQ(done.grad_norm, expected.grad_norm);
          EXPECT_EQ(done.samples, expected.samples);
          EXPECT_EQ(done.step, step);
          EXPECT_TRUE(done.updated && !done.stopped);
        }
        const at::Tensor x = inputs_of(rank, 9), y = targets_of(x);
        at::Tensor out = at::zeros({2, rank + 1}, at::kDouble);  // transposed, and another dtype
        expect_ok(tessera_session_predict(c.handle, View(x), View(out.t(), TESSERA_FLOAT64)));
        EXPECT_TRUE(at::equal(out.t().to(at::kFloat), session.predict(x)));
        double loss = 0;
        expect_ok(tessera_session_evaluate(c.handle, View(x), View(y), &loss));
        EXPECT_EQ(loss, session.evaluate(x, y).at("loss"));
        int64_t steps = 0, weights = 0;
        expect_ok(tessera_session_steps(c.handle, &steps));
        expect_ok(tessera_session_weights(c.handle, &weights));
        EXPECT_EQ(steps, 3);
        EXPECT_EQ(weights, 4);
      });
    }
  }
}

TEST(CInterface, WeightsGoOutAndIn) {
  for (const int world : {1, 3}) {
    for (const char* wrapper : kWrappers) {
      testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
        Session from(config_with(wrapper), group), to(config_with(wrapper), group);
        const at::Tensor x = inputs_of(0, 0), y = targets_of(x);
        expect_ok(tessera_session_step(from.handle, View(x), View(y), nullptr));
        for (int64_t i = 0; i < 4; ++i) {
          const char* name = nullptr;
          expect_ok(tessera_session_weight_name(from.handle, i, &name));
          const at::Tensor weight = at::zeros(i == 0   ? at::IntArrayRef{5, 3}
                                              : i == 1 ? at::IntArrayRef{5}
                                              : i == 2 ? at::IntArrayRef{2, 5}
                                                       : at::IntArrayRef{2});
          const View view(weight);
          for (int to_rank = 0; to_rank < world; ++to_rank)
            expect_ok(tessera_session_get_weight(from.handle, name, to_rank,
                                                 to_rank == rank ? &view.array : nullptr));
          expect_ok(tessera_session_set_weight(to.handle, name, View(weight)));
        }
        const at::Tensor a = at::zeros({1, 2}), b = at::zeros({1, 2});
        expect_ok(tessera_session_predict(from.handle, View(x), View(a)));
        expect_ok(tessera_session_predict(to.handle, View(x), View(b)));
        EXPECT_TRUE(at::equal(a, b)) << wrapper;
        EXPECT_GT(a.abs().sum().item<float>(), 0);
      });
    }
  }
}

/// A binding's model: y = W tanh(V x), over tensors of its own.
struct Bound {
  Bound() {
    for (const auto shape : {at::IntArrayRef{5, 3}, at::IntArrayRef{2, 5}})
      tensors.push_back(
          at::arange(shape[0] * shape[1], at::kFloat).sin().view(shape).set_requires_grad(true));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) const {
    return at::mse_loss(x.mm(tensors[0].t()).tanh().mm(tensors[1].t()), y);
  }
  static int forward(void* self, void* inputs, void* targets, void* loss) {
    const auto& bound = *static_cast<Bound*>(self);
    *static_cast<at::Tensor*>(loss) =
        bound.loss(*static_cast<at::Tensor*>(inputs), *static_cast<at::Tensor*>(targets));
    return bound.fails;
  }
  std::vector<at::Tensor> tensors;
  int fails = 0;
};

const char* const kNames[] = {"in.weight", "out.weight"};

TEST(CInterface, TrainsTensorsOfABinding) {
  for (const int world : {1, 2, 3}) {
    Bound plain;
    torch::optim::Adam optimizer(plain.tensors, torch::optim::AdamOptions(0.05));
    std::vector<double> losses;
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < world; ++rank) all.push_back(inputs_of(rank, step));
      const at::Tensor x = at::cat(all);
      optimizer.zero_grad();
      const at::Tensor loss = plain.loss(x, targets_of(x));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    for (const char* wrapper : kWrappers) {
      testing::run_ranks(world, [&](const ProcessGroup& ranks, int rank) {
        Bound bound;
        Group group(ranks);
        tessera_session* session = nullptr;
        void* parameters[] = {&bound.tensors[0], &bound.tensors[1]};
        const std::string config =
            std::string("optimizer: {type: Adam, lr: 0.05}\nparallel: {type: ") + wrapper + "}\n";
        expect_ok(tessera_session_create_over(config.c_str(), group.handle, parameters, kNames, 2,
                                              Bound::forward, &bound, &session));
        ASSERT_NE(session, nullptr);
        for (int step = 0; step < 4; ++step) {
          const at::Tensor x = inputs_of(rank, step), y = targets_of(x);
          tessera_step done;
          expect_ok(tessera_session_step(session, View(x), View(y), &done));
          EXPECT_NEAR(done.loss, losses[static_cast<size_t>(step)], 1e-6) << wrapper << world;
        }
        const at::Tensor weight = at::zeros({2, 5});
        expect_ok(tessera_session_get_weight(session, "out.weight", 0, View(weight)));
        if (rank == 0) {
          EXPECT_TRUE(at::allclose(weight, plain.tensors[1], 1e-4, 1e-6));
        }
        tessera_session_free(session);
      });
    }
  }
}

TEST(CInterface, AMistakeIsACodeWithAText) {
  Session c(config_with("none"), ProcessGroup());
  tessera_session* none = nullptr;
  tessera_step done;
  const at::Tensor x = inputs_of(1, 0), y = targets_of(x);
  expect_error(tessera_session_step(nullptr, View(x), View(y), &done), TESSERA_USAGE_ERROR,
               "tessera_session_step: session is NULL; expected a pointer");
  expect_error(tessera_session_create("model: [", c.group.handle, &none), TESSERA_USAGE_ERROR,
               "config");
  expect_error(tessera_session_create("{model: {type: MLB}, optimizer: {type: Adam}}",
                                      c.group.handle, &none),
               TESSERA_USAGE_ERROR, "config:1: model.type: MLB; expected one of");
  View wrong(x);
  wrong.array.dtype = 7;
  expect_error(tessera_session_step(c.handle, wrong, View(y), &done), TESSERA_USAGE_ERROR,
               "tessera_session_step: inputs: dtype 7; expected");
  wrong.array.dtype = TESSERA_FLOAT32;
  wrong.array.dims = 9;
  expect_error(tessera_session_step(c.handle, wrong, View(y), &done), TESSERA_USAGE_ERROR,
               "dims 9; expected 1 to 8");
  wrong.array.dims = 2;
  const int64_t none_fits[] = {int64_t{1} << 62, 3}, shared[] = {1, 1};
  wrong.array.shape = none_fits;
  wrong.array.strides = nullptr;
  expect_error(tessera_session_step(c.handle, wrong, View(y), &done), TESSERA_USAGE_ERROR,
               "more than memory can have");
  wrong = View(y);
  wrong.array.strides = shared;
  expect_error(tessera_session_predict(c.handle, View(x), wrong), TESSERA_USAGE_ERROR,
               "share memory by the strides [1, 1]");
  wrong = View(x);
  wrong.array.data = nullptr;
  expect_error(tessera_session_step(c.handle, wrong, View(y), &done), TESSERA_USAGE_ERROR,
               "data is NULL and the shape [2, 3]; expected values");
  expect_error(tessera_session_step(c.handle, View(x), View(y.narrow(0, 0, 1)), &done),
               TESSERA_USAGE_ERROR, "inputs are a tensor of shape [2, 3] and targets");
  expect_error(tessera_session_predict(c.handle, View(x), View(at::zeros({2, 3}))),
               TESSERA_USAGE_ERROR, "the array has shape [2, 3]; expected [2, 2]");
  expect_error(tessera_session_get_weight(c.handle, "nobody", 0, View(x)), TESSERA_USAGE_ERROR,
               "no parameter nobody");
  expect_error(tessera_session_get_weight(c.handle, "layers.0.weight", 1, View(x)),
               TESSERA_USAGE_ERROR, "rank 1; expected 0 to 0");
  expect_error(tessera_session_set_weight(c.handle, "layers.0.weight", View(x)),
               TESSERA_USAGE_ERROR, "layers.0.weight: a tensor of shape [2, 3]; expected shape");
  expect_error(tessera_session_set_weight(c.handle, "nobody", View(x)), TESSERA_USAGE_ERROR,
               "no parameter nobody");
  expect_error(tessera_load_components("/nowhere.so"), TESSERA_USAGE_ERROR, "/nowhere.so");
  expect_error(tessera_session_save(c.handle), TESSERA_USAGE_ERROR, "no checkpoint.folder");
  expect_ok(tessera_session_step(c.handle, View(x), View(y), &done));  // it goes on
  EXPECT_STREQ(tessera_last_error(), "");

  Bound bound;
  bound.fails = 3;
  void* parameters[] = {&bound.tensors[0], &bound.tensors[1]};
  expect_ok(tessera_session_create_over("optimizer: {type: Adam}\n", c.group.handle, parameters,
                                        kNames, 2, Bound::forward, &bound, &none));
  expect_error(tessera_session_step(none, View(x), View(y), &done), TESSERA_ERROR,
               "forward returned 3");
  tessera_session_free(none);
  parameters[1] = nullptr;
  expect_error(tessera_session_create_over("optimizer: {type: Adam}\n", c.group.handle, parameters,
                                           kNames, 2, Bound::forward, &bound, &none),
               TESSERA_USAGE_ERROR, "a parameter is NULL");
  EXPECT_EQ(none, nullptr);
  expect_error(tessera_session_create_over("optimizer: {type: Adam}\n", c.group.handle, parameters,
                                           kNames, 0, Bound::forward, &bound, &none),
               TESSERA_USAGE_ERROR, "count is 0; expected 1 or more");
}

TEST(CInterface, AWrongArrayOnOneRankIsAnErrorOnAll) {
  testing::run_ranks(2, [](const ProcessGroup& ranks, int rank) {
    Session c(config_with("ZeroRedundancyOptimizer"), ranks);
    const at::Tensor x = inputs_of(1, 0), y = targets_of(x);
    View mine(x);
    if (rank == 1) mine.array.dtype = 7;
    double loss = 0;
    expect_error(tessera_session_step(c.handle, mine, View(y), nullptr), TESSERA_USAGE_ERROR,
                 "tessera_session_step: inputs: dtype 7");
    expect_error(tessera_session_predict(c.handle, mine, View(y)), TESSERA_USAGE_ERROR,
                 "tessera_session_predict: inputs: dtype 7");
    expect_error(tessera_session_evaluate(c.handle, View(x), View(y), rank == 1 ? nullptr : &loss),
                 TESSERA_USAGE_ERROR, "loss is NULL");
    expect_error(
        tessera_session_set_weight(c.handle, "layers.0.bias", rank == 1 ? nullptr : &mine.array),
        TESSERA_USAGE_ERROR, "weight is NULL");
    expect_ok(tessera_session_step(c.handle, View(x), View(y), nullptr));  // it goes on
  });
}

TEST(CInterface, AGroupSums) {
  testing::run_ranks(3, [](const ProcessGroup& ranks, int rank) {
    Group group(ranks);
    const at::Tensor values = at::full({2, 3}, rank + 1, at::kDouble);
    const at::Tensor every_other = at::ones({4}, at::kDouble).as_strided({2}, {2});
    const at::Tensor whole = at::ones({2}, at::kInt);
    expect_error(tessera_group_all_reduce(group.handle, View(whole, TESSERA_INT32), 0.5),
                 TESSERA_USAGE_ERROR, "scale is 0.5 for dtype Int; expected 1");
    expect_error(
        tessera_group_all_reduce(group.handle, View(whole, rank == 1 ? 7 : TESSERA_INT32), 1),
        TESSERA_USAGE_ERROR, "tessera_group_all_reduce: values: dtype 7");
    expect_ok(tessera_group_all_reduce(group.handle, View(values, TESSERA_FLOAT64), 0.5));
    expect_ok(tessera_group_all_reduce(group.handle, View(every_other, TESSERA_FLOAT64), 1));
    EXPECT_TRUE(at::equal(values, at::full({2, 3}, 3.0, at::kDouble)));
    EXPECT_EQ(every_other.sum().item<double>(), 6);
    int number = -1, size = -1;
    expect_ok(tessera_group_rank(group.handle, &number));
    expect_ok(tessera_group_size(group.handle, &size));
    EXPECT_EQ(number, rank);
    EXPECT_EQ(size, 3);
  });
}

TEST(CInterface, ALostRankHasACodeOfItsOwn) {
  testing::run_ranks_catching(2, [](const ProcessGroup& ranks, int rank) {
    if (rank == 1) throw std::runtime_error("gone");
    Group group(ranks);
    const at::Tensor values = at::ones({2});
    int code = TESSERA_OK;
    for (int i = 0; i < 100 && code == TESSERA_OK; ++i)
      code = tessera_group_all_reduce(group.handle, View(values), 1);
    EXPECT_EQ(code, TESSERA_BROKEN_WORLD) << tessera_last_error();
  });
}

}  // namespace
}  // namespace tessera
