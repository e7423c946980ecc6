#include "fsdp/sharded_module.h"
#include "tessera/error.h"

namespace tessera::fsdp {

/// One forward and backward of the ranks with data (and what they do under no_sync before), see
/// [Note: ranks without data].
void ShardedModule::shadow_backward() {
  require_idle("shadow_backward");
  const bool sync = gradients->sync();
  const JoinLeader::Follow follow(join_leader);
  at::NoGradGuard no_grad;
  for (bool over = false; !over;) {
    const auto event = join_leader.receive_event();
    switch (event.kind) {
      case Event::Kind::forward:
        set_full_precision(event.values.at(0));
        residency->shadow_forward();
        break;
      case Event::Kind::forward_over:
        residency->shadow_forward_over();
        break;
      case Event::Kind::use:
        residency->shadow_use(event.values);
        break;
      case Event::Kind::gradient:
        gradients->set_sync(event.values.at(0));
        gradients->shadow_gradient(event.values.at(1));
        break;
      case Event::Kind::reduce:
        gradients->shadow_reduce(event.values);
        break;
      case Event::Kind::over:
        over = event.values.at(0);
        gradients->set_sync(over);
        end_backward();
        break;
    }
  }
  gradients->set_sync(sync);
}

void ShardedModule::shadow_step() {
  if (!step_of_shadow) {
    throw UsageError(prefix() +
                     ": a join has ranks without data, and it is not known how they step the "
                     "optimizer, which has their shards of "
                     "the parameters; expected "
                     "set_shadow_step([&] { optimizer.zero_grad(); fsdp.shadow_backward(); "
                     "optimizer.step(); }) before join()");
  }
  step_of_shadow();
}

/// Shards are right everywhere, for every rank stepped its own; buffers went their ways.
void ShardedModule::finish_join(int last_active_rank) {
  const auto buffers = module.buffers();
  if (!buffers.empty()) model.world.broadcast(buffers, last_active_rank);
}

}  // namespace tessera::fsdp
