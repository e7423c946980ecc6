#include "checkpoint/pickle/torch_values.h"

#include <algorithm>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

using safetensors::in_quotes;

constexpr int kMaxDepth = 32;
constexpr size_t kMaxVisits = 2'000'000;
constexpr size_t kMaxDims = 64;
constexpr size_t kMaxStorageKey = 64;  // bytes; PyTorch counts from 0
constexpr int64_t kMaxRepeatedBytes = 1 << 20;

std::string key_text(const Values& values, const Value& key) {
  if (key.kind == Kind::text) return std::string(values.text(key));
  if (key.kind == Kind::integer) return std::to_string(key.integer);
  return "(" + kind_name(key.kind) + ")";
}

bool is_container(const Value& value) {
  return value.kind == Kind::dict || value.kind == Kind::list || value.kind == Kind::tuple;
}

bool is_foreign(const Value& value) {
  return value.kind == Kind::foreign || value.kind == Kind::set;
}

std::string described(const Values& values, const Value& value) {
  return value.kind == Kind::foreign ? in_quotes(values.global_name(value)) + " of Python"
                                     : kind_name(value.kind);
}

/// Walks over containers. Shared values are visited once for each use, so the visits, the tensors
/// and their names are bounded; a cycle ends at the greatest depth.
class Walk {
 public:
  Walk(const std::string& where, const Values& values) : where_(where), values_(values) {}

  std::vector<TorchTensor> tensors(const Value& root) {
    visit(root, 0);
    check_names();
    return std::move(found_);
  }

  bool any(const Value& root) { return has_tensor(root, 0); }

  /// Counts `more` values as visited.
  void count(size_t more) {
    visits_ += more;
    if (visits_ > kMaxVisits)
      throw UsageError(fmt::format("{}has more than {} values", where_, kMaxVisits));
  }

 private:
  void enter(int depth) {
    if (depth > kMaxDepth)
      throw UsageError(
          fmt::format("{}nests values deeper than {}, or in a cycle", where_, kMaxDepth));
    count(1);
  }

  bool has_tensor(const Value& value, int depth) {
    enter(depth);
    if (value.kind == Kind::tensor) return true;
    if (!is_container(value)) return false;
    for (const auto& item : values_.items(value))
      if (has_tensor(item, depth + 1)) return true;
    return false;
  }

  /// True if a value that Tessera does not read has tensors anywhere in it.
  bool hides_tensor(const Value& root) {
    std::vector<Value> left{root};
    std::unordered_set<uint32_t> seen;
    while (!left.empty()) {
      const Value value = left.back();
      left.pop_back();
      if (value.kind == Kind::tensor || value.kind == Kind::storage) return true;
      if ((!is_container(value) && !is_foreign(value)) || !seen.insert(value.node).second) continue;
      const auto& items = values_.items(value);
      if (value.kind == Kind::foreign && values_.text(items[0]).starts_with("torch.") &&
          values_.text(items[1]).starts_with("_rebuild"))
        return true;
      count(items.size());
      left.insert(left.end(), items.begin(), items.end());
    }
    return false;
  }

  /// name_ contains the name of `value`, before and after the call.
  void visit(const Value& value, int depth) {
    enter(depth);
    if (value.kind == Kind::tensor) return add(value);
    if (is_foreign(value) && hides_tensor(value))
      throw UsageError(fmt::format(
          "{}{} is a {} with tensors, which Tessera does not read; expected tensors in dicts, "
          "lists and tuples: save the state dicts alone with torch.save",
          where_, in_quotes(name_), described(values_, value)));
    if (!is_container(value)) return;
    const auto& items = values_.items(value);
    const size_t name_bytes = name_.size();
    if (!name_.empty()) name_ += '.';
    const size_t prefix_bytes = name_.size();
    const size_t step = value.kind == Kind::dict ? 2 : 1;
    for (size_t i = 0; i + step <= items.size(); i += step) {
      const Value& item = items[i + step - 1];
      if (is_container(item) || is_foreign(item) || item.kind == Kind::tensor) {
        if (step == 2) append(items[i], item.kind != Kind::tensor);
        else name_ += std::to_string(i);
      }
      visit(item, depth + 1);
      name_.resize(prefix_bytes);
    }
    name_.resize(name_bytes);
  }

  /// Appends `key` to the name. The name of a tensor is charged as a whole by add().
  void append(const Value& key, bool charged) {
    const size_t bytes = key.kind == Kind::text ? key.piece.bytes : 0;
    if (name_.size() + bytes > kMaxName)
      throw UsageError(fmt::format("{}has a name of more than {} bytes; expected shorter keys",
                                   where_, kMaxName));
    if (charged) charge(bytes);
    if (key.kind == Kind::text) name_ += values_.text(key);
    else name_ += key_text(values_, key);
  }

