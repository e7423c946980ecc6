#pragma once

#pragma GCC visibility push(default)
namespace tessera::detail {

/// True if `name`, the dotted name of a module or parameter, matches `pattern`: `*` stands for any
/// characters but dots, `**` for any characters, `?` for one character. Local.
inline bool matches_name(const char* pattern, const char* name) {
  if (*pattern == '\0') return *name == '\0';
  if (*pattern == '*') {
    const bool dots = pattern[1] == '*';
    const char* rest = pattern + (dots ? 2 : 1);
    for (const char* at = name;; ++at) {
      if (matches_name(rest, at)) return true;
      if (*at == '\0' || (*at == '.' && !dots)) return false;
    }
  }
  return *name != '\0' && (*pattern == '?' || *pattern == *name) &&
         matches_name(pattern + 1, name + 1);
}

}  // namespace tessera::detail
#pragma GCC visibility pop
