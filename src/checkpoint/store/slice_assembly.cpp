#include "checkpoint/store/slice_assembly.h"

#include <algorithm>
#include <bit>

#include <fmt/ranges.h>

#include "sharding/bucket.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

/// The elements [begin, end) of the parameter, and the saved slice that they are read from.
struct Part {
  SavedSlice slice;
  int64_t begin, end;

  const SliceRecord& record() const { return *slice.record; }
  const std::string& file() const { return slice.file->name; }
  int64_t offset() const { return begin - record().begin; }
};

class Assembly {
 public:
  Assembly(const std::string& where, const ElementRange& request,
           const std::vector<SavedSlice>& saved, const SliceReader& reader)
      : where_(where), request_(request), range_(request), saved_(saved), reader_(reader) {}

  StateSlice run();

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(where_ + ": " + reason);
  }
  void check_shapes() const;
  void choose_range();
  at::Tensor reordered(const at::Tensor& whole) const;
  std::vector<Part> parts() const;
  std::vector<Part> cover() const;
  void check_consistent(const std::vector<Part>& parts) const;
  bool kept_whole(const std::string& state) const;
  at::Tensor whole(const std::vector<Part>& parts, const std::string& state) const;
  at::Tensor joined(const std::vector<Part>& parts, const std::string& state) const;

  std::string where_;
  const ElementRange& request_;
  ElementRange range_;     // to read: the request, or the whole parameter in its saved order
  bool reorders_ = false;  // the latter
  const std::vector<SavedSlice>& saved_;
  const SliceReader& reader_;
};

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string> state_names(const SliceRecord& slice) {
  std::vector<std::string> names = slice.following;
  names.insert(names.end(), slice.whole.begin(), slice.whole.end());
  std::sort(names.begin(), names.end());
  return names;
}

bool same_bits(const ScalarValue& a, const ScalarValue& b) {
  if (a.index() != b.index()) return false;
  if (const auto* value = std::get_if<double>(&a))
    return std::bit_cast<uint64_t>(*value) == std::bit_cast<uint64_t>(std::get<double>(b));
  return a == b;
}

bool same_bits(const std::map<std::string, ScalarValue>& a,
               const std::map<std::string, ScalarValue>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && same_bits(x.second, y.second);
  });
}

void Assembly::check_shapes() const {
  for (const auto& slice : saved_) {
    if (slice.record->shape != request_.shape) {
      refuse(fmt::format("the parameter has shape [{}] here; it was saved with shape [{}] (in {})",
                         fmt::join(request_.shape, ", "), fmt::join(slice.record->shape, ", "),
                         slice.file->name));
    }
  }
}

/// A parameter that was saved in another memory order than the requested one is read whole.
void Assembly::choose_range() {
  const auto& order = saved_.front().record->strides;
  for (const auto& slice : saved_) {
    if (slice.record->strides != order) {
      refuse(fmt::format("{} and {} contradict each other: strides [{}] and [{}]",
                         saved_.front().file->name, slice.file->name, fmt::join(order, ", "),
                         fmt::join(slice.record->strides, ", ")));
    }
  }
  range_.strides = order;
  reorders_ = !order.empty() && !request_.strides.empty() && request_.strides != order &&
              request_.numel > 0;
  if (!reorders_) return;
  range_.begin = 0;
  range_.numel = count_elements(request_.shape);
}

/// The requested elements of `whole`, which has all elements in their saved order.
at::Tensor Assembly::reordered(const at::Tensor& whole) const {
  if (!reorders_) return whole;
  const auto tensor = whole.as_strided(range_.shape, range_.strides);
  return sharding::in_memory_order(tensor, sharding::order_of(request_))
      .narrow(0, request_.begin, request_.numel)
      .clone();
}

/// A slice with exactly this range if there is one, so that a rank with the same range as before
/// gets its own state back. Otherwise the slices that cover the range.
std::vector<Part> Assembly::parts() const {
  for (const auto& slice : saved_)
    if (slice.record->begin == range_.begin && slice.record->numel == range_.numel)
      return {{slice, range_.begin, range_.begin + range_.numel}};
  // An empty range of a parameter with elements still needs the tensors that are kept whole.
  if (range_.numel == 0)
    return {{saved_.front(), saved_.front().record->begin, saved_.front().record->begin}};
  return cover();
}

