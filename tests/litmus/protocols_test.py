"""Protocols between ranks and between threads under C++'s memory model: litmus tests.

    python3 protocols_test.py SOURCES

Each protocol is tried as it is in the sources, whose lines it names, and with each change that
breaks it: then checker.py must find the fault. After a change of a line that is named here, change
the protocol too. The table is in docs/liveness.md.
"""

import pathlib
import re
import sys

from checker import Broken, explore

SHM = "src/comm/shm/shm_control"


def barrier(arrivals, mine, count, order="seq_cst", sees="acquire"):
    yield "store", arrivals[mine], count, order
    for peer, theirs in enumerate(arrivals):
        if peer != mine:
            yield "await", theirs, lambda value: value >= count, sees


def share(ranks=2, order="seq_cst", sees="acquire", slots=2):
    """ShmControl::share(): the messages of three barriers in a row."""
    arrivals = [f"arrivals{r}" for r in range(ranks)]

    def rank(mine):
        def operations():
            for count in range(1, 4):
                yield "write", f"message{mine},{count % slots}", count
                yield from barrier(arrivals, mine, count, order, sees)
                for peer in range(ranks):
                    message = yield "read", f"message{peer},{count % slots}"
                    assert message == count, f"message {message} in barrier {count}"

        return operations

    return [rank(mine) for mine in range(ranks)], dict.fromkeys(arrivals, 0)


def sleep(store="seq_cst", look="seq_cst", announce="seq_cst", seen="seq_cst"):
    """ShmControl::arrive() and sleep_on(): the time-out is not needed."""

    def arriving():
        yield "store", "arrivals", 1, store
        if (yield "load", "sleepers", look):
            yield "futex_wake", "arrivals"

    def waiting():
        while not (yield "load", "arrivals", "acquire"):
            yield "rmw", "sleepers", lambda count: count + 1, announce
            if (yield "load", "arrivals", seen) == 0:
                yield "futex_wait", "arrivals", 0
            yield "rmw", "sleepers", lambda count: count - 1, "seq_cst"

    return [arriving, waiting], {"arrivals": 0, "sleepers": 0}


def staged(buffers=2, order="seq_cst"):
    """ShmTransport::rounds(): a barrier in each round, and two staging buffers by turns."""
    arrivals = ["arrivals0", "arrivals1"]

    def rank(mine):
        def operations():
            for turn in range(3):
                yield "write", f"staging{mine},{turn % buffers}", turn
                yield from barrier(arrivals, mine, turn + 1, order)
                value = yield "read", f"staging{1 - mine},{turn % buffers}"
                assert value == turn, f"round {turn} has the values of {value}"

        return operations

    return [rank(0), rank(1)], dict.fromkeys(arrivals, 0)


def direct(last=True, order="seq_cst"):
    """ShmTransport::reduce_direct(): each rank sums its slice of both tensors into both."""
    arrivals = ["arrivals0", "arrivals1"]

    def rank(mine):
        def operations():
            for part in (0, 1):
                yield "write", f"tensor{mine},{part}", 1
            yield from barrier(arrivals, mine, 1, order)
            total = 0
            for owner in (0, 1):
                total += yield "read", f"tensor{owner},{mine}"
            for owner in (0, 1):
                yield "write", f"tensor{owner},{mine}", total
            if last:
                yield from barrier(arrivals, mine, 2, order)
            for part in (0, 1):
                value = yield "read", f"tensor{mine},{part}"
                assert value == 2, f"a sum is {value}"

        return operations

    return [rank(0), rank(1)], dict.fromkeys(arrivals, 0)


def blame(status_first=True):
    """ShmControl::fail() and root_cause(): a rank that failed has said whom it blames."""

    def failing():
        yield "store", "blamed", 1, "seq_cst"
        yield "rmw", "status", lambda value: "failed" if value == "alive" else None, "seq_cst"

    def reading():
        if status_first:
            status = yield "load", "status", "seq_cst"
        blamed = yield "load", "blamed", "seq_cst"
        if not status_first:
            status = yield "load", "status", "seq_cst"
        assert status == "alive" or blamed == 1, "failed, and blames nobody"

    return [failing, reading], {"blamed": 0, "status": "alive"}


def slots(listed="seq_cst", back="seq_cst", take="seq_cst"):
    """RunningScope and list_running(): a slot is written, listed, copied, and used again."""

    def change(before, after):
        return lambda state: after if state == before else None

    def collective():
        for number in (1, 2):
            yield "await_rmw", "state", change("free", "written"), "seq_cst"
            yield "write", "slot", number
            yield "store", "state", "listed", listed
            yield "await_rmw", "state", change("listed", "free"), "seq_cst"

    def reader():
        if (yield "rmw", "state", change("listed", "read"), take) == "listed":
            yield "read", "slot"
            yield "store", "state", "listed", back

    return [collective, reader], {"state": "free"}