  void charge(size_t bytes) {
    const size_t most = std::min(kMaxNameBytes, kFreeNameBytes + 8 * values_.pickle.size());
    name_bytes_ += bytes;
    if (name_bytes_ > most)
      throw UsageError(fmt::format(
          "{}has names of more than {} bytes in all, in a pickle of {} bytes; expected the names "
          "of one model",
          where_, most, values_.pickle.size()));
  }

  void add(const Value& value) {
    if (found_.size() == kMaxTensors)
      throw UsageError(fmt::format(
          "{}has more than {} tensors; expected at most those of one model", where_, kMaxTensors));
    charge(name_.size());
    TorchTensor tensor = tensor_of(where_, name_, values_, value);
    sizes_ += tensor.shape.size();
    if (sizes_ > kMaxSizes)
      throw UsageError(fmt::format(
          "{}has tensors of more than {} dimensions in all; expected at most those of one model",
          where_, kMaxSizes));
    found_.push_back(std::move(tensor));
  }

  void check_names() const {
    std::vector<std::string_view> names;
    for (const auto& tensor : found_) names.emplace_back(tensor.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end())
      throw UsageError(where_ + "has two tensors named " + in_quotes(*twice));
  }

  static constexpr size_t kMaxName = 4096;
  // A small pickle has names of at most 1 MiB and 8 times its bytes, so that it is refused early.
  static constexpr size_t kMaxNameBytes = 16 << 20, kFreeNameBytes = 1 << 20;
  static constexpr size_t kMaxTensors = 200'000, kMaxSizes = 1'000'000;

  const std::string& where_;
  const Values& values_;
  size_t visits_ = 0, name_bytes_ = 0, sizes_ = 0;
  std::string name_;
  std::vector<TorchTensor> found_;
};

std::vector<int64_t> integers(const std::string& where, const Values& values, const Value& tuple) {
  std::vector<int64_t> numbers;
  if (values.items(tuple).size() > kMaxDims)
    throw UsageError(fmt::format("{}has more than {} dimensions", where, kMaxDims));
  for (const auto& item : values.items(tuple)) {
    if (item.kind != Kind::integer || item.integer < 0)
      throw UsageError(where + "has a size, stride or offset that is not a number from 0 on");
    numbers.push_back(item.integer);
  }
  return numbers;
}

DtypeName dtype_of(const std::string& where, const Values& values,
                   const std::vector<Value>& items) {
  const bool untyped = items.size() > 4;
  const auto type = values.items(untyped ? items[4] : values.items(items[0])[0]);
  const auto name = values.text(type[1]);
  for (const auto& dtype : kDtypes)
    if (untyped ? dtype.dtype == name : !dtype.storage.empty() && dtype.storage == name)
      return dtype;
  throw UsageError(where + "has no dtype that PyTorch writes: " + in_quotes(std::string(name)));
}

/// libtorch computes strides for tensors without elements too, with sizes of 0 as 1.
void check_strides(const std::string& where, const TorchTensor& tensor) {
  int64_t product = tensor.dtype.bytes;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product))
      throw UsageError(
          fmt::format("{}has shape [{}], which overflows", where, fmt::join(tensor.shape, ", ")));
  }
}

/// Sets numel and extent, without overflow.
void measure(const std::string& where, TorchTensor& tensor) {
  int64_t last = 0;
  tensor.numel = 1;
  bool fits = true;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    const int64_t size = tensor.shape[i];
    int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(tensor.numel, size, &tensor.numel);
    if (size > 0)
      fits = fits && !__builtin_mul_overflow(size - 1, tensor.strides[i], &reach) &&
             !__builtin_add_overflow(last, reach, &last);
  }
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) {
    check_strides(where, tensor);
    tensor.numel = tensor.extent = 0;
    return;
  }
  const auto elements =
      static_cast<int64_t>(tensor.storage_bytes / static_cast<uint64_t>(tensor.dtype.bytes));
  if (!fits || tensor.offset > elements || last >= elements - tensor.offset)
    throw UsageError(fmt::format(
        "{}has shape [{}], strides [{}] and offset {}, which leave its storage of {} elements",
        where, fmt::join(tensor.shape, ", "), fmt::join(tensor.strides, ", "), tensor.offset,
        elements));
  tensor.extent = last + 1;
  if (tensor.numel > elements && tensor.numel > kMaxRepeatedBytes / tensor.dtype.bytes)
    throw UsageError(
        fmt::format("{}has {} elements, which repeat the {} of its storage; save a "
                    "contiguous copy of it",
                    where, tensor.numel, elements));
}

std::string dicts_of(const Values& values, const Value& dict) {
  std::vector<std::string> names;
  for (size_t i = 0; i + 1 < values.items(dict).size() && names.size() < 10; i += 2)
    if (values.items(dict)[i + 1].kind == Kind::dict)
      names.push_back(in_quotes(key_text(values, values.items(dict)[i])));
  return names.empty() ? "it has no dicts"
                       : fmt::format("its dicts are {}", fmt::join(names, ", "));
}

}  // namespace

