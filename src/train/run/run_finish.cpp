#include <filesystem>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/step/nonfinite.h"
#include "train/run/evaluate.h"
#include "train/run/interruption.h"
#include "train/run/run.h"
#include "train/run/sample_text.h"

namespace tessera::train {

void Run::finish() {
  heartbeat_.enter(Phase::finishing, done_);
  if (result_.interrupted_by != 0) {
    if (reporter_) {
      reporter_->line(result_.checkpoint.empty()
                          ? "interrupted at step " + std::to_string(done_) +
                                "; no checkpoint.folder, nothing to resume from"
                          : "interrupted at step " + std::to_string(done_) +
                                "; the same command resumes from " + result_.checkpoint);
    }
    request_stop(0);
    if (store_) {
      return;
    }
  }
  check_parameters();
  if (ended_by_fault()) return;
  if (result_.interrupted_by == 0 && result_.eval_figures.empty()) {
    record_.step = done_;
    evaluate();
  }
  if (store_) {
    save_checkpoint();
    if (ended_by_fault()) return;
  }
  if (data_.test && result_.interrupted_by == 0) {
    evaluate_averaged([&] {
      const auto figures = train::evaluate(*wrapper_, *data_.test, 0,
                                           [&] { heartbeat_.enter(Phase::evaluating, done_); });
      if (reporter_) {
        reporter_->test(figures);
      }
    });
  }
  report_memory();
  evaluate_averaged([&] {
    save();
    heartbeat_.enter(Phase::finishing, done_);
    sample();
  });
  if (reporter_) {
    reporter_->summary(result_, group_.stats(), loader_ ? loader_->waited() : 0);
  }
}

void Run::report_memory() {
  const MemoryUse use = wrapper_->memory();
  const at::Tensor mine =
      at::tensor({use.parameters, use.gradients, use.optimizer_state}, at::kLong)
          .to(group_.control_device());
  const at::Tensor all = group_.all_gather(mine).cpu();
  if (reporter_) {
    std::vector<MemoryUse> ranks;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto* row = all.data_ptr<int64_t>() + 3 * rank;
      ranks.push_back({row[0], row[1], row[2]});
    }
    const MemoryUse whole = wrapper_->unsharded(ranks);
    reporter_->memory_table(ranks, wrapper_->formula(whole), whole);
  }
}

/// Writes the weights to one file, one tensor at a time. Rank 0 keeps an error until the end and
/// then broadcasts it, because the other ranks are in collectives meanwhile.
void Run::save() {
  const std::string& path = config_.train.save;
  if (path.empty()) {
    return;
  }
  std::string wrong;
  const auto attempt = [&](const std::function<void()>& action) {
    if (!first() || !wrong.empty()) {
      return;
    }
    try {
      action();
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  };
  std::unique_ptr<SafetensorsWriter> writer;
  attempt([&] {
    writer =
        std::make_unique<SafetensorsWriter>(path, weights_, SafetensorsMetadata{{"format", "pt"}});
  });
  std::set<std::string> buffers;
  for (const auto& buffer : model_.module->named_buffers(true)) buffers.insert(buffer.key());
  write_weights([&](const std::string& name, const at::Tensor& tensor) {
    attempt([&] {
      const std::string nonfinite = buffers.count(name) > 0 ? "" : nonfinite_text(tensor);
      if (!nonfinite.empty()) {
        throw Error(config_.at("train.save") + path + " is not written: after " +
                    std::to_string(done_) + " steps parameter " + name + " has " + nonfinite);
      }
      writer->write(name, tensor);
    });
  });
  attempt([&] {
    writer->commit();
    reporter_->line("weights written to " + path);
    if (config_.train.save_config) {
      const auto beside = std::filesystem::path(path).parent_path() / "config.json";
      write_file(beside.string(), model_.config_json);
      reporter_->line("its config written to " + beside.string());
    }
  });
  const std::string error = group_.broadcast_bytes(wrong, 0);
  if (!error.empty()) {
    throw Error(error);
  }
}

void Run::sample() {
  const SampleConfig& sample = config_.train.sample;
  if (sample.length == 0) {
    return;
  }
  const auto whole = wrapper_->whole_on_rank0();
  if (!first()) {
    return;
  }
  try {
    reporter_->line("sample:\n" + sample_text(model_, sample, config_.data.plan.text));
  } catch (const c10::Error&
               error) {  // such as weights that are not finite; all files are written already
    reporter_->line("warning: train.sample: no sample: " + message_of(error));
  }
}

}  // namespace tessera::train
