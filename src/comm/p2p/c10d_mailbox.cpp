#include "comm/p2p/c10d_mailbox.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/base/sigpipe_blocked.h"
#if TESSERA_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

namespace tessera::comm {
namespace {

class C10dMessage : public Message {
 public:
  explicit C10dMessage(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait(std::chrono::milliseconds timeout) override { work_->wait(timeout); }
  void abort() noexcept override {
    try {
      work_->abort();
    } catch (...) {
      // The message is complete already, or the backend cannot abort.
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class C10dMailbox : public Mailbox {
 public:
  C10dMailbox(const char* name, c10::intrusive_ptr<compat::C10dBackend> backend)
      : name_(name), backend_(std::move(backend)) {}

  const char* name() const override { return name_; }
  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    const SigpipeBlocked sigpipe;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return std::make_unique<C10dMessage>(backend_->send(tensors, to, tag));
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    const SigpipeBlocked sigpipe;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return std::make_unique<C10dMessage>(backend_->recv(tensors, from, tag));
  }

 private:
  const char* name_;
  c10::intrusive_ptr<compat::C10dBackend> backend_;
};

}  // namespace

std::unique_ptr<Mailbox> make_c10d_mailbox(const char* name,
                                           c10::intrusive_ptr<compat::C10dBackend> backend) {
  return std::make_unique<C10dMailbox>(name, std::move(backend));
}

}  // namespace tessera::comm
