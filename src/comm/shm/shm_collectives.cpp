#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/base/tensor_bytes.h"
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

std::vector<int64_t> starts_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> starts(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), starts.begin(), int64_t{0});
  return starts;
}

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

void ShmTransport::all_gather(at::Tensor flat, const std::vector<int64_t>& counts) {
  run(Op::all_gather, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto starts = starts_of(counts);
    const int64_t step = staging_bytes / width;
    const auto at = [&](int r, int64_t round) { return (starts[r] + round * step) * width; };
    const auto length = [&](int r, int64_t round) {
      return std::clamp<int64_t>(counts[r] - round * step, 0, step) * width;
    };
    const Step fill = [&](int64_t round) {
      if (length(rank_, round))
        std::memcpy(staging(rank_), data_of(flat) + at(rank_, round), length(rank_, round));
    };
    const auto exchanged = exchange_layout(flat, [&] { fill(0); });
    const bool direct = !exchanged.direct.empty();
    const auto from_each_peer = [&](auto&& take) {
      for (int next = 1; next < size_; ++next) take((rank_ + next) % size_);
    };
    if (direct && exchanged.direct[0] == exchanged.direct[1]) return;  // common memory
    if (direct) {
      from_each_peer([&](int peer) {
        in_windows(exchanged, starts[peer] * width, counts[peer] * width,
                   [&](int64_t from, int64_t bytes) {
                     copy_bytes(data_of(flat) + from, exchanged.direct[peer] + from, bytes);
                   });
      });
      return control_.barrier();
    }
    rounds(ceil_div(*std::max_element(counts.begin(), counts.end()), step), exchanged, fill,
           [&](int64_t round) {
             from_each_peer([&](int peer) {
               if (length(peer, round))
                 std::memcpy(data_of(flat) + at(peer, round), staging(peer), length(peer, round));
             });
           });
  });
}

// Sums `count` elements of this rank's segment, from element `offset` of it.
void ShmTransport::sum_segment(at::ScalarType dtype, const std::vector<const std::byte*>& inputs,
                               std::byte* own, int64_t count, int64_t offset,
                               const Target& target) {
  const auto width = static_cast<int64_t>(c10::elementSize(dtype));
  if (target.consume == nullptr)
    return sum_ranks(dtype, {target.output ? target.output + offset * width : own}, inputs, count,
                     target.scale);
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

void ShmTransport::reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts, double scale,
                                  const ConsumeRun* consume) {
  scatter_sums(flat, counts, {consume, nullptr, scale});
}

void ShmTransport::reduce_scatter_into(at::Tensor flat, const std::vector<int64_t>& counts,
                                       at::Tensor output, double scale) {
  scatter_sums(flat, counts, {nullptr, data_of(output), scale});
}

void ShmTransport::scatter_sums(const at::Tensor& flat, const std::vector<int64_t>& counts,
                                const Target& target) {
  run(Op::reduce_scatter, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto starts = starts_of(counts);
    const auto dtype = flat.scalar_type();
    // Each staging buffer is divided into one part for each receiving rank.
    const int64_t place_bytes = staging_bytes / size_ / line_bytes * line_bytes;
    const int64_t step = place_bytes / width;
    const auto count = [&](int r, int64_t round) {
      return std::clamp<int64_t>(counts[r] - round * step, 0, step);
    };
    const Step fill = [&](int64_t round) {
      for (int r = 0; r < size_; ++r) {
        if (r == rank_ || count(r, round) == 0) continue;
        std::memcpy(staging(rank_) + r * place_bytes,
                    data_of(flat) + (starts[r] + round * step) * width, count(r, round) * width);
      }
    };
    const auto exchanged = exchange_layout(flat, [&] { fill(0); });
    if (!exchanged.direct.empty()) {
      const int64_t start = starts[rank_] * width;
      in_windows(exchanged, start, counts[rank_] * width, [&](int64_t at, int64_t bytes) {
        sum_segment(dtype, shifted<const std::byte*>(exchanged.direct, at), data_of(flat) + at,
                    bytes / width, (at - start) / width, target);
      });
      return control_.barrier();
    }
    rounds(ceil_div(*std::max_element(counts.begin(), counts.end()), step), exchanged, fill,
           [&](int64_t round) {
             if (count(rank_, round) == 0) return;
             std::byte* own = data_of(flat) + (starts[rank_] + round * step) * width;
             std::vector<const std::byte*> inputs;
             for (int r = 0; r < size_; ++r)
               inputs.push_back(r == rank_ ? own : staging(r) + rank_ * place_bytes);
             sum_segment(dtype, inputs, own, count(rank_, round), round * step, target);
           });
  });
}

