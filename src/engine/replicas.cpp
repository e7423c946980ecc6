#include "tessera/step/replicas.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/detail/resolved.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr size_t kDigestLength = 32;

std::string digest_of(const void* data, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}
std::string digest_of(const std::string& text) { return digest_of(text.data(), text.size()); }

std::string digest_of_tensor(const at::Tensor& tensor) {
  const at::Tensor plain = detail::resolved(tensor.detach()).to(at::kCPU).contiguous();
  return digest_of(plain.numel() > 0 ? plain.data_ptr() : nullptr, plain.nbytes());
}

/// Digest and name of each tensor, one a line.
std::string list_of(const Tensors& tensors, const std::vector<std::string>& digests) {
  std::string list;
  for (size_t i = 0; i < tensors.size(); ++i) list += digests[i] + tensors[i].first + '\n';
  return list;
}

/// The ranks that hold one tensor, by its digest.
using Holders = std::map<std::string, std::vector<int>>;

std::map<std::string, Holders> holders_of(const std::vector<std::string>& lists) {
  std::map<std::string, Holders> tensors;
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    const std::string& list = lists[rank];
    for (size_t at = 0; at < list.size();) {
      const size_t end = list.find('\n', at);
      const std::string name = list.substr(at + kDigestLength, end - at - kDigestLength);
      tensors[name][list.substr(at, kDigestLength)].push_back(static_cast<int>(rank));
      at = end + 1;
    }
  }
  return tensors;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// The digest of more than half of the ranks; "" if there is none.
std::string majority(const Holders& holders) {
  size_t all = 0;
  for (const auto& [digest, ranks] : holders) all += ranks.size();
  for (const auto& [digest, ranks] : holders)
    if (2 * ranks.size() > all) return digest;
  return "";
}

/// The ranks outside the majority, ascending; empty if there is none.
std::vector<int> minority_of(const Holders& holders) {
  const std::string most = majority(holders);
  std::vector<int> result;
  for (const auto& [digest, ranks] : holders)
    if (!most.empty() && digest != most) result.insert(result.end(), ranks.begin(), ranks.end());
  std::sort(result.begin(), result.end());
  return result;
}

std::string describe(const std::string& name, const Holders& holders) {
  const std::string most = majority(holders);
  std::vector<std::string> texts;
  for (const auto& [digest, ranks] : holders)
    if (digest != most) texts.push_back(ranks_text(ranks));
  std::sort(texts.begin(), texts.end());
  return most.empty() ? fmt::format("{} is not the same on {}", name, fmt::join(texts, " and "))
                      : fmt::format("{} on {} is not that of {}", name, fmt::join(texts, " and "),
                                    ranks_text(holders.at(most)));
}

void copy_majority(const std::string& name, const Holders& holders, const Tensors& tensors,
                   ProcessGroup& group) {
  const std::vector<int>& sound = holders.at(majority(holders));
  const auto own = std::find_if(tensors.begin(), tensors.end(),
                                [&](const auto& tensor) { return tensor.first == name; });
  std::string bytes;
  if (group.rank() == sound.front()) {
    const at::Tensor plain = detail::resolved(own->second.detach()).to(at::kCPU).contiguous();
    bytes.assign(static_cast<const char*>(plain.data_ptr()), plain.nbytes());
  }
  bytes = group.broadcast_bytes(bytes, sound.front());
  if (own == tensors.end() || std::find(sound.begin(), sound.end(), group.rank()) != sound.end())
    return;
  const torch::NoGradGuard no_grad;
  at::Tensor target = own->second.detach();
  target.copy_(torch::from_blob(bytes.data(), target.sizes(), target.scalar_type()));
}

}  // namespace

std::string check_replicas(const Tensors& tensors, ProcessGroup group, bool repair) {
  std::string names;
  std::vector<std::string> digests;
  for (const auto& [name, tensor] : tensors) {
    names += name + '\n';
    digests.push_back(digest_of_tensor(tensor));
  }
  const std::string list = list_of(tensors, digests);
  // Ranks with equal names must have equal lists.
  const std::string mine = digest_of(names) + digest_of(list);
  std::map<std::string, std::string> by_names;
  bool equal = true;
  for (const auto& other : group.all_gather_bytes(mine, "digests of replicas")) {
    const auto [first, fresh] =
        by_names.emplace(other.substr(0, kDigestLength), other.substr(kDigestLength));
    equal = equal && (fresh || first->second == other.substr(kDigestLength));
  }
  if (equal) return "";
  std::string first;
  std::vector<int> began;  // the ranks outside the majority for that tensor
  size_t count = 0;
  const auto holders = holders_of(group.all_gather_bytes(list, "digests of each replica"));
  for (const auto& [name, ranks] : holders) {
    if (ranks.size() < 2) continue;
    if (count++ == 0) {
      first = describe(name, ranks);
      began = minority_of(ranks);
    }
    if (!repair) continue;
    if (majority(ranks).empty()) {
      throw AgreedError("check_replicas: " + describe(name, ranks) +
                        "; expected a majority of ranks with the same bits, to repair it");
    }
    copy_majority(name, ranks, tensors, group);
  }
  if (count > 1) first += fmt::format(", and {} other tensors differ", count - 1);
  if (!repair) {
    detail::report_agreed(began, "check_replicas: " + first);
    throw AgreedError("check_replicas: " + first + "; expected the same bits on all ranks");
  }
  return first;
}

}  // namespace tessera