std::vector<Part> Assembly::cover() const {
  std::vector<Part> found;
  const int64_t end = range_.begin + range_.numel;
  for (int64_t at = range_.begin; at < end;) {
    const SavedSlice* best = nullptr;
    int64_t best_end = at;
    for (const auto& slice : saved_) {
      const int64_t slice_end = slice.record->begin + slice.record->numel;
      if (slice.record->begin <= at && slice_end > best_end) {
        best = &slice;
        best_end = slice_end;
      }
    }
    if (best == nullptr) {
      refuse(fmt::format("no rank saved its element {}; elements [{}, {}) are requested", at,
                         range_.begin, end));
    }
    best_end = std::min(best_end, end);
    found.push_back({*best, at, best_end});
    at = best_end;
  }
  return found;
}

void Assembly::check_consistent(const std::vector<Part>& parts) const {
  const Part& first = parts.front();
  for (const Part& part : parts) {
    const auto contradict = [&](const std::string& reason) {
      refuse(fmt::format("{} and {} contradict each other: {}", first.file(), part.file(), reason));
    };
    if (part.record().stateless() != first.record().stateless())
      contradict("in one of them the parameter was never stepped");
    if (state_names(part.record()) != state_names(first.record())) {
      contradict(fmt::format("tensors {} and {}", fmt::join(state_names(first.record()), ", "),
                             fmt::join(state_names(part.record()), ", ")));
    }
    if (!same_bits(part.record().scalars, first.record().scalars))
      contradict("their scalars differ");
  }
}

bool Assembly::kept_whole(const std::string& state) const {
  return std::any_of(saved_.begin(), saved_.end(),
                     [&](const auto& slice) { return has(slice.record->whole, state); });
}

at::Tensor Assembly::whole(const std::vector<Part>& parts, const std::string& state) const {
  const Part& first = parts.front();
  const auto tensor = reader_.load(first.file(), first.record().tensor_name(state));
  for (const Part& part : parts) {
    const std::string name = part.record().tensor_name(state);
    // A tensor of one element may follow the parameter or be kept whole. The other slices of the
    // parameter show which is the case.
    if (part.record().numel != 1 && !has(part.record().whole, state)) {
      refuse(fmt::format("{} follows the parameter in {} and is kept whole elsewhere", state,
                         part.file()));
    }
    if (part.slice.file->tensors.at(name) !=
        first.slice.file->tensors.at(first.record().tensor_name(state))) {
      refuse(fmt::format("{} is kept whole, but differs between {} and {}", state, first.file(),
                         part.file()));
    }
  }
  return tensor;
}

at::Tensor Assembly::joined(const std::vector<Part>& parts, const std::string& state) const {
  const auto dtype = reader_.dtype(parts.front().file(), parts.front().record().tensor_name(state));
  at::Tensor all = at::empty({range_.numel}, at::TensorOptions().dtype(dtype));
  for (const Part& part : parts) {
    const std::string name = part.record().tensor_name(state);
    if (reader_.dtype(part.file(), name) != dtype) {
      refuse(fmt::format("{} has dtype {} in {} and {} in {}", state, c10::toString(dtype),
                         parts.front().file(), c10::toString(reader_.dtype(part.file(), name)),
                         part.file()));
    }
    const int64_t count = part.end - part.begin;
    if (count == 0) continue;
    reader_.load_slice(part.file(), name, part.offset(), count,
                       all.narrow(0, part.begin - range_.begin, count));
  }
  return all;
}

StateSlice Assembly::run() {
  StateSlice result{request_, {}};
  if (saved_.empty()) return result;
  check_shapes();
  choose_range();
  if (!reorders_) result.strides = range_.strides;
  const auto found = parts();
  check_consistent(found);
  result.state.scalars = found.front().record().scalars;
  for (const auto& state : state_names(found.front().record())) {
    result.state.tensors[state] =
        kept_whole(state) ? whole(found, state) : reordered(joined(found, state));
  }
  return result;
}

}  // namespace

StateSlice assemble(const std::string& where, const ElementRange& request,
                    const std::vector<SavedSlice>& saved, const SliceReader& reader) {
  return Assembly(where, request, saved, reader).run();
}

}  // namespace tessera::store
