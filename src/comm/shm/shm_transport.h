#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "comm/base/flat_tensor.h"
#include "comm/base/transport.h"
#include "comm/shm/shm_arena.h"
#include "comm/shm/shm_control.h"
#include "comm/shm/shm_segment.h"

namespace tessera::comm {

/// Collectives through shared memory. Every rank has one segment that all ranks map: its control
/// block, then two staging buffers. A collective works in one of two ways:
///   direct  if the tensor lies in memory of allocate() on all ranks: the ranks read and write each
///           other's memory in place.
///   staged  otherwise: in each round every rank fills a staging buffer, all ranks pass a barrier,
///           and each rank reads the others' buffers. Rounds alternate between the two buffers, so
///           one barrier in each round suffices: a rank that arrives at the barrier of round n has
///           finished reading round n-1.
class ShmTransport : public Transport {
 public:
  static constexpr int64_t staging_bytes = 1 << 20;  ///< Size of one staging buffer.
  static constexpr int64_t control_bytes = 4096;
  static constexpr int64_t window_bytes = 4 << 20;  ///< Part of a peer's memory mapped at a time.
  static constexpr int64_t segment_bytes = control_bytes + 2 * staging_bytes;

  ShmTransport(int rank, std::vector<std::shared_ptr<ShmSegment>> segments,
               std::shared_ptr<ShmArena> arena, std::chrono::milliseconds timeout);
  ~ShmTransport() override;

  const char* name() const override { return "shm"; }
  std::vector<OpHeader> exchange(const OpHeader& mine) override;
  void all_reduce(at::Tensor flat, double scale) override;
  void reduce(at::Tensor flat, int root) override;
  void broadcast(at::Tensor flat, int root) override;
  void all_gather(at::Tensor flat, const Counts& counts) override;
  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override;
  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override;
  at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) override;
  at::Tensor peer_view(const at::Tensor& allocated, int peer) const override;
  void set_timeout(std::chrono::milliseconds timeout) override { control_.set_timeout(timeout); }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    control_.set_stopped_timeout(timeout);
  }
  void abort() noexcept override { control_.leave(); }
  /// See ShmControl::is_late().
  bool is_late(int peer) const noexcept { return control_.is_late(peer); }

  /// The windows of one round.
  struct Window {
    const Segments& segments;
    int64_t round;
    int rank;                       ///< This rank.
    bool direct;                    ///< True: windows of the tensors, which can be written.
    std::vector<std::byte*> ranks;  ///< Each rank's tensor, or staging buffer.

    std::byte* operator()(int segment, int of) const {
      const bool in_tensor = direct || of == rank;
      return ranks[of] + (in_tensor ? segments.offset(segment, round)
                                    : segment * segments.step * segments.width);
    }
  };
  /// The way in which a collective uses the windows that share_windows() shows.
  class WindowUse {
   public:
    virtual ~WindowUse() = default;
    /// True if another rank reads this rank's window.
    virtual bool is_read(int segment, int64_t round) const = 0;
    /// A window is readable during the call for its round.
    virtual void visit(int64_t round, const Window& window) = 0;
    /// Called after the last round. Until it returns, a rank of a direct collective may read and
    /// write the windows that no other rank uses.
    virtual void finish() {}
    /// For data that arrives while the windows are shared: make_ready(round) returns when this
    /// rank's windows of stripe() rounds from `round` on, a multiple of that, have their values. 0:
    /// all have them. The same on all ranks.
    virtual int64_t stripe() const { return 0; }
    virtual void make_ready(int64_t /*round*/) {}
    bool waits_before(int64_t round) const { return stripe() > 0 && round % stripe() == 0; }
  };
  /// Shows the ranks windows of each other's tensors, round by round: in round i the windows i.
  /// `segments.step` is window_step().
  void share_windows(Op op, const Segments& segments, WindowUse& use);
  static int64_t window_step(size_t segments, int64_t width) {
    return std::max<int64_t>(1, staging_bytes / static_cast<int64_t>(segments) / 64 * 64 / width);
  }

 private:
  /// The tensors of all ranks in one collective.
  struct ExchangedLayout {
    std::vector<std::byte*> direct;  ///< Each rank's tensor; empty: the collective is staged.
    /// The allocation of the tensors; null unless its peers' segments are to be forgotten after
    /// use.
    std::shared_ptr<const ShmAllocation> allocation;
    bool filled = false;  ///< All ranks have filled their staging buffer for the first round.
    int64_t largest = 0;  ///< The largest `amount` that a rank passed.
  };

  /// Runs one collective. After an error of this rank itself (for example in `consume`), the other
  /// ranks' calls fail too.
  void run(Op op, const at::Tensor& tensor, const std::function<void()>& body);
  /// Exchanges the places of the ranks' tensors; a barrier. If this rank's tensor is not in shared
  /// memory, the collective will be staged, and `fill` of the first round is called before the
  /// barrier, which saves one.
  ExchangedLayout exchange_layout(const at::Tensor& tensor, const std::function<void()>& fill,
                                  int64_t amount = 0);
  using Step = std::function<void(int64_t round)>;
  void rounds(int64_t count, const ExchangedLayout& exchanged, const Step& fill, const Step& drain);
  std::byte* staging(int r) const { return staging_[r] + (turn_ & 1) * staging_bytes; }

  /// Calls part(from, bytes) for consecutive windows of [begin, begin + bytes) of the ranks'
  /// tensors. After each window, unmaps its pages of the peers' memory.
  template <class Part>
  void in_windows(const ExchangedLayout& exchanged, int64_t begin, int64_t bytes, Part&& part) {
    const int64_t window = exchanged.allocation ? window_bytes : bytes;
    for (int64_t done = 0; done < bytes; done += window) {
      const int64_t length = std::min(window, bytes - done);
      part(begin + done, length);
      if (exchanged.allocation) forget_peers(exchanged, begin + done, length);
    }
  }
  void share_staged(const Segments& segments, const ExchangedLayout& exchanged, WindowUse& use);
  void share_direct(const Segments& segments, const ExchangedLayout& exchanged, WindowUse& use);
  void stage(const Segments& segments, const WindowUse& use, int64_t round);
  void forget_peers(const ExchangedLayout& exchanged, int64_t begin, int64_t bytes) const;
  /// `outputs`: a subset of the ranks' tensors.
  void reduce_direct(const at::Tensor& flat, const ExchangedLayout& exchanged,
                     const std::vector<std::byte*>& outputs, double scale);
  void sum_segment(at::ScalarType dtype, const std::vector<const std::byte*>& inputs,
                   std::byte* own, int64_t count, int64_t offset, const Target& target);
  void sum_staged_chunk(at::ScalarType dtype, std::byte* chunk, int64_t count, double scale);
  /// Maps the segments that the first `makers` ranks have made. Throws UsageError on all ranks if
  /// one failed.
  std::vector<std::shared_ptr<ShmSegment>> open_all(const std::shared_ptr<ShmSegment>& own,
                                                    int makers, const std::string& problem);

  int rank_;
  int size_;
  std::vector<std::shared_ptr<ShmSegment>> segments_;
  std::vector<std::byte*> staging_;
  ShmControl control_;
  std::shared_ptr<ShmArena> arena_;
  int64_t next_allocation_;
  uint64_t turn_ = 0;
  Op op_ = Op::barrier;     // the current collective
  bool announced_ = false;  // exchange() has named the next collective for messages
  at::Tensor scratch_;      // memory of the runs that `consume` receives
};

}  // namespace tessera::comm
