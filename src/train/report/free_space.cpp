#include "train/report/free_space.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

namespace tessera::train {

std::string space_warning(const std::string& folder, int64_t bytes, const std::string& what) {
  struct statvfs system {};
  const std::string place = folder.empty() ? "." : folder;
  if (::statvfs(place.c_str(), &system) != 0) return "";
  const double free = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
  if (free >= static_cast<double>(bytes)) return "";
  constexpr double kMega = 1e6;
  return fmt::format("warning: {}: {:.1f} MB are free, and {} {:.1f} MB", place, free / kMega, what,
                     static_cast<double>(bytes) / kMega);
}

}  // namespace tessera::train
