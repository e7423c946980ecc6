#include "launch/rounds/leader.h"

#include <algorithm>

namespace tessera::launch {
namespace {

using End = NodeDocument::End;

/// A launcher that writes this often is not lost; over a sound network it writes far more often.
constexpr std::chrono::milliseconds kPresent{3000};

std::string list_nodes(const std::set<int>& nodes) {
  std::string text;
  for (const int node : nodes) text += (text.empty() ? "" : ", ") + std::to_string(node);
  return (nodes.size() == 1 ? "node " : "nodes ") + text;
}

std::string count_hosts(size_t count) {
  return std::to_string(count) + (count == 1 ? " host" : " hosts");
}

}  // namespace

std::string name_of_node(int node, const std::string& host) {
  return "node " + std::to_string(node) + (host.empty() ? "" : " (" + host + ")");
}

Leader::Leader(const LaunchOptions& options, std::string settings, Clock::time_point now)
    : options_(options),
      least_(options.min_nnodes.value_or(options.nnodes)),
      patience_(options.rejoin_timeout.value_or(kRejoinTimeout)),
      start_(now),
      not_before_(now),
      restarts_(options) {
  for (int node = 0; node < options.nnodes; ++node) expected_.insert(node);
  order_.settings = std::move(settings);
}

void Leader::hear(const NodeDocument& document, Clock::time_point now) {
  const auto [entry, is_new] = known_.try_emplace(document.node, Known{document, now});
  Known& known = entry->second;
  const bool changed =
      known.document.beat != document.beat || known.document.incarnation != document.incarnation;
  if (!is_new && changed) known = {document, now};
}

const Order& Leader::step(Clock::time_point now) {
  switch (phase_) {
    case Phase::gathering:
      gather(now);
      break;
    case Phase::running:
      watch(now);
      break;
    case Phase::ending:
      decide(now);
      break;
    case Phase::over:
      break;
  }
  return order_;
}

const Leader::Known* Leader::known(int node) const {
  const auto found = known_.find(node);
  return found == known_.end() ? nullptr : &found->second;
}

bool Leader::heard_within(int node, std::chrono::milliseconds time, Clock::time_point now) const {
  const Known* entry = known(node);
  return now - (entry ? entry->heard : start_) < time;
}

std::set<int> Leader::ready(Clock::time_point now) const {
  std::set<int> nodes;
  for (const auto& [node, entry] : known_) {
    const NodeDocument& document = entry.document;
    if (document.ready() && document.settings == order_.settings &&
        heard_within(node, kPresent, now))
      nodes.insert(node);
  }
  return nodes;
}

void Leader::gather(Clock::time_point now) {
  const auto present = ready(now);
  std::set<int> missing, others;
  for (const int node : expected_) {
    const Known* entry = known(node);
    const bool other_flags = entry && entry->document.settings != order_.settings;
    if (other_flags) others.insert(node);
    const bool comes = !other_flags && !(entry && entry->document.left);
    if (!present.count(node) && comes && heard_within(node, patience_, now)) missing.insert(node);
  }
  if (now < not_before_) return;
  if (missing.empty() && static_cast<int>(present.size()) >= least_) return begin(present, now);
  if (missing.empty()) {
    std::set<int> absent;
    for (int node = 0; node < options_.nnodes; ++node)
      if (!present.count(node)) absent.insert(node);
    return finish(list_nodes(absent) + " did not come within " + seconds_text(patience_) +
                  " s (--rejoin-timeout): " + count_hosts(present.size()) + " here, " +
                  std::to_string(least_) + " or more expected (--nnodes)" +
                  (others.empty() ? "; start a launcher on each host, or expect fewer hosts "
                                    "(--nnodes MIN:MAX)"
                                  : "; other flags on " + list_nodes(others)));
  }
  order_.text = "waiting for " + list_nodes(missing);
}

void Leader::begin(const std::set<int>& nodes, Clock::time_point now) {
  phase_ = Phase::running;
  failure_.clear();
  restarts_.begin(now);
  order_.kind = Order::Kind::begin;
  ++order_.round;
  order_.nodes.assign(nodes.begin(), nodes.end());
  order_.incarnations.clear();
  order_.ranks.clear();
  for (const int node : nodes) {
    order_.incarnations.push_back(known(node)->document.incarnation);
    order_.ranks.push_back(known(node)->document.ranks);
  }
  order_.text = count_hosts(nodes.size()) + ", " + list_nodes(nodes);
  std::set<int> absent;
  for (const int node : expected_)
    if (!nodes.count(node)) absent.insert(node);
  if (!absent.empty())
    order_.text += "; without " + list_nodes(absent) + ", which did not come within " +
                   seconds_text(patience_) + " s (--rejoin-timeout)";
  expected_ = nodes;
}

std::string Leader::loss_of(size_t place, Clock::time_point now) const {
  const int node = order_.nodes[place];
  const NodeDocument& document = known(node)->document;
  const std::string name = "the launcher of " + name_of_node(node, document.host);
  if (document.incarnation != order_.incarnations[place]) return name + " was started anew";
  if (document.left) return name + " has ended";
  if (heard_within(node, patience_, now)) return "";
  return name + " was not heard of for " + seconds_text(patience_) + " s (--rejoin-timeout)";
}

bool Leader::has_ended(size_t place) const {
  const NodeDocument& document = known(order_.nodes[place])->document;
  return document.incarnation == order_.incarnations[place] && document.ended == order_.round;
}

void Leader::watch(Clock::time_point now) {
  size_t done = 0;
  std::string failed;
  for (size_t place = 0; place < order_.nodes.size(); ++place) {
    const NodeDocument& document = known(order_.nodes[place])->document;
    const std::string name = name_of_node(document.node, document.host);
    if (!has_ended(place)) {
      if (failed.empty()) failed = failure_ = loss_of(place, now);
    } else if (document.end == End::stopped || document.end == End::followed) {
      return end_round(Order::Kind::stop, document.text + " on " + name);
    } else if (document.end == End::failed) {
      if (failed.empty()) failed = document.text + " on " + name;
    } else {
      ++done;
    }
  }
  if (!failed.empty()) return end_round(Order::Kind::fail, failed);
  if (done == order_.nodes.size()) return finish("");
  auto further = ready(now);
  for (const int node : order_.nodes) further.erase(node);
  if (done == 0 && !further.empty())
    end_round(Order::Kind::regroup, list_nodes(further) + " came; all hosts start again together");
}

void Leader::end_round(Order::Kind kind, std::string text) {
  phase_ = Phase::ending;
  order_.kind = kind;
  order_.text = std::move(text);
}

void Leader::decide(Clock::time_point now) {
  std::string stopped, failed = order_.text;
  bool final = false;
  for (size_t place = 0; place < order_.nodes.size(); ++place) {
    const NodeDocument& document = known(order_.nodes[place])->document;
    if (!has_ended(place)) {
      if (loss_of(place, now).empty()) return;
      continue;
    }
    const std::string on = " on " + name_of_node(document.node, document.host);
    if (document.end == End::stopped) stopped = document.text + on;
    if (document.end != End::failed) continue;
    // The origin of a failure says more than its consequence on another host.
    if (document.cause_known && failure_.empty()) failed = document.text + on;
    final = final || document.final;
  }
  if (order_.kind == Order::Kind::stop) stopped = order_.text;
  if (!stopped.empty()) return finish("no restart: " + stopped);
  if (order_.kind == Order::Kind::regroup && !final)
    return gather_again(now, std::chrono::milliseconds(0));
  const auto wait = final ? std::nullopt : restarts_.next(now);
  if (!wait)
    return finish(failed + (restarts_.refusal().empty() ? "" : "; " + restarts_.refusal()));
  gather_again(now, *wait);
  order_.text = "restart " + restarts_.count() + ", because " + failed + "; waiting " +
                seconds_text(*wait) + " s";
}

void Leader::gather_again(Clock::time_point now, std::chrono::milliseconds delay) {
  phase_ = Phase::gathering;
  order_.kind = Order::Kind::wait;
  not_before_ = now + delay;
}

void Leader::finish(std::string text) {
  phase_ = Phase::over;
  order_.kind = Order::Kind::over;
  order_.text = std::move(text);
}

bool Leader::all_left(Clock::time_point now) const {
  return std::all_of(known_.begin(), known_.end(), [&](const auto& entry) {
    return entry.first == 0 || entry.second.document.left ||
           !heard_within(entry.first, kPresent, now);
  });
}

}  // namespace tessera::launch
