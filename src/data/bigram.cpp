#include "tessera/data/bigram.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr double kSmoothing[] = {1.0, 0.1, 0.01, 0.001};

using Counts = std::unordered_map<int64_t, int64_t>;

int64_t count_of(const Counts& counts, int64_t key) {
  const auto found = counts.find(key);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

double bigram_cross_entropy(const Tokens& train, const Tokens& val, int64_t vocab_size) {
  for (const Tokens* part : {&train, &val}) {
    if (part->size() < 2) {
      throw UsageError("bigram: " + part->source() + ": " + std::to_string(part->size()) +
                       " tokens, expected two or more");
    }
    part->require_below(vocab_size);
  }
  // Sparse counts, because a vocabulary of 50,000 has 2.5 billion pairs.
  Counts pairs, firsts;
  for (int64_t i = 0; i + 1 < train.size(); ++i) {
    ++firsts[train[i]];
    ++pairs[train[i] * vocab_size + train[i + 1]];
  }
  double totals[std::size(kSmoothing)] = {};
  for (int64_t i = 0; i + 1 < val.size(); ++i) {
    const auto pair = static_cast<double>(count_of(pairs, val[i] * vocab_size + val[i + 1]));
    const auto first = static_cast<double>(count_of(firsts, val[i]));
    for (size_t s = 0; s < std::size(kSmoothing); ++s) {
      totals[s] -= std::log((pair + kSmoothing[s]) /
                            (first + kSmoothing[s] * static_cast<double>(vocab_size)));
    }
  }
  return *std::min_element(std::begin(totals), std::end(totals)) /
         static_cast<double>(val.size() - 1);
}

}  // namespace tessera
