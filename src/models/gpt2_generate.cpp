#include <algorithm>
#include <limits>

#include "tessera/error.h"
#include "tessera/models/gpt2.h"

namespace tessera {
namespace {

/// Evaluation mode for the duration of a scope. An exception restores the previous mode, too.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module)
      : module_(module), training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool training_;
};

/// Draws the next token, [1], from `logits` [V].
at::Tensor sample_token(at::Tensor logits, const GPT2SampleOptions& sample,
                        const std::optional<at::Generator>& generator) {
  if (sample.temperature == 0) return logits.argmax(0, true);
  logits = logits / sample.temperature;
  if (sample.top_k > 0 && sample.top_k < logits.size(0)) {
    const at::Tensor least = std::get<0>(logits.topk(sample.top_k)).slice(0, -1);
    logits = logits.masked_fill(logits < least, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor probabilities = at::softmax(logits, 0);
  return generator ? at::multinomial(probabilities, 1, false, *generator)
                   : at::multinomial(probabilities, 1);
}

}  // namespace

at::Tensor GPT2Impl::generate(const at::Tensor& prompt, int64_t count,
                              const GPT2SampleOptions& sample,
                              std::optional<at::Generator> generator) {
  if (!prompt.defined() || prompt.dim() != 1 || prompt.size(0) < 1 ||
      prompt.scalar_type() != at::kLong)
    throw UsageError("GPT2: generate: the prompt must be int64 [length] with at least one token");
  if (count < 0 || !(sample.temperature >= 0) || sample.top_k < 0) {
    throw UsageError("GPT2: generate: count " + std::to_string(count) + ", temperature " +
                     std::to_string(sample.temperature) + " and top_k " +
                     std::to_string(sample.top_k) + " must not be negative");
  }
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(*this);
  const int64_t length = prompt.size(0);
  at::Tensor tokens = at::empty({length + count}, prompt.options());
  tokens.slice(0, 0, length).copy_(prompt);
  for (int64_t end = length; end < length + count; ++end) {
    const at::Tensor seen =
        tokens.slice(0, std::max<int64_t>(0, end - options_.n_positions), end).unsqueeze(0);
    const at::Tensor logits = project(hidden(seen).select(1, -1)).squeeze(0);
    tokens.slice(0, end, end + 1).copy_(sample_token(logits, sample, generator));
  }
  return tokens;
}

}  // namespace tessera
