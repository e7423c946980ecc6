#include "tessera/data/bigram.h"
#include "tessera/data/idx_dataset.h"
#include "tessera/data/npy_dataset.h"
#include "tessera/data/token_dataset.h"
#include "tessera/data/token_source.h"
#include "tessera/error.h"
#include "train/builtins/builtin_components.h"

namespace tessera::train {
namespace {

using Paths = std::vector<std::string>;

/// The bigram baseline is omitted for more tokens than this, because counting would take too long.
constexpr int64_t kMostBigramTokens = 20'000'000;

void note_files(DataPlan& plan, const std::string& key, const Paths& paths) {
  for (const auto& path : paths) plan.files.emplace_back(key, path);
}

int64_t read_seq_len(OptionReader& options, const DataContext& context) {
  int64_t seq_len = context.max_length > 0 ? context.max_length : 128;
  options.read("seq_len", seq_len,
               "tokens per sequence; default: the longest that the model accepts", kAtLeastOne);
  return seq_len;
}

void check_seq_len(OptionReader& options, const DataContext& context, int64_t seq_len) {
  if (context.max_length > 0 && seq_len > context.max_length)
    options.fail("seq_len", std::to_string(seq_len) + " is longer than model.n_positions (" +
                                std::to_string(context.max_length) + "); expected at most that");
}

/// The sequences of `tokens`, with the loss of a bigram model on the evaluation part as the
/// baseline. `place`: the place of data.seq_len, for messages.
DataSplits splits_of(const TokenData& tokens, int64_t seq_len, const std::string& place,
                     const DataContext& context) {
  if (context.vocab_size > 0) {
    named(context.vocab_size_at, [&] {
      tokens.train.require_below(context.vocab_size);
      tokens.val.require_below(context.vocab_size);
    });
  }
  const auto sequences = [&](const Tokens& part, bool continuous) {
    return named(place, [&] { return std::make_shared<TokenDataset>(part, seq_len, continuous); });
  };
  DataSplits splits;
  splits.train = sequences(tokens.train, context.order == SampleOrder::sequential);
  if (tokens.val.size() == 0) return splits;
  splits.val = sequences(tokens.val, false);
  splits.baseline_name = "a bigram model of the same split";
  splits.baseline = [tokens, vocab = context.vocab_size]() -> std::optional<double> {
    if (vocab == 0 || tokens.val.size() < 2 ||
        tokens.train.size() + tokens.val.size() > kMostBigramTokens)
      return std::nullopt;
    return bigram_cross_entropy(tokens.train, tokens.val, vocab);
  };
  return splits;
}

DataPlan read_byte_text(OptionReader& options, const DataContext& context) {
  Paths paths, val_paths;
  double val_fraction = 0.1;
  options.require("path", "the training text or tokens");
  options.read_paths("path", paths, "files, folders or patterns");
  options.read_paths("val_path", val_paths, "evaluation text; all of path is then training data");
  const int64_t seq_len = read_seq_len(options, context);
  if (!val_paths.empty())
    options.refuse("val_fraction",
                   "data.val_path names the evaluation text already; give one of the two");
  options.read("val_fraction", val_fraction,
               "fraction at the end of the text that is used for evaluation; without val_path",
               kProbability);
  options.finish();
  if (paths.empty()) options.fail("path", "no path; expected the training text or tokens");
  check_seq_len(options, context, seq_len);
  DataPlan plan;
  plan.text = true;
  note_files(plan, "data.path", paths);
  note_files(plan, "data.val_path", val_paths);
  plan.load = [=, at_path = options.at("path"), at_val = options.at("val_path"),
               at_length = options.at("seq_len")] {
    TokenData tokens = named(at_path, [&] {
      return ByteText{paths, val_paths.empty() ? val_fraction : 0.0}.load();
    });
    if (!val_paths.empty())
      tokens.val = named(at_val, [&] { return ByteText{val_paths, 0.0}.load().train; });
    return splits_of(tokens, seq_len, at_length, context);
  };
  return plan;
}

DataPlan read_token_bin(OptionReader& options, const DataContext& context) {
  Paths paths, val_paths;
  options.require("path", "the training text or tokens");
  options.read_paths(
      "path", paths,
      "token files of llm.c, or patterns; read as one stream in order of their names");
  options.read_paths("val_path", val_paths, "evaluation files");
  const int64_t seq_len = read_seq_len(options, context);
  options.refuse(
      "val_fraction",
      "a TokenBin file is all training data; name an evaluation file with data.val_path");
  options.finish();
  if (paths.empty()) options.fail("path", "no path; expected the training text or tokens");
  check_seq_len(options, context, seq_len);
  DataPlan plan;
  note_files(plan, "data.path", paths);
  note_files(plan, "data.val_path", val_paths);
  plan.load = [=, at_path = options.at("path"), at_length = options.at("seq_len")] {
    return splits_of(named(at_path,
                           [&] {
                             return TokenBin{paths, val_paths, context.vocab_size}.load();
                           }),
                     seq_len, at_length, context);
  };
  return plan;
}

/// Datasets of two files per split: `train` is required, `val` and `test` are optional.
template <class Data, class Options>
DataPlan read_pairs(
    OptionReader& options, const std::string& first, const std::string& second,
    const std::function<void(Options&)>& complete = [](Options&) {}) {
  std::map<std::string, std::string> paths;
  for (const std::string part : {"", "val_", "test_"}) {
    for (const auto& key : {part + first, part + second}) {
      if (part.empty()) options.require(key, "a file");
      options.read_path(key, paths[key],
                        part.empty()     ? "training data"
                        : part == "val_" ? "evaluation data"
                                         : "test data");
    }
  }
  options.finish();
  DataPlan plan;
  for (const std::string part : {"val_", "test_"}) {
    if (paths[part + first].empty() != paths[part + second].empty()) {
      const std::string missing = paths[part + first].empty() ? part + first : part + second;
      options.fail(missing, "missing; expected a file beside the other one");
    }
  }
  for (const auto& [key, path] : paths)
    if (!path.empty()) plan.files.emplace_back("data." + key, path);
  plan.load = [=, place = options.at(first)] {
    const auto open = [&](const std::string& part) -> std::shared_ptr<const Dataset> {
      const std::string inputs = paths.at(part + first);
      if (inputs.empty()) return nullptr;
      Options files{inputs, paths.at(part + second)};
      complete(files);
      return named(place, [&] { return std::make_shared<Data>(files); });
    };
    return DataSplits{open(""), open("val_"), open("test_")};
  };
  return plan;
}

}  // namespace

void add_datasets(registry::Datasets& datasets) {
  datasets.add("ByteText", read_byte_text, "text as bytes, cut into sequences");
  datasets.add("TokenBin", read_token_bin, "llm.c's token files, cut into sequences");
  datasets.add(
      "Idx",
      [](OptionReader& options, const DataContext& context) {
        return read_pairs<IdxDataset, IdxOptions>(
            options, "images", "labels",
            [classes = context.classes](IdxOptions& files) { files.classes = classes; });
      },
      "images and labels in MNIST's IDX format");
  datasets.add(
      "Npy",
      [](OptionReader& options, const DataContext&) {
        return read_pairs<NpyDataset, NpyOptions>(options, "inputs", "targets");
      },
      "arrays in NumPy's .npy files");
}

}  // namespace tessera::train
