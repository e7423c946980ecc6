#include "tessera/train/report.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "commands.h"
#include "tessera/error.h"

namespace tessera::cli {
int report_command(int argc, char** argv) {
  CLI::App app("Writes the records of runs as one HTML page.", "tessera report");
  std::vector<std::string> runs;
  std::string output = "report.html";
  app.add_option("RUN", runs, "A file that train.log names, or a folder with such files")
      ->required();
  app.add_option("-o,--output", output, "The page to write [report.html]");
  return run_app(app, [&] {
    app.parse(argc, argv);
    const std::string page = html_report(runs);
    std::ofstream file(output, std::ios::binary);
    file << page << std::flush;
    if (!file) throw UsageError(output + ": " + std::strerror(errno));
    std::printf("%s\n", output.c_str());
    return 0;
  });
}

}  // namespace tessera::cli
