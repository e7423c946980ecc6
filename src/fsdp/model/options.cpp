#include "fsdp/model/options.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "fsdp/model/sharded_model.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::string option_text(const FullyShardedDataParallelOptions& options) {
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype ? c10::toString(*dtype) : "unchanged";
  };
  return fmt::format(
      "options: strategy {}, partition {}, group of {}, resident_bytes {}, prefetch {} "
      "and {}, dtypes {}, {}, {}, full in eval {}, wire: {}{}",
      static_cast<int>(options.sharding_strategy), partition_name(options.partition),
      options.shard_group_size, options.resident_bytes, static_cast<int>(options.backward_prefetch),
      static_cast<int>(options.overlap), name(options.mixed_precision.param_dtype),
      name(options.mixed_precision.reduce_dtype), name(options.mixed_precision.buffer_dtype),
      options.mixed_precision.full_precision_in_eval, to_string(options.wire),
      options.device ? ", device " + c10::DeviceTypeName(options.device->type(), true) : "");
}

std::optional<at::Device> chosen_device(const FullyShardedDataParallelOptions& options,
                                        const ProcessGroup& group) {
  if (!options.device || options.device->is_cpu()) return options.device;
  const auto refuse = [&](const std::string& what) {
    throw UsageError(fmt::format("{}: rank {}: option device is {}, and {}", kName, group.rank(),
                                 options.device->str(), what));
  };
  const auto type = options.device->type();
  if (!c10::impl::hasDeviceGuardImpl(type))
    refuse("this process sees no such device; expected one that it sees");
  const c10::impl::VirtualGuardImpl impl(type);
  const auto device = options.device->has_index() ? *options.device : impl.getDevice();
  if (device.index() >= impl.deviceCount())
    refuse(fmt::format("this process sees {} of them; expected a smaller number",
                       static_cast<int>(impl.deviceCount())));
  if (group.size() > 1 && !group.moves(type))
    refuse("the group does not move its tensors; expected a group of with_device()");
  return device;
}

void check_options(const FullyShardedDataParallelOptions& options, int rank) {
  check_option(fmt::format("{}: rank {}", kName, rank), "resident_bytes", options.resident_bytes,
               kNotNegative);
  const auto check = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype && !at::isFloatingType(*dtype))
      throw UsageError(fmt::format(
          "{}: rank {}: option mixed_precision.{} is {}; expected a floating-point dtype", kName,
          rank, name, c10::toString(*dtype)));
  };
  check("param_dtype", options.mixed_precision.param_dtype);
  check("reduce_dtype", options.mixed_precision.reduce_dtype);
  check("buffer_dtype", options.mixed_precision.buffer_dtype);
}

}  // namespace tessera::fsdp
