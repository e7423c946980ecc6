#include "train/run/run_loop.h"

namespace tessera::train {

TrainResult RunLoop::run() {
  TrainResult result;
  run_.placing_errors([&] {
    run_.begin();
    train();
    result = run_.end();
  });
  return result;
}

void RunLoop::train() {
  RunData& data = run_.data();
  if (!data.joins()) {
    while (run_.goes_on()) run_.iteration(data.next());
    return;
  }
  JoinOptions options;
  options.divide_by_initial_world_size = false;  // a mean over the ranks with data
  join({static_cast<Joinable&>(*this)}, options, [&](JoinLoop& loop) {
    while (!run_.stopped() && data.has_samples(run_.now().done)) {
      run_.load();
      loop.next();
      run_.iteration(data.next());
    }
  });
}

}  // namespace tessera::train
