#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "comm/store/socket.h"
#define XXH_STATIC_LINKING_ONLY  // the size of XXH3_state_t
#include <xxhash.h>

namespace tessera::comm {

/// A message that was posted, and the number of its bytes that have moved.
struct Parcel {
  char* data = nullptr;
  size_t bytes = 0;
  int tag = 0;
  uint64_t moved = 0;
  bool complete = false;
  std::string failure;            ///< Not empty: it will never be complete.
  std::condition_variable ready;  ///< Notified when it is complete or has failed.
};

/// The messages of one connection, in both directions. Each is a frame: its size, its tag and a
/// checksum of the two, its bytes, and their checksum. A message is read into the parcel that was
/// posted for it. If none was posted, reading stops until one is, so that TCP slows the sender
/// down. Exception: if a parcel for another message waits, the message before it is kept in memory,
/// so that the order in which a receiver posts cannot stop it.
///
/// Not thread-safe. Never blocks.
class TcpLink {
 public:
  /// Begins to use a connected socket. `greeting` is sent first.
  void open(Socket socket, std::string greeting);
  bool is_open() const { return socket_.fd() >= 0; }
  /// Was never open and has not ended.
  bool is_new() const { return !is_open() && ended_.empty(); }
  int fd() const { return socket_.fd(); }

  /// Parcels must stay until they are complete or forget() was called.
  void send(Parcel& parcel);
  void receive(Parcel& parcel);
  /// The parcel is no longer used. If a part of it has moved, the connection ends.
  void forget(Parcel& parcel);

  /// True if a checksum was wrong. The connection has ended, but its socket stays open, so that the
  /// peer, which knows nothing yet, does not think that this rank has ended.
  bool is_damaged() const { return damaged_; }
  void close() { socket_ = Socket(); }

  /// Events of poll(2) for which the connection waits; 0: none.
  short events() const;
  /// Moves what the socket has or takes now.
  void read();
  void write();

  /// Ends the connection. Parcels that are not complete, and later ones, fail with `reason`.
  void end(const std::string& reason);

 private:
  struct Frame {
    uint64_t bytes = 0;
    int64_t tag = 0;
    uint64_t sum = 0;  // of what is before it
  };
  /// The state of a message that is sent.
  struct Sending {
    Frame frame = {};
    size_t frame_written = 0;
    size_t summed = 0;         ///< Bytes of the parcel that are in `sum`.
    std::vector<char> window;  ///< The last of these.
    XXH3_state_t sum;
    uint64_t end = 0;  ///< Their checksum.
    size_t end_written = 0;
  };
  /// The frame of a message that arrives.
  struct Arriving {
    Frame frame = {};
    size_t frame_read = 0;
    XXH3_state_t sum;
    uint64_t end = 0;  ///< The checksum that arrives.
    size_t end_read = 0;
  };
  /// A message that arrived before its parcel.
  struct Early {
    int tag;
    std::vector<char> data;
    uint64_t arrived = 0;
    Parcel* wanted = nullptr;
  };

  bool has_frame() const { return arriving_.frame_read == sizeof(Frame); }
  bool is_stalled() const { return has_frame() && !target_ && !filling_; }
  uint64_t& moved() { return target_ ? target_->moved : filling_->arrived; }
  void begin_to_send();
  void read_available();
  void set_low_water();
  void begin_message();
  void finish_message();
  void end_damaged(const char* what);
  size_t take(iovec* parts, size_t count);
  void skip_written(size_t bytes);
  void end_with_error(int error);

  Socket socket_;
  std::string ended_;             // the reason; empty: it has not
  std::string greeting_;          // what is left of it
  std::deque<Parcel*> outgoing_;  // not complete
  Sending sending_;               // of outgoing_.front()
  std::list<Parcel*> receives_;   // no byte has arrived
  std::list<Early> early_;
  Arriving arriving_;
  bool damaged_ = false;
  Parcel* target_ = nullptr;  // into which it is read
  Early* filling_ = nullptr;  // or where it is kept
  int low_water_ = 1;         // SO_RCVLOWAT of the socket
};

}  // namespace tessera::comm
