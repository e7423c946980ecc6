#include "checkpoint/pickle/legacy_archive.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "checkpoint/pickle/allowed_names.h"
#include "checkpoint/pickle/file_kind.h"
#include "checkpoint/pickle/pickle_reader.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

constexpr size_t kMaxStorages = 200'000;
constexpr size_t kMaxPrologueBytes = 4096;  // of each pickle that describes one thing
constexpr size_t kMaxTarMembers = 64, kMaxTarObjects = 20'000, kMaxTarDims = 64;
constexpr uint64_t kTarBlock = 512;

/// Bytes of an element of a storage class of module torch; 0 for a dtype that is not read.
uint64_t width_of(std::string_view storage_class) {
  for (const auto& dtype : kDtypes)
    if (!dtype.storage.empty() && dtype.storage == storage_class) return dtype.bytes;
  return 0;
}

/// The same of each storage, by key.
std::unordered_map<std::string_view, uint64_t> widths_of(const Values& values) {
  std::unordered_map<std::string_view, uint64_t> widths;
  for (const auto& storage : values.storages) {
    const auto& items = values.items(storage);
    widths.emplace(values.text(items[1]), width_of(values.text(values.items(items[0])[1])));
  }
  return widths;
}

/// Reads a part of the file from its beginning to its end.
struct Stream {
  const std::string& where;
  const ReadAt& read;
  uint64_t at, end;

  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(where + "is no sound file of torch.save before PyTorch 1.6: " + reason);
  }
  void take(void* to, size_t bytes) {
    if (end - at < bytes) refuse("it ends too early");
    read(to, bytes, at);
    at += bytes;
  }
  /// Little-endian, as all that Tessera runs on. One read, because a call of the system costs more
  /// than a number.
  std::vector<int64_t> numbers(size_t count) {
    std::vector<int64_t> values(count);
    take(values.data(), count * sizeof(int64_t));
    return values;
  }
  int64_t number() { return numbers(1)[0]; }
  Values pickle(size_t most, bool tensor_ids = false) {
    std::string text(std::min<uint64_t>(end - at, most), '\0');
    read(text.data(), text.size(), at);
    Values values = read_pickle(where, std::move(text), tensor_ids);
    at += values.pickle.size();
    return values;
  }
  void check_machine() {
    const Values machine = pickle(kMaxPrologueBytes);
    const Value* little =
        machine.root.kind == Kind::dict ? machine.find(machine.root, "little_endian") : nullptr;
    if (little == nullptr || little->integer == 0) refuse("it is not of a little-endian machine");
  }
  /// Takes the elements of a storage and their number. The record contains the elements.
  ZipRecord storage(std::string_view key, uint64_t width) {
    if (width == 0) refuse("a storage has a dtype that Tessera does not read");
    const auto count = static_cast<uint64_t>(number());
    if (count > (end - at) / width) refuse("a storage leaves the file");
    ZipRecord record{"data/" + std::string(key), at, count * width};
    at += record.bytes;
    return record;
  }
};

/// Reads the tar archive of PyTorch 0.1. Its members are: `sys_info`. `pickle`, in which a tensor
/// is a text with its number. `tensors`: their count; then for each one a pickle of its number, its
/// storage's number and a class, the number of dimensions, sizes, strides and offset. `storages`:
/// their count; then for each one a pickle of its number, place and class, the number of elements,
/// and the elements. After it comes a list of views of storages, which is not read.
class TarReader {
 public:
  TarReader(const std::string& where, uint64_t file_bytes, const ReadAt& read)
      : file_{where, read, 0, file_bytes} {}

  LegacyArchive run() {
    find_members();
    member("sys_info").check_machine();
    archive_.values = member("pickle").pickle(kMaxPickleBytes, true);
    read_storages(member("storages"));
    read_tensors(member("tensors"));
    for (const auto& value : archive_.values.tensor_ids) {
      auto& items = archive_.values.nodes[value.node];
      const auto found = tensors_.find(std::string(archive_.values.text(items[0])));
      if (found == tensors_.end()) file_.refuse("a value is none of its tensors");
      items = found->second;
    }
    return std::move(archive_);
  }

 private:
  void find_members() {
    std::string header(kTarBlock, '\0');
    for (size_t i = 0; i < kMaxTarMembers && file_.end - file_.at >= kTarBlock; ++i) {
      file_.take(header.data(), header.size());
      const std::string name = header.substr(0, header.find('\0'));
      if (name.empty()) return;
      const char* digits = header.data() + 124;
      uint64_t bytes = 0;
      if (std::from_chars(digits, digits + 11, bytes, 8).ec != std::errc() ||
          bytes > file_.end - file_.at)
        file_.refuse("a member of the archive leaves it");
      members_.emplace(name, Stream{file_.where, file_.read, file_.at, file_.at + bytes});
      file_.at += std::min(file_.end - file_.at, (bytes + kTarBlock - 1) / kTarBlock * kTarBlock);
    }
  }

