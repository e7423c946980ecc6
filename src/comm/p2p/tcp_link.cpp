#include "comm/p2p/tcp_link.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include <fmt/format.h>
#include <poll.h>

namespace tessera::comm {
namespace {

// Read at a time, so that one connection does not keep the thread from the others.
constexpr size_t kMostBytesAtOnce = 1 << 20;

// The socket counts as readable when so much of a message has arrived, or its rest.
constexpr uint64_t kLowWaterBytes = 128 << 10;

// Bytes that are copied, summed and sent at a time, while they are in the cache. A copy, because
// the owner of the bytes may change them meanwhile: [Note: reduction within backward].
constexpr size_t kMostBytesSummed = 256 << 10;

template <class Frame>
uint64_t sum_of(const Frame& frame) {
  return XXH3_64bits(&frame, offsetof(Frame, sum));
}

void complete(Parcel& parcel) {
  parcel.complete = true;
  parcel.ready.notify_all();
}

void fail(Parcel& parcel, const std::string& reason) {
  parcel.failure = reason;
  parcel.ready.notify_all();
}

}  // namespace

void TcpLink::open(Socket socket, std::string greeting) {
  socket_ = std::move(socket);
  greeting_ = std::move(greeting);
  write();
}

void TcpLink::send(Parcel& parcel) {
  if (!ended_.empty()) return fail(parcel, ended_);
  outgoing_.push_back(&parcel);
  if (outgoing_.size() > 1) return;
  begin_to_send();
  write();
}

void TcpLink::begin_to_send() {
  sending_.frame = {outgoing_.front()->bytes, outgoing_.front()->tag, 0};
  sending_.frame.sum = sum_of(sending_.frame);
  sending_.frame_written = sending_.summed = sending_.end_written = 0;
  XXH3_64bits_reset(&sending_.sum);
}

void TcpLink::receive(Parcel& parcel) {
  const auto kept = std::find_if(early_.begin(), early_.end(), [&](const Early& early) {
    return early.tag == parcel.tag && !early.wanted;
  });
  if (kept != early_.end()) {
    if (kept->data.size() != parcel.bytes)
      return fail(parcel, fmt::format("the peer sent {} bytes, expected {}", kept->data.size(),
                                      parcel.bytes));
    kept->wanted = &parcel;
    if (&*kept == filling_) return;
    std::memcpy(parcel.data, kept->data.data(), parcel.bytes);
    early_.erase(kept);
    return complete(parcel);
  }
  if (!ended_.empty()) return fail(parcel, ended_);
  receives_.push_back(&parcel);
  if (!is_stalled()) return;
  begin_message();
  read();
}

void TcpLink::forget(Parcel& parcel) {
  const bool sending = std::find(outgoing_.begin(), outgoing_.end(), &parcel) != outgoing_.end();
  const bool begun = sending && outgoing_.front() == &parcel && sending_.frame_written > 0;
  if (begun || target_ == &parcel) end("a message was given up");
  std::erase(outgoing_, &parcel);
  if (sending && !begun && !outgoing_.empty() && sending_.frame_written == 0) begin_to_send();
  receives_.remove(&parcel);
  for (auto& early : early_)
    if (early.wanted == &parcel) early.wanted = nullptr;
}

short TcpLink::events() const {
  if (!is_open() || damaged_) return 0;
  const bool writes = !greeting_.empty() || !outgoing_.empty();
  return static_cast<short>((is_stalled() ? 0 : POLLIN) | (writes ? POLLOUT : 0));
}

void TcpLink::write() {
  while (is_open() && (!greeting_.empty() || !outgoing_.empty())) {
    iovec parts[4];
    size_t count = 0;
    if (!greeting_.empty()) parts[count++] = {greeting_.data(), greeting_.size()};
    if (!outgoing_.empty()) {
      auto& parcel = *outgoing_.front();
      parts[count++] = {reinterpret_cast<char*>(&sending_.frame) + sending_.frame_written,
                        sizeof(Frame) - sending_.frame_written};
      if (sending_.summed == parcel.moved) {
        const size_t more = std::min(kMostBytesSummed, parcel.bytes - sending_.summed);
        sending_.window.assign(parcel.data + sending_.summed, parcel.data + sending_.summed + more);
        XXH3_64bits_update(&sending_.sum, sending_.window.data(), more);
        sending_.summed += more;
      }
      const size_t left = sending_.summed - parcel.moved;
      parts[count++] = {sending_.window.data() + sending_.window.size() - left, left};
      if (sending_.summed == parcel.bytes) {
        sending_.end = XXH3_64bits_digest(&sending_.sum);
        parts[count++] = {reinterpret_cast<char*>(&sending_.end) + sending_.end_written,
                          sizeof sending_.end - sending_.end_written};
      }
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const auto written = ::sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (!is_temporary(errno)) end_with_error(errno);
      return;
    }
    skip_written(static_cast<size_t>(written));
  }
}

void TcpLink::skip_written(size_t bytes) {
  const auto part = [&](size_t most) {
    const size_t taken = std::min(bytes, most);
    bytes -= taken;
    return taken;
  };
  greeting_.erase(0, part(greeting_.size()));
  if (outgoing_.empty()) return;
  auto& parcel = *outgoing_.front();
  sending_.frame_written += part(sizeof(Frame) - sending_.frame_written);
  parcel.moved += part(sending_.summed - parcel.moved);
  sending_.end_written += part(sizeof sending_.end - sending_.end_written);
  if (sending_.end_written < sizeof sending_.end) return;
  outgoing_.pop_front();
  if (!outgoing_.empty()) begin_to_send();
  complete(parcel);
}

size_t TcpLink::take(iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  for (;;) {
    const auto taken = ::recvmsg(socket_.fd(), &message, MSG_DONTWAIT);
    if (taken > 0) return static_cast<size_t>(taken);
    if (taken < 0 && errno == EINTR) continue;
    if (taken == 0) end("the connection was closed by the peer");
    else if (!is_temporary(errno)) end_with_error(errno);
    return 0;
  }
}

void TcpLink::read() {
  read_available();
  set_low_water();
}

/// A large message arrives in thousands of packets. The thread is woken for parts of it.
void TcpLink::set_low_water() {
  if (!is_open()) return;
  const uint64_t left =
      !has_frame() || is_stalled()
          ? 1
          : arriving_.frame.bytes - moved() + sizeof arriving_.end - arriving_.end_read;
  const int wanted = static_cast<int>(std::clamp<uint64_t>(left, 1, kLowWaterBytes));
  if (wanted == low_water_) return;
  ::setsockopt(socket_.fd(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
  low_water_ = wanted;
}

void TcpLink::read_available() {
  auto& in = arriving_;
  for (size_t budget = kMostBytesAtOnce; budget > 0 && is_open();) {
    if (!has_frame()) {
      iovec part{reinterpret_cast<char*>(&in.frame) + in.frame_read, sizeof(Frame) - in.frame_read};
      const auto taken = take(&part, 1);
      if (taken == 0) return;
      in.frame_read += taken;
      if (!has_frame()) continue;
      if (in.frame.sum != sum_of(in.frame)) return end_damaged("the head of a message");
      begin_message();
      continue;
    }
    if (is_stalled()) return;
    char* const to = (target_ ? target_->data : filling_->data.data()) + moved();
    iovec parts[] = {{to, std::min(budget, in.frame.bytes - moved())},
                     {reinterpret_cast<char*>(&in.end) + in.end_read, sizeof in.end - in.end_read}};
    const auto taken = take(parts, moved() + parts[0].iov_len == in.frame.bytes ? 2 : 1);
    if (taken == 0) return;
    const size_t data = std::min(taken, parts[0].iov_len);
    XXH3_64bits_update(&in.sum, to, data);
    moved() += data;
    in.end_read += taken - data;
    budget -= data;
    if (in.end_read < sizeof in.end) continue;
    if (in.end != XXH3_64bits_digest(&in.sum)) return end_damaged("a message");
    finish_message();
  }
}

void TcpLink::begin_message() {
  const Frame& frame = arriving_.frame;
  arriving_.end_read = 0;
  XXH3_64bits_reset(&arriving_.sum);
  const auto posted = std::find_if(receives_.begin(), receives_.end(),
                                   [&](const Parcel* parcel) { return parcel->tag == frame.tag; });
  if (posted != receives_.end()) {
    if ((*posted)->bytes != frame.bytes)
      return end(fmt::format("the peer sent {} bytes, expected {}", frame.bytes, (*posted)->bytes));
    target_ = *posted;
    receives_.erase(posted);
  } else if (!receives_.empty()) {
    early_.push_back({static_cast<int>(frame.tag), std::vector<char>(frame.bytes)});
    filling_ = &early_.back();
  }
}

void TcpLink::finish_message() {
  arriving_.frame_read = 0;
  if (target_) return complete(*std::exchange(target_, nullptr));
  const auto* const filled = std::exchange(filling_, nullptr);
  auto* const wanted = filled->wanted;
  if (!wanted) return;
  std::memcpy(wanted->data, filled->data.data(), wanted->bytes);
  early_.remove_if([&](const Early& early) { return &early == filled; });
  complete(*wanted);
}

void TcpLink::end_damaged(const char* what) {
  damaged_ = true;
  end(fmt::format("the checksum of {} is wrong", what));
}

void TcpLink::end_with_error(int error) { end(std::strerror(error)); }

void TcpLink::end(const std::string& reason) {
  if (!ended_.empty()) return;
  ended_ = reason;
  if (!damaged_) close();
  for (auto* parcel : outgoing_) fail(*parcel, reason);
  for (auto* parcel : receives_) fail(*parcel, reason);
  if (target_) fail(*target_, reason);
  outgoing_.clear();
  receives_.clear();
  greeting_.clear();
  target_ = nullptr;
  if (!filling_) return;
  if (filling_->wanted) fail(*filling_->wanted, reason);
  early_.remove_if([&](const Early& early) { return &early == filling_; });
  filling_ = nullptr;
}

}  // namespace tessera::comm
