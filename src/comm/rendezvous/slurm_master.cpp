#include "comm/rendezvous/slurm_master.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kDigits = "0123456789";

[[noreturn]] void refuse_variable(const std::string& name, const std::string& value,
                                  const std::string& expected) {
  throw UsageError(fmt::format("init_process_group: environment variable {} is '{}'; expected {}",
                               name, value, expected));
}

std::string value_or_empty(const GetVariable& get, const char* name) {
  const char* const value = get(name);
  return value ? value : "";
}

/// The number at the front of a variable such as SLURM_JOB_ID; nullopt if it is not set.
std::optional<uint64_t> leading_number(const GetVariable& get, const char* name,
                                       const std::string& expected) {
  const auto text = value_or_empty(get, name);
  if (text.empty()) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool ends = end == text.data() + text.size() || *end == '-' || *end == ',';
  if (error != std::errc() || !ends) refuse_variable(name, text, expected);
  return value;
}

int slurm_port(const GetVariable& get) {
  const std::string range = "ports from 1 to 65535, as 12000-12001";
  if (const auto port = leading_number(get, "SLURM_STEP_RESV_PORTS", range)) {
    if (*port < 1 || *port > 65535)
      refuse_variable("SLURM_STEP_RESV_PORTS", std::to_string(*port), range);
    return static_cast<int>(*port);
  }
  const auto job = leading_number(get, "SLURM_JOB_ID", "a number");
  if (!job) return 0;
  const auto step = leading_number(get, "SLURM_STEP_ID", "a number").value_or(0);
  // A port below those that the kernel gives to clients. Successive jobs and steps differ.
  constexpr uint64_t kLowest = 20000, kPorts = 10000, kBetweenJobs = 10;
  return static_cast<int>(kLowest + (*job % kPorts * kBetweenJobs + step % kPorts) % kPorts);
}

/// True if `range` is a number or two of them in order, such as 01-03.
bool is_range(std::string_view range) {
  const auto dash = range.find('-');
  const auto first = range.substr(0, dash);
  const auto last = dash == std::string_view::npos ? first : range.substr(dash + 1);
  uint64_t from = 0, to = 0;
  const auto is_number = [](std::string_view text, uint64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
  };
  return is_number(first, from) && is_number(last, to) && from <= to;
}

/// True if `test` holds for each part of `list` between commas. No part is left out.
template <class Test>
bool all_parts(std::string_view list, const Test& test) {
  for (size_t comma; (comma = list.find(',')) != std::string_view::npos;
       list.remove_prefix(comma + 1))
    if (!test(list.substr(0, comma))) return false;
  return test(list);
}

/// True if `list` consists of hosts between commas: names that may contain ranges in brackets.
bool is_host_list(std::string_view list) {
  std::string names;  // the list without its brackets
  while (!list.empty()) {
    const auto open = list.find('[');
    names += list.substr(0, open);
    if (open == std::string_view::npos) break;
    const auto close = list.find(']', open);
    if (close == std::string_view::npos) return false;
    if (!all_parts(list.substr(open + 1, close - open - 1), is_range)) return false;
    names += '0';
    list.remove_prefix(close + 1);
  }
  return all_parts(names, [](std::string_view name) {
    return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
      return std::isalnum(c) || c == '-' || c == '_' || c == '.';
    });
  });
}

}  // namespace

std::string first_slurm_host(const std::string& variable, const std::string& list) {
  const auto refuse = [&] {
    refuse_variable(variable, list, "hosts as Slurm lists them, such as node[01-03,7],gpu5");
  };
  if (!is_host_list(list)) refuse();
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ',';) {
    if (list[at] != '[') {
      host += list[at++];
      continue;
    }
    const size_t end = list.find_first_not_of(kDigits, at + 1);
    host += list.substr(at + 1, end - at - 1);
    at = list.find(']', at) + 1;
  }
  return host;
}

void add_slurm_master(const GetVariable& get, LaunchEnvironment& result) {
  if (!result.master_address.empty() || result.master_port != 0) return;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
    const auto list = value_or_empty(get, name);
    if (list.empty()) continue;
    result.master_address = first_slurm_host(name, list);
    result.master_port = slurm_port(get);
    return;
  }
}

}  // namespace tessera::comm
