#include "train/report/sample_text.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

namespace tessera::train {

std::string sample_text(const TrainedModel& model, const SampleConfig& sample, bool bytes) {
  const at::Device device = model.module->parameters().front().device();
  const at::Tensor tokens = model
                                .generate(at::tensor(sample.prompt, at::kLong).to(device),
                                          sample.length, sample.temperature, sample.top_k,
                                          at::make_generator<at::CPUGeneratorImpl>(sample.seed))
                                .cpu()
                                .contiguous();
  const auto* token = tokens.data_ptr<int64_t>();
  std::string text;
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    if (!bytes) {
      text += (i > 0 ? " " : "") + std::to_string(token[i]);
    } else if (token[i] == '\n' || token[i] == '\t' || (token[i] >= ' ' && token[i] <= '~')) {
      text += static_cast<char>(token[i]);
    } else {
      text += fmt::format("\\x{:02x}", token[i]);
    }
  }
  return text;
}

}  // namespace tessera::train