  Stream member(const std::string& name) const {
    const auto found = members_.find(name);
    if (found == members_.end())
      throw UsageError(file_.where + "is a tar archive without a member " + name +
                       ", which PyTorch 0.1 writes; expected a file of torch.save: unpack it");
    return found->second;
  }

  size_t count(Stream& in) const {
    const Values number = in.pickle(kMaxPrologueBytes);
    if (number.root.kind != Kind::integer || number.root.integer < 0 ||
        number.root.integer > static_cast<int64_t>(kMaxTarObjects))
      in.refuse("it has no number of tensors or storages of at most " +
                std::to_string(kMaxTarObjects));
    return static_cast<size_t>(number.root.integer);
  }

  /// The description of a tensor or storage: three values. The first `numbers` of them are numbers.
  static Values described(Stream& in, size_t numbers) {
    Values values = in.pickle(kMaxPrologueBytes);
    bool sound = values.root.kind == Kind::tuple && values.items(values.root).size() == 3;
    for (size_t i = 0; sound && i < numbers; ++i)
      sound = values.items(values.root)[i].kind == Kind::integer;
    if (!sound) in.refuse("a tensor or storage has other values than PyTorch writes");
    return values;
  }

  Value node(Kind kind, std::vector<Value> items) {
    Value value;
    value.kind = kind;
    value.node = static_cast<uint32_t>(archive_.values.nodes.size());
    archive_.values.nodes.push_back(std::move(items));
    return value;
  }
  Value text(std::string_view text) {
    Value value;
    value.kind = Kind::text;
    value.piece = {static_cast<uint32_t>(archive_.values.pickle.size()),
                   static_cast<uint32_t>(text.size())};
    archive_.values.pickle += text;
    return value;
  }
  static Value integer(int64_t number) {
    Value value;
    value.kind = Kind::integer;
    value.integer = number;
    return value;
  }

  void read_storages(Stream in) {
    for (size_t left = count(in); left > 0; --left) {
      const Values values = described(in, 1);
      const auto& items = values.items(values.root);
      const bool known = items[2].kind == Kind::global;
      const auto type = known ? values.text(values.items(items[2])[1]) : "";
      const std::string key = std::to_string(items[0].integer);
      archive_.records.push_back(in.storage(key, width_of(type)));
      const auto elements = static_cast<int64_t>(archive_.records.back().bytes / width_of(type));
      const Value global = node(Kind::global, {text("torch"), text(type)});
      storages_.emplace(items[0].integer,
                        node(Kind::storage, {global, text(key), integer(elements)}));
    }
  }

  void read_tensors(Stream in) {
    for (size_t left = count(in); left > 0; --left) {
      const Values values = described(in, 2);
      const auto& items = values.items(values.root);
      const auto storage = storages_.find(items[1].integer);
      if (storage == storages_.end())
        in.refuse("a tensor has a storage that is not there, or is a view of another storage");
      const auto dims = static_cast<uint32_t>(in.number());  // the upper half was not always set
      if (dims > kMaxTarDims) in.refuse("a tensor has more than 64 dimensions");
      std::vector<Value> numbers;
      for (const int64_t number : in.numbers(2 * dims + 1)) numbers.push_back(integer(number));
      const auto strides = numbers.begin() + dims, offset = strides + dims;
      std::vector<Value> tensor{storage->second, *offset};
      tensor.push_back(node(Kind::tuple, {numbers.begin(), strides}));
      tensor.push_back(node(Kind::tuple, {strides, offset}));
      tensors_.emplace(std::to_string(items[0].integer), std::move(tensor));
    }
  }

  Stream file_;
  LegacyArchive archive_;
  std::unordered_map<std::string, Stream> members_;
  std::unordered_map<int64_t, Value> storages_;
  std::unordered_map<std::string, std::vector<Value>> tensors_;  // the items of their nodes
};

}  // namespace

LegacyArchive read_legacy_archive(const std::string& where, uint64_t file_bytes,
                                  const ReadAt& read) {
  Stream in{where, read, 0, file_bytes};
  std::string begin(std::min<uint64_t>(file_bytes, kKindBytes), '\0');
  read(begin.data(), begin.size(), 0);
  if (is_tar(begin)) return TarReader(where, file_bytes, read).run();
  in.pickle(kMaxPrologueBytes);  // a number by which the file was recognised
  in.pickle(kMaxPrologueBytes);  // the form, 1001 in all files
  in.check_machine();
  LegacyArchive archive{in.pickle(kMaxPickleBytes), {}};
  const Values keys = in.pickle(kMaxPickleBytes);
  if (keys.root.kind != Kind::list || keys.items(keys.root).size() > kMaxStorages)
    in.refuse("it has no list of at most " + std::to_string(kMaxStorages) + " storages");
  const auto widths = widths_of(archive.values);
  for (const auto& key : keys.items(keys.root)) {
    const auto found = key.kind == Kind::text ? widths.find(keys.text(key)) : widths.end();
    if (found == widths.end()) in.refuse("a storage has a key that its values do not use");
    archive.records.push_back(in.storage(found->first, found->second));
  }
  return archive;
}

}  // namespace tessera::pickle
