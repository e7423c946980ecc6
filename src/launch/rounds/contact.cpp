#include "launch/rounds/contact.h"

#include <algorithm>
#include <cstdlib>

#include "comm/store/key_table.h"
#include "comm/store/secret.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

// A request that needs longer is sent again over a new connection: the cable may have been cut.
constexpr std::chrono::milliseconds kAnswer{2000};
// Within this time a running launcher writes again.
constexpr std::chrono::milliseconds kRivalWrites{2500};

constexpr const char* kSameVersion = "expected the same version of tessera on every host";

const char* variable(const char* name) { return std::getenv(name); }

std::string key_of(int node) { return "node/" + std::to_string(node); }

comm::StorePlace place_of(const LaunchOptions& options) {
  const comm::Caller caller{options.command, "launcher"};
  comm::StorePlace place;
  place.address = options.master_addr;
  place.port = *options.master_port + 1;
  place.rank = *options.node_rank;
  place.size = options.nnodes;
  place.secret = comm::read_secret(variable, place.rank, caller);
  place.caller = caller;
  return place;
}

}  // namespace

Contact::Contact(const LaunchOptions& options, const std::string& settings)
    : options_(options),
      patience_(options.rejoin_timeout.value_or(kRejoinTimeout)),
      place_(place_of(options)) {
  if (place_.rank != 0) return;
  served_ = comm::serve_store(place_.caller, place_.address, place_.port, "(--master-port + 1)",
                              {0, place_.secret, place_.caller.noun});
  leader_ = std::make_unique<Leader>(options, settings, Clock::now());
}

std::optional<Order> Contact::exchange(const NodeDocument& own) {
  own_name_ = name_of_node(own.node, own.host);
  try {
    if (!link_) connect();
    check_alone(own);
    if (!checked_) return std::nullopt;
    write(key_of(own.node), own.encode());
    if (leader_) lead();
    const auto bytes = read("order");
    heard_ = Clock::now();
    met_ = true;
    if (bytes.empty()) return std::nullopt;
    auto order = Order::decode(bytes);
    if (!order) give_up("it gives a malformed order", kSameVersion);
    return order;
  } catch (const comm::StoreClosed& error) {
    give_up("its launcher has ended",
            "the output of that launcher says why; then start the launchers of all hosts again");
  } catch (const comm::StoreLost& error) {
    link_.reset();
    if (Clock::now() - heard_ >= patience_) give_up_waiting(error.what());
  }
  return std::nullopt;
}

void Contact::connect() {
  const auto left = heard_ + patience_ - Clock::now();
  const auto limit = std::clamp<Clock::duration>(left, std::chrono::milliseconds(200), kAnswer);
  link_.emplace(place_, Clock::now() + limit, met_);
}

/// Two launchers with the same node rank would overwrite each other's document.
void Contact::check_alone(const NodeDocument& own) {
  if (checked_) return;
  const auto bytes = read(key_of(own.node));
  heard_ = Clock::now();
  const auto other = NodeDocument::decode(bytes);
  const auto now = Clock::now();
  if (!other || other->left || other->incarnation == own.incarnation) {
    checked_ = true;
  } else if (rival_.empty()) {
    rival_ = bytes;
    rival_until_ = now + kRivalWrites;
  } else if (bytes != rival_) {
    throw UsageError("--node-rank = '" + std::to_string(own.node) +
                     "': expected a number of its own, because the launcher on host " +
                     other->host + " has it");
  } else {
    checked_ = now >= rival_until_;
  }
}

void Contact::lead() {
  const auto now = Clock::now();
  for (int node = 0; node < options_.nnodes; ++node) {
    const auto document = NodeDocument::decode(read(key_of(node)));
    if (document && document->node == node) leader_->hear(*document, now);
  }
  write("order", leader_->step(now).encode());
}

bool Contact::all_left() const { return !leader_ || leader_->all_left(Clock::now()); }

void Contact::give_up(const std::string& reason, const std::string& advice) const {
  throw BrokenWorldError(own_name_ + (met_ ? " lost" : " did not reach") + " node 0 at " +
                             place_.address + ":" + std::to_string(place_.port) +
                             " (--master-addr, --master-port + 1): " + reason +
                             (met_ ? "; node 0 is needed until the end: " : "; ") + advice,
                         {});
}

void Contact::give_up_waiting(const std::string& cause) const {
  give_up("not heard of for " + seconds_text(patience_) + " s (--rejoin-timeout): " + cause,
          met_ ? "check that host and the network, and start the launchers of all hosts again; a "
                 "longer --rejoin-timeout tolerates longer interruptions"
               : "expected a launcher there with --node-rank 0 and this launcher's --nnodes, "
                 "--max-restarts and --master-port, and no firewall before the port");
}

/// The value of a key, or "" if there is none.
std::string Contact::read(const std::string& key) {
  return ask({static_cast<uint8_t>(comm::Request::compare_set), {key, "", ""}});
}

void Contact::write(const std::string& key, const std::string& value) {
  ask({static_cast<uint8_t>(comm::Request::set), {key, value}});
}

std::string Contact::ask(const comm::StoreMessage& request) {
  auto reply = link_->call(request, Clock::now() + kAnswer);
  if (static_cast<comm::Reply>(reply.code) != comm::Reply::done)
    give_up("its store refuses a request: " + (reply.parts.empty() ? "" : reply.parts[0]),
            kSameVersion);
  return reply.parts.empty() ? "" : std::move(reply.parts[0]);
}

}  // namespace tessera::launch
