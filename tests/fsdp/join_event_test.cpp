#include "fsdp/join/join_event.h"

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace {

using namespace tessera;
using namespace tessera::fsdp;

TEST(JoinEvent, EveryKindIsReadAsItWasWritten) {
  const std::vector<JoinEvent> events = {ForwardBegins{false},
                                         ForwardBegins{true},
                                         ForwardEnds{},
                                         UnitsUsed{Phase::forward, {3}},
                                         UnitsUsed{Phase::backward, {}},
                                         UnitsUsed{Phase::backward, {0, 7, 300}},
                                         FirstGradient{true, 0},
                                         FirstGradient{false, 12},
                                         GradientsReduced{2, 7, {1, 0, 1}},
                                         GradientsReduced{0, 0, {}},
                                         BackwardEnds{true},
                                         BackwardEnds{false}};
  for (size_t i = 0; i < events.size(); ++i)
    for (size_t j = 0; j < events.size(); ++j)
      EXPECT_EQ(event_from_bytes(to_bytes(events[i])) == events[j], i == j) << i << " " << j;
}

TEST(JoinEvent, AnUnknownKindIsAnError) {
  auto bytes = to_bytes(ForwardEnds{});
  bytes[0] = 100;
  EXPECT_THROW(event_from_bytes(bytes), Error);
}

}  // namespace
