// Sums over ranks, encoded values, updates of optimizers and checksums have the same bits on every
// processor: the digests below were made on x86-64. Inputs are made of integers. NaN is left out:
// processors differ in its sign and payload.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#define XXH_STATIC_LINKING_ONLY  // XXH3_state_t
#include <xxhash.h>

#include "comm/base/tree_sum.h"
#include "comm/base/wire_codec.h"
#include "comm/shm/shm_kernels.h"
#include "comm/shm/shm_sum.h"
#include "optim/kernels.h"

#if defined(__x86_64__)
extern "C" {  // of src/comm/base/xxhash.cpp, for processors without AVX2
XXH64_hash_t tessera_generic_64bits(const void* data, size_t bytes);
XXH128_hash_t tessera_generic_128bits(const void* data, size_t bytes);
XXH_errorcode tessera_generic_64bits_update(XXH3_state_t* state, const void* data, size_t bytes);
XXH_errorcode tessera_generic_128bits_update(XXH3_state_t* state, const void* data, size_t bytes);
}
#endif

namespace {

using namespace tessera;

class Numbers {
 public:
  uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 16;
  }
  /// An odd multiple of 2^-exponent, with 31 bits: additions and products of such values round.
  double real(int exponents) {
    const auto bits = static_cast<int64_t>(next() % (1u << 31)) * 2 + 1 - (int64_t{1} << 31);
    return std::ldexp(static_cast<double>(bits), -31 - static_cast<int>(next() % exponents));
  }

 private:
  uint64_t state_ = 1;
};

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)  // FNV-1a
      value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  void add(const at::Tensor& tensor) { add(tensor.data_ptr(), tensor.nbytes()); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037u;
};

at::Tensor tensor_of(Numbers& numbers, at::ScalarType dtype, int64_t count, int exponents = 24) {
  auto tensor = at::empty({count}, at::TensorOptions().dtype(dtype));
  auto* const data = static_cast<uint8_t*>(tensor.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = numbers.next();
    const double real = numbers.real(exponents);
    const auto single = static_cast<float>(real);
    const auto put = [&](const auto& value) {
      std::memcpy(data + i * sizeof value, &value, sizeof value);
    };
    // Every sign and fraction, and exponents below 2; half has subnormal values too.
    if (dtype == at::kHalf) put(static_cast<uint16_t>(bits & 0xBFFF));
    else if (dtype == at::kBFloat16) put(static_cast<uint16_t>((bits & 0x87FF) | 0x3800));
    else if (dtype == at::kFloat) put(single);
    else if (dtype == at::kDouble) put(real);
    else std::memcpy(data + i * tensor.element_size(), &bits, tensor.element_size());
  }
  return tensor;
}

struct Sums {
  at::ScalarType dtype;
  uint64_t digest;
};

class BitsOfSums : public ::testing::TestWithParam<Sums> {};

TEST_P(BitsOfSums, AreThoseOfX86) {
  const auto [dtype, expected] = GetParam();
  Numbers numbers;
  Digest chosen, generic;
  for (const int64_t count : {1, 15, 16, 33, 100, 1003}) {
    for (const size_t ranks : {1, 2, 3, 4, 7}) {
      for (const double scale : {1.0, 1.0 / 3}) {
        if (scale != 1 && !c10::isFloatingType(dtype)) continue;
        std::vector<at::Tensor> inputs;
        std::vector<const std::byte*> places;
        for (size_t r = 0; r < ranks; ++r) {
          inputs.push_back(tensor_of(numbers, dtype, count));
          places.push_back(static_cast<const std::byte*>(inputs.back().data_ptr()));
        }
        auto sum = at::zeros({count}, at::TensorOptions().dtype(dtype));
        auto* const output = static_cast<std::byte*>(sum.data_ptr());
        comm::sum_ranks(dtype, {output}, places, count, scale);
        chosen.add(sum);
        comm::generic_sum_kernel(dtype)({&output, 1, places.data(), ranks, count, scale});
        generic.add(sum);
        const auto rows = at::stack(inputs);
        EXPECT_TRUE(comm::sum_rows(rows, scale).equal(sum)) << count << " " << ranks;
      }
    }
  }
  EXPECT_EQ(chosen.value(), expected) << "the kernel of this processor";
  EXPECT_EQ(generic.value(), expected) << "the kernel of any processor";
}

INSTANTIATE_TEST_SUITE_P(
    , BitsOfSums,
    ::testing::Values(Sums{at::kFloat, 0x49e523f142c56b1e}, Sums{at::kDouble, 0xedc8a5551650b35f},
                      Sums{at::kHalf, 0xd96fd16a40aeba25}, Sums{at::kBFloat16, 0x14ed3a1bf67890a2},
                      Sums{at::kLong, 0xfe458170379b6091}, Sums{at::kInt, 0xeaeed50f3ac40295},
                      Sums{at::kShort, 0x94fd44f764a93d51}, Sums{at::kByte, 0xd56ae1ce6a3ee939}),
    [](const auto& test) { return c10::toString(test.param.dtype); });

