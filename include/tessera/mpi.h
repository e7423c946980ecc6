#pragma once

// For programs with MPI: compiled with the program's MPI, any implementation of MPI 3.0 or later.

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <mpi.h>

#include "tessera/detail/communicator.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {
namespace detail {

/// Throws MPI's text for `code`, unless the call succeeded.
inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(std::string(call) + ": " + text);
}

inline bool mpi_has_ended() {
  int ended = 0;
  MPI_Finalized(&ended);
  return ended != 0;
}

/// A message in parts of at most 1 GiB, because MPI counts with int.
class MpiTransfer final : public Communicator::Transfer {
 public:
  static constexpr size_t kPart = size_t{1} << 30;

  /// `start(data, bytes, request)` starts one part.
  template <class Start>
  MpiTransfer(at::Tensor tensor, bool receives, const Start& start)
      : tensor_(std::move(tensor)), receives_(receives) {
    auto* const data = static_cast<char*>(tensor_.data_ptr());
    for (size_t at = 0; at < tensor_.nbytes(); at += kPart) {
      parts_.push_back(
          {MPI_REQUEST_NULL, static_cast<int>(std::min(kPart, tensor_.nbytes() - at))});
      start(data + at, parts_.back().bytes, &parts_.back().request);
    }
  }

  /// If the group fails, MPI may still use the memory of a message: it is never freed then.
  ~MpiTransfer() override {
    if (complete_ < parts_.size()) new at::Tensor(tensor_);
    for (; receives_ && complete_ < parts_.size() && !mpi_has_ended(); ++complete_)
      MPI_Cancel(&parts_[complete_].request);
  }

  bool test() override {
    for (; complete_ < parts_.size(); ++complete_) {
      auto& part = parts_[complete_];
      int done = 0, bytes = 0;
      MPI_Status status;
      check_mpi(MPI_Test(&part.request, &done, &status), "MPI_Test");
      if (!done) return false;
      if (!receives_) continue;
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      if (bytes != part.bytes)
        throw std::runtime_error(std::to_string(bytes) + " bytes arrived, expected " +
                                 std::to_string(part.bytes));
    }
    return true;
  }

 private:
  struct Part {
    MPI_Request request;
    int bytes;
  };
  at::Tensor tensor_;
  bool receives_;
  std::vector<Part> parts_;
  size_t complete_ = 0;
};

/// Owns a communicator of MPI.
class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm owned) : comm_(owned) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    check_mpi(MPI_Query_thread(&level_), "MPI_Query_thread");
    void* bound = nullptr;
    int given = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &bound, &given);
    if (given) most_tag_ = *static_cast<int*>(bound);
  }

  ~MpiCommunicator() override {
    if (!mpi_has_ended()) {
      MPI_Comm_free(&comm_);
      return;
    }
    std::fputs(
        "tessera: a process group with backend MPI is destroyed after MPI_Finalize; "
        "expected its end before MPI_Finalize\n",
        stderr);
  }

  /// Duplicates `comm`. Collective; blocks at most until the deadline.
  static std::shared_ptr<MpiCommunicator> duplicate(MPI_Comm comm, Deadline deadline) {
    // Not on the stack: MPI may write it after the deadline.
    auto* const made = new MPI_Comm(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Comm_idup(comm, made, &request), "MPI_Comm_idup");
    wait(request, deadline);
    const std::unique_ptr<MPI_Comm> owned(made);
    return std::make_shared<MpiCommunicator>(*owned);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    struct Table {
      std::string mine, all;
      std::vector<int> sizes, starts;
    };
    auto* const table = new Table{mine, {}, {}, {}};  // as in duplicate()
    const int bytes = static_cast<int>(mine.size());
    table->sizes.assign(size_ + 1, bytes);  // the last one is this rank's
    table->starts.resize(size_);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallgather(&table->sizes[size_], 1, MPI_INT, table->sizes.data(), 1, MPI_INT,
                             comm_, &request),
              "MPI_Iallgather");
    wait(request, deadline);
    std::exclusive_scan(table->sizes.begin(), table->sizes.end() - 1, table->starts.begin(), 0);
    table->all.resize(table->starts.back() + table->sizes[size_ - 1]);
    check_mpi(MPI_Iallgatherv(table->mine.data(), bytes, MPI_BYTE, table->all.data(),
                              table->sizes.data(), table->starts.data(), MPI_BYTE, comm_, &request),
              "MPI_Iallgatherv");
    wait(request, deadline);
    const std::unique_ptr<Table> owned(table);
    std::vector<std::string> result;
    for (int r = 0; r < size_; ++r)
      result.push_back(table->all.substr(table->starts[r], table->sizes[r]));
    return result;
  }

  std::string refuses_threads() const override {
    if (level_ == MPI_THREAD_MULTIPLE) return "";
    return std::string("MPI provides ") + (level_ == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE"
                                           : level_ == MPI_THREAD_FUNNELED
                                               ? "MPI_THREAD_FUNNELED"
                                               : "MPI_THREAD_SERIALIZED");
  }

  std::shared_ptr<Communicator> subset(const std::vector<int>& ranks, int number) override {
    check_running();
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(comm_, &all), "MPI_Comm_group");
    int code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
    MPI_Comm made = MPI_COMM_NULL;
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(comm_, some, tag_of(number), &made);
    if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
    MPI_Group_free(&all);
    check_mpi(code, "MPI_Comm_create_group");
    return std::make_shared<MpiCommunicator>(made);
  }

  std::unique_ptr<Transfer> send(at::Tensor tensor, int to, int tag) override {
    check_running();
    const auto start = [&](char* data, int bytes, MPI_Request* request) {
      check_mpi(MPI_Isend(data, bytes, MPI_BYTE, to, tag_of(tag), comm_, request), "MPI_Isend");
    };
    return std::make_unique<MpiTransfer>(std::move(tensor), false, start);
  }

  std::unique_ptr<Transfer> receive(at::Tensor tensor, int from, int tag) override {
    check_running();
    const auto start = [&](char* data, int bytes, MPI_Request* request) {
      check_mpi(MPI_Irecv(data, bytes, MPI_BYTE, from, tag_of(tag), comm_, request), "MPI_Irecv");
    };
    return std::make_unique<MpiTransfer>(std::move(tensor), true, start);
  }

 private:
  /// Blocks until MPI has done it. After the deadline MPI may still use what `request` uses.
  static void wait(MPI_Request& request, Deadline deadline) {
    for (int tries = 0, done = 0;; ++tries) {
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done) return;
      if (std::chrono::steady_clock::now() >= deadline)
        throw BrokenWorldError(
            "init_process_group: not all ranks of the communicator have called it, or one has "
            "failed, within the time-out",
            {});
      // Others may need this core.
      if (tries < 1000) std::this_thread::yield();
      else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  static void check_running() {
    if (mpi_has_ended())
      throw UsageError(
          "ProcessGroup: backend MPI: the group is used after MPI_Finalize; expected its last use "
          "before");
  }

  /// MPI has tags from 0 to MPI_TAG_UB. Messages that share one stay in order.
  int tag_of(int tag) const { return most_tag_ == INT32_MAX ? tag : tag % (most_tag_ + 1); }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1, level_ = MPI_THREAD_SINGLE;
  int most_tag_ = 32767;  // the least value that MPI guarantees
};

