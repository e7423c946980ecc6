#pragma once

#include <memory>
#include <optional>
#include <string>

#include "fuzz/training/plain/lockstep.h"
#include "fuzz/training/subject.h"
#include "harness/temporary_folder.h"
#include "tessera/step/grad_scaler.h"

namespace tessera::fuzz {

/// A run of events with one world and one wrapper.
struct Segment {
  int world = 0;
  Item wrapper;
  size_t begin = 0, end = 0;  ///< Events of the story.
};

/// What goes from one segment to the next.
struct Carried {
  ModuleStateDict weights;
  OptimizerStateDict state;
  double lr = 0;
  std::shared_ptr<testing::TemporaryFolder> folder;  ///< With a checkpoint, if the "move" says so.
};

/// One rank's part of a segment.
class Player {
 public:
  /// `scratch`: folder for the checkpoints of this player's resumes, the same on all ranks.
  Player(const Case& which, const Segment& segment, ProcessGroup group, const Carried& carried,
         std::string scratch);

  Record play(const Item& event, int number);
  /// The same, with what Lockstep takes over from this rank.
  Seen show(const Item& event, int number);
  Carried carry(std::shared_ptr<testing::TemporaryFolder> folder);
  void barrier() { group_.barrier(); }

 private:
  void make(uint64_t seed);
  void load();
  void resume(int number);
  at::ScalarType other_dtype() const;
  at::Tensor loss(const Item& event, int number, int micro, int micros);
  void zero_grad(const Item& event);
  void spring(const Item& event, int number);
  void train(const Item& event, int number, Record& record);
  void gradients(const Item& event, int number, bool clear_between, Record& record);
  bool unscale();
  void join_event(const Item& event, int number);
  void evaluate(const Item& event, int number, Record& record);
  void set_trainable(int part, bool on);
  void write(const Item& event);
  void change_lr(const Item& event);

  const Case& which_;
  const Item& wrapper_;
  ProcessGroup group_, inner_;  ///< All ranks; those that train together.
  const Carried& carried_;
  std::string scratch_;
  std::unique_ptr<Subject> subject_;
  GradScaler scaler_;
  std::optional<LocalSgdGroups> apart_;  ///< Groups that train apart.
  std::unique_ptr<LocalSgd> local_sgd_;
  bool cleared_ = true;  ///< No gradient is left from an earlier step.
};

}  // namespace tessera::fuzz