TEST(Bits, EncodedValuesAreThoseOfX86) {
  Numbers numbers;
  Digest int8, bfloat16;
  for (const int64_t count : {1, 255, 256, 1003}) {
    auto values = tensor_of(numbers, at::kFloat, count);
    // Halves between two codes, which round to even if the product is rounded before the sum.
    values.narrow(0, 0, count / 2)
        .copy_(at::arange(count / 2, at::kFloat).remainder_(255).mul_(.5));
    for (const auto& [format, digest] :
         {std::pair(WireFormat::int8, &int8), std::pair(WireFormat::bfloat16, &bfloat16)}) {
      const auto bytes = comm::encode(format, values);
      digest->add(bytes);
      digest->add(comm::decode(format, bytes, count));
    }
  }
  EXPECT_EQ(int8.value(), 0xb1fe3f06b175d564);
  EXPECT_EQ(bfloat16.value(), 0x6328f80c4fde365d);
}

/// The state after three updates of `count` elements, and the copies of the parameter.
void add_updates(Digest& digest, optim::Precision precision, int64_t count, RangeKernel kernel,
                 const std::vector<double>& coefficients) {
  const auto dtype = precision == optim::Precision::Float32 ? at::kFloat : at::kDouble;
  Numbers numbers;
  std::vector<at::Tensor> state;
  for (int i = 0; i < 4; ++i) state.push_back(tensor_of(numbers, dtype, count, 8));
  for (int i : {2, 3}) state[i].abs_();
  RangeUpdate update;
  update.kernel = kernel;
  update.parameter = state[0].data_ptr();
  update.first = state[1].data_ptr();
  update.second = state[2].data_ptr();
  update.maximum = state[3].data_ptr();
  update.numel = count;
  std::copy(coefficients.begin(), coefficients.end(), update.coefficients);
  for (const double scale : {1.0, 0.3, 0.125}) {
    const auto grad = tensor_of(numbers, dtype, count, 8);
    auto copy = at::zeros_like(grad);
    kernel(update, 0, grad.data_ptr(), count, scale, scale == 1 ? nullptr : copy.data_ptr());
    digest.add(copy);
  }
  for (const auto& tensor : state) digest.add(tensor);
}

void check_updates() {
  Digest adam_bits, sgd_bits;
  for (const auto precision : {optim::Precision::Float32, optim::Precision::Float64}) {
    for (const int64_t count : {1, 31, 1000}) {
      for (const bool l2 : {false, true}) {
        for (const bool amsgrad : {false, true})
          add_updates(adam_bits, precision, count, optim::adam_kernel(precision, l2, amsgrad),
                      {0.9, 0.1, 0.999, 0.001, 1.7, 1e-8, 0.01, 0.99, 0.03});
        for (const auto momentum :
             {optim::Momentum::None, optim::Momentum::Plain, optim::Momentum::Nesterov})
          add_updates(sgd_bits, precision, count, optim::sgd_kernel(precision, l2, momentum),
                      {0.9, 0.7, 0.01, 0.03});
      }
    }
  }
  EXPECT_EQ(adam_bits.value(), 0x85852794dbce7c2c);
  EXPECT_EQ(sgd_bits.value(), 0x492caab417788ef9);
}

TEST(Bits, UpdatesAreThoseOfX86) {
  for (const bool allowed : {true, false}) {
    optim::allow_avx2(allowed);
    check_updates();
    Numbers numbers;
    Digest squares;
    for (const int64_t count : {1, 15, 16, 1003}) {
      const auto values = tensor_of(numbers, at::kFloat, count);
      const double sum = optim::sum_of_squares(static_cast<float*>(values.data_ptr()), count);
      squares.add(&sum, sizeof sum);
    }
    EXPECT_EQ(squares.value(), 0xad723e969451ae28);
  }
  optim::allow_avx2(true);
}

template <class Whole64, class Whole128, class Update64, class Update128>
uint64_t checksums(Whole64 whole64, Whole128 whole128, Update64 update64, Update128 update128) {
  Digest digest;
  Numbers numbers;
  for (const int64_t count : {0, 1, 16, 200, 241, 1024, 1025, 4096, 70001}) {
    const auto values = tensor_of(numbers, at::kByte, count);
    const auto* const data = static_cast<const char*>(values.data_ptr());
    XXH3_state_t in_parts[2];
    XXH3_64bits_reset(&in_parts[0]);
    XXH3_128bits_reset(&in_parts[1]);
    for (int64_t at = 0, part = 0; at < count; at += part) {
      part = std::min<int64_t>(1 + static_cast<int64_t>(numbers.next() % 3000), count - at);
      update64(&in_parts[0], data + at, part);
      update128(&in_parts[1], data + at, part);
    }
    const XXH64_hash_t sum = XXH3_64bits_digest(&in_parts[0]);
    const XXH128_hash_t wide = XXH3_128bits_digest(&in_parts[1]);
    EXPECT_EQ(sum, whole64(data, count)) << count;
    EXPECT_TRUE(XXH128_isEqual(wide, whole128(data, count))) << count;
    digest.add(&sum, sizeof sum);
    digest.add(&wide, sizeof wide);
  }
  return digest.value();
}

TEST(Bits, ChecksumsAreThoseOfX86) {
  constexpr uint64_t kExpected = 0xddc4821ce86c28c7;
  EXPECT_EQ(checksums(XXH3_64bits, XXH3_128bits, XXH3_64bits_update, XXH3_128bits_update),
            kExpected);
#if defined(__x86_64__)
  EXPECT_EQ(checksums(tessera_generic_64bits, tessera_generic_128bits,
                      tessera_generic_64bits_update, tessera_generic_128bits_update),
            kExpected);
#endif
}

}  // namespace
