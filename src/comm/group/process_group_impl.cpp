#include "comm/group/process_group_impl.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <xxhash.h>

#include "comm/failures/process_failures.h"
#include "comm/group/argument_checks.h"
#include "comm/group/checked_transport.h"
#include "comm/group/divergence_scope.h"
#include "comm/group/make_transport.h"
#include "comm/group/tag_scope.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::unique_ptr<comm::Transport> with_checks(std::unique_ptr<comm::Transport> transport,
                                             const comm::World& world) {
  if (!world.options.check_results) return transport;
  if (transport->device_type() != at::kCPU) {
    throw UsageError(
        fmt::format("ProcessGroup: check_results is true with backend {}; expected "
                    "false, because it verifies CPU tensors only",
                    transport->name()));
  }
  return comm::make_checked_transport(std::move(transport), world);
}

thread_local std::string tag_of_scope;
thread_local bool may_diverge = false;

}  // namespace

comm::TagScope::TagScope(std::string tag) : before_(std::exchange(tag_of_scope, std::move(tag))) {}
comm::TagScope::~TagScope() { tag_of_scope = std::move(before_); }

comm::DivergenceScope::DivergenceScope(bool allowed)
    : before_(std::exchange(may_diverge, allowed || may_diverge)) {}
comm::DivergenceScope::~DivergenceScope() { may_diverge = before_; }

ProcessGroup::Impl::Impl() : Impl(comm::World(), nullptr) { world.world_ranks = {0}; }

ProcessGroup::Impl::Impl(comm::World of_group, std::unique_ptr<comm::Transport> connected,
                         std::shared_ptr<comm::Traffic> traffic, std::shared_ptr<Impl> control)
    : world(std::move(of_group)),
      transport(with_checks(std::move(connected), world)),
      control_(std::move(control)),
      traffic_(traffic ? std::move(traffic) : std::make_shared<comm::Traffic>()),
      host_(world, transport.get(), traffic_->clock(), !control_) {
  if (control_) executor_ = comm::make_compared_executor(control_->host_, host_);
  else if (transport && transport->waits_for_device())
    executor_ = comm::make_staged_executor(host_);
  else if (transport && transport->device_type() != at::kCPU)
    executor_ = comm::make_device_executor(host_);
  if (world.failures) world.failures->add(world);
}

ProcessGroup::Impl::~Impl() {
  host_.failure().leave();
  executor().drain();
  executor_.reset();
  if (transport) transport->abort();
  host_.queue().stop();
  if (world.failures) world.failures->remove(world);
}

comm::Executor& ProcessGroup::Impl::executor() {
  if (executor_) return *executor_;
  return host_;
}

Work ProcessGroup::Impl::issue(comm::Call call, comm::Mode mode) {
  if (alone()) return {};
  check_process();
  call.tag.insert(0, tag_of_scope);
  // Ranks with different tags disagree.
  if (!call.tag.empty()) call.header.detail ^= XXH64(call.tag.data(), call.tag.size(), 1);
  call.header.may_diverge = may_diverge && !call.header.on_device;
  return executor().issue(std::move(call), mode);
}

void ProcessGroup::Impl::rejoin() { (control_ ? control_->host_ : host_).rejoin(); }

void ProcessGroup::Impl::check_process() const {
  if (process_.is_this() || alone()) return;
  throw UsageError(fmt::format(
      "ProcessGroup: rank {}: process {} uses the group of process {}, from which it was "
      "forked; expected collectives in that process alone",
      world.rank, ::getpid(), process_.pid()));
}

void ProcessGroup::Impl::fail(const std::string& message) {
  check_process();
  if (control_) control_->fail(message);
  const auto groups = descendants();
  std::vector<comm::HostExecutor*> below;
  for (const auto& group : groups) below.push_back(&group->host_);
  comm::fail(host_, below, message);
}

void ProcessGroup::Impl::add_child(const std::shared_ptr<Impl>& child) {
  std::lock_guard lock(children_mutex_);
  children_.push_back(child);
}

std::vector<std::shared_ptr<ProcessGroup::Impl>> ProcessGroup::Impl::descendants() {
  std::vector<std::shared_ptr<Impl>> result;
  std::lock_guard lock(children_mutex_);
  for (const auto& known : children_) {
    if (const auto child = known.lock()) {
      result.push_back(child);
      for (const auto& further : child->descendants()) result.push_back(further);
    }
  }
  return result;
}

std::shared_ptr<ProcessGroup::Impl> ProcessGroup::Impl::duplicate(comm::World w, const char* method,
                                                                  std::shared_ptr<Impl> control) {
  require(world.store != nullptr, *this, method,
          "this group was made by the caller without a store");
  w.start_group.store = comm::store_of_start(world);
  w.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}/", method, ++splits), world.store);
  if (control && control->control_) control = control->control_;
  auto made = comm::make_transport(w);
  auto child = make(std::move(w), std::move(made), traffic_, std::move(control));
  add_child(child);
  return child;
}

}  // namespace tessera
