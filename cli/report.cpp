#include "tessera/train/report.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "commands.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

void write(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) throw UsageError(path + ": " + std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) throw UsageError(path + ": cannot write: " + std::strerror(errno));
}

}  // namespace

int report_command(int argc, char** argv) {
  CLI::App app("Writes the records of runs as one HTML page.", "tessera report");
  std::vector<std::string> runs;
  std::string output = "report.html";
  app.add_option("RUN", runs, "A file that train.log names, or a folder with such files")
      ->required();
  app.add_option("-o,--output", output, "The page to write [report.html]");
  try {
    app.parse(argc, argv);
    write(output, html_report(runs));
    std::printf("%s\n", output.c_str());
    return 0;
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "tessera report: %s (tessera report --help shows the flags)\n",
                 error.what());
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera report: %s\n", error.what());
  }
  return kUsageExit;
}

}  // namespace tessera::cli
