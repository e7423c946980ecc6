#pragma once

#include <cstdint>

#include "tessera/process_group.h"

namespace tessera {

inline constexpr double kDefaultBucketMib = 25;

/// MiB of a bucket for which `latency` (seconds of the smallest all-reduce) is at most 1/16 of its
/// all-reduce at `bandwidth` (bytes of gradients per second): a power of two from 1 to 16, else 25.
double bucket_mib_for(double latency, double bandwidth);

/// The size of DistributedDataParallel's buckets if the user gives none. On one host 25 MiB, and
/// nothing is sent. On several hosts it follows from all-reduces that are timed here: small buckets
/// start early and leave little to wait for after backward, but each one costs the latency. Sums do
/// not depend on the size. The same on every rank. Collective; blocks.
double choose_bucket_mib(ProcessGroup& group);

}  // namespace tessera
