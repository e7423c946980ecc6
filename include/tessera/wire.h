#pragma once

#include <optional>
#include <string>

#pragma GCC visibility push(default)
namespace tessera {

/// The form in which values travel between hosts. Within a host they keep their dtype.
enum class WireFormat {
  float32,   ///< In their own dtype, unchanged.
  bfloat16,  ///< 2 bytes a value, rounded to nearest.
  int8,      ///< 1 byte a value and a float32 scale for each block of 256: the block's largest
             ///< magnitude / 127 (ZeRO++, Wang et al. 2023).
};

/// Option `wire` of the wrappers. It has no effect among ranks of one host. Deterministic, but the
/// results depend on which ranks share a host. The ranks' replicas stay equal. Values must be
/// float32, bfloat16 or float16.
struct WireOptions {
  /// Sums of gradients. Each host sends its ranks' sum and adds the rounding error of that sum in
  /// the next step (error feedback: float32, at most gradient bytes / ranks of the host, within a
  /// step up to three times that). A loop that leaves out steps or scales the loss: see
  /// docs/hosts.md.
  WireFormat gradients = WireFormat::float32;
  /// Parameters that are gathered from their owners. An owner keeps the exact values.
  WireFormat parameters = WireFormat::float32;
};

bool operator==(const WireOptions& a, const WireOptions& b);

/// "float32", "bfloat16" or "int8".
std::string to_string(WireFormat format);
/// The reverse; no value for another text.
std::optional<WireFormat> wire_format_of(const std::string& text);
/// "gradients int8, parameters float32".
std::string to_string(const WireOptions& wire);

}  // namespace tessera
#pragma GCC visibility pop