std::string kind_name(Kind kind) {
  constexpr const char* kNames[] = {"None",    "bool",   "integer", "float", "text",
                                    "bytes",   "name",   "tuple",   "list",  "dict",
                                    "storage", "tensor", "set",     "value"};
  return kNames[static_cast<size_t>(kind)];
}

bool TorchTensor::contiguous() const {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return numel == 0;
    expected *= shape[i];
  }
  return true;
}

TorchTensor tensor_of(const std::string& where, const std::string& name, const Values& values,
                      const Value& value) {
  const std::string who = where + "tensor " + in_quotes(name) + " ";
  const auto& items = values.items(value);
  const auto& storage = values.items(items[0]);
  TorchTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype_of(who, values, items);
  tensor.offset = items[1].integer;
  tensor.shape = integers(who, values, items[2]);
  tensor.strides = integers(who, values, items[3]);
  if (storage[1].piece.bytes > kMaxStorageKey)
    throw UsageError(fmt::format("{}has a storage with a key of {} bytes; expected at most {}", who,
                                 storage[1].piece.bytes, kMaxStorageKey));
  tensor.storage = std::string(values.text(storage[1]));
  if (tensor.offset < 0 || storage[2].integer < 0 || tensor.shape.size() != tensor.strides.size())
    throw UsageError(who + "has a negative offset or size, or not one stride for each size");
  const auto unit = static_cast<uint64_t>(items.size() > 4 ? 1 : tensor.dtype.bytes);
  if (__builtin_mul_overflow(static_cast<uint64_t>(storage[2].integer), unit,
                             &tensor.storage_bytes))
    throw UsageError(who + "has a storage whose size overflows");
  measure(who, tensor);
  return tensor;
}

bool is_optimizer_state(const Values& values, const Value& value) {
  if (value.kind != Kind::dict) return false;
  const Value* state = values.find(value, "state");
  const Value* groups = values.find(value, "param_groups");
  return state && groups && state->kind == Kind::dict && groups->kind == Kind::list;
}

Value dict_at(const std::string& where, const Values& values, const std::string& path) {
  Value at = values.root;
  size_t begin = 0;
  while (begin < path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    const Value* found = at.kind == Kind::dict ? values.find(at, key) : nullptr;
    if (found == nullptr || found->kind != Kind::dict)
      throw UsageError(
          fmt::format("{}has no dict at {}; {}", where, in_quotes(path),
                      at.kind == Kind::dict ? dicts_of(values, at) : "it has no dicts"));
    at = *found;
    begin = end + 1;
  }
  if (at.kind != Kind::dict && at.kind != Kind::tensor)
    throw UsageError(where + "holds a " + described(values, at) +
                     "; expected a dict of tensors: save the state dicts alone with torch.save");
  return at;
}

Value weights_at(const std::string& where, const Values& values, const std::string& path) {
  const Value dict = dict_at(where, values, path);
  if (!path.empty() || dict.kind != Kind::dict) return dict;
  std::vector<Value> candidates;
  bool optimizer = is_optimizer_state(values, dict);
  Walk walk(where, values);
  const auto& items = values.items(dict);
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    const Value& value = items[i + 1];
    if (value.kind == Kind::tensor) return dict;
    if (value.kind == Kind::dict) walk.count(values.items(value).size());
    if (value.kind == Kind::dict && is_optimizer_state(values, value)) optimizer = true;
    else if (value.kind == Kind::dict && walk.any(value)) candidates.push_back(value);
  }
  if (candidates.size() == 1 && !is_optimizer_state(values, dict)) return candidates[0];
  if (candidates.empty() && !optimizer) return dict;
  throw UsageError(fmt::format(
      "{}holds {}; name the one with the weights: {}", where,
      candidates.empty() ? "the state of an optimizer and no weights" : "several dicts of tensors",
      dicts_of(values, dict)));
}

std::vector<TorchTensor> tensors_in(const std::string& where, const Values& values,
                                    const Value& dict) {
  auto tensors = Walk(where, values).tensors(dict);
  if (tensors.empty() && !values.foreign.empty())
    throw UsageError(where + "has no tensors, but " + foreign_text(values) +
                     "; expected tensors in dicts, lists and tuples");
  return tensors;
}

std::string foreign_text(const Values& values) {
  constexpr size_t kShown = 10;
  std::string text = "values of";
  for (size_t i = 0; i < values.foreign.size() && i < kShown; ++i)
    text += (i > 0 ? ", " : " ") + in_quotes(values.foreign[i]);
  if (values.foreign.size() > kShown)
    text += fmt::format(" and {} more", values.foreign.size() - kShown);
  return text + ", which Tessera does not run or read";
}

}  // namespace tessera::pickle
