#include <utility>

#include <fmt/format.h>
#include <xxhash.h>

#include "comm/execution/host_executor.h"

namespace tessera::comm {
namespace {

/// A collective whose headers are compared in one group and whose data move in another. The
/// comparing group's next collective throws the error of a comparison, unless wait() has thrown it.
class ComparedWork : public Work::State {
 public:
  ComparedWork(std::shared_ptr<Work::State> compared, std::shared_ptr<Work::State> data)
      : compared_(std::move(compared)), data_(std::move(data)) {}
  void wait() override {
    data_->wait();
    compared_->wait();
  }
  bool done() override { return data_->done(); }

 private:
  std::shared_ptr<Work::State> compared_, data_;
};

/// The call that compares `call` and moves no data. `headers` gets the headers of all ranks.
Call comparison_of(const Call& call, WireFormat wire, std::shared_ptr<Headers> headers) {
  const auto format = "as " + to_string(wire);
  Call comparison{call.header, [headers = std::move(headers)](Transport&, const Headers& all) {
                    *headers = all;
                  }};
  comparison.tag = call.tag.empty() ? format : call.tag + ", " + format;
  comparison.header.detail ^= XXH64(format.data(), format.size(), 2);
  return comparison;
}

class ComparedExecutor : public Executor {
 public:
  ComparedExecutor(HostExecutor& control, HostExecutor& data) : control_(control), data_(data) {}
  Work issue(Call call, Mode mode) override;

 private:
  HostExecutor &control_, &data_;
};

Work ComparedExecutor::issue(Call call, Mode mode) {
  constexpr std::chrono::milliseconds kLook{20};
  const auto headers = std::make_shared<Headers>();
  auto comparison = comparison_of(call, data_.world().wire, headers);
  call.body = [headers, body = std::move(call.body)](Transport& data, const Headers&) {
    body(data, *headers);
  };
  if (mode == Mode::wait) {
    control_.issue(std::move(comparison), mode);
    return data_.issue(std::move(call), mode);
  }
  auto compared = control_.queue().add(
      [control = &control_, comparison = std::move(comparison)] { control->execute(comparison); });
  auto moved = data_.queue().add([data = &data_, call = std::move(call), compared] {
    while (!compared->done_within(kLook)) {
      if (data->failure().leaving())
        throw BrokenWorldError("ProcessGroup: the group was shut down", {});
    }
    if (!compared->failed()) data->execute(call);
  });
  return Work(std::make_shared<ComparedWork>(std::move(compared), std::move(moved)));
}

}  // namespace

std::unique_ptr<Executor> make_compared_executor(HostExecutor& control, HostExecutor& data) {
  return std::make_unique<ComparedExecutor>(control, data);
}

}  // namespace tessera::comm
