// Schedules of the Sessions of a store, with ranks that connect again when they lose a connection,
// ranks without the secret or of another world, and strangers.
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "comm/store/handshake.h"
#include "comm/store/session.h"
#include "sim/schedule.h"

namespace tessera::sim {
namespace {

using namespace comm;

constexpr int kMostTurns = 20'000, kMostTries = 40;

/// Bytes on the way in one direction. At most one bit is flipped.
struct Way {
  std::string bytes;
  int64_t carried = 0, flip_at = -1;
  bool flipped = false;

  void put(std::string more) {
    const auto size = static_cast<int64_t>(more.size());
    if (flip_at >= carried && flip_at < carried + size) {
      more[static_cast<size_t>(flip_at - carried)] ^= 4;
      flipped = true;
    }
    carried += size;
    bytes += more;
  }
  std::string take(Dice& dice) {
    const auto size = static_cast<size_t>(
        dice.one_in(3) ? dice.between(0, 9) : dice.below(static_cast<int64_t>(bytes.size()) + 1));
    const auto taken = bytes.substr(0, size);
    bytes.erase(0, taken.size());
    return taken;
  }
};

/// A connection, whose end at the store is a Session.
struct Connection {
  Connection(const Session::Gate& gate, KeyTable& table) : session(gate, table) {}
  Session session;
  Way there, back;
  bool open = true;
};

/// What connects: a rank, which asks for what its program wants, or somebody else.
class Visitor {
 public:
  enum Kind { rank, other_secret, no_secret, early, other_attempt, mute, junk };

  Visitor(Kind kind, int number, int ranks, Dice& dice)
      : kind_(kind),
        number_(number),
        ranks_(ranks),
        secret_(kind == other_secret ? "other" : "secret") {
    if (kind == no_secret) secret_.clear();
    // Sets a key of its own, waits for those of all ranks, and reads each.
    requests_.push_back({static_cast<uint8_t>(Request::set), {key(number), value(number)}});
    std::vector<std::string> keys;
    for (int i = 0; i < ranks; ++i) keys.push_back(key(i));
    requests_.push_back({static_cast<uint8_t>(Request::wait), keys});
    for (int i = 0; i < ranks; ++i)
      requests_.push_back({static_cast<uint8_t>(Request::get), {key(i)}});
    if (kind == junk) {
      words_ = dice.one_in(2) ? make_hello({number, 7, true, 3}).substr(0, dice.below(60)) : "";
      for (int64_t i = dice.between(1, 200); i > 0; --i)
        words_ += static_cast<char>(dice.below(256));
    }
  }

  Kind kind() const { return kind_; }
  bool done() const {
    if (kind_ == rank) return asked_ == requests_.size();
    if (kind_ == mute || kind_ == junk) return true;
    return refused_;
  }
  int tries() const { return tries_; }
  int number() const { return number_; }

  void connected(Connection& connection) {
    ++tries_;
    stage_ = Stage::challenge;
    input_.clear();
    hello_ = make_hello(
        {number_, kind_ == other_attempt ? 6 : 7, !secret_.empty(), kind_ == early ? 4 : 3});
    if (kind_ == junk) connection.there.put(words_);
    else if (kind_ != mute) connection.there.put(hello_);
  }

  /// Takes what has arrived. Returns what is wrong with it, or "". Closes the connection if it must
  /// connect again.
  std::string take(Connection& connection, const std::string& bytes) {
    input_ += bytes;
    if (stage_ == Stage::challenge) return take_challenge(connection);
    if (stage_ == Stage::verdict) return take_verdict(connection);
    return take_reply(connection);
  }

 private:
  enum class Stage { challenge, verdict, member };

  static std::string key(int i) { return fmt::format("key {}", i); }
  static std::string value(int i) {
    return std::string(static_cast<size_t>(50 + 100 * i), static_cast<char>('a' + i));
  }

  std::string take_challenge(Connection& connection) {
    if (input_.size() < kChallengeBytes) return "";
    const auto content = read_challenge(input_);
    challenge_ = input_;
    if (!content) connection.open = false;
    if (!content) return "";
    if (content->has_secret != !secret_.empty()) {
      refused_ = true;
      connection.there.put(make_no_proof());
      return "";
    }
    connection.there.put(make_proof(secret_, hello_, challenge_));
    input_.clear();
    stage_ = Stage::verdict;
    return "";
  }

  std::string take_verdict(Connection& connection) {
    if (input_.size() < kVerdictBytes) return "";
    const auto verdict = input_;
    input_.clear();
    if (!is_sealed(verdict)) connection.open = false;
    if (!is_sealed(verdict)) return "";
    const bool proved = store_proves(secret_, hello_, challenge_, verdict);
    if (kind_ == rank && (!proved || verdict[0] != kWelcome))
      return fmt::format("rank {} is refused", number_);
    if (kind_ != rank && verdict[0] == kWelcome) return "a stranger is welcome";
    if (kind_ == other_secret && proved) return "a store proves a secret that it does not have";
    refused_ = kind_ != rank;
    if (refused_) return "";
    stage_ = Stage::member;
    ask(connection);
    return "";
  }