def queue(locked=True, waits=True):
    """Queue::add(), Queue::loop() and Work::State: an operation on the worker, and its result."""

    def caller():
        yield "lock", "queue"
        yield "write", "items", 1
        yield "unlock", "queue"
        yield "notify", "changed"
        yield "lock", "work"
        while not (yield "read", "done") and waits:
            yield "wait", "finished", "work"
            yield "lock", "work"
        yield "unlock", "work"
        result = yield "read", "result"
        assert result == 1, "a result that is not there yet"

    def worker():
        yield "lock", "queue"
        while not (yield "read", "items"):
            yield "wait", "changed", "queue"
            yield "lock", "queue"
        yield "unlock", "queue"
        yield "write", "result", 1
        if locked:
            yield "lock", "work"
        yield "write", "done", True
        if locked:
            yield "unlock", "work"
        yield "notify", "finished"

    return [caller, worker], {}


def lost_page(mark_first=True, fence=True):
    """on_sigbus() and check_mapped_pages(): a reader of a lost page's zeros finds the mark. The
    page is stored with release, because the kernel shows it after all that the handler did.
    Without the fence, a processor may read the mark before the page."""

    def handler():
        if mark_first:
            yield "rmw", "lost_pages", lambda count: count + 1, "seq_cst"
        yield "store", "page", "zeros", "release"
        if not mark_first:
            yield "rmw", "lost_pages", lambda count: count + 1, "seq_cst"

    def reader():
        lost = None if fence else (yield "load", "lost_pages", "seq_cst")
        page = yield "load", "page", "acquire"
        lost = (yield "load", "lost_pages", "seq_cst") if fence else lost
        assert page != "zeros" or lost, "zeros without the mark"

    return [handler, reader], {"lost_pages": 0, "page": "data"}


# Protocol, its changes that break it, and the lines that it stands for.
PROTOCOLS = [
    (share, [{"order": "relaxed"}, {"sees": "relaxed"}, {"slots": 1}],
     {SHM + ".cpp": ["block.arrivals.store(++round_);",
                     "theirs = members_[peer].block->arrivals.load(std::memory_order_acquire);"],
      SHM + ".h": ["const uint32_t slot = (round_ + 1) & 1;", "Message messages[2]{};"]}),
    (sleep, [{"store": "release"}, {"look": "acquire"}, {"announce": "acq_rel"},
             {"seen": "acquire"}],
     {SHM + ".cpp": ["block.arrivals.store(++round_); if (block.sleepers.load() != 0) "
                     "futex_wake_all(block.arrivals);",
                     "block.sleepers.fetch_add(1); const uint32_t seen = block.arrivals.load();"]}),
    (staged, [{"buffers": 1}, {"order": "relaxed"}],
     {"src/comm/shm/shm_transport.cpp": ["fill(round); control_.barrier(); } drain(round); "
                                         "++turn_;"],
      "src/comm/shm/shm_transport.h": ["staging_[r] + (turn_ & 1) * staging_bytes;"]}),
    (direct, [{"last": False}, {"order": "relaxed"}],
     {"src/comm/shm/shm_collectives.cpp": ["exchanged.direct, at), bytes / width, scale); }); "
                                           "control_.barrier();"]}),
    (blame, [{"status_first": False}],
     {SHM + ".cpp": ["if (block.status.load() != ControlBlock::failed) break; const int next = "
                     "static_cast<int>(block.blamed.load()) - 1;"]}),
    (slots, [{"listed": "relaxed"}, {"back": "relaxed"}, {"take": "relaxed"}],
     {"src/comm/execution/running_collectives.cpp": [
         "slot->state.compare_exchange_strong(expected, kWritten)", "slot_->state = kListed;",
         "slot_->state.compare_exchange_weak(expected, kFree)",
         "slot->state.compare_exchange_strong(expected, kRead)", "slot->state = kListed;"]}),
    (queue, [{"locked": False}, {"waits": False}],
     {"src/comm/execution/queue.cpp": ["std::lock_guard lock(mutex_); done_ = true;",
                                       "changed_.wait(lock, [&] { return done_; });"]}),
    (lost_page, [{"mark_first": False}, {"fence": False}],
     {"src/data/mapped_file.cpp": ["std::atomic_thread_fence(std::memory_order_acquire); "
                                   "if (lost_pages.load() > 0) check_mapped(data);"]}),
]


def main():
    failures = 0
    for protocol, changes, lines in PROTOCOLS:
        for path, texts in lines.items():
            source = re.sub(r"\s+", " ", (pathlib.Path(sys.argv[1]) / path).read_text())
            for text in texts:
                if text not in source:
                    failures += 1
                    print(f"{path}: expected '{text}', which {protocol.__name__} stands for")
        try:
            print(f"{protocol.__name__}: holds in {explore(*protocol())} states")
        except Broken as error:
            failures += 1
            print(f"{protocol.__name__}: {error}")
        for change in changes:
            try:
                explore(*protocol(**change))
                failures += 1
                print(f"{protocol.__name__} with {change}: expected a fault, and none was found")
            except Broken as error:
                print(f"{protocol.__name__} with {change}: {str(error).split(';')[0]}")
    sys.exit(failures > 0)


main()
