#pragma once

#include <memory>

#include <c10/util/intrusive_ptr.h>

#include "comm/p2p/mailbox.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::comm {

/// A mailbox over send and recv of any c10d backend. `name` must outlive it.
std::unique_ptr<Mailbox> make_c10d_mailbox(const char* name,
                                           c10::intrusive_ptr<compat::C10dBackend> backend);

}  // namespace tessera::comm
