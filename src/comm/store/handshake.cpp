#include "comm/store/handshake.h"

#include <algorithm>
#include <stdexcept>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

namespace tessera::comm {
namespace {

constexpr std::string_view kHelloMark = "tesser2>", kChallengeMark = "tesser2<";
constexpr size_t kNonceBytes = 32, kHmacBytes = 32;
static_assert(kHelloBytes == kHelloMark.size() + 4 + 4 + 4 + 1 + kNonceBytes + kSealBytes);
static_assert(kChallengeBytes == kChallengeMark.size() + 4 + 4 + 1 + kNonceBytes + kSealBytes);

/// Threads may still use the store when the process ends: see call_with_timeout(). libcrypto would
/// release its locks then.
void keep_libcrypto_until_the_end() {
  [[maybe_unused]] static const int done = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
}

std::string nonce() {
  keep_libcrypto_until_the_end();
  std::string bytes(kNonceBytes, '\0');
  if (::RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), kNonceBytes) != 1)
    throw std::runtime_error("libcrypto has no random numbers");
  return bytes;
}

std::string sealed(std::string bytes) {
  seal(bytes);
  return bytes;
}

std::string hmac_of(std::string_view side, const std::string& secret, std::string_view hello,
                    std::string_view challenge) {
  keep_libcrypto_until_the_end();
  std::string text(side);
  text.append(hello).append(challenge);
  std::string proof(EVP_MAX_MD_SIZE, '\0');
  unsigned size = 0;
  const bool done = ::HMAC(::EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                           reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                           reinterpret_cast<unsigned char*>(proof.data()), &size) != nullptr;
  if (!done || size != kHmacBytes) throw std::runtime_error("libcrypto has no HMAC-SHA256");
  proof.resize(size);
  return proof;
}

/// Takes the same time wherever the bytes differ.
bool equal(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

constexpr std::string_view kStoreSide = "store", kRankSide = "rank ";

}  // namespace

std::string make_hello(const Hello& hello) {
  std::string bytes(kHelloMark);
  append_number(bytes, static_cast<uint32_t>(hello.rank));
  append_number(bytes, static_cast<uint32_t>(hello.attempt));
  append_number(bytes, static_cast<uint32_t>(hello.world));
  bytes += hello.has_secret ? '\1' : '\0';
  return sealed(bytes += nonce());
}

bool begins_hello(std::string_view bytes) {
  return bytes.size() <= kHelloBytes && kHelloMark.starts_with(bytes.substr(0, kHelloMark.size()));
}

std::optional<Hello> read_hello(std::string_view bytes) {
  if (bytes.size() != kHelloBytes || !begins_hello(bytes) || !is_sealed(bytes)) return std::nullopt;
  const size_t at = kHelloMark.size();
  return Hello{static_cast<int>(number_at(bytes, at)), static_cast<int>(number_at(bytes, at + 4)),
               bytes[at + 12] != 0, static_cast<int>(number_at(bytes, at + 8))};
}

std::string make_challenge(const Challenge& challenge) {
  std::string bytes(kChallengeMark);
  append_number(bytes, static_cast<uint32_t>(challenge.attempt));
  append_number(bytes, static_cast<uint32_t>(challenge.world));
  bytes += challenge.has_secret ? '\1' : '\0';
  return sealed(bytes += nonce());
}

bool begins_challenge(std::string_view bytes) {
  size_t wrong = 0;  // bytes; a single one may be damage, which the checksum shows
  for (size_t i = 0; i < std::min(bytes.size(), kChallengeMark.size()); ++i)
    wrong += bytes[i] != kChallengeMark[i];
  return bytes.size() <= kChallengeBytes && wrong <= 1;
}

std::optional<Challenge> read_challenge(std::string_view bytes) {
  if (bytes.size() != kChallengeBytes || !begins_challenge(bytes) || !is_sealed(bytes))
    return std::nullopt;
  const size_t at = kChallengeMark.size();
  return Challenge{static_cast<int>(number_at(bytes, at)), bytes[at + 8] != 0,
                   static_cast<int>(number_at(bytes, at + 4))};
}

std::string make_proof(const std::string& secret, std::string_view hello,
                       std::string_view challenge) {
  return sealed(hmac_of(kRankSide, secret, hello, challenge));
}

std::string make_no_proof() { return sealed(std::string(kHmacBytes, '\0')); }

bool rank_proves(const std::string& secret, std::string_view hello, std::string_view challenge,
                 std::string_view proof) {
  return equal(proof, make_proof(secret, hello, challenge));
}

std::string make_verdict(char verdict, bool proves, const std::string& secret,
                         std::string_view hello, std::string_view challenge) {
  const auto proof =
      proves ? hmac_of(kStoreSide, secret, hello, challenge) : std::string(kHmacBytes, '\0');
  return sealed(verdict + proof);
}

bool store_proves(const std::string& secret, std::string_view hello, std::string_view challenge,
                  std::string_view verdict) {
  return verdict.size() == kVerdictBytes &&
         equal(verdict.substr(1, kHmacBytes), hmac_of(kStoreSide, secret, hello, challenge));
}

}  // namespace tessera::comm
