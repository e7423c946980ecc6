#include "checkpoint/pickle/legacy_archive.h"

#include <algorithm>
#include <unordered_map>

#include "checkpoint/pickle/allowed_names.h"
#include "checkpoint/pickle/pickle_reader.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

constexpr size_t kMaxStorages = 200'000;
constexpr size_t kMaxPrologueBytes = 4096;  // of each of the first three pickles

/// Bytes of an element of each storage, by key; 0 for a dtype that is not read.
std::unordered_map<std::string_view, uint64_t> widths_of(const Values& values) {
  std::unordered_map<std::string_view, uint64_t> widths;
  for (const auto& storage : values.storages) {
    const auto& items = values.items(storage);
    uint64_t width = 0;
    for (const auto& dtype : kDtypes)
      if (!dtype.storage.empty() && dtype.storage == values.text(values.items(items[0])[1]))
        width = dtype.bytes;
    widths.emplace(values.text(items[1]), width);
  }
  return widths;
}

}  // namespace

LegacyArchive read_legacy_archive(const std::string& where, uint64_t file_bytes,
                                  const ReadAt& read) {
  uint64_t at = 0;
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(where + "is no sound file of torch.save before PyTorch 1.6: " + reason);
  };
  const auto next_pickle = [&](size_t most) {
    std::string text(std::min<uint64_t>(file_bytes - at, most), '\0');
    read(text.data(), text.size(), at);
    Values values = read_pickle(where, std::move(text));
    at += values.pickle.size();
    return values;
  };
  next_pickle(kMaxPrologueBytes);  // a number by which the file was recognised
  next_pickle(kMaxPrologueBytes);  // the form, 1001 in all files
  const Values machine = next_pickle(kMaxPrologueBytes);
  const Value* little =
      machine.root.kind == Kind::dict ? machine.find(machine.root, "little_endian") : nullptr;
  if (little == nullptr || little->integer == 0) refuse("it is not of a little-endian machine");
  LegacyArchive archive{next_pickle(kMaxPickleBytes), {}};
  const Values keys = next_pickle(kMaxPickleBytes);
  if (keys.root.kind != Kind::list || keys.items(keys.root).size() > kMaxStorages)
    refuse("it has no list of at most " + std::to_string(kMaxStorages) + " storages");
  const auto widths = widths_of(archive.values);
  for (const auto& key : keys.items(keys.root)) {
    const auto found = key.kind == Kind::text ? widths.find(keys.text(key)) : widths.end();
    if (found == widths.end()) refuse("a storage has a key that its values do not use");
    if (found->second == 0) refuse("a storage has a dtype that Tessera does not read");
    uint64_t count = 0;  // little-endian, as all that Tessera runs on
    if (file_bytes - at < sizeof count) refuse("it ends too early");
    read(&count, sizeof count, at);
    at += sizeof count;
    if (count > (file_bytes - at) / found->second) refuse("a storage leaves the file");
    archive.records.push_back({"data/" + std::string(found->first), at, count * found->second});
    at += archive.records.back().bytes;
  }
  return archive;
}

}  // namespace tessera::pickle
