#include "comm/p2p_transport.h"

#include "tessera/error.h"
#include "tessera/torch_compat.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <fmt/format.h>

#include <cstdlib>

namespace tessera::comm {
namespace {

class GlooMessage : public Message {
 public:
  explicit GlooMessage(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait(std::chrono::milliseconds timeout) override { work_->wait(timeout); }
  void abort() noexcept override {
    try {
      work_->abort();
    } catch (...) {
      // Already over: nothing to stop.
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class GlooMailbox : public Mailbox {
 public:
  explicit GlooMailbox(const World& world) {
    auto options = c10d::ProcessGroupGloo::Options::create(world.options.timeout);
    const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
    if (world.same_host) options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    else if (interface && *interface) options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    else options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    options->threads = 1;
    backend_ = c10::make_intrusive<c10d::ProcessGroupGloo>(world.store, world.rank, world.size, options);
  }

  const char* name() const override { return "gloo"; }

  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return std::make_unique<GlooMessage>(backend_->send(tensors, to, tag));
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return std::make_unique<GlooMessage>(backend_->recv(tensors, from, tag));
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> backend_;
};

}  // namespace

std::unique_ptr<Mailbox> make_gloo_mailbox(const World& world) {
  try {
    return std::make_unique<GlooMailbox>(world);
  } catch (const std::exception& error) {
    throw BrokenWorldError(fmt::format("ProcessGroup: rank {} of {} could not connect to the other ranks through Gloo within {} ms: {}",
                                       world.rank, world.size, world.options.timeout.count(), compat::first_line(error.what())), {});
  }
}

}  // namespace tessera::comm
