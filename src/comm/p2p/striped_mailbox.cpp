#include "comm/p2p/striped_mailbox.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace tessera::comm {
namespace {

// A part below this takes less time than another thread needs to wake up.
constexpr int64_t kLeastPart = 256 << 10;

class StripedMessage : public Message {
 public:
  explicit StripedMessage(std::vector<std::unique_ptr<Message>> parts) : parts_(std::move(parts)) {}
  void wait(std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (const auto& part : parts_) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      part->wait(std::max(left, std::chrono::milliseconds(0)));
    }
  }
  void abort() noexcept override {
    for (const auto& part : parts_) part->abort();
  }

 private:
  std::vector<std::unique_ptr<Message>> parts_;
};

class StripedMailbox : public Mailbox {
 public:
  explicit StripedMailbox(std::vector<std::unique_ptr<Mailbox>> mailboxes)
      : mailboxes_(std::move(mailboxes)) {}

  const char* name() const override { return mailboxes_[0]->name(); }
  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    return post(tensor, [&](Mailbox& mailbox, at::Tensor part) {
      return mailbox.send(std::move(part), to, tag);
    });
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    return post(tensor, [&](Mailbox& mailbox, at::Tensor part) {
      return mailbox.receive(std::move(part), from, tag);
    });
  }

 private:
  /// The parts follow from the size alone, which is the same at both ends.
  template <class PostPart>
  std::unique_ptr<Message> post(const at::Tensor& tensor, const PostPart& post_part) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const auto most = static_cast<int64_t>(mailboxes_.size());
    const int64_t count = std::min(most, bytes / kLeastPart);
    if (count < 2) return post_part(*mailboxes_[0], tensor);
    const auto flat = tensor.view({-1});
    std::vector<std::unique_ptr<Message>> parts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = flat.numel() * i / count, end = flat.numel() * (i + 1) / count;
      parts.push_back(post_part(*mailboxes_[i], flat.slice(0, begin, end)));
    }
    return std::make_unique<StripedMessage>(std::move(parts));
  }

  const std::vector<std::unique_ptr<Mailbox>> mailboxes_;
};

}  // namespace

int stripes_for(int64_t speed, int ranks, int cores) {
  constexpr int64_t kOfOne = 16'000, kMost = 4;
  const int64_t needed = (speed / ranks + kOfOne - 1) / kOfOne;
  return static_cast<int>(std::max<int64_t>(1, std::min({needed, kMost, int64_t{cores} / ranks})));
}

std::unique_ptr<Mailbox> make_striped_mailbox(std::vector<std::unique_ptr<Mailbox>> mailboxes) {
  if (mailboxes.size() == 1) return std::move(mailboxes[0]);
  return std::make_unique<StripedMailbox>(std::move(mailboxes));
}

}  // namespace tessera::comm
