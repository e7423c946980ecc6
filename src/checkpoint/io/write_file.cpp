#include "tessera/detail/write_file.h"

#include <algorithm>
#include <filesystem>

#include <unistd.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"

namespace tessera {

void write_file(const std::string& path, const std::string& text) {
  AtomicFile file("output", path);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

bool write_through(std::FILE* file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const auto left = text.size() - done;
    const auto count =
        uninterrupted([&] { return ::write(::fileno(file), text.data() + done, left); });
    if (count < 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

void check_writable(const std::string& path) { AtomicFile("output", path).rehearse(); }

std::string read_file(const std::string& component, const std::string& path, uint64_t most) {
  const std::string where = component + ": " + path + ": ";
  uint64_t bytes = 0;
  const FileDescriptor file = open_regular(where, path, bytes);
  std::string text(std::min(bytes, most), '\0');
  const int64_t got = file.read_at(text.data(), text.size(), 0);
  if (got < 0) throw Error(where + "reading failed: " + errno_text(errno));
  text.resize(static_cast<size_t>(got));
  return text;
}

std::error_code make_folder(const std::string& folder) {
  const std::filesystem::path path(folder), parent = path.parent_path();
  std::error_code error;
  if (path.empty() || std::filesystem::is_directory(path, error)) return {};
  if (parent != path) error = make_folder(parent.string());
  else error.clear();
  if (error) return error;
  do std::filesystem::create_directory(path, error);
  while (error == std::errc::interrupted);
  if (!error && !sync_folder(parent.string())) error = {errno, std::generic_category()};
  return error;
}

}  // namespace tessera
