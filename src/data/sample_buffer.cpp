#include "tessera/data/sample_buffer.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/core/grad_mode.h>

#include "data/permutation.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw UsageError("SampleBuffer" + text); }

/// "float [3]", the dtype and the shape of one sample.
std::string kind_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  std::string text = std::string(c10::toString(tensor.scalar_type())) + " [";
  for (int64_t d = 1; d < tensor.dim(); ++d)
    text += (d > 1 ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]";
}

void check_kind(const char* name, const at::Tensor& given, const at::Tensor& kept) {
  if (kind_of(given) != kind_of(kept))
    refuse(std::string(".add: ") + name + " of one sample are " + kind_of(given) + "; expected " +
           kind_of(kept) + ", as in the first call");
}

at::Tensor with_rows(const at::Tensor& like, int64_t rows) {
  if (!like.defined()) return {};
  auto shape = like.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, like.options().requires_grad(false));
}

}  // namespace

SampleBuffer::SampleBuffer(SampleBufferOptions options) : options_(options) {
  if (options.capacity < 0)
    refuse(": capacity is " + std::to_string(options.capacity) + "; expected 0 or more");
  if (options.capacity == 0 && options.keep == KeptSamples::reservoir)
    refuse(": a reservoir with capacity 0; expected a capacity, or the newest samples");
}

int64_t SampleBuffer::size() const {
  return options_.capacity > 0 ? std::min(seen_, options_.capacity) : seen_;
}

/// The row for the sample with number `number`; -1: the sample is not kept.
int64_t SampleBuffer::place_of(int64_t number) const {
  const int64_t capacity = options_.capacity;
  if (capacity == 0 || number < capacity) return number;
  if (options_.keep == KeptSamples::newest) return number % capacity;
  const uint64_t random = mix_bits(mix_bits(options_.seed) + static_cast<uint64_t>(number));
  const auto row = static_cast<int64_t>(random % static_cast<uint64_t>(number + 1));
  return row < capacity ? row : -1;
}

/// Makes room for `rows` rows; doubles it, so that adding takes constant time a sample.
void SampleBuffer::reserve(int64_t rows, const at::Tensor& inputs, const at::Tensor& targets) {
  const int64_t room = inputs_.defined() ? inputs_.size(0) : 0;
  if (rows <= room) return;
  int64_t more = std::max(rows, 2 * room);
  if (options_.capacity > 0) more = std::min(more, options_.capacity);
  for (const auto& [kept, given] : {std::pair(&inputs_, &inputs), std::pair(&targets_, &targets)}) {
    at::Tensor larger = with_rows(*given, more);
    if (room > 0 && kept->defined()) larger.narrow(0, 0, room).copy_(*kept);
    *kept = larger;
  }
}

void SampleBuffer::add(const at::Tensor& inputs, const at::Tensor& targets) {
  const at::NoGradGuard no_grad;
  if (!inputs.defined() || inputs.dim() == 0) refuse(".add: inputs have no dimension of samples");
  const int64_t count = inputs.size(0);
  if (targets.defined() && (targets.dim() == 0 || targets.size(0) != count))
    refuse(".add: " + std::to_string(count) + " inputs and " +
           (targets.dim() == 0 ? "a number as targets"
                               : std::to_string(targets.size(0)) + " targets") +
           "; expected as many targets");
  if (inputs_.defined()) {
    check_kind("inputs", inputs, inputs_);
    check_kind("targets", targets, targets_);
  }
  const int64_t all = seen_ + count;
  reserve(options_.capacity > 0 ? std::min(all, options_.capacity) : all, inputs, targets);
  std::unordered_map<int64_t, int64_t> source;  // of rows; a later sample replaces an earlier one
  for (int64_t i = 0; i < count; ++i) source[place_of(seen_ + i)] = i;
  source.erase(-1);
  std::vector<int64_t> from, to;
  for (const auto& [row, i] : source) {
    to.push_back(row);
    from.push_back(i);
  }
  seen_ = all;
  if (to.empty()) return;
  const at::Tensor rows = at::tensor(to, at::kLong), of = at::tensor(from, at::kLong);
  inputs_.index_copy_(0, rows, inputs.index_select(0, of));
  if (targets.defined()) targets_.index_copy_(0, rows, targets.index_select(0, of));
}

Batch SampleBuffer::draw(int64_t count) {
  if (count < 0) refuse(".draw: count is " + std::to_string(count) + "; expected 0 or more");
  if (!inputs_.defined()) return {};
  const int64_t drawn = std::min(count, size());
  const uint64_t key = mix_bits(mix_bits(options_.seed + 1) + static_cast<uint64_t>(draws_++));
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < drawn; ++i)
    rows.push_back(static_cast<int64_t>(
        permuted_index(static_cast<uint64_t>(i), static_cast<uint64_t>(size()), key)));
  const at::Tensor index = at::tensor(rows, at::kLong);
  return {inputs_.index_select(0, index),
          targets_.defined() ? targets_.index_select(0, index) : at::Tensor(),
          {}};
}

std::vector<std::pair<std::string, at::Tensor>> SampleBuffer::state() const {
  std::vector<std::pair<std::string, at::Tensor>> state{
      {"counters", at::tensor({seen_, draws_}, at::kLong)}};
  if (inputs_.defined()) state.emplace_back("inputs", inputs_.narrow(0, 0, size()).clone());
  if (targets_.defined()) state.emplace_back("targets", targets_.narrow(0, 0, size()).clone());
  return state;
}

void SampleBuffer::load_state(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  at::Tensor counters, inputs, targets;
  for (const auto& [name, tensor] : state) {
    if (name == "counters") counters = tensor;
    else if (name == "inputs") inputs = tensor;
    else if (name == "targets") targets = tensor;
  }
  if (!counters.defined() || counters.numel() != 2)
    refuse(".load_state: no tensor counters with two numbers; expected the result of state()");
  const auto* numbers = counters.data_ptr<int64_t>();
  const int64_t rows = inputs.defined() ? inputs.size(0) : 0;
  const int64_t capacity = options_.capacity;
  if (rows != (capacity > 0 ? std::min(numbers[0], capacity) : numbers[0]))
    refuse(".load_state: " + std::to_string(rows) + " samples of " + std::to_string(numbers[0]) +
           ", and the capacity is " + std::to_string(capacity) +
           "; expected the capacity of the run that saved them");
  seen_ = numbers[0];
  draws_ = numbers[1];
  inputs_ = inputs.defined() ? inputs.clone() : at::Tensor();
  targets_ = targets.defined() ? targets.clone() : at::Tensor();
}

}  // namespace tessera
