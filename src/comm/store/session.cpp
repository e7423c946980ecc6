#include "comm/store/session.h"

#include <fmt/format.h>

namespace tessera::comm {

void Session::feed(std::string_view bytes) {
  // A peer sends its next request after the reply to the last one.
  if (waiting_ || !output_.empty()) stage_ = Stage::dropped;
  if (dropped()) return;
  input_ += bytes;
  if (stage_ == Stage::hello) take_hello();
  else if (stage_ == Stage::proof) take_proof();
  else take_requests();
}

void Session::take_hello() {
  if (!begins_hello(input_)) stage_ = Stage::dropped;
  if (dropped() || input_.size() < kHelloBytes) return;
  hello_ = read_hello(input_);
  hello_bytes_ = input_.substr(0, kHelloBytes);
  input_.clear();
  challenge_ = make_challenge({gate_.attempt, !gate_.secret.empty()}, gate_.secret, hello_bytes_);
  output_ = challenge_;
  stage_ = Stage::proof;
}

void Session::take_proof() {
  if (input_.size() > kProofBytes) stage_ = Stage::dropped;
  if (dropped() || input_.size() < kProofBytes) return;
  const bool proved = rank_proves(gate_.secret, hello_bytes_, challenge_, input_);
  input_.clear();
  if (proved && hello_->attempt == gate_.attempt) {
    output_ = kWelcome;
    stage_ = Stage::member;
    return;
  }
  output_ = kRefusal;
  stage_ = Stage::dropped;
  complaint_ = fmt::format("it calls itself {} {} and ", gate_.noun, hello_->rank);
  if (proved) {
    complaint_ +=
        fmt::format("belongs to attempt {}; expected attempt {}", hello_->attempt, gate_.attempt);
    return;
  }
  const auto server = gate_.noun + " 0";
  complaint_ += !hello_->has_secret    ? "has no secret, and " + server + " has one"
                : gate_.secret.empty() ? "has a secret, and " + server + " has none"
                                       : "has another secret than " + server;
  complaint_ += "; set the same TESSERA_SECRET or TESSERA_SECRET_FILE on every " + gate_.noun;
}

void Session::take_requests() {
  StoreMessage request;
  const auto taken = take_message(input_, request);
  if (taken == Taken::malformed || (taken == Taken::whole && !input_.empty()))
    stage_ = Stage::dropped;
  if (dropped() || taken == Taken::incomplete) return;
  waiting_ = std::move(request);
  answer_waiting();
}

void Session::answer_waiting() {
  if (!waiting_) return;
  const auto reply = table_.answer(*waiting_);
  if (!reply) return;
  waiting_.reset();
  output_ = encode(*reply);
}

}  // namespace tessera::comm
