#include "mpi/cases.h"

#include <numeric>
#include <stdexcept>

#include "local_sgd/simulation.h"
#include "placements/wrappers.h"

namespace tessera::testing {
namespace {

Tensors train_plain(int world, const Training& training) {
  auto net = fresh(training);
  auto optimizer = adamw(net->parameters());
  for (int step = 0; step < training.steps; ++step) {
    optimizer->zero_grad();
    auto loss = at::zeros({}, training.dtype);
    for (int rank = 0; rank < world; ++rank)
      loss = loss + loss_of(net(own_rows(step, rank).to(training.dtype))) / world;
    loss.backward();
    optimizer->step();
  }
  return copies(net->parameters());
}

}  // namespace

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not as expected: " + what);
}

void expect_sums(ProcessGroup group) {
  const int world = group.size(), rank = group.rank();
  const int64_t ranks = world;
  for (const int64_t numel : {int64_t{1}, int64_t{1001}, int64_t{300000}}) {
    auto sum = at::full({numel}, rank + 1, at::kFloat);
    group.all_reduce(sum);
    expect(sum.eq(ranks * (ranks + 1) / 2).all().item<bool>(), "all_reduce");
    auto root = at::full({numel}, rank, at::kLong);
    group.broadcast(root, world - 1);
    expect(root.eq(world - 1).all().item<bool>(), "broadcast");
    std::vector<int64_t> counts;
    for (int r = 0; r < world; ++r) counts.push_back(r == 0 ? 0 : numel + r);
    const auto all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    auto flat = at::full({all}, rank, at::kHalf);
    group.all_gather(flat, counts);
    const auto parts = flat.split_with_sizes(counts);
    for (int r = 0; r < world; ++r) expect(parts[r].eq(r).all().item<bool>(), "all_gather");
    auto scattered = at::ones({all}, at::kDouble);
    group.reduce_scatter(scattered, counts);
    expect(scattered.split_with_sizes(counts)[rank].eq(world).all().item<bool>(), "reduce_scatter");
  }
  const auto texts = group.all_gather_bytes(std::string(rank, 'x'));
  expect(texts.back().size() == static_cast<size_t>(world - 1), "all_gather_bytes");
  group.barrier();
}

void expect_parity(ProcessGroup group) {
  const Training training;
  const auto plain = train_plain(group.size(), training);
  for (const auto& wrapper : all_trainings(group.size())) {
    if (wrapper.shares && (group.size() == 1 || group.backend_name() != "shm")) continue;
    const auto found = wrapper.train(group, group.rank(), training);
    expect(found.size() == plain.size(), wrapper.name);
    for (size_t i = 0; i < found.size(); ++i)
      expect(at::allclose(found[i], plain[i], 1e-5, 1e-7),
             wrapper.name + ", parameter " + std::to_string(i));
  }
  if (group.size() == 1) return;
  const LocalSgdOptions options{.sync_every = 2};
  local::Simulation simulation(group.size(), options, local::own_batches);
  simulation.run(training.steps);
  auto net = seeded<Uneven>(1);
  const auto optimizer = local::inner_optimizer(net);
  LocalSgd apart(group, local::shards_of(*net), options);
  for (int step = 0; step < training.steps; ++step) {
    local::train_on(net, *optimizer, own_rows(step, group.rank()));
    apart.step();
  }
  expect(at::allclose(local::flat(net->parameters()), simulation.parameters(0), 1e-5, 1e-6),
         "LocalSgd");
}

}  // namespace tessera::testing