void ShmTransport::share_windows(Op op, const at::Tensor& flat, const std::vector<int64_t>& counts,
                                 const IsRead& is_read, const VisitWindows& visit,
                                 const std::function<void()>& finish, const Arrival& arrival) {
  run(op, flat, [&] {
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto starts = starts_of(counts);
    const int64_t step = window_step(counts.size(), width);
    const int segments = static_cast<int>(counts.size());
    const auto count = [&](int segment, int64_t round) {
      return std::clamp<int64_t>(counts[segment] - round * step, 0, step);
    };
    const auto at = [&](int segment, int64_t round) {
      return (starts[segment] + round * step) * width;
    };
    const int64_t most = ceil_div(*std::max_element(counts.begin(), counts.end()), step);
    const auto waits_before = [&](int64_t round) {
      return arrival.rounds > 0 && round % arrival.rounds == 0;
    };
    const Step fill = [&](int64_t round) {
      if (round > 0 && waits_before(round)) arrival.make_ready(round);
      for (int s = 0; s < segments; ++s) {
        if (count(s, round) == 0 || !is_read(s, round, rank_)) continue;
        std::memcpy(staging(rank_) + s * step * width, data_of(flat) + at(s, round),
                    count(s, round) * width);
      }
    };
    if (most > 0 && waits_before(0)) arrival.make_ready(0);
    const auto exchanged = exchange_layout(flat, [&] {
      if (most > 0) fill(0);
    });
    if (exchanged.direct.empty()) {
      rounds(most, exchanged, fill, [&](int64_t round) {
        const auto window = [&](int segment, int rank) {
          return rank == rank_ ? data_of(flat) + at(segment, round)
                               : staging(rank) + segment * step * width;
        };
        visit(round, {window, false});
      });
      if (finish) finish();
      return;
    }
    // The windows of so many rounds fill a page of each segment, which is unmapped once then.
    const int64_t rounds_a_page = ShmSegment::huge_bytes / (step * width);
    int64_t first = 0;  // round whose windows are mapped
    for (int64_t round = 0; round < most; ++round) {
      if (round > 0 && waits_before(round)) {
        arrival.make_ready(round);
        control_.barrier();
      }
      const auto window = [&](int segment, int rank) {
        return exchanged.direct[rank] + at(segment, round);
      };
      visit(round, {window, true});
      if (!exchanged.allocation || round + 1 - first < rounds_a_page) continue;
      for (int s = 0; s < segments; ++s) {
        const int64_t end = std::min(at(s, round + 1), (starts[s] + counts[s]) * width);
        if (at(s, first) < end) forget_peers(exchanged, at(s, first), end - at(s, first));
      }
      first = round + 1;
    }
    if (finish) finish();
    if (exchanged.allocation) forget_peers(exchanged, 0, static_cast<int64_t>(flat.nbytes()));
    control_.barrier();
  });
}

void ShmTransport::all_to_all(at::Tensor output, at::Tensor input,
                              const std::vector<int64_t>& recv_counts,
                              const std::vector<int64_t>& send_counts) {
  run(Op::all_to_all, input, [&] {
    const auto width = static_cast<int64_t>(input.element_size());
    const auto from = starts_of(send_counts), to = starts_of(recv_counts);
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
    if (send_counts[rank_]) {
      std::memcpy(data_of(output) + to[rank_] * width, data_of(input) + from[rank_] * width,
                  send_counts[rank_] * width);
    }
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
