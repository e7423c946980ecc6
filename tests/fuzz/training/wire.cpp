#include "fuzz/training/wire.h"

#include <algorithm>

namespace tessera::fuzz {

std::vector<int> hosts_of(const Item& wrapper, int world) {
  std::vector<int> hosts;
  const auto text = wrapper.text("hosts");
  for (int rank = 0; rank < world && !text.empty(); ++rank)
    hosts.push_back(text[static_cast<size_t>(rank) % text.size()] - '0');
  return hosts;
}

WireOptions wire_of(const Item& wrapper) {
  WireOptions wire;
  wire.gradients = wire_format_of(wrapper.text("wire_gradients", "float32")).value();
  wire.parameters = wire_format_of(wrapper.text("wire_parameters", "float32")).value();
  return wire;
}

bool rounds(const Item& wrapper) {
  return wrapper.has("wire_gradients") || wrapper.has("wire_parameters");
}

bool rounds(const Case& which) {
  return rounds(which.wrapper) ||
         std::any_of(which.story.begin(), which.story.end(),
                     [](const Item& event) { return event.kind == "move" && rounds(event); });
}

bool refuses_wire(const Case& which, const Item& wrapper, int world) {
  if (!rounds(wrapper)) return false;
  if (which.dtype == "double") return true;
  const auto hosts = hosts_of(wrapper, world);
  const bool several =
      std::any_of(hosts.begin(), hosts.end(), [&hosts](int host) { return host != hosts.front(); });
  if (several && wrapper.flag("check_results")) return true;
  const auto& kind = wrapper.kind;
  const bool parameters = wrapper.has("wire_parameters");
  if (kind == "ddp") return parameters || wrapper.has("hook");
  if (kind == "distributed_optimizer") return parameters;
  if (kind != "zero" && kind != "ddp_zero") return false;
  return parameters && wrapper.flag("no_bucket_view");
}

}  // namespace tessera::fuzz
