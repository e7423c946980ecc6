#pragma once

#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera::detail {

// Each writes the report to the file that TESSERA_REPORT names; it replaces an earlier one. Does
// nothing if the variable is not set. The ranks are ranks of the world, ascending. Local; from any
// thread.

/// Call it before an error that all ranks throw. Does nothing if `began` is empty: no rank began.
void report_agreed(const std::vector<int>& began, const std::string& text) noexcept;
/// Call it before a BrokenWorldError that names `ranks`. Does nothing if it names none.
void report_broken(const std::vector<int>& ranks, const std::string& text) noexcept;
/// Call it when training has ended because of `signal`. `ranks`: this rank, if it got the signal.
void report_stop(int signal, const std::vector<int>& ranks) noexcept;

/// Removes the report, because the program has caught the error and continues. Costs one load if
/// there is none. Local; from any thread.
void withdraw_report() noexcept;

/// The origin of an error that all ranks find by comparing a value: the ranks whose value differs
/// from that of more than half of the ranks. Empty if no value is so frequent. `same(a, b)` says
/// whether the values of ranks a and b are equal. Pure.
std::vector<int> minority(int size, const std::function<bool(int, int)>& same);

}  // namespace tessera::detail
#pragma GCC visibility pop
