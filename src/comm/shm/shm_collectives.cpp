#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/base/flat_tensor.h"
#include "comm/shm/shm_kernels.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {
namespace {

constexpr int64_t line_bytes = 64;
// Size of the runs that reduce_scatter passes to `consume`, chosen so that a run and the consumer's
// own data fit in a second-level cache.
constexpr int64_t consume_bytes = 64 << 10;
// Every rank sums chunks up to this size by itself, which saves a barrier.
constexpr int64_t small_chunk_bytes = 16 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Part `index` of `parts` about equal parts that begin on cache lines: elements [begin, end).
struct Slice {
  int64_t begin, end;

  Slice(int64_t count, int64_t width, int index, int parts) {
    const int64_t step = ceil_div(ceil_div(count * width, parts), line_bytes) * line_bytes / width;
    begin = std::min(count, index * step);
    end = std::min(count, begin + step);
  }
  int64_t count() const { return end - begin; }
};

template <class To, class From>
std::vector<To> shifted(const std::vector<From>& pointers, int64_t bytes) {
  std::vector<To> result;
  for (auto* pointer : pointers) result.push_back(pointer + bytes);
  return result;
}

}  // namespace

// Each rank sums one slice of all inputs into all outputs, so no element is read or written twice.
void ShmTransport::reduce_direct(const at::Tensor& flat, const ExchangedLayout& exchanged,
                                 const std::vector<std::byte*>& outputs, double scale) {
  const auto width = static_cast<int64_t>(flat.element_size());
  const Slice mine(flat.numel(), width, rank_, size_);
  in_windows(exchanged, mine.begin * width, mine.count() * width, [&](int64_t at, int64_t bytes) {
    sum_ranks(flat.scalar_type(), shifted<std::byte*>(outputs, at),
              shifted<const std::byte*>(exchanged.direct, at), bytes / width, scale);
  });
  control_.barrier();
}

void ShmTransport::all_reduce(at::Tensor flat, double scale) {
  run(Op::all_reduce, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const int64_t step = staging_bytes / width;
    const auto chunk = [&](int64_t round) { return data_of(flat) + round * step * width; };
    const auto count = [&](int64_t round) { return std::min(step, flat.numel() - round * step); };
    const Step fill = [&](int64_t round) {
      std::memcpy(staging(rank_), chunk(round), count(round) * width);
    };
    const auto exchanged = exchange_layout(flat, [&] {
      if (flat.numel()) fill(0);
    });
    if (!exchanged.direct.empty()) return reduce_direct(flat, exchanged, exchanged.direct, scale);
    rounds(ceil_div(flat.numel(), step), exchanged, fill, [&](int64_t round) {
      sum_staged_chunk(flat.scalar_type(), chunk(round), count(round), scale);
    });
  });
}

// Sums the chunks in the ranks' staging buffers, times `scale`, into this rank's `chunk`.
void ShmTransport::sum_staged_chunk(at::ScalarType dtype, std::byte* chunk, int64_t count,
                                    double scale) {
  std::vector<const std::byte*> inputs;
  for (int r = 0; r < size_; ++r) inputs.push_back(r == rank_ ? chunk : staging(r));
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  if (size_ == 2 || count * width <= small_chunk_bytes)
    return sum_ranks(dtype, {chunk}, inputs, count, scale);

  const Slice mine(count, width, rank_, size_);
  const int64_t at = mine.begin * width;
  sum_ranks(dtype, {staging(rank_) + at, chunk + at}, shifted<const std::byte*>(inputs, at),
            mine.count(), scale);
  control_.barrier();
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const Slice theirs(count, width, peer, size_);
    copy_bytes(chunk + theirs.begin * width, staging(peer) + theirs.begin * width,
               theirs.count() * width);
  }
}

void ShmTransport::reduce(at::Tensor flat, int root) {
  run(Op::reduce, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const int64_t step = staging_bytes / width;
    const auto chunk = [&](int64_t round) { return data_of(flat) + round * step * width; };
    const auto count = [&](int64_t round) { return std::min(step, flat.numel() - round * step); };
    const Step fill = [&](int64_t round) {
      if (rank_ != root) std::memcpy(staging(rank_), chunk(round), count(round) * width);
    };
    const auto exchanged = exchange_layout(flat, [&] {
      if (flat.numel()) fill(0);
    });
    if (!exchanged.direct.empty())
      return reduce_direct(flat, exchanged, {exchanged.direct[root]}, 1);
    rounds(ceil_div(flat.numel(), step), exchanged, fill, [&](int64_t round) {
      if (rank_ != root) return;
      std::vector<const std::byte*> inputs;
      for (int r = 0; r < size_; ++r) inputs.push_back(r == root ? chunk(round) : staging(r));
      sum_ranks(flat.scalar_type(), {chunk(round)}, inputs, count(round));
    });
  });
}

