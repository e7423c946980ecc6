#include "train/report/prepare_outputs.h"

#include <filesystem>
#include <set>
#include <system_error>
#include <tuple>
#include <vector>

#include <glob.h>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/save_weights.h"
#include "train/report/log_files.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

void prepare_file(const Config& config, const std::string& key, const std::string& file) {
  if (file.empty()) return;
  const fs::path folder = fs::path(file).parent_path();
  std::error_code failure;
  if (!folder.empty()) failure = make_folder(folder.string());
  if (failure)
    throw UsageError(config.at(key) + file + ": cannot make the folder " + folder.string() + ": " +
                     failure.message());
  try {
    check_writable(file);
  } catch (const Error& error) {
    throw UsageError(config.at(key) + error.what());
  }
}

struct UsedFile {
  std::string use;  // "data.path reads it"
  fs::path path;
};

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code ignored;
  if (fs::equivalent(a, b, ignored)) return true;
  const fs::path left = fs::weakly_canonical(a, ignored), right = fs::weakly_canonical(b, ignored);
  return !left.empty() && left == right;
}

/// The files of train.save, which it writes or removes.
std::vector<std::string> files_of_save(const std::string& save) {
  return is_weights_folder(save) ? weights_files_of(save) : std::vector<std::string>{save};
}

std::vector<UsedFile> outputs_of(const Config& config) {
  std::vector<UsedFile> files;
  if (!config.train.log.empty()) {
    files.push_back({"train.log writes it, too", config.train.log});
    files.push_back({"train.log writes its events there", EventLog::path_beside(config.train.log)});
  }
  for (const ModelSections* own : config.trained()) {
    const auto& [save, save_optimizer] = std::tie(own->train.save, own->train.save_optimizer);
    if (!save.empty())
      for (const auto& file : files_of_save(save))
        files.push_back({"train.save writes it, too", file});
    if (!save_optimizer.empty())
      files.push_back({"train.save_optimizer writes it, too", save_optimizer});
    if (own->train.save_config)
      files.push_back(
          {"train.save_config writes it, too", fs::path(save).parent_path() / "config.json"});
  }
  return files;
}

/// Adds the files of a path as datasets interpret it: a file, a folder of files or a pattern.
void add_matches(const std::string& use, const std::string& path, std::vector<UsedFile>& files) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    for (const auto& entry : fs::directory_iterator(path, ignored))
      files.push_back({use, entry.path()});
    return;
  }
  files.push_back({use, path});
  glob_t matches{};
  if (path.find_first_of("*?[") != std::string::npos &&
      ::glob(path.c_str(), GLOB_NOSORT, nullptr, &matches) == 0)
    for (size_t i = 0; i < matches.gl_pathc; ++i) files.push_back({use, matches.gl_pathv[i]});
  ::globfree(&matches);
}

std::vector<UsedFile> inputs_of(const Config& config) {
  std::set<std::string> read{config.file};
  for (const auto& [key, place] : config.where)
    read.insert(place.substr(0, place.rfind(':')));  // "base.yaml" of "base.yaml:12"
  std::vector<UsedFile> files;
  for (const auto& path : read) files.push_back({"the config is read from it", path});
  for (const auto& [key, path] : config.data.plan.files)
    add_matches(key + " reads it", path, files);
  for (const ModelSections* own : config.trained()) {
    const std::string &init = own->model.init, &state = own->optimizer_init.path;
    if (!init.empty()) add_matches(own->prefix() + "model.init reads it", init, files);
    if (!state.empty()) files.push_back({own->prefix() + "optimizer.init reads it", state});
  }
  return files;
}

/// Throws UsageError when an output is the same file as another output or as an input.
void check_distinct(const Config& config) {
  const std::vector<UsedFile> outputs = outputs_of(config), inputs = inputs_of(config);
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::vector<UsedFile> others = inputs;
    others.insert(others.end(), outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(i));
    for (const auto& other : others) {
      if (same_file(outputs[i].path, other.path)) {
        const std::string key = outputs[i].use.substr(0, outputs[i].use.find(' '));
        throw UsageError(config.at(key) + outputs[i].path.string() + ": " + other.use +
                         "; expected a file of its own");
      }
    }
  }
}

}  // namespace

void prepare_outputs(const Config& config) {
  check_distinct(config);
  prepare_file(config, "train.log", config.train.log);
  for (const ModelSections* own : config.trained()) {
    const std::string& save = own->train.save;
    prepare_file(config, "train.save", save + (is_weights_folder(save) ? kWeightsIndexName : ""));
    prepare_file(config, "train.save_optimizer", own->train.save_optimizer);
  }
}

}  // namespace tessera::train
