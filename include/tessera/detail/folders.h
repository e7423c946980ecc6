#pragma once

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The names in a folder, in any order. Begins again after an interrupt (EINTR). Local.
inline std::vector<std::string> names_in(const std::string& folder, std::error_code& error) {
  std::vector<std::string> names;
  do {
    names.clear();
    std::filesystem::directory_iterator at(folder, error), end;
    for (; !error && at != end; at.increment(error))
      names.push_back(at->path().filename().string());
  } while (error == std::errc::interrupted);
  return names;
}

/// Removes a file, or a folder with everything in it. Goes on after interrupts (EINTR). Local.
inline std::error_code remove_all(const std::string& path) {
  std::error_code error;
  do std::filesystem::remove_all(path, error);
  while (error == std::errc::interrupted);
  return error;
}

}  // namespace tessera::detail
#pragma GCC visibility pop
