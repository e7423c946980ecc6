#pragma once

#include <string>

#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::train {

/// Runs `part`, and puts `place` ("step 12") in front of the text of an error of the library. A
/// collective knows its number, but not the step that it belongs to.
template <class Part>
void at_place(const std::string& place, Part&& part) {
  try {
    part();
  } catch (const BrokenWorldError& error) {
    throw BrokenWorldError(place + ": " + error.what(), error.ranks());
  } catch (const AgreedError& error) {
    throw AgreedError(place + ": " + error.what());
  } catch (const UsageError& error) {
    throw UsageError(place + ": " + error.what());
  }
}

}  // namespace tessera::train
