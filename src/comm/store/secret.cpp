#include "comm/store/secret.h"

#include <cerrno>
#include <cstring>
#include <set>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "comm/store/socket.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr size_t kMaxSecretBytes = 4096, kMinSecretBytes = 16, kMinDifferentBytes = 8;

/// The secret, or UsageError if it can be found by trying. `variable`: its source.
std::string checked(std::string secret, const char* variable, int rank, const Caller& caller) {
  const std::set<char> different(secret.begin(), secret.end());
  if (secret.size() >= kMinSecretBytes && different.size() >= kMinDifferentBytes) return secret;
  throw UsageError(fmt::format(
      "{}: {} {}: the secret of {} is {}; expected at least {} bytes, {} of them different, the "
      "same on every {}, such as the output of 'openssl rand -hex 16'",
      caller.component, caller.noun, rank, variable, secret.empty() ? "empty" : "easy to guess",
      kMinSecretBytes, kMinDifferentBytes, caller.noun));
}

std::string secret_in(const std::string& path, int rank, const Caller& caller) {
  const auto refuse = [&](const std::string& problem) {
    throw UsageError(
        fmt::format("{}: {} {}: TESSERA_SECRET_FILE is '{}': {}; expected a "
                    "regular file of this user with mode 0600 or 0400 and 1 to {} bytes",
                    caller.component, caller.noun, rank, path, problem, kMaxSecretBytes));
  };
  // Opening a FIFO would block without O_NONBLOCK.
  const Socket file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info {};
  if (file.fd() < 0 || ::fstat(file.fd(), &info) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) refuse("it is not a regular file");
  if (info.st_uid != ::geteuid())
    refuse(fmt::format("its owner is user {}, and this process runs as user {}", info.st_uid,
                       ::geteuid()));
  if (const auto mode = info.st_mode & 07777; mode != 0600 && mode != 0400)
    refuse(fmt::format("its mode is {:04o}", mode));
  std::string text(kMaxSecretBytes + 1, '\0');
  const auto size = ::read(file.fd(), text.data(), text.size());
  if (size < 0) refuse(std::strerror(errno));
  if (static_cast<size_t>(size) > kMaxSecretBytes) refuse("it is too long");
  text.resize(static_cast<size_t>(size));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty()) refuse("it is empty");
  return text;
}

}  // namespace

std::string random_token(size_t characters) {
  std::vector<unsigned char> bytes(characters / 2);
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw std::system_error(errno, std::generic_category(), "getrandom");
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

std::string read_secret(const std::function<const char*(const char* name)>& get, int rank,
                        const Caller& caller) {
  if (const char* const text = get("TESSERA_SECRET"))
    return checked(text, "TESSERA_SECRET", rank, caller);
  const char* const path = get("TESSERA_SECRET_FILE");
  if (!path) return "";
  return checked(secret_in(path, rank, caller), "TESSERA_SECRET_FILE", rank, caller);
}

}  // namespace tessera::comm
