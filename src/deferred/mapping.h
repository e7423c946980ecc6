#pragma once

#include <cstddef>

namespace tessera::deferred {

/// Private anonymous memory in whole pages, which the system provides when it is touched.
class Mapping {
 public:
  enum class Access { none, read, write };

  /// Throws Error if the system has no address space left.
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* address) const;

  void allow(Access access);
  /// Returns the pages to the system; the contents are then zero.
  void drop();
  /// Takes the pages of `other`, which has the same size, in one step: no thread sees only a part.
  /// They may be written afterwards.
  void take(Mapping& other);
  /// True if any page was touched since construction or drop().
  bool touched() const;

 private:
  char* base_;
  size_t bytes_;
};

}  // namespace tessera::deferred
