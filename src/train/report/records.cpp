#include "train/report/records.h"

#include <chrono>

namespace tessera::train {

using Json = nlohmann::ordered_json;

Json json_of(const StepRecord& record, bool with_scale) {
  const double seconds = record.ms / 1000;
  Json json = {{"step", record.step},
               {"loss", record.loss},
               {"grad_norm", record.grad_norm},
               {"lr", record.lr},
               {"ms", record.ms}};
  json["tokens_per_s"] = static_cast<double>(record.tokens) / seconds;
  json["samples_per_s"] = static_cast<double>(record.samples) / seconds;
  json["epoch"] = record.epoch;
  if (with_scale) json["loss_scale"] = record.loss_scale;
  for (const auto& [name, value] : record.figures)
    if (name != "loss") json[name] = value;
  for (const auto& [name, value] : record.evaluation) json["eval_" + name] = value;
  return json;
}

Json json_of(const CommStats& communication) {
  const auto kind = [](const CollectiveStats& stats) {
    return Json{
        {"calls", stats.calls}, {"sent", stats.bytes_sent}, {"received", stats.bytes_received}};
  };
  return {{"all_reduce", kind(communication.all_reduce)},
          {"reduce", kind(communication.reduce)},
          {"broadcast", kind(communication.broadcast)},
          {"all_gather", kind(communication.all_gather)},
          {"reduce_scatter", kind(communication.reduce_scatter)},
          {"all_to_all", kind(communication.all_to_all)},
          {"waited_seconds", communication.waited_seconds}};
}

std::string event_line(const std::string& name, int64_t step, Json event) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  Json json = {{"event", name}, {"time", now.count()}, {"step", step}};
  json.update(event);
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tessera::train