void ShmTransport::broadcast(at::Tensor flat, int root) {
  run(Op::broadcast, flat, [&] {
    const auto bytes = static_cast<int64_t>(flat.nbytes());
    const auto chunk = [&](int64_t round) { return data_of(flat) + round * staging_bytes; };
    const auto length = [&](int64_t round) {
      return std::min(staging_bytes, bytes - round * staging_bytes);
    };
    const Step fill = [&](int64_t round) {
      if (rank_ == root) std::memcpy(staging(rank_), chunk(round), length(round));
    };
    const auto exchanged = exchange_layout(flat, [&] {
      if (bytes) fill(0);
    });
    if (!exchanged.direct.empty()) {
      if (rank_ != root)
        in_windows(exchanged, 0, bytes, [&](int64_t from, int64_t part) {
          copy_bytes(data_of(flat) + from, exchanged.direct[root] + from, part);
        });
      return control_.barrier();
    }
    rounds(ceil_div(bytes, staging_bytes), exchanged, fill, [&](int64_t round) {
      if (rank_ != root) std::memcpy(chunk(round), staging(root), length(round));
    });
  });
}

void ShmTransport::all_gather(at::Tensor flat, const Counts& counts) {
  run(Op::all_gather, flat, [&] {
    const Segments segments(flat, counts,
                            staging_bytes / static_cast<int64_t>(flat.element_size()));
    const auto at = [&](int r, int64_t round) { return data_of(flat) + segments.offset(r, round); };
    const auto length = [&](int r, int64_t round) {
      return segments.count(r, round) * segments.width;
    };
    const Step fill = [&](int64_t round) {
      if (length(rank_, round)) std::memcpy(staging(rank_), at(rank_, round), length(rank_, round));
    };
    const auto exchanged = exchange_layout(flat, [&] { fill(0); });
    const bool direct = !exchanged.direct.empty();
    if (direct && exchanged.direct[0] == exchanged.direct[1]) return;  // common memory
    for (int next = 1; direct && next < size_; ++next) {
      const int peer = (rank_ + next) % size_;
      in_windows(exchanged, segments.offset(peer, 0), counts[peer] * segments.width,
                 [&](int64_t from, int64_t bytes) {
                   copy_bytes(data_of(flat) + from, exchanged.direct[peer] + from, bytes);
                 });
    }
    if (direct) return control_.barrier();
    rounds(segments.windows, exchanged, fill, [&](int64_t round) {
      for (int next = 1; next < size_; ++next) {
        const int peer = (rank_ + next) % size_;
        if (length(peer, round)) std::memcpy(at(peer, round), staging(peer), length(peer, round));
      }
    });
  });
}

// Sums `count` elements of this rank's segment, from element `offset` of it.
void ShmTransport::sum_segment(at::ScalarType dtype, const std::vector<const std::byte*>& inputs,
                               std::byte* own, int64_t count, int64_t offset,
                               const Target& target) {
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  if (target.consume == nullptr)
    return sum_ranks(dtype,
                     {target.output.defined() ? data_of(target.output) + offset * width : own},
                     inputs, count, target.scale);
  const int64_t step = consume_bytes / width;
  if (!scratch_.defined())
    scratch_ = at::empty({consume_bytes}, at::TensorOptions().dtype(at::kByte));
  const auto run = at::from_blob(scratch_.data_ptr(), {step}, at::TensorOptions().dtype(dtype));
  for (int64_t done = 0; done < count; done += step) {
    const int64_t length = std::min(step, count - done);
    sum_ranks(dtype, {data_of(scratch_)}, shifted<const std::byte*>(inputs, done * width), length,
              target.scale);
    (*target.consume)(offset + done, length == step ? run : run.narrow(0, 0, length));
  }
}

void ShmTransport::reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) {
  run(Op::reduce_scatter, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto dtype = flat.scalar_type();
    // Each staging buffer is divided into one part for each receiving rank.
    const int64_t place_bytes = staging_bytes / size_ / line_bytes * line_bytes;
    const Segments segments(flat, counts, place_bytes / width);
    const auto at = [&](int r, int64_t round) { return data_of(flat) + segments.offset(r, round); };
    const Step fill = [&](int64_t round) {
      for (int r = 0; r < size_; ++r) {
        const int64_t n = r == rank_ ? 0 : segments.count(r, round);
        if (n) std::memcpy(staging(rank_) + r * place_bytes, at(r, round), n * width);
      }
    };
    const auto exchanged = exchange_layout(flat, [&] { fill(0); });
    if (!exchanged.direct.empty()) {
      const int64_t start = segments.offset(rank_, 0);
      in_windows(exchanged, start, counts[rank_] * width, [&](int64_t from, int64_t bytes) {
        sum_segment(dtype, shifted<const std::byte*>(exchanged.direct, from), data_of(flat) + from,
                    bytes / width, (from - start) / width, target);
      });
      return control_.barrier();
    }
    rounds(segments.windows, exchanged, fill, [&](int64_t round) {
      const int64_t n = segments.count(rank_, round);
      if (n == 0) return;
      std::vector<const std::byte*> inputs;
      for (int r = 0; r < size_; ++r)
        inputs.push_back(r == rank_ ? at(r, round) : staging(r) + rank_ * place_bytes);
      sum_segment(dtype, inputs, at(rank_, round), n, round * segments.step, target);
    });
  });
}

