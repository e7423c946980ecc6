#include "fsdp/paging/advice.h"

#include <algorithm>
#include <initializer_list>

#include <fmt/format.h>

#include "tessera/step/agreement.h"

namespace tessera::fsdp {

namespace {

bool contains_any(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

}  // namespace

void advise_on_dtypes(const c10::Error& error, const MixedPrecision& mixed,
                      const std::string& where) {
  const auto text = message_of(error);
  // The words that libtorch's operators use for it.
  if (!mixed.param_dtype ||
      !contains_any(text, {"dtype", "scalar type", "Input type", "data type"}))
    return;
  const auto dtype = c10::toString(*mixed.param_dtype);
  throw UsageError(fmt::format(
      "{}: {}; option mixed_precision.param_dtype is {}, so the model's parameters have this dtype "
      "while it runs, {}. Tensors that forward makes or keeps itself (constants, masks, states, "
      "targets of a loss) keep theirs; expected cast_input(tensor) or tensor.to(parameter.dtype()) "
      "where they meet parameters",
      where, text, dtype,
      mixed.cast_forward_inputs
          ? "and so have the tensors among forward's arguments"
          : "but forward's arguments have not (cast_forward_inputs is false)"));
}

void advise_on_order(const UsageError& error) {
  const std::string text = error.what();
  if (!contains_any(text, {"the ranks disagree about a collective"})) return;
  throw UsageError(
      text +
      ". FullyShardedDataParallel: ranks may use different units and parameters, but all make the "
      "same forwards, backwards and own collectives, in the same order. On an accelerator, and in "
      "a join where some rank has no data, they must also use the same units in the same order, "
      "and a branch that leaves out parameters on some ranks adds 0 * parameter.sum() of these to "
      "the loss");
}

}  // namespace tessera::fsdp
