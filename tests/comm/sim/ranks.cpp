// Schedules of TcpConnections: all of the messages between ranks but the thread and the kernel's
// TCP. Each rank's program posts messages at times of the schedule.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/p2p/tcp_connections.h"
#include "sim/schedule.h"
#include "sim/wire.h"

namespace tessera::sim {
namespace {

using comm::Greeting;
using comm::Parcel;
using comm::Socket;
using comm::TcpConnections;
using Pair = std::pair<int, int>;

constexpr auto kLongest = std::chrono::seconds(120);  // after which nothing may be left
constexpr int kMostTurnsAtOnce = 20'000;

struct Message {
  int from, to, tag;
  std::string sent, received;
  TimePoint send_at, receive_at;
  Parcel leaving, arriving;
  bool leaves = false, arrives = false;  // it was posted
};

struct Rank {
  std::unique_ptr<TcpConnections> connections;  // null: it has ended
  TimePoint paused_until, due = TimePoint::max();
  std::optional<TimePoint> ends_at;
};

struct Burst {
  TimePoint at;
  int to = 0;
  int64_t count = 0;
};

class Network {
 public:
  Network(uint64_t seed, Counts& counts)
      : dice_(seed), counts_(counts), name_(fmt::format("tessera-sim/{}/{}", ::getpid(), seed)) {
    now_ = start_ = TimePoint() + std::chrono::hours(1);
    const int size = static_cast<int>(dice_.between(2, 4));
    ranks_.resize(size);
    for (int rank = 0; rank < size; ++rank)
      addresses_.push_back({path(rank), fmt::format("{:032x}", dice_.below(1LL << 60)), rank});
    for (int rank = 0; rank < size; ++rank) start(rank);
    for (int from = 0; from < size; ++from)
      for (int to = 0; to < size; ++to)
        if (from != to && !dice_.one_in(5)) plan_messages(from, to);
    if (dice_.one_in(4)) ranks_[dice_.below(size)].ends_at = soon(200);
    if (dice_.one_in(2))
      for (int64_t i = dice_.between(1, 4); i > 0; --i)
        bursts_.push_back({soon(100), static_cast<int>(dice_.below(size)), dice_.between(1, 100)});
    faults_left_ = dice_.one_in(3) ? 0 : dice_.between(1, 2);
  }

  std::string run() {
    for (int turns = 0; !all_ended();) {
      if (++turns > kMostTurnsAtOnce) return "the ranks do not come to rest";
      if (turn()) continue;
      const auto next = next_time();
      if (next == TimePoint::max() || next > start_ + kLongest) return left_over();
      now_ = next;
      turns = 0;
    }
    return check();
  }

 private:
  std::string path(int rank) const { return fmt::format("{}/{}", name_, rank); }
  TimePoint soon(int64_t most) { return now_ + milliseconds(dice_.between(0, most)); }
  static Pair pair(int a, int b) { return {std::min(a, b), std::max(a, b)}; }
  bool alive(int rank) const { return ranks_[rank].connections != nullptr; }

  void start(int rank) {
    TcpConnections::Surroundings surroundings;
    surroundings.now = [this] { return now_; };
    surroundings.connect = [this, rank](const comm::TcpAddress& to) {
      return connect(rank, to.port);
    };
    ranks_[rank].paused_until = now_;
    ranks_[rank].connections = std::make_unique<TcpConnections>(
        rank, listen_at_path(path(rank)), addresses_, std::move(surroundings));
  }

