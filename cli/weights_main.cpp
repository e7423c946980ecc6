// tessera weights: looks at files of weights, converts and compares them, without a model.

#include <cstdio>
#include <map>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "tessera/error.h"
#include "tessera/weights/weights_tools.h"

namespace {

using tessera::UsageError;
using tessera::Weights;

constexpr int kDifferent = 1, kFailed = 1, kUsage = 2;

struct Flags {
  std::string first, second, key, dtype, max_shard;
  std::vector<std::string> map;
  bool no_digests = false, all = false;
  double tolerance = 0;
};

/// "^a=b": the pattern ends at the first "=".
tessera::WeightsOptions options_of(const Flags& flags) {
  tessera::WeightsOptions options;
  options.key = flags.key;
  for (const auto& text : flags.map) {
    const size_t at = text.find('=');
    if (at == text.npos || at == 0)
      throw UsageError("--map = '" + text + "': expected PATTERN=REPLACEMENT");
    options.key_map.push_back({text.substr(0, at), text.substr(at + 1)});
  }
  return options;
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  const std::map<std::string, at::ScalarType> kTypes{{"float32", at::kFloat},
                                                     {"float64", at::kDouble},
                                                     {"float16", at::kHalf},
                                                     {"bfloat16", at::kBFloat16}};
  if (name.empty()) return std::nullopt;
  const auto found = kTypes.find(name);
  if (found == kTypes.end())
    throw UsageError("--dtype = '" + name + "': expected float32, float64, float16 or bfloat16");
  return found->second;
}

/// "500MB", "5GB", or a number of bytes.
uint64_t bytes_of(const std::string& text) {
  if (text.empty()) return std::numeric_limits<uint64_t>::max();
  const std::map<std::string, double> kUnits{{"", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
  size_t end = 0;
  double number = 0;
  if (text.find_first_not_of("0123456789.") > 0) {  // std::stod takes hexadecimal digits
    try {
      number = std::stod(text.substr(0, text.find_first_not_of("0123456789.")), &end);
    } catch (const std::exception&) {
    }
  }
  const auto unit = kUnits.find(text.substr(end));
  if (unit == kUnits.end() || !(number * unit->second >= 1 && number * unit->second < 1e18))
    throw UsageError("--max-shard-size = '" + text +
                     "': expected a size such as 5GB, 500MB, or a number of bytes");
  return static_cast<uint64_t>(number * unit->second);
}

/// A name in one line of the output.
std::string shown(const std::string& name) {
  std::string result;
  for (const char c : tessera::detail::printable(name))
    if (c == '\n') result += "\\n";
    else if (c == '\t') result += "\\t";
    else result += c;
  return result;
}

int inspect(const Flags& flags) {
  const Weights weights(flags.first, options_of(flags));
  uint64_t bytes = 0;
  int64_t elements = 0;
  for (const auto& entry : weights.entries()) {
    const std::string digest =
        flags.no_digests ? "" : tessera::weights_digest(weights, entry.name) + "  ";
    fmt::print("{}{}  [{}]  {} bytes  {}\n", digest, entry.dtype, fmt::join(entry.shape, ", "),
               entry.end - entry.begin, shown(entry.name));
    bytes += entry.end - entry.begin;
    elements += entry.numel();
  }
  fmt::print("{} tensors, {} elements, {} bytes in {}\n", weights.entries().size(), elements, bytes,
             weights.path());
  return 0;
}

int convert(const Flags& flags) {
  tessera::ConvertOptions options;
  options.dtype = dtype_of(flags.dtype);
  options.max_shard_bytes = bytes_of(flags.max_shard);
  if (!flags.max_shard.empty() && !flags.second.ends_with('/'))
    throw UsageError("--max-shard-size: is for folders; expected a path with \"/\" at its end");
  const Weights weights(flags.first, options_of(flags));
  tessera::convert_weights(weights, flags.second, options);
  fmt::print("{} tensors written to {}\n", weights.entries().size(), flags.second);
  return 0;
}

int diff(const Flags& flags) {
  const auto options = options_of(flags);
  const Weights first(flags.first, options), second(flags.second);
  size_t different = 0;
  const auto all = tessera::compare_weights(first, second);
  for (const auto& one : all) {
    // A difference that is NaN is not within the tolerance.
    const bool differs =
        !one.note.empty() || (one.elements > 0 && !(one.largest <= flags.tolerance));
    different += differs ? 1 : 0;
    if (!differs && !flags.all) continue;
    const std::string text =
        one.note.empty()
            ? fmt::format("largest difference {:g}, {} elements differ", one.largest, one.elements)
            : one.note;
    fmt::print("{}  {}\n", shown(one.name), text);
  }
  fmt::print("{} of {} tensors differ\n", different, all.size());
  return different > 0 ? kDifferent : 0;
}

/// Flags of every command that reads weights.
void add_reading_flags(CLI::App& command, Flags& flags) {
  command.add_option("--key", flags.key,
                     "The dict with the weights in a file of torch.save that has several");
  command.add_option("--map", flags.map,
                     "PATTERN=REPLACEMENT: changes names by a regular expression; may be repeated, "
                     "and is applied in order");
}

void add_inspect(CLI::App& app, Flags& flags) {
  auto* command = app.add_subcommand(
      "inspect", "Print digest (XXH3, 128 bits), dtype, shape, bytes and name of each tensor");
  command->add_option("FILE", flags.first, "File, index or folder")->required();
  command->add_flag("--no-digests", flags.no_digests, "Read headers only");
  add_reading_flags(*command, flags);
}

void add_convert(CLI::App& app, Flags& flags) {
  auto* command = app.add_subcommand("convert", "Write weights in another form");
  command->add_option("FROM", flags.first, "File, index or folder")->required();
  command
      ->add_option("TO", flags.second,
                   "File for torch.load (.pt, .pth, .bin), safetensors file, or folder (with / at "
                   "its end)")
      ->required();
  command->add_option("--dtype", flags.dtype,
                      "Floating-point tensors become float32, float64, float16 or bfloat16");
  command->add_option("--max-shard-size", flags.max_shard,
                      "Size of each file of a folder, such as 5GB [no limit]");
  add_reading_flags(*command, flags);
}

void add_diff(CLI::App& app, Flags& flags) {
  auto* command = app.add_subcommand(
      "diff",
      "Print the tensors that differ; exit code 1 if there are any. --key and --map are for the "
      "first file");
  command->add_option("FIRST", flags.first, "File, index or folder")->required();
  command->add_option("SECOND", flags.second, "File, index or folder")->required();
  command->add_option("--tolerance", flags.tolerance, "Difference that does not count [0]");
  command->add_flag("--all", flags.all, "Print every tensor");
  add_reading_flags(*command, flags);
}

int run(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Files of weights: safetensors, torch.save (.pt, .pth, .bin), torch::save() of C++, and "
      "folders of Hugging Face. The kind of a file that is read is recognised by its content; "
      "nothing of it is run.",
      "tessera weights");
  app.require_subcommand(1);
  add_inspect(app, flags);
  add_convert(app, flags);
  add_diff(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    fmt::print("{}", (chosen.empty() ? &app : chosen[0])->help());
    return 0;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "tessera weights: {} (tessera weights --help shows the flags)\n",
               error.what());
    return kUsage;
  }
  const std::string command = app.get_subcommands()[0]->get_name();
  if (command == "inspect") return inspect(flags);
  return command == "convert" ? convert(flags) : diff(flags);
}

}  // namespace

int main(int argc, char** argv) {
  spdlog::set_default_logger(spdlog::stderr_color_mt("tessera"));  // standard output is for results
  try {
    const int code = run(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      throw tessera::Error("standard output: writing failed");
    return code;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera weights: %s\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera weights: %s\n", error.what());
    return kFailed;
  }
}
