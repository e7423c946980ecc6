#include "train/run/run_records.h"

#include <filesystem>

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/version.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const MemoryUse& use) {
  return {{"parameters", use.parameters},
          {"gradients", use.gradients},
          {"optimizer_state", use.optimizer_state}};
}

/// Adds the memory of one model to the memory of others.
void add(const std::vector<MemoryUse>& ranks, ModelWrapper& wrapper, Json& event) {
  const MemoryUse whole = wrapper.unsharded(ranks);
  Json own = {{"ranks", Json::array()},
              {"formula", json_of(wrapper.formula(whole))},
              {"unsharded", json_of(whole)}};
  for (const auto& use : ranks) own["ranks"].push_back(json_of(use));
  if (event.is_null()) {
    event = own;
    return;
  }
  const Json numbers = own.flatten();
  for (const auto& [path, number] : numbers.items()) {
    Json& sum = event[Json::json_pointer(path)];
    sum = sum.get<int64_t>() + number.get<int64_t>();
  }
}

/// "AdamW", or "generator: AdamW, discriminator: SGD" of several models.
template <class Function>
std::string of_each(const Config& config, const Function& of) {
  std::string text;
  for (const ModelSections* model : config.trained())
    text += (text.empty() ? "" : ", ") +
            (model->name.empty() ? of(*model) : model->name + ": " + of(*model));
  return text;
}

/// Generated text, including its prompt. `bytes`: tokens are bytes and are shown as text, with \xNN
/// for bytes that are not printable; otherwise tokens are shown as numbers.
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
  for (int64_t i = 0; i < tokens.numel(); ++i)
    if (!bytes) text += (i > 0 ? " " : "") + std::to_string(token[i]);
    else if (token[i] == '\n' || token[i] == '\t' || (token[i] >= ' ' && token[i] <= '~'))
      text += static_cast<char>(token[i]);
    else text += fmt::format("\\x{:02x}", token[i]);
  return text;
}

}  // namespace

void report_start(const RunContext& context, const RunData& data, const RunWeights& weights,
                  const Checkpoint* resumed, int64_t done) {
  if (!context.reporter) return;
  const Config& config = context.config;
  const auto model = of_each(config, [](const auto&own) { return own.model.type; }),
             parallel = of_each(config, [](const auto&own) { return own.parallel.type; }),
             optimizer = of_each(config, [](const auto&own) { return own.optimizer.type; });
  const DataSplits& splits = data.splits();
  const int ranks = context.group.size();
  context.say(
      fmt::format("{} with {} parameters; {}{}; {}, parallel: {}, {} rank{} ({}){}", model,
                  weights.elements(), data.describe(),
                  splits.val ? fmt::format(", evaluation on {} samples", splits.val->size()) : "",
                  optimizer, parallel, ranks, ranks == 1 ? "" : "s", context.group.backend_name(),
                  context.groups->note()));
  if (resumed != nullptr) context.say("resuming from " + resumed->path());
  Json options = Json::object();
  if (config.options) {
    for (const auto& option : *config.options) {
      const std::string key = dotted(option.path);
      options[key] = config.value(key);
    }
  }
  context.reporter->event("start", done,
                          {{"steps", data.iterations()},
                           {"ranks", ranks},
                           {"backend", context.group.backend_name()},
                           {"model", model},
                           {"parallel", parallel},
                           {"optimizer", optimizer},
                           {"global_batch", config.train.global_batch},
                           {"parameters", weights.elements()},
                           {"parameter_bytes", weights.bytes(false)},
                           {"resumed_from", resumed ? Json(resumed->path()) : Json()},
                           {"version", TESSERA_VERSION},
                           {"config", options}});
}

void record_memory(const RunContext& context, const RunModels& models, int64_t done) {
  if (!context.reporter) return;
  const auto ranks = static_cast<size_t>(context.own_group().size());
  Json event;
  for (const auto& model : models.each())
    add(std::vector<MemoryUse>(ranks, model.wrapper->memory()), *model.wrapper, event);
  context.reporter->event("memory", done, std::move(event));
}

void report_memory(const RunContext& context, const RunModels& models, int64_t done) {
  ProcessGroup group = context.own_group();
  Json event;
  for (const auto& model : models.each()) {
    const MemoryUse use = model.wrapper->memory();
    const at::Tensor mine =
        at::tensor({use.parameters, use.gradients, use.optimizer_state}, at::kLong)
            .to(group.control_device());
    const at::Tensor all = group.all_gather(mine).cpu();
    if (!context.reporter) continue;
    std::vector<MemoryUse> ranks;
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto* row = all.data_ptr<int64_t>() + 3 * rank;
      ranks.push_back({row[0], row[1], row[2]});
    }
    const MemoryUse whole = model.wrapper->unsharded(ranks);
    if (!model.own.name.empty()) context.say("memory of " + model.own.name + ":");
    context.reporter->memory_table(ranks, model.wrapper->formula(whole), whole);
    add(ranks, *model.wrapper, event);
  }
  if (context.reporter) context.reporter->event("memory", done, std::move(event));
}

void record_end(const RunContext& context, const RunData& data, const std::string& outcome,
                int64_t first_step, int64_t done) {
  if (!context.reporter) return;
  context.reporter->event("end", done,
                          {{"outcome", outcome},
                           {"steps_here", done - first_step},
                           {"waited_for_data", data.waited()},
                           {"communication", train::json_of(context.groups->stats())}});
}

std::string space_warning(const std::string& folder, int64_t bytes, const std::string& what) {
  struct statvfs system {};
  const std::string place = folder.empty() ? "." : folder;
  if (::statvfs(place.c_str(), &system) != 0) return "";
  const double free = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
  if (free >= static_cast<double>(bytes)) return "";
  constexpr double kMega = 1e6;
  return fmt::format("warning: {}: {:.1f} MB are free, and {} {:.1f} MB", place, free / kMega, what,
                     static_cast<double>(bytes) / kMega);
}

void warn_of_space(const RunContext& context, int64_t bytes, const std::string& what,
                   bool with_save) {
  const auto warn = [&](const std::string& folder) {
    const std::string text = space_warning(folder, bytes, what);
    if (!text.empty()) context.say(text);
  };
  if (!context.reporter) return;
  const std::string &folder = context.config.checkpoint.folder, &save = context.config.train.save;
  if (!folder.empty()) warn(folder);
  if (with_save && !save.empty()) warn(std::filesystem::path(save).parent_path().string());
}

void print_sample(const RunContext& context, ModelWrapper& wrapper) {
  const Config& config = context.config;
  if (config.train.sample.length == 0) return;
  const auto whole = wrapper.whole_on_rank0();
  if (!context.first()) return;
  try {
    context.say("sample:\n" +
                sample_text(wrapper.model(), config.train.sample, config.data.plan.text));
  } catch (const c10::Error& error) {
    // For example because weights are not finite. All files are written already.
    context.say("warning: train.sample: no sample: " + message_of(error));
  }
}

}  // namespace tessera::train
