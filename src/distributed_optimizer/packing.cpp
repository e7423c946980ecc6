#include "distributed_optimizer/packing.h"

#include <map>
#include <sstream>

namespace tessera::distributed_optimizer {
namespace {

constexpr size_t kSingles = 8;

}  // namespace

Packs pack_by_arrival(const std::vector<PackItem>& items, const std::vector<size_t>& order,
                      int64_t threshold) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
  };
  Packs packs;
  std::map<std::string, Open> open;
  for (size_t k = 0; k < order.size(); ++k) {
    const auto i = order[k];
    if (k < kSingles) {
      packs.push_back({i});
      continue;
    }
    auto& pack = open[items[i].dtype];
    pack.members.push_back(i);
    pack.bytes += items[i].bytes;
    if (pack.bytes > threshold) {
      packs.push_back(std::move(pack.members));
      pack = {};
    }
  }
  for (auto& [dtype, pack] : open)
    if (!pack.members.empty()) packs.push_back(std::move(pack.members));
  return packs;
}

std::string to_text(const Packs& packs) {
  std::string text;
  for (const auto& pack : packs) {
    if (!text.empty()) text += ' ';
    for (size_t k = 0; k < pack.size(); ++k) text += (k ? "," : "") + std::to_string(pack[k]);
  }
  return text;
}

Packs packs_from_text(const std::string& text) {
  Packs packs;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    auto& pack = packs.emplace_back();
    std::istringstream numbers(word);
    for (std::string number; std::getline(numbers, number, ',');)
      pack.push_back(std::stoul(number));
  }
  return packs;
}

}  // namespace tessera::distributed_optimizer
