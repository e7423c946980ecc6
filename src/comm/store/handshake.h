#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/store/message.h"

namespace tessera::comm {

// A rank and the store prove to each other that they know the same secret, without sending it:
//
//   rank  -> store   hello      mark, rank, attempt, world, whether it has a secret, nonce
//   store -> rank    challenge  mark, attempt, world, whether it has a secret, nonce
//   rank  -> store   proof      32 bytes
//   store -> rank    verdict    1 byte, proof of the store; zeros for a rank that has proved
//   nothing
//
// A proof is HMAC-SHA256, with the secret as key, over the name of the side that proves, the hello
// and the challenge. Words can be tried against a proof, and anybody can connect to the store, so
// the rank proves first. Nonces are 32 random bytes, so no proof can be used twice. Each of the
// four messages ends with a checksum (seal()), so damage on the way is not mistaken for another
// secret. All sizes are fixed. Integers are big-endian. An empty secret is a key too. These
// functions are pure, except for the random nonces.

/// The identity that a rank claims before it has proved anything.
struct Hello {
  int rank = 0;
  int attempt = 0;
  bool has_secret = false;
  int world = 0;  ///< Its number among those of the program, from 0.
};

/// The identity of the store.
struct Challenge {
  int attempt = 0;
  bool has_secret = false;
  int world = 0;
};

constexpr size_t kHelloBytes = 8 + 4 + 4 + 4 + 1 + 32 + kSealBytes;
constexpr size_t kChallengeBytes = 8 + 4 + 4 + 1 + 32 + kSealBytes;
constexpr size_t kProofBytes = 32 + kSealBytes;
constexpr size_t kVerdictBytes = 1 + 32 + kSealBytes;
constexpr char kWelcome = 1, kRefusal = 0;  ///< First bytes of a verdict.

/// A hello with a fresh nonce.
std::string make_hello(const Hello& hello);
/// False if no hello begins with these bytes.
bool begins_hello(std::string_view bytes);
/// nullopt if these bytes are no hello.
std::optional<Hello> read_hello(std::string_view bytes);

/// A challenge with a fresh nonce.
std::string make_challenge(const Challenge& challenge);
bool begins_challenge(std::string_view bytes);
/// nullopt if these bytes are no challenge.
std::optional<Challenge> read_challenge(std::string_view bytes);

/// The rank's proof, in answer to `challenge`.
std::string make_proof(const std::string& secret, std::string_view hello,
                       std::string_view challenge);
/// The message of a rank that leaves without a proof: the store then reports why.
std::string make_no_proof();
/// True if the sender of the proof knows the secret.
bool rank_proves(const std::string& secret, std::string_view hello, std::string_view challenge,
                 std::string_view proof);

/// The store's answer to a proof. `proves`: the store's proof is part of it.
std::string make_verdict(char verdict, bool proves, const std::string& secret,
                         std::string_view hello, std::string_view challenge);
/// True if the sender of the verdict knows the secret.
bool store_proves(const std::string& secret, std::string_view hello, std::string_view challenge,
                  std::string_view verdict);

}  // namespace tessera::comm
