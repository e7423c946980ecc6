#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "comm/store/handshake.h"
#include "comm/store/key_table.h"

namespace tessera::comm {

/// The store's side of one connection, without a socket: it takes and returns bytes. A peer that
/// sends anything unexpected is dropped. Until the peer has proved the secret, at most kHelloBytes
/// of its bytes are kept, and its requests are not read.
class Session {
 public:
  struct Gate {
    int attempt = 0;
    std::string secret;
    std::string noun = "rank";  ///< See Caller.
    int world = 0;              ///< See Hello.
  };

  /// Both must outlive the session.
  Session(const Gate& gate, KeyTable& table) : gate_(gate), table_(table) {}

  /// Takes bytes of the peer.
  void feed(std::string_view bytes);
  /// Answers the waiting request if its keys exist now.
  void answer_waiting();

  /// The bytes to send; the caller removes those that it has sent.
  std::string& output() { return output_; }
  /// True if the connection is to be closed, after the output.
  bool dropped() const { return stage_ == Stage::dropped; }
  bool is_member() const { return stage_ == Stage::member; }
  /// False if the peer has not even sent a hello.
  bool greeted() const { return hello_.has_value(); }
  /// The reason for refusing a peer that speaks this protocol, as "it calls itself rank 2 and …";
  /// empty if it was not refused.
  const std::string& complaint() const { return complaint_; }

 private:
  enum class Stage { hello, proof, member, dropped };

  void take_hello();
  void take_proof();
  void complain(bool proved);
  void take_requests();

  const Gate& gate_;
  KeyTable& table_;
  Stage stage_ = Stage::hello;
  std::string input_, output_, complaint_;
  std::string hello_bytes_, challenge_;
  std::optional<Hello> hello_;
  std::optional<StoreMessage> waiting_;
};

}  // namespace tessera::comm
