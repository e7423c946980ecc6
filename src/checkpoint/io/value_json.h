#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tessera/optim/optimizer_state.h"

// Values as JSON that keeps every bit. Integers are JSON integers. Doubles are "f64:" and their
// bits in hexadecimal, because JSON has no infinities and many readers round.

namespace tessera::store {

nlohmann::json json_of(const ScalarValue& value);
/// Throws UsageError for another text.
ScalarValue scalar_from_json(const nlohmann::json& value);

/// Booleans are JSON booleans, texts begin with "text:", lists are JSON objects {"doubles": […]} or
/// {"texts": […]}.
nlohmann::json json_of(const OptionValue& value);
OptionValue option_from_json(const nlohmann::json& value);

}  // namespace tessera::store