/// Throws UsageError unless a group can be made of `comm` on this thread.
inline void check_communicator(MPI_Comm comm) {
  int begun = 0, level = 0, main = 0, inter = 0;
  MPI_Initialized(&begun);
  if (!begun)
    throw UsageError(
        "init_process_group: MPI is not initialized; expected MPI_Init or MPI_Init_thread before");
  if (mpi_has_ended())
    throw UsageError("init_process_group: MPI has ended; expected a call before MPI_Finalize");
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&main);
  if (level <= MPI_THREAD_FUNNELED && !main)
    throw UsageError(
        "init_process_group: MPI provides no calls on this thread; expected the thread that "
        "called MPI_Init, or MPI_THREAD_SERIALIZED");
  if (comm == MPI_COMM_NULL)
    throw UsageError(
        "init_process_group: the communicator is MPI_COMM_NULL; expected one that this process is "
        "in");
  check_mpi(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  if (inter)
    throw UsageError(
        "init_process_group: the communicator is an inter-communicator; expected one of one group "
        "(MPI_Intercomm_merge)");
}

}  // namespace detail

/// Makes this process a rank of a group of the ranks of `comm`: MPI_COMM_WORLD, or any other
/// intra-communicator. Its ranks are those of `comm`. Rank, size, hosts, addresses and a fresh
/// secret travel by MPI, on a duplicate of `comm`; the variables of launchers, MASTER_ADDR and
/// TESSERA_SECRET are not read. Data then travel as in every group: in shared memory, over TCP or
/// by NCCL; between hosts over MPI, see Backend. A program may make several groups, one after the
/// other or at once.
///
/// The program calls MPI_Init and MPI_Finalize; this function calls neither. It calls MPI on the
/// calling thread alone, so every thread level works. After its return the group does not use MPI,
/// unless MPI carries its messages: see Backend.
///
/// Collective; blocks until all ranks of `comm` have called it, at most `options.timeout`. Throws
/// UsageError, on all ranks, if the options differ between ranks; UsageError on this rank if MPI is
/// not initialized, or has ended, or `comm` is MPI_COMM_NULL or an inter-communicator;
/// BrokenWorldError if ranks do not arrive.
template <class Comm>
requires std::same_as<Comm, MPI_Comm>  // init_process_group({}) means the options
    ProcessGroup init_process_group(Comm comm, ProcessGroupOptions options = {}) {
  detail::check_communicator(comm);
  const auto limit = options.timeout.count() > 0 ? options.timeout : ProcessGroupOptions().timeout;
  return detail::init_process_group(
      detail::MpiCommunicator::duplicate(comm, std::chrono::steady_clock::now() + limit), options);
}

}  // namespace tessera
#pragma GCC visibility pop
