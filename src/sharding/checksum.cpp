#include "sharding/checksum.h"

#include <xxhash.h>

#include "tessera/detail/resolved.h"

namespace tessera::sharding {

uint64_t checksum(const at::Tensor& tensor) {
  const auto values = detail::resolved(tensor.detach()).cpu().contiguous();
  return XXH3_64bits(values.data_ptr(), values.nbytes());
}

}  // namespace tessera::sharding
