#include <filesystem>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/step/nonfinite.h"
#include "train/report/sample_text.h"
#include "train/run/interruption.h"
#include "train/run/run.h"

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
      const auto figures = figures_on(*data_.test, 0);
      if (reporter_) {
        reporter_->test(figures);
      }
    });
  }
  report_memory();
  evaluate_averaged([&] {
    save();
    save_optimizer();
    heartbeat_.enter(Phase::finishing, done_);
    sample();
  });
  if (reporter_) {
    reporter_->summary(result_, groups_->stats(), loader_ ? loader_->waited() : 0);
  }
}

void Run::report_memory() {
  const MemoryUse use = wrapper_->memory();
  const at::Tensor mine =
      at::tensor({use.parameters, use.gradients, use.optimizer_state}, at::kLong)
          .to(own_group().control_device());
  const at::Tensor all = ProcessGroup(own_group()).all_gather(mine).cpu();
  if (reporter_) {
    std::vector<MemoryUse> ranks;
    for (int rank = 0; rank < own_group().size(); ++rank) {
      const auto* row = all.data_ptr<int64_t>() + 3 * rank;
      ranks.push_back({row[0], row[1], row[2]});
    }
    const MemoryUse whole = wrapper_->unsharded(ranks);
    reporter_->memory_table(ranks, wrapper_->formula(whole), whole);
    record_memory(ranks);
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
