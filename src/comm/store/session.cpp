#include "comm/store/session.h"

#include <utility>

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
  if (!hello_) stage_ = Stage::dropped;
  if (dropped()) return;
  hello_bytes_ = std::exchange(input_, "");
  challenge_ = make_challenge({gate_.attempt, !gate_.secret.empty(), gate_.world});
  output_ = challenge_;
  stage_ = Stage::proof;
}

void Session::take_proof() {
  if (input_.size() < kProofBytes) return;
  if (!is_sealed(input_)) stage_ = Stage::dropped;
  if (dropped()) return;
  const bool proved = rank_proves(gate_.secret, hello_bytes_, challenge_, input_);
  const bool belongs = hello_->attempt == gate_.attempt && hello_->world == gate_.world;
  input_.clear();
  stage_ = proved && belongs ? Stage::member : Stage::dropped;
  output_ = make_verdict(is_member() ? kWelcome : kRefusal, proved, gate_.secret, hello_bytes_,
                         challenge_);
  if (!is_member()) complain(proved);
}

void Session::complain(bool proved) {
  const auto who = fmt::format("it calls itself {} {} and ", gate_.noun, hello_->rank);
  if (proved && hello_->attempt != gate_.attempt) {
    complaint_ = fmt::format("{}belongs to attempt {}; expected attempt {}", who, hello_->attempt,
                             gate_.attempt);
  } else if (proved && hello_->world < gate_.world) {
    complaint_ = fmt::format("{}makes its world number {}; expected number {}", who,
                             hello_->world + 1, gate_.world + 1);
  }
  if (proved) return;  // a rank of the next world may come early
  complaint_ = who;
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