void ShmTransport::stage(const Segments& segments, const WindowUse& use, int64_t round) {
  for (int s = 0; s < segments.size(); ++s) {
    if (segments.count(s, round) == 0 || !use.is_read(s, round)) continue;
    std::memcpy(staging(rank_) + s * segments.step * segments.width,
                data_of(segments.flat) + segments.offset(s, round),
                segments.count(s, round) * segments.width);
  }
}

void ShmTransport::share_windows(Op op, const Segments& segments, WindowUse& use) {
  run(op, segments.flat, [&] {
    if (segments.windows > 0 && use.waits_before(0)) use.make_ready(0);
    const auto exchanged = exchange_layout(segments.flat, [&] {
      if (segments.windows > 0) stage(segments, use, 0);
    });
    if (exchanged.direct.empty()) share_staged(segments, exchanged, use);
    else share_direct(segments, exchanged, use);
  });
}

void ShmTransport::share_staged(const Segments& segments, const ExchangedLayout& exchanged,
                                WindowUse& use) {
  for (int64_t round = 0; round < segments.windows; ++round, ++turn_) {
    if (round > 0 && use.waits_before(round)) use.make_ready(round);
    if (round > 0 || !exchanged.filled) {
      stage(segments, use, round);
      control_.barrier();
    }
    Window window{segments, round, rank_, false, {}};
    for (int r = 0; r < size_; ++r)
      window.ranks.push_back(r == rank_ ? data_of(segments.flat) : staging(r));
    use.visit(round, window);
  }
  use.finish();
}

void ShmTransport::share_direct(const Segments& segments, const ExchangedLayout& exchanged,
                                WindowUse& use) {
  // The number of rounds whose windows fill a page of each segment, which is then unmapped once.
  const int64_t rounds_a_page = ShmSegment::huge_bytes / (segments.step * segments.width);
  int64_t first = 0;  // round whose windows are mapped
  for (int64_t round = 0; round < segments.windows; ++round) {
    if (round > 0 && use.waits_before(round)) {
      use.make_ready(round);
      control_.barrier();
    }
    use.visit(round, {segments, round, rank_, true, exchanged.direct});
    if (!exchanged.allocation || round + 1 - first < rounds_a_page) continue;
    for (int s = 0; s < segments.size(); ++s) {
      const int64_t begin = segments.offset(s, first);
      const int64_t end = std::min(segments.offset(s, round + 1),
                                   (segments.starts[s] + segments.counts[s]) * segments.width);
      if (begin < end) forget_peers(exchanged, begin, end - begin);
    }
    first = round + 1;
  }
  use.finish();
  if (exchanged.allocation)
    forget_peers(exchanged, 0, static_cast<int64_t>(segments.flat.nbytes()));
  control_.barrier();
}

void ShmTransport::all_to_all(at::Tensor output, at::Tensor input,
                              const std::vector<int64_t>& recv_counts,
                              const std::vector<int64_t>& send_counts) {
  run(Op::all_to_all, input, [&] {
    const auto width = static_cast<int64_t>(input.element_size());
    const auto from = segment_starts(send_counts), to = segment_starts(recv_counts);
    const int64_t place_bytes = staging_bytes / size_ / line_bytes * line_bytes;
    const int64_t step = place_bytes / width;
    const auto count = [&](int64_t whole, int64_t round) {
      return std::clamp<int64_t>(whole - round * step, 0, step);
    };
    const Step fill = [&](int64_t round) {
      for (int r = 0; r < size_; ++r) {
        const int64_t n = r == rank_ ? 0 : count(send_counts[r], round);
        if (n)
          std::memcpy(staging(rank_) + r * place_bytes,
                      data_of(input) + (from[r] + round * step) * width, n * width);
      }
    };
    if (send_counts[rank_])
      std::memcpy(data_of(output) + to[rank_] * width, data_of(input) + from[rank_] * width,
                  send_counts[rank_] * width);
    auto longest = send_counts;
    longest[rank_] = 0;
    const auto exchanged = exchange_layout(
        at::Tensor(), [&] { fill(0); }, *std::max_element(longest.begin(), longest.end()));
    rounds(ceil_div(exchanged.largest, step), exchanged, fill, [&](int64_t round) {
      for (int next = 1; next < size_; ++next) {
        const int peer = (rank_ + next) % size_;
        const int64_t n = count(recv_counts[peer], round);
        if (n)
          std::memcpy(data_of(output) + (to[peer] + round * step) * width,
                      staging(peer) + rank_ * place_bytes, n * width);
      }
    });
  });
}

}  // namespace tessera::comm
