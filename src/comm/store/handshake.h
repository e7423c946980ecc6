#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::comm {

// How a rank and the store prove to each other that they know the same secret, and do not send it:
//
//   rank  -> store   hello      mark, rank, attempt, whether it has a secret, nonce
//   store -> rank    challenge  mark, attempt, whether it has a secret, nonce, proof of the store
//   rank  -> store   proof      32 bytes
//   store -> rank    verdict    1 byte
//
// A proof is HMAC-SHA256, with the secret as key, over the name of the side that proves, the hello
// and the challenge without its proof. Nonces are 32 random bytes, so no proof is of use twice.
// All sizes are fixed. Integers are big-endian. An empty secret is a key too. These functions are
// pure, except for the random nonces.

/// What a rank says about itself before it has proved anything.
struct Hello {
  int rank = 0;
  int attempt = 0;
  bool has_secret = false;
};

/// What the store says about itself.
struct Challenge {
  int attempt = 0;
  bool has_secret = false;
};

constexpr size_t kHelloBytes = 8 + 4 + 4 + 1 + 32;
constexpr size_t kChallengeBytes = 8 + 4 + 1 + 32 + 32;
constexpr size_t kProofBytes = 32;
constexpr char kWelcome = 1, kRefusal = 0;  ///< The verdicts.

/// A hello with a fresh nonce.
std::string make_hello(const Hello& hello);
/// False if no hello begins with these bytes.
bool begins_hello(std::string_view bytes);
/// nullopt if these bytes are no hello.
std::optional<Hello> read_hello(std::string_view bytes);

/// A challenge with a fresh nonce and the store's proof, in answer to `hello`.
std::string make_challenge(const Challenge& challenge, const std::string& secret,
                           std::string_view hello);
bool begins_challenge(std::string_view bytes);
std::optional<Challenge> read_challenge(std::string_view bytes);
/// True if the sender of the challenge knows the secret.
bool store_proves(const std::string& secret, std::string_view hello, std::string_view challenge);

/// The rank's proof, in answer to `challenge`.
std::string make_proof(const std::string& secret, std::string_view hello,
                       std::string_view challenge);
/// True if the sender of the proof knows the secret.
bool rank_proves(const std::string& secret, std::string_view hello, std::string_view challenge,
                 std::string_view proof);

}  // namespace tessera::comm
