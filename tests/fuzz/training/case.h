#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// A layer, a wrapper, an optimizer or an event of a story: a kind with named values. A value that
/// is absent has the default that its reader gives.
struct Item {
  std::string kind;
  std::map<std::string, std::string> values = {};

  bool has(const std::string& name) const { return values.count(name) > 0; }
  std::string text(const std::string& name, const std::string& otherwise = "") const;
  int number(const std::string& name, int otherwise = 0) const;
  double real(const std::string& name, double otherwise) const;
  bool flag(const std::string& name) const { return number(name) != 0; }
};

/// One run of training, complete: everything that the fuzzer does follows from it.
struct Case {
  uint64_t seed = 0;            ///< Of weights and data.
  int world = 2;                ///< Ranks of the first segment.
  std::string dtype = "float";  ///< "float" or "double".
  std::vector<Item> layers;
  Item optimizer;  ///< A name of default_optimizers() with its options, and master_weights.
  Item wrapper;    ///< "ddp", "zero", "ddp_zero", "distributed_optimizer" or "fsdp".
  std::vector<Item> story;  ///< Events, in order.
};

/// A random case. The same for the same seed.
Case generate(uint64_t seed);

/// The case as a C++ test, with a comment that says what was found.
std::string reproducer(const Case& which, const std::string& finding);

/// The case in one line, for logs.
std::string one_line(const Case& which);

}  // namespace tessera::fuzz
