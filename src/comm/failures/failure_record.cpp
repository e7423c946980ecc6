#include "comm/failures/failure_record.h"

#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/classic.h"

namespace tessera::comm {

using Store = c10::intrusive_ptr<c10d::Store>;

std::string failure_key(int rank) { return "failed/" + std::to_string(rank); }

std::optional<FailureRecord> read_failure(const Store& store, int rank) {
  try {
    if (!store->check({failure_key(rank)})) return std::nullopt;
    const auto bytes = store->get(failure_key(rank));
    detail::Classic<std::istringstream> text(std::string(bytes.begin(), bytes.end()));
    FailureRecord record;
    text >> record.order >> record.verdict >> record.damage;
    for (int rank_blamed; text >> rank_blamed;) record.blamed.push_back(rank_blamed);
    return record;
  } catch (...) {
    return std::nullopt;  // the rank that serves the store has ended
  }
}

void write_failure(const Store& store, int rank, const FailureRecord& record) {
  try {
    const auto text = fmt::format("{} {:d} {:d} {}", record.order, record.verdict, record.damage,
                                  fmt::join(record.blamed, " "));
    store->set(failure_key(rank), std::vector<uint8_t>(text.begin(), text.end()));
  } catch (...) {
  }
}

int64_t next_failure(const Store& store) {
  try {
    return store->add("failures", 1);
  } catch (...) {
    return 0;
  }
}

}  // namespace tessera::comm
