#include <c10/util/ScopeExit.h>

#include "fsdp/sharded_module.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace

void ShardedModule::shadow_backward() {
  require_idle("shadow_backward");
  const auto reset = c10::make_scope_exit([this] {
    while (residency->forwards() > 0) residency->abandon_forward(false);  // after an error
    gradients->follow_sync(std::nullopt);
  });
  const JoinLeader::Follow follow(join_leader);
  at::NoGradGuard no_grad;
  gradients->begin_backward();
  bool over = false;
  const Overloaded act{[&](const ForwardBegins& event) {
                         set_full_precision(event.full_precision);
                         residency->begin_forward(event.full_precision);
                       },
                       [&](const ForwardEnds&) { residency->end_forward(false); },
                       [&](const UnitsUsed& event) { residency->shadow_use(event); },
                       [&](const FirstGradient& event) {
                         gradients->follow_sync(event.sync);
                         gradients->shadow_gradient(event.flat);
                       },
                       [&](const GradientsReduced& event) { gradients->shadow_reduce(event); },
                       [&](const BackwardEnds& event) {
                         // Passes under no_sync(), and autograd::grad(), come before the one that
                         // reduces.
                         over = event.reduced;
                         gradients->follow_sync(event.reduced);
                         end_backward(false);
                         if (!over) gradients->begin_backward();
                       }};
  while (!over) std::visit(act, join_leader.receive_event());
}

void ShardedModule::shadow_step() {
  if (!step_of_shadow) {
    throw UsageError(prefix() +
                     ": join: some rank has no data, and no function was given that runs the "
                     "optimizer step on such a rank, which updates its shards of the parameters; "
                     "expected set_shadow_step([&] { optimizer.zero_grad(); "
                     "fsdp.shadow_backward(); optimizer.step(); }) before join()");
  }
  step_of_shadow();
}

void ShardedModule::finish_join(int last_active_rank) {
  // Every rank has updated its own shards in each step, but buffers changed only where there was
  // data.
  buffers.broadcast(model.world, last_active_rank);
}

}  // namespace tessera::fsdp
