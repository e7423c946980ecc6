#include "tessera/detail/write_file.h"

#include "checkpoint/io/atomic_file.h"

namespace tessera {

void write_file(const std::string& path, const std::string& text) {
  AtomicFile file("output", path);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

void check_writable(const std::string& path) { AtomicFile("output", path).rehearse(); }

}  // namespace tessera
