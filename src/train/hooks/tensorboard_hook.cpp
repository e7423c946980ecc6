#include <optional>

#include <nlohmann/json.hpp>

#include "train/hooks/event_file.h"
#include "train/hooks/hooks.h"

namespace tessera::train {
namespace {

/// "eval_loss" as "eval/loss", anything else in the group "train".
std::string tag_of(const std::string& name) {
  return name.rfind("eval_", 0) == 0 ? "eval/" + name.substr(5) : "train/" + name;
}

class TensorBoardHook : public RunHook {
 public:
  explicit TensorBoardHook(TensorBoardHookOptions options) : options_(std::move(options)) {}

  void after_step(RunState& state) override {
    const int64_t every = options_.histograms_every;
    if (every == 0 || state.step % every != 0) return;
    auto histograms = parameter_histograms(*state.model);
    if (!file_ || histograms.empty()) return;
    for (auto& [name, histogram] : histograms) name = "parameters/" + name;
    file_->histograms(state.step - 1, histograms);
  }

  void on_record(const std::string& json) override {
    const auto record = nlohmann::json::parse(json);
    const auto step = record.at("step").get<int64_t>();
    if (record.contains("event")) {
      if (record.at("event") == "start") file_.emplace(options_.folder, step);
      return;
    }
    std::vector<std::pair<std::string, double>> values;
    for (const auto& [name, value] : record.items())
      if (name != "step" && value.is_number())
        values.emplace_back(tag_of(name), value.get<double>());
    file_->scalars(step, values);
  }

 private:
  TensorBoardHookOptions options_;
  std::optional<EventFile> file_;  // rank 0
};

}  // namespace

void TensorBoardHookOptions::read(OptionReader& options) {
  options.require("folder", "the folder of the event files");
  options.read_path("folder", folder, "folder of the event files; it is made if it is missing");
  options.read("histograms_every", histograms_every,
               "steps from one histogram of each parameter to the next; 0: none", kNotNegative);
}

std::shared_ptr<RunHook> tensorboard_hook(const TensorBoardHookOptions& options) {
  return std::make_shared<TensorBoardHook>(options);
}

}  // namespace tessera::train
