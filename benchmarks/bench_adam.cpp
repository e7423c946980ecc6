// Times one Adam step over a flat bucket: tessera::FusedAdam, a bare loop with the same memory
// traffic, and libtorch's Adam.
//
//   bench_adam [--elements 100000000] [--rounds 9] [--threads 1] [--json FILE]
//
// Every round runs each candidate once, in turn, on the same arrays; the table shows medians. Below
// the table is a second comparison: the bare loop and FusedAdam's ranges alternate over parts of
// the bucket, so that other load of the machine slows both equally.

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "bare_loop.h"
#include "optim/plain_math.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/optim/fused_optimizer.h"

namespace {

using tessera::FusedAdam;

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> ms;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void measure(std::vector<Candidate>& candidates, int rounds) {
  for (auto& c : candidates) c.run();
  for (int round = 0; round < rounds; ++round) {
    for (auto& c : candidates) {
      const auto start = std::chrono::steady_clock::now();
      c.run();
      c.ms.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
              .count());
    }
  }
}

struct Arrays {
  float *p, *g, *m, *v;
};

// Ratio of the median times of FusedAdam and of the bare loop, which alternate over parts of the
// bucket.
double ratio_by_parts(FusedAdam& optimizer, const at::Tensor& param, const Arrays& a, int rounds) {
  const int64_t part = std::min<int64_t>(param.numel(), 1'000'000), parts = param.numel() / part;
  std::vector<double> bare, ours;
  for (int round = 0; round < rounds; ++round) {
    const auto update = optimizer.begin_update(param);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t at = i * part;
      const bool is_ours = (i + round) % 2 != 0;
      const auto start = std::chrono::steady_clock::now();
      if (is_ours) {
        FusedAdam::update_range(update, at, a.g + at, part);
      } else {
        tessera::benchmarks::bare_four_read_three_write(a.p + at, a.g + at, a.m + at, a.v + at,
                                                        part);
      }
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      (is_ours ? ours : bare).push_back(took.count());
    }
  }
  return ours.empty() || bare.empty() ? 0 : median(ours) / median(bare);
}

struct Bench {
  at::Tensor param;
  std::shared_ptr<FusedAdam> optimizer;
  Arrays arrays;
  std::vector<Candidate> candidates;
};

Bench make_bench(int64_t n, bool with_plain) {
  const auto param = torch::full({n}, 0.5F).requires_grad_();
  param.mutable_grad() = torch::full({n}, 1e-3F);
  const auto optimizer = std::make_shared<FusedAdam>(std::vector<at::Tensor>{param});
  optimizer->step();
  const auto state = tessera::get_state(*optimizer, param).value();
  const auto data = [](at::Tensor t) { return t.data_ptr<float>(); };
  const Arrays a{data(param), data(param.grad()), data(state.tensors.at("exp_avg")),
                 data(state.tensors.at("exp_avg_sq"))};

  std::vector<Candidate> all;
  all.push_back({"bare loop, 4 reads 3 writes",
                 [=] { tessera::benchmarks::bare_four_read_three_write(a.p, a.g, a.m, a.v, n); },
                 {}});
  all.push_back({"tessera::FusedAdam", [optimizer, param] { optimizer->step(); }, {}});
  if (tessera::compat::kHasFusedAdam) {
    all.push_back({"libtorch's fused kernel",
                   [=] {
                     const at::NoGradGuard no_grad;
                     tessera::optim::list_adam({{param,
                                                 param.grad(),
                                                 state.tensors.at("exp_avg"),
                                                 state.tensors.at("exp_avg_sq"),
                                                 {},
                                                 10}},
                                               {1e-3, 0.9, 0.999, 1e-8, 0, false, false}, true);
                   },
                   {}});
  }
  if (with_plain) {
    const auto plain = std::make_shared<torch::optim::Adam>(std::vector<at::Tensor>{param});
    tessera::set_state(*plain, param, state);
    all.push_back({"torch::optim::Adam", [plain, param] { plain->step(); }, {}});
  }
  return {param, optimizer, a, std::move(all)};
}

}  // namespace

int main(int argc, char** argv) {
  int64_t n = 100'000'000;
  int rounds = 9, threads = 1;
  bool skip_plain = false;
  std::string json_path;
  CLI::App app("Adam over one flat bucket");
  app.add_option("--elements", n, "elements of the bucket")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads, "threads of the optimizers; the bare loop has one")
      ->check(CLI::PositiveNumber);
  app.add_flag("--skip-plain", skip_plain,
               "leave out torch::optim::Adam, which is slow and doubles the memory");
  app.add_option("--json", json_path, "also write the figures here");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(threads);
  auto bench = make_bench(n, !skip_plain);
  auto& candidates = bench.candidates;
  measure(candidates, rounds);
  const double by_parts = ratio_by_parts(*bench.optimizer, bench.param, bench.arrays, rounds);
  const double bare = median(candidates.front().ms);
  nlohmann::json report{
      {"elements", n}, {"rounds", rounds}, {"threads", threads}, {"torch", TORCH_VERSION}};
  fmt::print("{:<32} {:>10} {:>10} {:>8}\n", "Adam, median of " + std::to_string(rounds), "ms",
             "GB/s", "ratio");
  for (const auto& c : candidates) {
    const double ms = median(c.ms);
    fmt::print("{:<32} {:>10.2f} {:>10.2f} {:>8.3f}\n", c.name, ms,
               28e-6 * static_cast<double>(n) / ms, ms / bare);
    report["results"].push_back(
        {{"name", c.name}, {"ms", ms}, {"ratio", ms / bare}, {"all_ms", c.ms}});
  }
  fmt::print("FusedAdam against the bare loop, alternating parts: {:.3f}\n", by_parts);
  report["ratio_by_parts"] = by_parts;
  if (!json_path.empty()) {
    std::ofstream file(json_path);
    file << report.dump(2) << "\n";
    if (!file) {
      fmt::print(stderr, "bench_adam: cannot write {}\n", json_path);
      return 1;
    }
  }
  return 0;
}
