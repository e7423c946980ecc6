#include "local_sgd/block_int8.h"

#include <cmath>

#include <gtest/gtest.h>

#include "harness/batches.h"

namespace tessera::testing::local {
namespace {

using local_sgd::dequantize;
using local_sgd::kBlock;
using local_sgd::quantize;
using local_sgd::quantized_bytes;

TEST(BlockInt8, TheErrorIsAtMostHalfAStepOfTheBlock) {
  for (const int64_t numel : {0, 1, 255, 256, 257, 1000}) {
    auto values = random_batch({numel}, static_cast<int>(numel));
    if (numel > kBlock) values.narrow(0, kBlock, numel - kBlock).mul_(1000);
    const auto bytes = quantize(values);
    ASSERT_EQ(bytes.numel(), quantized_bytes(numel));
    const auto back = dequantize(bytes, numel);
    for (int64_t begin = 0; begin < numel; begin += kBlock) {
      const auto size = std::min(kBlock, numel - begin);
      const auto block = values.narrow(0, begin, size);
      const double step = block.abs().max().item<double>() / 127;
      EXPECT_LE((back.narrow(0, begin, size) - block).abs().max().item<double>(), 0.5001 * step);
    }
  }
}

TEST(BlockInt8, ZerosStayZero) {
  EXPECT_TRUE(at::equal(dequantize(quantize(at::zeros({300})), 300), at::zeros({300})));
}

TEST(BlockInt8, ABlockWithAValueThatIsNotFiniteBecomesNan) {
  for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    auto values = at::ones({600});
    values[300] = bad;
    const auto back = dequantize(quantize(values), 600);
    EXPECT_TRUE(back.narrow(0, kBlock, kBlock).isnan().all().item<bool>()) << bad;
    EXPECT_TRUE(at::isfinite(back.narrow(0, 0, kBlock)).all().item<bool>()) << bad;
    EXPECT_TRUE(at::isfinite(back.narrow(0, 2 * kBlock, 600 - 2 * kBlock)).all().item<bool>());
  }
}

}  // namespace
}  // namespace tessera::testing::local
