// Schedules of the store of several worlds, one after the other: StoreServer with its thread, and
// ranks with StoreLink, which run as they are. Ranks without the secret, of another attempt or
// world, and strangers disturb them.
#include <algorithm>
#include <memory>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "comm/store/handshake.h"
#include "comm/store/store_link.h"
#include "comm/store/store_server.h"
#include "sim/schedule.h"
#include "sim/tasks.h"
#include "sim/wire.h"
#include "tessera/error.h"

namespace tessera::sim {
namespace {

using namespace comm;

constexpr auto kLongest = std::chrono::seconds(400);  // after which nothing may be left
constexpr auto kPatience = std::chrono::seconds(90), kStrangersPatience = std::chrono::seconds(10);
constexpr int kMostTurnsAtOnce = 20'000, kPort = 29500, kStrangers = 20;  // their first number
constexpr int kMostWrong = 4;

class Schedule {
 public:
  Schedule(uint64_t seed, Counts& counts)
      : dice_(seed),
        counts_(counts),
        path_(fmt::format("tessera-sim/{}/{}", ::getpid(), seed)),
        size_(static_cast<int>(dice_.between(1, 5))),
        start_(TimePoint() + std::chrono::hours(1)),
        connections_(kStrangers + kMostWrong) {
    tasks_.connect = [this](int fd, int number) { return connect(fd, number); };
    if (dice_.one_in(6)) tasks_.lacks_files = [this] { return dice_.one_in(40); };
    faults_left_ = dice_.below(6);
    has_secret_ = !dice_.one_in(8);
    for (int64_t i = dice_.between(1, 3), attempt = 7, world = 0; i > 0; --i) {
      worlds_.push_back({static_cast<int>(attempt), static_cast<int>(world), 0, {}});
      dice_.one_in(3) ? ++attempt, world = 0 : ++world;
    }
    for (size_t i = worlds_.size() * size_; i > 0; --i)
      value_sizes_.push_back(dice_.one_in(8) ? dice_.below(300'000) : dice_.below(500));
    for (int rank = 0; rank < size_; ++rank) add(rank, [this, rank] { be_rank(rank); });
    for (int i = static_cast<int>(dice_.below(kMostWrong + 1)); i > 0; --i) {
      const auto kind = static_cast<Kind>(dice_.below(5));
      const int number = kStrangers + i - 1;
      add(number, [this, kind, number] { be_wrong(kind, number); });
      ++counts_["store: ranks that do not belong"];
    }
    if (dice_.one_in(2))
      for (int64_t i = dice_.between(1, 4); i > 0; --i)
        bursts_.push_back({start_ + milliseconds(dice_.below(1000)), dice_.between(1, 100)});
  }

  std::string run() {
    for (int turns = 0; !tasks_.all_ended() && finding_.empty();) {
      if (++turns > kMostTurnsAtOnce) return "the store does not come to rest";
      if (turn()) continue;
      auto next = tasks_.next();
      const auto at = [&](TimePoint time) {
        if (time > tasks_.now) next = std::min(next, time);
      };
      for (const auto& wire : wires_) at(wire.wire->next());
      for (const auto& burst : bursts_)
        if (burst.count > 0) at(burst.at);
      if (next == TimePoint::max() || next > start_ + kLongest) return "never ends";
      tasks_.now = next;
      turns = 0;
    }
    return check();
  }
  bool ended() const { return tasks_.all_ended(); }

 private:
  enum Kind { other_secret, no_secret, other_attempt, early, behind };

  struct World {
    int attempt, number;
    int left;  // ranks that have finished
    std::vector<std::string> reported;
  };
  struct Carried {
    std::unique_ptr<Wire> wire;
    Wire::Fault::Kind fault;
  };
  struct Connections {
    int made = 0, struck = 0, lost = 0;
  };
  struct Burst {
    TimePoint at;
    int64_t count;
  };

  void add(int number, std::function<void()> body) {
    tasks_.start(number, [this, body = std::move(body)] {
      try {
        body();
      } catch (const std::exception& error) {
        find(error.what());
      }
    });
  }
  void find(const std::string& what) {
    if (finding_.empty()) finding_ = what;
  }
  std::string secret() const { return has_secret_ ? "secret" : ""; }
  std::string value(size_t world, int rank) const {
    return std::string(value_sizes_[world * size_ + rank],
                       static_cast<char>('a' + 7 * world + rank));
  }
  static std::string key(int rank) { return fmt::format("key {}", rank); }
  void dawdle() {
    if (dice_.one_in(3)) tasks_.sleep(milliseconds(dice_.below(200)));
  }

  /// connect() of StoreLink.
  int connect(int fd, int number) {
    const auto refuse = [](int error) {
      errno = error;
      return -1;
    };
    if (!listens_) return refuse(ECONNREFUSED);
    if (dice_.one_in(20)) {
      ++counts_["store: connections that the network refused"];
      return refuse(dice_.one_in(2) ? ENETUNREACH : ETIMEDOUT);
    }
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return -1;
    const Socket kept(ends[0]);
    if (::dup3(kept.fd(), fd, O_CLOEXEC) < 0) return -1;
    Wire::Fault fault;
    if (faults_left_ > 0 && dice_.one_in(2)) {
      --faults_left_;
      fault.kind = dice_.one_in(3) ? Wire::Fault::cut : Wire::Fault::flip;
      fault.direction = static_cast<int>(dice_.below(2));
      fault.at = dice_.one_in(10) ? dice_.below(100'000) : dice_.below(600);
    }
    wires_.push_back(
        {std::make_unique<Wire>(Socket(ends[1]), path_, number, 0, fault), fault.kind});
    if (connections_[number].made++ > 0) ++counts_["store: connections made again"];
    return 0;
  }

  StorePlace place(int number, const World& world) const {
    return {"127.0.0.1", kPort, number, size_, world.attempt, secret(), {}, world.number};
  }

  void serve(World& world) {
    std::vector<Socket> listeners;
    listeners.push_back(listen_at_path(path_));
    StoreServer::Options options;
    options.gate = {world.attempt, secret(), "rank", world.number};
    server_ = std::make_unique<StoreServer>(std::move(listeners), std::move(options));
    listens_ = true;
  }

  /// In each world a rank sets a key, waits for those of all ranks, and reads them.
  void be_rank(int rank) {
    for (size_t i = 0; i < worlds_.size(); ++i) {
      auto& world = worlds_[i];
      dawdle();
      if (rank == 0) serve(world);
      auto link = std::make_unique<StoreLink>(place(rank, world), tasks_.now + kPatience, false);
      ++counts_["store: ranks that joined a world"];
      std::vector<StoreMessage> requests{
          {static_cast<uint8_t>(Request::set), {key(rank), value(i, rank)}},
          {static_cast<uint8_t>(Request::wait), {}}};
      for (int other = 0; other < size_; ++other) {
        requests[1].parts.push_back(key(other));
        requests.push_back({static_cast<uint8_t>(Request::get), {key(other)}});
      }
      for (size_t r = 0; r < requests.size(); ++r) {
        dawdle();
        const auto reply = ask(link, rank, world, requests[r]);
        if (r >= 2 && (reply.parts.size() != 1 || reply.parts[0] != value(i, int(r) - 2)))
          return find(fmt::format("rank {} reads a wrong value of rank {}", rank, r - 2));
      }
      ++world.left;
      if (rank > 0) continue;
      while (world.left < size_) tasks_.sleep(milliseconds(10));
      dawdle();
      listens_ = false;
      first_over_ = true;
      world.reported = server_->reported();
      server_.reset();
    }
  }

  /// A connection that is lost is made again, if something has disturbed it.
  StoreMessage ask(std::unique_ptr<StoreLink>& link, int rank, const World& world,
                   const StoreMessage& request) {
    for (;;) {
      std::string lost;
      try {
        auto reply = link->call(request, tasks_.now + kPatience);
        if (static_cast<Reply>(reply.code) != Reply::done)
          find(fmt::format("the store refuses a request of rank {}", rank));
        return reply;
      } catch (const StoreLost& error) {
        lost = error.what();
      }
      ++counts_["store: connections lost"];
      if (++connections_[rank].lost > connections_[rank].struck)
        throw std::runtime_error(
            fmt::format("rank {} loses a connection that nothing disturbed: {}", rank, lost));
      link = std::make_unique<StoreLink>(place(rank, world), tasks_.now + kPatience, true);
    }
  }

  /// Somebody who speaks the protocol and gets an error, never a connection.
  void be_wrong(Kind kind, int number) {
    dawdle();
    const auto& first = worlds_.front();
    if (kind == behind)  // the first world is over
      while (!first_over_) tasks_.sleep(milliseconds(20));
    auto place = this->place(number, kind == early ? World{99, 0, 0, {}} : first);
    if (kind == other_secret) place.secret = "other";
    if (kind == no_secret) place.secret = has_secret_ ? "" : "other";
    if (kind == other_attempt) place.attempt = 6;
    try {
      const StoreLink link(place, tasks_.now + kStrangersPatience, false);
      find("a stranger is a member");
    } catch (const UsageError& error) {
      const std::string text = error.what();
      const bool of_secrets = text.find("TESSERA_SECRET") != std::string::npos;
      if (of_secrets != (kind == other_secret || kind == no_secret))
        find(fmt::format("a rank of kind {} gets: {}", int{kind}, text));
      ++counts_["store: strangers that got their error"];
    } catch (const StoreLost&) {
      ++counts_["store: strangers that found no store"];
    }
  }

  bool let_strangers_come() {
    bool any = false;
    for (auto& burst : bursts_) {
      if (burst.count == 0 || burst.at > tasks_.now) continue;
      any = true;
      for (; burst.count > 0; --burst.count) {
        auto socket = connect_to_path(path_);
        if (socket.fd() < 0) continue;
        const auto hello = make_hello({static_cast<int>(dice_.below(4)), 7, has_secret_, 0});
        auto words = dice_.one_in(3) ? hello : hello.substr(0, dice_.below(60));
        for (int64_t i = dice_.one_in(3) ? dice_.below(200) : 0; i > 0; --i)
          words += static_cast<char>(dice_.below(256));
        (void)!::send(socket.fd(), words.data(), words.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        strangers_.push_back(std::move(socket));
        ++counts_["store: strangers"];
      }
    }
    return any;
  }

  bool turn() {
    bool moved = let_strangers_come();
    moved = tasks_.turn() || moved;
    if (moved && dice_.one_in(2)) return true;
    for (auto& [wire, fault] : wires_) {
      const bool before = wire->struck();
      moved = wire->move(tasks_.now, dice_) || moved;
      if (before || !wire->struck()) continue;
      ++connections_[wire->from].struck;
      ++counts_[fault == Wire::Fault::flip ? "store: bits flipped" : "store: cuts"];
    }
    std::erase_if(wires_, [](const Carried& carried) { return carried.wire->closed(); });
    return moved;
  }

  std::string check() {
    if (!finding_.empty()) return finding_;
    for (const auto& world : worlds_)
      for (const auto& line : world.reported) {
        const auto says = [&](const std::string& text) {
          return line.find(text) != std::string::npos;
        };
        // A rank of the next attempt may ask the store of this one.
        for (int rank = 0; rank < size_; ++rank)
          if (says(fmt::format("calls itself rank {} ", rank)) &&
              !says(fmt::format("belongs to attempt {};", world.attempt + 1)))
            return "the store complains of a rank: " + line;
      }
    for (const auto& stranger : strangers_) {
      char bytes[1000];
      const auto got = ::recv(stranger.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got > static_cast<ssize_t>(kChallengeBytes))
        return fmt::format("a stranger gets {} bytes", got);
    }
    return "";
  }

  Dice dice_;
  Counts& counts_;
  const std::string path_;
  const int size_;
  const TimePoint start_;
  std::string finding_;
  std::vector<World> worlds_;
  std::vector<int64_t> value_sizes_;
  std::vector<Connections> connections_;  // by number
  std::vector<Carried> wires_;
  std::vector<Burst> bursts_;
  std::vector<Socket> strangers_;
  int64_t faults_left_ = 0;
  bool has_secret_ = true, listens_ = false, first_over_ = false;
  std::unique_ptr<StoreServer> server_;
  Tasks tasks_{dice_, start_};
};

}  // namespace

std::string run_store(uint64_t seed, Counts& counts) {
  auto schedule = std::make_unique<Schedule>(seed, counts);
  const auto finding = schedule->run();
  if (!schedule->ended()) (void)schedule.release();  // its tasks wait for ever
  return finding;
}

}  // namespace tessera::sim
