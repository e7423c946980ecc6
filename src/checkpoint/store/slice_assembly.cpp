#include "checkpoint/store/slice_assembly.h"

#include <algorithm>
#include <bit>

#include <fmt/ranges.h>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

/// A part of the request, and the saved slice that has it.
struct Part {
  SavedSlice slice;
  int64_t begin, end;  // of the parameter

  const SliceRecord& layout() const { return *slice.layout; }
  const std::string& file() const { return slice.file->name; }
  int64_t offset() const { return begin - layout().begin; }
};

class Assembly {
 public:
  Assembly(const std::string& where, const ElementRange& request,
           const std::vector<SavedSlice>& saved, const SliceReader& reader)
      : where_(where + ": optimizer state of " + safetensors::in_quotes(request.parameter)),
        request_(request),
        saved_(saved),
        reader_(reader) {}

  StateSlice run();

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(where_ + ": " + reason);
  }
  void check_shapes() const;
  std::vector<Part> parts() const;
  std::vector<Part> cover() const;
  void check_consistent(const std::vector<Part>& parts) const;
  bool kept_whole(const std::string& state) const;
  at::Tensor whole(const std::vector<Part>& parts, const std::string& state) const;
  at::Tensor joined(const std::vector<Part>& parts, const std::string& state) const;

  std::string where_;
  const ElementRange& request_;
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
    if (slice.layout->shape != request_.shape) {
      refuse(fmt::format("the parameter has shape [{}] here; it was saved with shape [{}] (in {})",
                         fmt::join(request_.shape, ", "), fmt::join(slice.layout->shape, ", "),
                         slice.file->name));
    }
  }
}

/// A slice of just this run if there is one, so that each rank of the same cutting gets its own
/// back; else what covers it.
std::vector<Part> Assembly::parts() const {
  for (const auto& slice : saved_) {
    if (slice.layout->begin == request_.begin && slice.layout->numel == request_.numel) {
      return {{slice, request_.begin, request_.begin + request_.numel}};
    }
  }
  // An empty run of a parameter that is not: what is kept whole is still wanted.
  if (request_.numel == 0)
    return {{saved_.front(), saved_.front().layout->begin, saved_.front().layout->begin}};
  return cover();
}

std::vector<Part> Assembly::cover() const {
  std::vector<Part> found;
  const int64_t end = request_.begin + request_.numel;
  for (int64_t at = request_.begin; at < end;) {
    const SavedSlice* best = nullptr;
    int64_t best_end = at;
    for (const auto& slice : saved_) {
      const int64_t slice_end = slice.layout->begin + slice.layout->numel;
      if (slice.layout->begin <= at && slice_end > best_end) {
        best = &slice;
        best_end = slice_end;
      }
    }
    if (best == nullptr) {
      refuse(fmt::format("no rank saved its element {}; elements [{}, {}) are asked for", at,
                         request_.begin, end));
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
    const auto contradict = [&](const std::string& what) {
      refuse(fmt::format("{} and {} contradict each other: {}", first.file(), part.file(), what));
    };
    if (part.layout().stateless() != first.layout().stateless())
      contradict("in one of them it was never stepped");
    if (state_names(part.layout()) != state_names(first.layout())) {
      contradict(fmt::format("tensors {} and {}", fmt::join(state_names(first.layout()), ", "),
                             fmt::join(state_names(part.layout()), ", ")));
    }
    if (!same_bits(part.layout().scalars, first.layout().scalars))
      contradict("their scalars differ");
  }
}

bool Assembly::kept_whole(const std::string& state) const {
  return std::any_of(saved_.begin(), saved_.end(),
                     [&](const auto& slice) { return has(slice.layout->whole, state); });
}

at::Tensor Assembly::whole(const std::vector<Part>& parts, const std::string& state) const {
  const Part& first = parts.front();
  const auto tensor = reader_.load(first.file(), first.layout().tensor_name(state));
  for (const Part& part : parts) {
    const std::string name = part.layout().tensor_name(state);
    // One element follows the parameter or is kept whole: only the other slices tell.
    if (part.layout().numel != 1 && !has(part.layout().whole, state)) {
      refuse(fmt::format("{} follows the parameter in {}, and is kept whole elsewhere", state,
                         part.file()));
    }
    if (part.slice.file->tensors.at(name) !=
        first.slice.file->tensors.at(first.layout().tensor_name(state))) {
      refuse(fmt::format("{} is kept whole, but differs between {} and {}", state, first.file(),
                         part.file()));
    }
  }
  return tensor;
}

at::Tensor Assembly::joined(const std::vector<Part>& parts, const std::string& state) const {
  const auto dtype = reader_.dtype(parts.front().file(), parts.front().layout().tensor_name(state));
  at::Tensor all = at::empty({request_.numel}, at::TensorOptions().dtype(dtype));
  for (const Part& part : parts) {
    const std::string name = part.layout().tensor_name(state);
    if (reader_.dtype(part.file(), name) != dtype) {
      refuse(fmt::format("{} has dtype {} in {} and {} in {}", state, c10::toString(dtype),
                         parts.front().file(), c10::toString(reader_.dtype(part.file(), name)),
                         part.file()));
    }
    const int64_t count = part.end - part.begin;
    if (count == 0) continue;
    reader_.load_slice(part.file(), name, part.offset(), count,
                       all.narrow(0, part.begin - request_.begin, count));
  }
  return all;
}

StateSlice Assembly::run() {
  StateSlice result{request_.parameter, request_.shape, request_.begin, request_.numel, {}};
  if (saved_.empty()) return result;
  check_shapes();
  const auto found = parts();
  check_consistent(found);
  result.state.scalars = found.front().layout().scalars;
  for (const auto& state : state_names(found.front().layout())) {
    result.state.tensors[state] = kept_whole(state) ? whole(found, state) : joined(found, state);
  }
  return result;
}

}  // namespace

StateSlice assemble(const std::string& where, const ElementRange& request,
                    const std::vector<SavedSlice>& saved, const SliceReader& reader) {
  return Assembly(where, request, saved, reader).run();
}

}  // namespace tessera::store
