#include "tessera/train/report.h"

#include "report/page_style.h"
#include "report/sections.h"
#include "tessera/version.h"

namespace tessera {

std::string html_report(const std::vector<std::string>& paths) {
  std::vector<report::RunLog> runs;
  for (const auto& path : paths)
    for (auto& run : report::read_runs(path)) runs.push_back(std::move(run));
  return std::string(
             "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>\n<meta name=viewport "
             "content='width=device-width, initial-scale=1'>\n<title>Training report</title>\n"
             "<style>") +
         report::kStyle + "</style></head><body>\n<h1>Training report</h1>\n" +
         report::overview(runs) + report::charts(runs) + report::time_line(runs) +
         report::memory(runs) + report::communication(runs) + report::configs(runs) +
         "<p class=note>Written by tessera report " TESSERA_VERSION "</p>\n</body></html>\n";
}

}  // namespace tessera
