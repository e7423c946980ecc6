#include "train/builtins/builtin_components.h"
#include "train/hooks/hooks.h"

namespace tessera::train {
namespace {

template <class Options>
auto reader(std::shared_ptr<RunHook> (*make)(const Options&)) {
  return [=](OptionReader& options) -> std::function<std::shared_ptr<RunHook>()> {
    Options chosen;
    chosen.read(options);
    options.finish();
    return [=, place = options.at("type")] { return named(place, [&] { return make(chosen); }); };
  };
}

}  // namespace

void add_hooks(Registry<std::function<std::shared_ptr<RunHook>()>>& hooks) {
  hooks.add("CSV", reader(csv_hook),
            "the figures of every step as a table of comma-separated values");
  hooks.add("Predictions", reader(predictions_hook),
            "the predictions of the last evaluation, or of the test, as a file of safetensors");
  hooks.add("TensorBoard", reader(tensorboard_hook),
            "the figures of every step, and histograms of the parameters, as event files");
}

}  // namespace tessera::train
