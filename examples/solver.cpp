// A simulation that trains while it runs: the solver has the time loop, Tessera makes the steps.
//   tessera run -n 3 solver STEPS
#include <cmath>
#include <cstdlib>
#include <iostream>

#include <tessera/tessera.h>

const char* const config = R"(
model: {type: MLP, inputs: 3, outputs: 1, hidden: [32, 32], dtype: float64}
loss: {type: mse}
optimizer: {type: AdamW, lr: 3.0e-3}
parallel: {type: ZeroRedundancyOptimizer}
train: {clip_grad_norm: 1.0, save: solver.safetensors}
checkpoint: {folder: solver_run, every: 100}
)";

/// A coarse field that is transported with its own speed, and the exact flux at the points where it
/// is steep: as many samples as the solution asks for, another number on each rank and in each
/// step.
std::pair<torch::Tensor, torch::Tensor> advance(int64_t step, int rank, int ranks) {
  const auto x = torch::arange(rank, 96, ranks, torch::kDouble) * (2 * M_PI / 96);
  const double t = 0.01 * static_cast<double>(step % 200);
  const auto u = (x - t).sin() + 0.3 * (3 * x + t).cos();
  const auto slope = (x - t).cos() - 0.9 * (3 * x + t).sin();
  const auto steep = (slope.abs() > 0.8).nonzero().flatten();
  const auto inputs = torch::stack({u, slope, u * slope}, 1).index_select(0, steep);
  return {inputs, (0.5 * u * u - 0.1 * slope).unsqueeze(1).index_select(0, steep)};
}

int main(int argc, char** argv) try {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 300;
  auto world = tessera::init_process_group();
  tessera::TrainingSession session(tessera::parse_config(config), world);
  while (session.steps() < steps) {
    const auto [inputs, flux] = advance(session.steps(), world.rank(), world.size());
    const auto done = session.step(inputs, flux);
    if (world.rank() == 0 && done.step % 100 == 99)
      std::cout << "step " << done.step << ", loss " << done.loss << ", " << done.samples
                << " samples" << std::endl;
  }
  const auto [inputs, flux] = advance(0, world.rank(), world.size());
  const auto corrected = session.predict(inputs);  // the solver goes on with these
  const auto test = session.evaluate(inputs, flux);
  if (world.rank() == 0) std::cout << "evaluation " << test.at("loss") << std::endl;
  session.finish();
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
