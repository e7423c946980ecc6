#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/config_tree.h"
#include "train/config_values.h"

namespace tessera::train {

/// "file.yaml:12: train.steps: " followed by `what`, thrown as UsageError.
[[noreturn]] void fail_at(const ConfigNode& node, const std::string& path, const std::string& what);

/// Reads one map into typed values. Each `read` leaves `out` alone when the key is absent and throws UsageError, with
/// file, line, full key, value and what was expected, when it is there and wrong. `finish` reports the keys that nobody
/// read before those that are missing: a misspelt key is usually both.
class MapReader {
 public:
  /// `node` may be null (the map is absent). `where` names the file for messages about missing keys.
  MapReader(const ConfigNode* node, std::string path, std::string where);

  void read(const std::string& key, int64_t& out, Range range = {});
  void read(const std::string& key, uint64_t& out);
  void read(const std::string& key, double& out, Range range = {});
  void read(const std::string& key, bool& out);
  void read(const std::string& key, std::string& out);
  /// null takes the value away.
  void read(const std::string& key, std::optional<double>& out, Range range = {});
  /// null gives the empty string.
  void read_path(const std::string& key, std::string& out);
  /// One path or a list of them; null gives none.
  void read_paths(const std::string& key, std::vector<std::string>& out);
  /// One of a few words.
  void read_choice(const std::string& key, std::string& out, const std::vector<std::string>& choices);

  /// The node of a key that the caller reads himself; null pointer when absent.
  const ConfigNode* take(const std::string& key);
  /// A map inside this one.
  MapReader map(const std::string& key);
  /// As `map`; nullopt when absent or null.
  std::optional<MapReader> optional_map(const std::string& key);

  bool has(const std::string& key) const;
  /// Keys in the file that nobody has read so far.
  std::vector<std::string> unread() const;
  /// Allows `key` with an explanation why it is not allowed here, for keys that make sense elsewhere.
  void refuse(const std::string& key, const std::string& why);
  /// finish() will throw when `key` is absent; `what` says what belongs there.
  void require(const std::string& key, const std::string& what);
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;
  void finish() const;

  const std::string& path() const { return path_; }
  const std::string& where() const { return where_; }
  std::string full(const std::string& key) const;

 private:
  const ConfigNode* node_;
  std::string path_;
  std::string where_;
  std::vector<std::string> known_;
  std::vector<std::string> missing_;
};

}  // namespace tessera::train
