#include "comm/base/wire_codec.h"

#include <cmath>
#include <stdexcept>

#include <gtest/gtest.h>

#include "harness/batches.h"

namespace tessera::testing {
namespace {

using comm::decode;
using comm::encode;
using comm::encoded_bytes;
using comm::WireFeedback;

constexpr auto kBlock = comm::kWireBlock;
constexpr auto kInt8 = WireFormat::int8;

TEST(WireCodec, TheErrorIsAtMostHalfAStepOfTheBlock) {
  for (const int64_t numel : {0, 1, 255, 256, 257, 1000}) {
    auto values = random_batch({numel}, static_cast<int>(numel));
    if (numel > kBlock) values.narrow(0, kBlock, numel - kBlock).mul_(1000);
    const auto bytes = encode(kInt8, values);
    ASSERT_EQ(bytes.numel(), encoded_bytes(kInt8, numel));
    const auto back = decode(kInt8, bytes, numel);
    for (int64_t begin = 0; begin < numel; begin += kBlock) {
      const auto size = std::min(kBlock, numel - begin);
      const auto block = values.narrow(0, begin, size);
      const double step = block.abs().max().item<double>() / 127;
      EXPECT_LE((back.narrow(0, begin, size) - block).abs().max().item<double>(), 0.5001 * step);
    }
  }
}

TEST(WireCodec, ZerosStayZero) {
  EXPECT_TRUE(at::equal(decode(kInt8, encode(kInt8, at::zeros({300})), 300), at::zeros({300})));
}

TEST(WireCodec, ABlockWithAValueThatIsNotFiniteBecomesNan) {
  for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    auto values = at::ones({600});
    values[300] = bad;
    const auto back = decode(kInt8, encode(kInt8, values), 600);
    EXPECT_TRUE(back.narrow(0, kBlock, kBlock).isnan().all().item<bool>()) << bad;
    EXPECT_TRUE(at::isfinite(back.narrow(0, 0, kBlock)).all().item<bool>()) << bad;
    EXPECT_TRUE(at::isfinite(back.narrow(0, 2 * kBlock, 600 - 2 * kBlock)).all().item<bool>());
  }
}

TEST(WireCodec, ABlockTooSmallForAScaleBecomesZeros) {
  const auto values = at::full({300}, 1e-40F);
  EXPECT_TRUE(at::equal(decode(kInt8, encode(kInt8, values), 300), at::zeros({300})));
}

TEST(WireCodec, Bfloat16RoundsToNearest) {
  for (const int64_t numel : {0, 1, 1000}) {
    const auto values = random_batch({numel}, 5);
    const auto bytes = encode(WireFormat::bfloat16, values);
    ASSERT_EQ(bytes.numel(), 2 * numel);
    EXPECT_TRUE(at::equal(decode(WireFormat::bfloat16, bytes, numel),
                          values.to(at::kBFloat16).to(at::kFloat)));
  }
}

TEST(WireCodec, BytesOfAnotherLengthAreRefused) {
  const auto bytes = encode(kInt8, at::ones({300}));
  EXPECT_THROW(decode(kInt8, bytes, 600), std::logic_error);
  EXPECT_THROW(decode(WireFormat::bfloat16, bytes, 300), std::logic_error);
}

TEST(WireFeedback, WhatAStepLacksComesInTheNext) {
  const auto values = random_batch({700}, 3);
  WireFeedback feedback;
  auto sent = at::zeros({700});
  constexpr int kSteps = 50;
  for (int step = 0; step < kSteps; ++step) {
    feedback.begin();
    sent += decode(kInt8, feedback.encode(kInt8, values), 700);
    feedback.commit();
  }
  const double step = values.abs().max().item<double>() / 127;
  EXPECT_LE((sent - kSteps * values).abs().max().item<double>(), 0.6 * step);
  EXPECT_EQ(feedback.bytes(), 700 * 4);
}

TEST(WireFeedback, ARepeatedCollectiveStartsFromTheSameErrors) {
  const auto values = random_batch({300}, 3), other = random_batch({300}, 4);
  WireFeedback once, twice;
  at::Tensor expected, found;
  for (int step = 0; step < 3; ++step) {
    once.begin();
    expected = once.encode(kInt8, values);
    once.commit();
    twice.begin();
    twice.encode(kInt8, other);
    twice.begin();
    found = twice.encode(kInt8, values);
    twice.commit();
    EXPECT_TRUE(at::equal(found, expected)) << step;
  }
}

/// A collective of `values`, complete. Returns what arrives.
at::Tensor sent(WireFeedback& feedback, const at::Tensor& values) {
  feedback.begin();
  const auto bytes = feedback.encode(kInt8, values);
  feedback.commit();
  return decode(kInt8, bytes, values.numel());
}

TEST(WireFeedback, ADiscardReturnsToTheLastAcceptedStep) {
  const auto values = [](int seed) { return random_batch({700}, seed); };
  WireFeedback plain, discards;
  for (int step = 0; step < 4; ++step) {
    for (const int collective : {0, 1}) {
      EXPECT_TRUE(at::equal(sent(discards, values(2 * step + collective)),
                            sent(plain, values(2 * step + collective))))
          << step;
    }
    plain.accept();
    discards.accept();
    for (int collective = 0; collective < step; ++collective) sent(discards, values(50));
    discards.begin();
    discards.encode(kInt8, values(51));  // not complete
    discards.discard();
    discards.discard();
  }
}

TEST(WireFeedback, WithoutAnAcceptedStepADiscardForgetsAll) {
  const auto values = random_batch({300}, 3);
  WireFeedback feedback, fresh;
  sent(feedback, values);
  feedback.discard();
  EXPECT_EQ(feedback.bytes(), 0);
  EXPECT_TRUE(at::equal(sent(feedback, values), sent(fresh, values)));
}

TEST(WireFeedback, ErrorsOfTheAcceptedStepTakeMemoryOnlyWithinTheNext) {
  constexpr int64_t kOnce = 300 * 4;
  const auto values = random_batch({300}, 3);
  WireFeedback feedback;
  for (int step = 0; step < 3; ++step) {
    sent(feedback, values);
    sent(feedback, values);
    EXPECT_EQ(feedback.bytes(), step == 0 ? kOnce : 2 * kOnce);
    if (step == 1) feedback.discard();
    else feedback.accept();
    EXPECT_EQ(feedback.bytes(), kOnce);
    feedback.rescale(2);
    EXPECT_EQ(feedback.bytes(), kOnce);
  }
}

TEST(WireFeedback, RescaledErrorsFitRescaledValues) {
  const auto values = random_batch({700}, 3), more = random_batch({700}, 4);
  WireFeedback plain, scaled;
  for (auto* feedback : {&plain, &scaled}) {
    sent(*feedback, values);
    feedback->accept();
    sent(*feedback, more);
  }
  scaled.rescale(8);
  EXPECT_TRUE(at::equal(sent(scaled, 8 * values), 8 * sent(plain, values)));
  plain.discard();
  scaled.discard();
  EXPECT_TRUE(at::equal(sent(scaled, 8 * values), 8 * sent(plain, values)));
  scaled.rescale(1e38);
  scaled.rescale(1e38);
  EXPECT_TRUE(at::isfinite(sent(scaled, values)).all().item<bool>());
}

TEST(WireFeedback, AnInfinityLeavesNoError) {
  auto values = at::ones({300});
  values[3] = INFINITY;
  WireFeedback feedback;
  feedback.begin();
  feedback.encode(kInt8, values);
  feedback.commit();
  feedback.begin();
  const auto next = decode(kInt8, feedback.encode(kInt8, at::ones({300})), 300);
  EXPECT_TRUE(at::equal(next, at::ones({300})));
}

}  // namespace
}  // namespace tessera::testing