  Socket connect(int from, int to) {
    if (!alive(to)) throw std::system_error(ECONNREFUSED, std::generic_category());
    if (dice_.one_in(10)) {
      ++counts_["ranks: connections that the network refused"];
      throw std::system_error(dice_.one_in(2) ? ENETUNREACH : ETIMEDOUT, std::generic_category());
    }
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
      throw std::system_error(errno, std::generic_category());
    if (dice_.one_in(2)) {
      const int little = static_cast<int>(dice_.between(1, 20'000));
      ::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    }
    Wire::Fault fault;
    if (faults_left_ > 0 && dice_.one_in(2)) {
      --faults_left_;
      fault.kind = dice_.one_in(3) ? Wire::Fault::cut : Wire::Fault::flip;
      fault.direction = static_cast<int>(dice_.below(2));
      fault.at = dice_.one_in(3) ? dice_.below(100) : dice_.below(20'000);
    }
    wires_.push_back(std::make_unique<Wire>(Socket(ends[1]), path(to), from, to, fault));
    faults_.push_back(fault);
    ++counts_["ranks: connections"];
    return Socket(ends[0]);
  }

  void plan_messages(int from, int to) {
    std::map<int, std::pair<std::vector<TimePoint>, std::vector<TimePoint>>> times;
    const int64_t count = dice_.between(1, 8);
    std::vector<int> tags;
    for (int64_t i = 0; i < count; ++i) {
      tags.push_back(static_cast<int>(dice_.below(3)));
      times[tags.back()].first.push_back(soon(200));
      times[tags.back()].second.push_back(soon(200));
    }
    // Messages of one tag are posted in the same order at both ends.
    for (auto& [tag, both] : times) {
      std::sort(both.first.rbegin(), both.first.rend());
      std::sort(both.second.rbegin(), both.second.rend());
    }
    for (const int tag : tags) {
      auto message = std::make_unique<Message>();
      message->from = from;
      message->to = to;
      message->tag = tag;
      const auto size = dice_.one_in(8) ? dice_.between(0, 400'000) : dice_.between(0, 3000);
      message->sent.resize(static_cast<size_t>(size));
      for (auto& byte : message->sent) byte = static_cast<char>(dice_.below(256));
      message->received.assign(message->sent.size(), '\0');
      auto& [sends, receives] = times[tag];
      message->send_at = sends.back();
      message->receive_at = receives.back();
      sends.pop_back();
      receives.pop_back();
      messages_.push_back(std::move(message));
    }
  }

  void post(Message& message, bool sending) {
    auto& parcel = sending ? message.leaving : message.arriving;
    auto& text = sending ? message.sent : message.received;
    parcel.data = text.data();
    parcel.bytes = text.size();
    parcel.tag = message.tag;
    ranks_[sending ? message.from : message.to].connections->post(
        sending ? message.to : message.from, parcel, sending);
    (sending ? message.leaves : message.arrives) = true;
  }

  bool post_what_is_due() {
    bool any = false;
    for (auto& message : messages_) {
      if (!message->leaves && alive(message->from) && message->send_at <= now_)
        post(*message, true), any = true;
      if (!message->arrives && alive(message->to) && message->receive_at <= now_)
        post(*message, false), any = true;
    }
    return any;
  }

  /// As TcpMessage::wait() does when a message has failed.
  void look_at_failures() {
    for (auto& message : messages_) {
      if (!message->arriving.failure.empty() && alive(message->to) &&
          ranks_[message->to].connections->was_damaged(message->from))
        damaged_.insert({message->to, message->from});
      if (!message->leaving.failure.empty() && alive(message->from) &&
          ranks_[message->from].connections->was_damaged(message->to))
        damaged_.insert({message->from, message->to});
    }
  }

  bool turn_of(Rank& rank) {
    if (!rank.connections || rank.paused_until > now_) return false;
    if (dice_.one_in(10)) {  // the thread does not run for a while
      rank.paused_until = soon(dice_.one_in(30) ? 3000 : 20);
      if (rank.paused_until > now_) return false;
    }
    epoll_event events[16];
    const int count = rank.connections->wait(events, 16, 0);
    for (int i = 0; i < count; ++i) rank.connections->on_event(events[i]);
    const int left = rank.connections->do_what_is_due();
    rank.due = left < 0 ? TimePoint::max() : now_ + milliseconds(left);
    return count > 0;
  }

  bool end_ranks() {
    bool any = false;
    for (auto& rank : ranks_) {
      if (!rank.connections || !rank.ends_at || *rank.ends_at > now_) continue;
      rank.connections.reset();
      ++counts_["ranks: ranks that ended"];
      any = true;
    }
    return any;
  }

  /// Strangers who connect at once, and stay.
  bool let_strangers_come() {
    bool any = false;
    for (auto& burst : bursts_) {
      if (burst.count == 0 || burst.at > now_) continue;
      any = true;
      for (; burst.count > 0; --burst.count) {
        auto socket = connect_to_path(path(burst.to));
        if (socket.fd() < 0) continue;
        const auto guess = comm::bytes_of({static_cast<int>(dice_.below(4)), Greeting::link},
                                          std::string(32, '0'));
        const auto words = dice_.one_in(2)   ? std::string()
                           : dice_.one_in(2) ? guess.substr(0, dice_.below(guess.size() + 1))
                                             : std::string(dice_.between(1, 300), 'j');
        (void)!::send(socket.fd(), words.data(), words.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        strangers_.push_back(std::move(socket));
        ++counts_["ranks: strangers"];
      }
    }
    return any;
  }

  bool turn() {
    bool moved = end_ranks();
    moved = let_strangers_come() || moved;
    moved = post_what_is_due() || moved;
    const auto first = static_cast<size_t>(dice_.below(static_cast<int64_t>(ranks_.size())));
    for (size_t i = 0; i < ranks_.size(); ++i)
      moved = turn_of(ranks_[(first + i) % ranks_.size()]) || moved;
    for (size_t i = 0; i < wires_.size(); ++i) moved = wires_[i]->move(now_, dice_) || moved;
    look_at_failures();
    return moved;
  }

  TimePoint next_time() const {
    auto next = TimePoint::max();
    const auto at = [&](TimePoint time) {
      if (time > now_) next = std::min(next, time);
    };
    for (const auto& rank : ranks_) {
      if (!rank.connections) continue;
      at(rank.due);
      at(rank.paused_until);
      if (rank.ends_at) at(*rank.ends_at);
    }
    for (const auto& message : messages_) {
      if (!message->leaves) at(message->send_at);
      if (!message->arrives) at(message->receive_at);
    }
    for (const auto& burst : bursts_)
      if (burst.count > 0) at(burst.at);
    for (const auto& wire : wires_) at(wire->next());
    return next;
  }

  static bool has_ended(const Parcel& parcel) { return parcel.complete || !parcel.failure.empty(); }

  bool all_ended() const {
    return std::all_of(messages_.begin(), messages_.end(), [&](const auto& message) {
      return (!alive(message->from) || has_ended(message->leaving)) &&
             (!alive(message->to) || has_ended(message->arriving));
    });
  }

  std::string text_of(const Message& message) const {
    return fmt::format("the message of {} bytes, tag {}, from rank {} to rank {}",
                       message.sent.size(), message.tag, message.from, message.to);
  }

  std::string left_over() const {
    for (const auto& message : messages_) {
      if (alive(message->to) && !has_ended(message->arriving))
        return "never ends: receiving " + text_of(*message);
      if (alive(message->from) && !has_ended(message->leaving))
        return "never ends: sending " + text_of(*message);
    }
    return "never ends";
  }

  /// The pairs that may have failed, because their connection was disturbed after the answer to its
  /// greeting had left, or a rank of theirs has ended.
  std::set<Pair> disturbed() {
    std::set<Pair> result;
    for (size_t i = 0; i < wires_.size(); ++i) {
      const auto& wire = *wires_[i];
      const bool in_greeting =
          faults_[i].direction == 0 && faults_[i].at < static_cast<int64_t>(comm::kGreetingBytes);
      // A watch carries nothing that damage could change.
      const bool harmless = faults_[i].kind == Wire::Fault::flip && wire.from < wire.to;
      if (wire.struck() && !in_greeting && !harmless) result.insert(pair(wire.from, wire.to));
      if (wire.struck())
        ++counts_[fmt::format("ranks: {} in {}",
                              faults_[i].kind == Wire::Fault::flip ? "bits flipped" : "cuts",
                              in_greeting ? "greetings" : "messages and answers")];
    }
    for (int a = 0; a < static_cast<int>(ranks_.size()); ++a)
      for (int b = 0; b < a; ++b)
        if (!alive(a) || !alive(b)) result.insert({b, a});
    return result;
  }

  std::string check() {
    const auto may_fail = disturbed();
    for (const auto& message : messages_) {
      const bool excused = may_fail.count(pair(message->from, message->to)) > 0;
      for (const bool sending : {true, false}) {
        const auto& parcel = sending ? message->leaving : message->arriving;
        if (!alive(sending ? message->from : message->to)) continue;
        if (!excused && !parcel.failure.empty())
          return fmt::format("{} {} fails, although nothing disturbed its connection: {}",
                             sending ? "sending" : "receiving", text_of(*message), parcel.failure);
      }
      if (message->arriving.complete && message->received != message->sent)
        return "wrong data in " + text_of(*message);
      ++counts_[message->arriving.complete ? "ranks: messages that arrived"
                                           : "ranks: messages that failed"];
    }
    for (const auto& [here, there] : damaged_) {
      if (!may_fail.count(pair(here, there)))
        return fmt::format("rank {} finds damage from rank {}, where there was none", here, there);
      ++counts_["ranks: damage found, by rank and peer"];
    }
    return check_flips();
  }

  /// A bit that was flipped within messages is found by the rank that reads it.
  std::string check_flips() {
    for (size_t i = 0; i < wires_.size(); ++i) {
      const auto& wire = *wires_[i];
      const auto& fault = faults_[i];
      const int reader = fault.direction == 0 ? wire.to : wire.from;
      const int writer = fault.direction == 0 ? wire.from : wire.to;
      const auto before = fault.direction == 0 ? comm::kGreetingBytes : size_t{1};
      if (!wire.struck() || fault.kind != Wire::Fault::flip || !alive(reader) || !alive(writer) ||
          fault.at < static_cast<int64_t>(before))
        continue;
      // Another fault may have ended the connection first.
      const auto others = std::count_if(wires_.begin(), wires_.end(), [&](const auto& other) {
        return other->struck() && pair(other->from, other->to) == pair(reader, writer);
      });
      if (others == 1 && !damaged_.count({reader, writer}))
        return fmt::format("rank {} does not find the damage from rank {}", reader, writer);
    }
    return "";
  }

  Dice dice_;
  Counts& counts_;
  const std::string name_;
  TimePoint now_, start_;
  std::vector<comm::TcpAddress> addresses_;
  std::vector<std::unique_ptr<Message>> messages_;
  std::vector<Burst> bursts_;
  std::vector<Socket> strangers_;
  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<Wire::Fault> faults_;  // of wires_
  int64_t faults_left_ = 0;
  std::set<Pair> damaged_;  // a rank, and the peer whose data arrived damaged
  std::vector<Rank> ranks_;
};

}  // namespace

std::string run_ranks(uint64_t seed, Counts& counts) {
  Network network(seed, counts);
  return network.run();
}

}  // namespace tessera::sim
