#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/group/process_group_impl.h"
#include "comm/hosts/message_transport.h"
#include "comm/p2p/c10d_mailbox.h"
#include "tessera/detail/c10d.h"
#include "tessera/error.h"
#if TESSERA_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

namespace tessera {

ProcessGroup from_c10d(c10::intrusive_ptr<compat::C10dBackend> backend,
                       ProcessGroupOptions options) {
  if (!backend) throw UsageError("from_c10d: the backend is null; expected one that is connected");
  if (backend->getSize() == 1) return ProcessGroup();
  auto world = comm::World::start(backend->getRank(), backend->getSize(), options);
  world.same_host = false;
  auto transport =
      comm::make_message_transport(world, comm::make_c10d_mailbox("c10d", std::move(backend)));
  return ProcessGroup(ProcessGroup::Impl::make(std::move(world), std::move(transport)));
}

}  // namespace tessera
