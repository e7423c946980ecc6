#pragma once

#include <string>

#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::train {

/// Runs `part`, and puts `place` ("step 12") in front of the text of an error of a collective. A
/// collective knows its number, but not the step that it belongs to. Errors of other components
/// stay as they are.
template <class Part>
void at_place(const std::string& place, Part&& part) {
  const auto placed = [&](const Error& error) {
    const std::string text = error.what();
    return text.rfind("ProcessGroup", 0) == 0 ? place + ": " + text : text;
  };
  try {
    part();
  } catch (const BrokenWorldError& error) {
    throw BrokenWorldError(placed(error), error.ranks());
  } catch (const AgreedError& error) {
    throw AgreedError(placed(error));
  } catch (const UsageError& error) {
    throw UsageError(placed(error));
  }
}

}  // namespace tessera::train
