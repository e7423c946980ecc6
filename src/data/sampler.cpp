#include "tessera/data/sampler.h"

#include "data/permutation.h"
#include "tessera/error.h"

namespace tessera {
namespace {

void require_position(const char* name, int64_t value) {
  if (value < 0) {
    throw UsageError("Sampler: " + std::string(name) + " is " + std::to_string(value) +
                     ", expected 0 or more");
  }
}

template <class Value>
void require_same(const char* name, const Value& loaded, const Value& own) {
  if (loaded != own) {
    throw UsageError("Sampler: the loaded state has " + std::string(name) + " " + loaded +
                     ", this run has " + name + " " + own +
                     "; expected the same data in the same order");
  }
}

}  // namespace

const char* to_string(SampleOrder order) {
  return order == SampleOrder::sequential ? "sequential" : "shuffled";
}

Sampler::Sampler(int64_t size, SampleOrder order, uint64_t seed) : state_{0, size, order, seed} {
  if (size < 1)
    throw UsageError("Sampler: size is " + std::to_string(size) + ", expected at least one sample");
}

int64_t Sampler::sample(int64_t number) const {
  require_position("sample number", number);
  if (state_.order == SampleOrder::sequential) return number;
  const auto size = static_cast<uint64_t>(state_.size), at = static_cast<uint64_t>(number);
  return static_cast<int64_t>(
      permuted_index(at % size, size, mix_bits(mix_bits(state_.seed) + at / size)));
}

std::vector<int64_t> Sampler::samples(int64_t first, int64_t count) const {
  std::vector<int64_t> result;
  for (int64_t number = first; number < first + count; ++number) result.push_back(sample(number));
  return result;
}

void Sampler::seek(int64_t position) {
  require_position("position", position);
  state_.position = position;
}

void Sampler::load_state(const SamplerState& state) {
  require_same("size", std::to_string(state.size), std::to_string(state_.size));
  require_same<std::string>("order", to_string(state.order), to_string(state_.order));
  if (state_.order == SampleOrder::shuffled)
    require_same("seed", std::to_string(state.seed), std::to_string(state_.seed));
  seek(state.position);
}

}  // namespace tessera
