#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/store/store_link.h"
#include "comm/store/store_server.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::comm {

/// The store of a world over hosts, which StoreServer serves. Thread-safe: calls that overlap use
/// connections of their own. A call waits at most for the store's time-out or for its own argument;
/// c10d's kNoTimeout means no limit. All calls throw BrokenWorldError. It names rank 0 if the store
/// is lost, at once if its process has ended; it names no rank if a key does not appear in time.
class VerifiedStore final : public compat::CloneableStore<c10d::Store> {
 public:
  /// Connects, see StoreLink. `server` is the store itself on the rank that serves it, and null on
  /// the others; the server ends with the last of its stores.
  VerifiedStore(StorePlace place, std::chrono::milliseconds timeout,
                std::shared_ptr<StoreServer> server);
  ~VerifiedStore() override;

  c10::intrusive_ptr<c10d::Store> clone() final;
  void set(const std::string& key, const std::vector<uint8_t>& value) final;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& wanted) final;
  std::vector<uint8_t> get(const std::string& key) final;
  int64_t add(const std::string& key, int64_t amount) final;
  bool deleteKey(const std::string& key) final;
  bool check(const std::vector<std::string>& keys) final;
  int64_t getNumKeys() final;
  void wait(const std::vector<std::string>& keys) final;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) final;

 private:
  class Links;
  VerifiedStore(std::shared_ptr<Links> links, std::chrono::milliseconds timeout);
  std::string ask(Request request, std::vector<std::string> parts) const;

  const std::shared_ptr<Links> links_;
};

}  // namespace tessera::comm
