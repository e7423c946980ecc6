#pragma once

#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {

/// The page of `tessera report`: the records of one or several runs as one HTML file that loads
/// nothing. Each of `runs` is a log that `train.log` names, or a folder with such logs (`*.jsonl`).
/// The events beside a log, if it has any, are read too. Lines that are no JSON are left out, and
/// the page says how many. Throws UsageError, with the path, for a file that cannot be read or has
/// no record of a run. Local.
std::string html_report(const std::vector<std::string>& runs);

}  // namespace tessera
#pragma GCC visibility pop
