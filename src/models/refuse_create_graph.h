#pragma once

#include <string>

#include <torch/types.h>

#include "tessera/error.h"

namespace tessera {

/// For the backward of a function that can be differentiated only once. Throws UsageError under
/// create_graph. `what`: the function, for the message. Local.
inline void refuse_create_graph(const char* component, const char* what) {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError(std::string(component) + ": this backward has create_graph, and " + what +
                   " can be differentiated only once; expected backward() without create_graph");
}

}  // namespace tessera
