#include <algorithm>

#include "tessera/train/config.h"
#include "tessera/train/registries.h"
#include "train/config/config_sections.h"

namespace tessera {
namespace {

std::string inline_yaml(const ConfigNode& node) {
  std::string text = to_yaml(node);
  text.pop_back();
  return text == "~" ? "" : text;
}

std::string escaped(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2)
    text.insert(at, 1, '\\');
  return text;
}

/// A table of options. `without`: keys to omit, because another table has them.
std::string table(const OptionRecord& options, const std::vector<std::string>& without = {}) {
  std::string rows;
  for (const auto& option : options) {
    if (std::find(without.begin(), without.end(), option.path.front()) != without.end()) continue;
    const std::string standard = option.required ? "required" : inline_yaml(option.standard);
    rows += "| `" + train::dotted(option.path) + "` | " + escaped(option.expected) + " | " +
            (standard.empty()  ? "none"
             : option.required ? standard
                               : "`" + escaped(standard) + "`") +
            " | " + escaped(option.doc) + " |\n";
  }
  return rows.empty() ? "No options.\n"
                      : "| Key | Value | Default | Meaning |\n|---|---|---|---|\n" + rows;
}

/// The components of a registry, each with a table of its own options. `common`: keys to omit.
template <class Registry, class... Context>
std::string components(const Registry& registry, const std::vector<std::string>& common,
                       const Context&... context) {
  std::string text;
  for (const auto& name : registry.names())
    text += "\n### " + name + "\n\n" + registry.doc(name) + "\n\n" +
            table(registry.describe(name, context...), common);
  return text;
}

std::string section(const std::string& title, const std::string& text) {
  return "\n## " + title + "\n\n" + text;
}

std::string models_section() {
  const auto read_own = [](OptionReader& keys) {
    RunConfig run;
    train::read_step(keys, run);
    train::read_ema(keys, run.ema);
  };
  return section(
             "models",
             "In place of `model`, `optimizer` and `scheduler`: a map in which each key is the "
             "name of a model.\nIts value has the sections `model`, `optimizer`, `scheduler` and "
             "`parallel`\n(without the keys of the run), as above, and `train` with:\n\n" +
                 table(OptionReader::describe(read_own))) +
         section("train_step",
                 "`type` and its options: what the program has added to "
                 "`registry::train_steps()`.\n") +
         components(registry::train_steps(), {"type"});
}

}  // namespace

std::string config_reference() {
  const std::vector<std::string> model_keys{"type", "init", "seed", "deferred", "device"};
  const std::vector<std::string> data_keys{"type",   "order",          "seed",
                                           "uneven", "loader_threads", "prefetch"};
  const std::vector<std::string> parallel_keys{"type", "backend", "timeout", "check_results",
                                               "deterministic"};
  std::string text =
      "# Reference of the config\n\nAll keys of all sections and of the library's components, as "
      "printed by `tessera train\n--config-reference`. [config.md](config.md) explains how they "
      "work together.\n";
  text += section("Top level", table(OptionReader::describe(train::describe_top_level)));
  text += section("model", table(OptionReader::describe(train::describe_model))) +
          components(registry::models(), model_keys);
  text += section("data", table(OptionReader::describe(train::describe_data))) +
          components(registry::datasets(), data_keys, DataContext{});
  text +=
      section(
          "loss",
          "`type` and the options of the loss. Not needed for models with a loss of their own.\n") +
      components(registry::losses(), {"type"});
  text += section("data_preprocessor", "`type` and its options.\n") +
          components(registry::preprocessors(), {"type"});
  text += section("optimizer", "`type`, the options of that optimizer, and:\n\n" +
                                   table(OptionReader::describe(train::describe_optimizer))) +
          components(registry::optimizers(), {"type"});
  text += section("scheduler", "`type` and its options.\n") +
          components(registry::schedulers(), {"type"});
  text += section("parallel", table(OptionReader::describe(train::describe_parallel))) +
          components(registry::parallel(), parallel_keys) +
          section("parallel.wrap_policy", "`type` and its options.\n") +
          components(registry::wrap_policies(), {"type"}) +
          section("parallel.comm_hook", "`type` and its options.\n") +
          components(registry::comm_hooks(), {"type"});
  text += section("train", table(OptionReader::describe([](OptionReader& keys) {
                    RunConfig run;
                    train::read_train(keys, Config{}, run);
                  })));
  text += models_section();
  text += section("metrics", "A list of types, or of maps with the options of that type and:\n\n" +
                                 table(OptionReader::describe(train::describe_metric))) +
          components(registry::metrics(), {"type", "prefix"});
  text += section("hooks", "A list of maps with `type` and its options, or of types.\n") +
          components(registry::hooks(), {"type"});
  text += section("checkpoint", table(OptionReader::describe([](OptionReader& keys) {
                    CheckpointConfig checkpoint;
                    train::read_checkpoint(keys, checkpoint);
                  })));
  return text;
}

}  // namespace tessera
