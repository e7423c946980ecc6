#include "train/state/saved_state.h"

#include <cmath>

#include "tessera/error.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

/// A figure that is not finite is null: JSON has no number for it.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(); }
double number_of(const Json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

constexpr std::pair<const char*, double StepRecord::*> kNumbers[] = {
    {"loss", &StepRecord::loss},   {"grad_norm", &StepRecord::grad_norm},
    {"lr", &StepRecord::lr},       {"ms", &StepRecord::ms},
    {"epoch", &StepRecord::epoch}, {"loss_scale", &StepRecord::loss_scale}};

Json saved_record(const StepRecord& record) {
  Json json = {{"samples", record.samples}, {"tokens", record.tokens}, {"figures", Json::array()}};
  for (const auto& [name, member] : kNumbers) json[name] = number(record.*member);
  for (const auto& [name, value] : record.figures) json["figures"].push_back({name, number(value)});
  return json;
}

StepRecord record_of(const Json& json, int64_t step) {
  StepRecord record;
  record.step = step;
  record.samples = json.at("samples").get<int64_t>();
  record.tokens = json.at("tokens").get<int64_t>();
  for (const auto& [name, member] : kNumbers) record.*member = number_of(json.at(name));
  for (const auto& figure : json.at("figures"))
    record.figures.emplace_back(figure.at(0).get<std::string>(), number_of(figure.at(1)));
  return record;
}

Json json_of(const RankedStep& ranked) { return {{"step", ranked.step}, {"value", ranked.value}}; }
RankedStep ranked_of(const Json& json) {
  return {json.at("step").get<int64_t>(), json.at("value").get<double>()};
}

KeptSteps kept_of(const Json& json) {
  KeptSteps kept{json.at("metric").get<std::string>(), json.at("mode") == "max", {}};
  for (const auto& each : json.at("checkpoints")) kept.steps.push_back(ranked_of(each));
  return kept;
}

SavedModel model_of(const Json& json) {
  SavedModel saved{json.value("parallel", ""), json.value("optimizer", "")};
  if (json.contains("loss_scale")) {
    const Json& scale = json.at("loss_scale");
    saved.loss_scale = {scale.at("scale").get<double>(), scale.at("growth_tracker").get<int64_t>()};
  }
  const Json meaning = json.value("model", Json::object());
  for (const auto& [option, value] : meaning.items())
    saved.meaning.emplace_back(option, value.get<std::string>());
  if (json.contains("weight_average_updates"))
    saved.average_updates = json.at("weight_average_updates").get<int64_t>();
  return saved;
}

Json json_of(const SavedModel& saved) {
  Json json = {{"parallel", saved.parallel}, {"optimizer", saved.optimizer}};
  if (const auto& scale = saved.loss_scale)
    json["loss_scale"] = {{"scale", scale->scale}, {"growth_tracker", scale->growth_tracker}};
  json["model"] = Json::object();
  for (const auto& [option, value] : saved.meaning) json["model"][option] = value;
  if (saved.average_updates) json["weight_average_updates"] = *saved.average_updates;
  return json;
}

SavedState state_of(const Json& json) {
  SavedState state;
  const Json& data = json.at("data");
  state.step = json.at("step").get<int64_t>();
  state.data = {json.at("samples").get<int64_t>(), data.at("size").get<int64_t>(),
                data.at("order").get<std::string>() == "shuffled" ? SampleOrder::shuffled
                                                                  : SampleOrder::sequential,
                data.at("seed").get<uint64_t>()};
  state.global_batch =
      json.value("global_batch", state.step > 0 ? state.data.position / state.step : 0);
  if (!json.contains("models")) state.models[""] = model_of(json);
  else
    for (const auto& [name, model] : json.at("models").items())
      state.models[name] = model_of(model);
  state.ranks = json.value("ranks", 0);
  if (json.contains("early_stop")) {
    const Json& stop = json.at("early_stop");
    state.best.early_stop = {{}, stop.at("waited").get<int64_t>(), stop.at("stopped").get<bool>()};
    state.best.stop_metric = stop.value("metric", "");
    state.best.stop_larger = stop.value("mode", "") == "max";
    if (!stop.at("best").is_null()) state.best.early_stop->best = stop.at("best").get<double>();
  }
  if (json.contains("best_weights")) state.best.weights = ranked_of(json.at("best_weights"));
  if (json.contains("keep_best")) state.best.kept = kept_of(json.at("keep_best"));
  if (json.contains("evaluation_due"))
    state.evaluation_due = record_of(json.at("evaluation_due"), state.step - 1);
  state.local_sgd = json.value("local_sgd", Json());
  state.left_out = json.value("left_out", state.left_out);
  if (json.contains("best_eval_loss"))
    state.best_eval_loss = json.at("best_eval_loss").get<double>();
  state.hooks = json.at("hooks").get<std::vector<std::string>>();
  return state;
}

}  // namespace

std::string to_text(const SavedState& state) {
  const SamplerState& data = state.data;
  Json json = {
      {"step", state.step},
      {"samples", data.position},
      {"global_batch", state.global_batch},
      {"data", {{"size", data.size}, {"order", to_string(data.order)}, {"seed", data.seed}}},
      {"ranks", state.ranks}};
  for (const auto& [name, model] : state.models)
    if (name.empty()) json.update(json_of(model));
    else json["models"][name] = json_of(model);
  if (const auto& stop = state.best.early_stop)
    json["early_stop"] = {{"metric", state.best.stop_metric},
                          {"mode", state.best.stop_larger ? "max" : "min"},
                          {"best", stop->best ? Json(*stop->best) : Json()},
                          {"waited", stop->waited},
                          {"stopped", stop->stopped}};
  if (state.best.weights) json["best_weights"] = json_of(*state.best.weights);
  if (const auto& kept = state.best.kept) {
    json["keep_best"] = {{"metric", kept->metric}, {"mode", kept->larger ? "max" : "min"}};
    json["keep_best"]["checkpoints"] = Json::array();
    for (const auto& each : kept->steps) json["keep_best"]["checkpoints"].push_back(json_of(each));
  }
  if (state.evaluation_due) json["evaluation_due"] = saved_record(*state.evaluation_due);
  if (!state.local_sgd.is_null()) json["local_sgd"] = state.local_sgd;
  if (!state.left_out.empty()) json["left_out"] = state.left_out;
  if (state.best_eval_loss) json["best_eval_loss"] = *state.best_eval_loss;
  json["hooks"] = state.hooks;
  return json.dump(2) + "\n";
}

SavedState saved_state_of(const std::string& text, const std::string& where) {
  try {
    return state_of(Json::parse(text));
  } catch (const Json::exception& error) {
    throw UsageError(where + ": " + error.what());
  }
}

}  // namespace tessera::train
