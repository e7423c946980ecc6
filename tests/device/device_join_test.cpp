// Ranks with unequal data on a device; device_parity_test.cpp has the test.
#include "device/wrapped.h"

namespace tessera::on_device {
namespace {

/// Two loops, with means over all ranks and over those that have data. In the first one the last
/// rank ends last; in the second one the first rank does, and the last one has no data at all.
Training unequal(const MakeWrapped& make) {
  return [=](ProcessGroup group, at::Device where) -> Outcome {
    const auto model = make(group, where);
    const int world = group.size();
    const auto train = [&](int first, int batches, bool all_ranks) {
      join(model->joinables(), {.divide_by_initial_world_size = all_ranks}, [&](JoinLoop& loop) {
        for (int i = 0; i < batches; ++i) {
          loop.next();
          model->step(batch(first + i, group.rank(), where));
        }
      });
    };
    train(0, 1 + 2 * group.rank(), true);
    train(10, 2 * (world - 1 - group.rank()), false);
    std::vector<at::Tensor> result;
    for (const auto& [name, tensor] : model->state().tensors()) result.push_back(tensor);
    return {result, 0};
  };
}

const auto kShardingGradients = ZeroOptions{.bucket_cap_mb = 1e-4, .shard_gradients = true};
const std::vector<int> kPairs{2, 4};

Training unequal_groups(const MakeWrapped& inner) {
  return unequal(wrapped<InLocalSgd>(LocalSgdOptions{}, inner, 2));
}

Case paired(const char* name, Training train) {
  Case result{name, std::move(train)};
  result.worlds = kPairs;
  return result;
}

INSTANTIATE_TEST_SUITE_P(
    UnequalData, DeviceParity,
    ::testing::Values(
        Case{"ddp_join", unequal(wrapped<InDdp>())}, Case{"zero_join", unequal(wrapped<InZero>())},
        Case{"zero_shard_gradients_join", unequal(wrapped<InZero>(kShardingGradients))},
        Case{"ddp_with_zero_join", unequal(wrapped<InDdpWithZero>())},
        Case{"distributed_optimizer_join", unequal(wrapped<InDistributedOptimizer>(means()))},
        Case{"distributed_optimizer_packed_join",
             unequal(wrapped<InDistributedOptimizer>(means(true)))},
        Case{"fsdp_join", unequal(wrapped<InFsdp>())},
        Case{"local_sgd_join", unequal(wrapped<InLocalSgd>(LocalSgdOptions{}))},
        Case{"local_sgd_in_background_join",
             unequal(wrapped<InLocalSgd>(LocalSgdOptions{.overlap = Overlap::background}))},
        paired("local_sgd_ddp_join", unequal_groups(wrapped<InDdp>())),
        paired("local_sgd_zero_join", unequal_groups(wrapped<InZero>())),
        paired("local_sgd_fsdp_join", unequal_groups(wrapped<InFsdp>()))),
    name_of_case);

}  // namespace
}  // namespace tessera::on_device
