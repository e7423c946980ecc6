#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

// Suggestions for error messages about unknown names. Pure functions.

#pragma GCC visibility push(default)
namespace tessera {

/// The least number of edits that turn `a` into `b`. An edit inserts, deletes or replaces a
/// character, or swaps two neighbours. Case is ignored.
inline int edit_distance(const std::string& a, const std::string& b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  };
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

/// The first of the `known` names with the least edit distance from `name`. Returns "" when no
/// distance is within a third of the longer name's length (one edit is always allowed). Names of
/// more than 256 characters are not compared.
inline std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  std::string best;
  int best_distance = 0;
  for (const auto& candidate : known) {
    const size_t longer = std::max(name.size(), candidate.size());
    if (longer > 256) continue;
    const int distance = edit_distance(name, candidate);
    if (distance <= std::max(1, static_cast<int>(longer + 1) / 3) &&
        (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

/// Returns `; did you mean "steps"?`, or "" when there is no nearest_name().
inline std::string did_you_mean(const std::string& name, const std::vector<std::string>& known) {
  const std::string nearest = nearest_name(name, known);
  return nearest.empty() ? "" : "; did you mean \"" + nearest + "\"?";
}

/// As did_you_mean(); `; known: a, b` when no known name is near.
inline std::string suggestion(const std::string& name, const std::vector<std::string>& known) {
  std::string text = did_you_mean(name, known);
  for (size_t i = 0; text.rfind("; did", 0) != 0 && i < known.size(); ++i)
    text += (i == 0 ? "; known: " : ", ") + known[i];
  return text;
}

}  // namespace tessera
#pragma GCC visibility pop