  std::string take_reply(Connection& connection) {
    StoreMessage reply;
    const auto taken = take_message(input_, reply);
    if (taken == Taken::malformed) connection.open = false;
    if (taken != Taken::whole) return "";
    if (static_cast<Reply>(reply.code) != Reply::done) return "the store refuses a request";
    const auto& request = requests_[asked_];
    if (static_cast<Request>(request.code) == Request::get) {
      const int other = static_cast<int>(asked_) - 2;
      if (reply.parts.size() != 1 || reply.parts[0] != value(other))
        return fmt::format("rank {} reads a wrong value of rank {}", number_, other);
    }
    ++asked_;
    ask(connection);
    return "";
  }

  void ask(Connection& connection) {
    if (asked_ < requests_.size()) connection.there.put(encode(requests_[asked_]));
  }

  const Kind kind_;
  const int number_, ranks_;
  std::string secret_, words_, hello_, challenge_, input_;
  std::vector<StoreMessage> requests_;
  size_t asked_ = 0;
  int tries_ = 0;
  bool refused_ = false;
  Stage stage_ = Stage::challenge;
};

class Schedule {
 public:
  Schedule(uint64_t seed, Counts& counts) : dice_(seed), counts_(counts) {
    const int ranks = static_cast<int>(dice_.between(1, 5));
    for (int i = 0; i < ranks; ++i) add(Visitor::rank, i, ranks);
    for (int64_t i = dice_.below(8); i > 0; --i) {
      const auto kind = static_cast<Visitor::Kind>(dice_.between(1, Visitor::junk));
      add(kind, 20 + static_cast<int>(i), ranks);
    }
    faults_left_ = dice_.below(6);
  }

  std::string run() {
    for (int turn = 0; turn < kMostTurns; ++turn) {
      auto finding = this->turn();
      if (!finding.empty()) return finding;
      if (std::all_of(visitors_.begin(), visitors_.end(), [](const auto& v) { return v.done(); }))
        return check();
    }
    for (const auto& visitor : visitors_)
      if (!visitor.done())
        return fmt::format("visitor {} of kind {} never ends", visitor.number(),
                           int{visitor.kind()});
    return "never ends";
  }

 private:
  void add(Visitor::Kind kind, int number, int ranks) {
    visitors_.emplace_back(kind, number, ranks, dice_);
    connections_.emplace_back();
    ++counts_[kind == Visitor::rank ? "store: ranks" : "store: strangers"];
  }

  /// One visitor connects, or a piece of what is on the way arrives.
  std::string turn() {
    const auto i = static_cast<size_t>(dice_.below(static_cast<int64_t>(visitors_.size())));
    auto& visitor = visitors_[i];
    auto& connection = connections_[i];
    if (!connection) {
      if (visitor.tries() > 0 && visitor.kind() != Visitor::rank && visitor.done()) return "";
      if (visitor.tries() >= kMostTries) return fmt::format("visitor {} tries for ever", i);
      connection = std::make_unique<Connection>(gate_, table_);
      if (faults_left_ > 0 && dice_.one_in(2)) {
        --faults_left_;
        (dice_.one_in(2) ? connection->there : connection->back).flip_at = dice_.below(600);
      }
      if (visitor.tries() > 0) ++counts_["store: connections made again"];
      visitor.connected(*connection);
    }
    auto& session = connection->session;
    if (faults_left_ > 0 && dice_.one_in(60)) {
      --faults_left_;
      ++counts_["store: connections lost"];
      connection->open = false;
    }
    if (connection->open) {
      const auto bytes = connection->there.take(dice_);
      // A socket with output is not read, see StoreServer::wait_for_events().
      if (!session.output().empty()) connection->there.bytes.insert(0, bytes);
      else if (!bytes.empty()) session.feed(bytes);
      for (auto& other : connections_)
        if (other) other->session.answer_waiting();
      const auto sent = std::min<size_t>(session.output().size(), dice_.between(1, 300));
      connection->back.put(session.output().substr(0, sent));
      session.output().erase(0, sent);
    }
    std::string finding;
    if (const auto arrived = connection->back.take(dice_); connection->open && !arrived.empty())
      finding = visitor.take(*connection, arrived);
    if (session.dropped() && session.output().empty() && connection->back.bytes.empty())
      connection->open = false;
    if (!finding.empty()) return finding;  // no flipped bit may cause one
    if (session.is_member() && visitor.kind() != Visitor::rank) return "a stranger is a member";
    if (!session.complaint().empty() && visitor.kind() == Visitor::rank)
      return "the store complains of a rank: " + session.complaint();
    if (!connection->open) count_and_close(connection);
    return "";
  }

  void count_and_close(std::unique_ptr<Connection>& connection) {
    counts_["store: bits flipped"] += connection->there.flipped + connection->back.flipped;
    connection.reset();
  }

  std::string check() {
    for (auto& connection : connections_)
      if (connection) count_and_close(connection);
    return "";
  }

  Dice dice_;
  Counts& counts_;
  const Session::Gate gate_{7, "secret", "rank", 3};
  KeyTable table_;
  std::deque<Visitor> visitors_;
  std::vector<std::unique_ptr<Connection>> connections_;
  int64_t faults_left_ = 0;
};

}  // namespace

std::string run_store(uint64_t seed, Counts& counts) {
  Schedule schedule(seed, counts);
  return schedule.run();
}

}  // namespace tessera::sim
