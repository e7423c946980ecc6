"""Tries every execution of a few threads that C++'s memory model allows: explore(threads, values).

A thread is a generator function. It yields operations and receives their results:

    ("load", x, order)                  an atomic load, which may return an older value
    ("await", x, test, order)           a load that is repeated until test(value)
    ("store", x, value, order)
    ("rmw", x, change, order)           the old value; change(old) is the new one, None: no change
    ("await_rmw", x, change, order)     repeated until it changes the value
    ("read", x), ("write", x, value)    not atomic; two threads that do not synchronize are a race
    ("futex_wait", x, value), ("futex_wake", x)
    ("lock", m), ("unlock", m), ("wait", c, m), ("notify", c)    a mutex, a condition variable

Orders are relaxed, acquire, release, acq_rel and seq_cst. A view says what a thread knows: of each
atomic the oldest value that it may still read, of each thread the last operation that happens
before. A store with release passes its thread's view on to the loads with acquire that read it. A
seq_cst load returns no value older than the last seq_cst store. Two things are stronger than in
C++: stores of one atomic take effect in the order of execution, and a relaxed load comes before the
later loads of its thread. explore() returns the number of states. It raises Broken, with the
operations that lead there, at a race, when an assertion fails, and when all threads wait.
"""

import copy


ACQUIRES, RELEASES = ("acquire", "acq_rel", "seq_cst"), ("release", "acq_rel", "seq_cst")


class Broken(Exception):
    pass


def join(a, b):
    return {key: max(a.get(key, 0), b.get(key, 0)) for key in a.keys() | b.keys()}


def freeze(value):
    if isinstance(value, dict):
        return frozenset((key, freeze(each)) for key, each in value.items())
    return tuple(map(freeze, value)) if isinstance(value, (list, tuple)) else value


class State:
    def __init__(self, count, values):
        self.results = [[] for _ in range(count)]  # of a thread's operations: they say where it is
        self.views = [{t: 1} for t in range(count)]
        self.asleep = [None] * count  # on a futex or a condition variable
        self.atomics = {x: [(value, {})] for x, value in values.items()}
        self.plain = {}  # x -> [value, {thread: its last write}, {thread: its last read}]
        self.last_seq_cst, self.futexes, self.mutexes = {}, {}, {}

    def key(self):
        return tuple(map(freeze, vars(self).values()))

    def end(self, t, result=None, view=None):
        """Thread t has done its operation, and knows what is in `view` too."""
        self.views[t] = join(self.views[t], view or {})
        self.views[t][t] += 1
        self.results[t].append(result)
        return self

    def load(self, t, x, order, accept):
        """The states after each load that may return a value which `accept` allows."""
        oldest = self.views[t].get(x, 0)
        if order == "seq_cst":
            oldest = max(oldest, self.last_seq_cst.get(x, 0))
        for time, (value, passed) in enumerate(self.atomics[x]):
            if time >= oldest and accept(value):
                view = join({x: time}, passed if order in ACQUIRES else {})
                yield copy.deepcopy(self).end(t, value, view)

    def store(self, t, x, value, order, replaces=False):
        after, time = copy.deepcopy(self), len(self.atomics[x])
        old, passed = self.atomics[x][-1]
        view = join(self.views[t], {x: time}) if order in RELEASES else {}
        # A read-modify-write also passes on what the store has that it has read.
        after.atomics[x].append((value, join(view, passed) if replaces else view))
        if order == "seq_cst":
            after.last_seq_cst[x] = time
        return after.end(t, old, join({x: time}, passed if replaces and order in ACQUIRES else {}))

    def access(self, t, x, writes, *value):
        after, mine = copy.deepcopy(self), self.views[t]
        place = after.plain.setdefault(x, [None, {}, {}])
        for times in place[1:] if writes else place[1:2]:
            if any(mine.get(u, 0) < time for u, time in times.items() if u != t):
                raise Broken(f"a race at {x}")
        if writes:
            place[:] = value[0], {t: mine[t]}, {}
        else:
            place[2][t] = mine[t]
        return after.end(t, place[0])

    def futex(self, t, x, waits, *value):
        """The kernel's lock of a futex orders the calls."""
        after = copy.deepcopy(self)
        after.views[t] = after.futexes[x] = join(self.futexes.get(x, {}), self.views[t])
        if not waits:
            return [after.wake(x).end(t)]
        results = list(after.load(t, x, "relaxed", lambda value: True))
        for each in results:
            each.asleep[t] = x if each.results[t][-1] == value[0] else None
        return results

    def wake(self, x):
        self.asleep = [None if place == x else place for place in self.asleep]
        return self

    def step(self, t, kind, x, *rest):
        """The states after the operation of thread t; none: it waits."""
        if kind == "load":
            return self.load(t, x, rest[0], lambda value: True)
        if kind == "await":
            return self.load(t, x, rest[1], rest[0])
        if kind == "store":
            return [self.store(t, x, *rest)]
        if kind in ("rmw", "await_rmw"):
            change, order = rest
            new = change(self.atomics[x][-1][0])
            stays = self.load(t, x, order, lambda value: kind == "rmw" and change(value) is None)
            return list(stays) + ([] if new is None else [self.store(t, x, new, order, True)])
        if kind in ("read", "write"):
            return [self.access(t, x, kind == "write", *rest)]
        if kind in ("futex_wait", "futex_wake"):
            return self.futex(t, x, kind == "futex_wait", *rest)
        after = copy.deepcopy(self)
        if kind == "notify":
            return [after.wake(x).end(t)]
        if kind == "lock":
            view = after.mutexes.get(x, {})  # None: locked
            after.mutexes[x] = None
            return [] if view is None else [after.end(t, None, view)]
        if kind == "wait":  # the thread locks the mutex itself when it has been woken
            after.asleep[t], x = x, rest[0]
        after.mutexes[x] = self.views[t]
        return [after.end(t)]


def explore(threads, values):
    first = State(len(threads), values)
    seen, stack = {first.key()}, [(first, ())]
    while stack:
        state, path = stack.pop()
        ended, moved = 0, False
        for t, thread in enumerate(threads):
            try:
                running = thread()
                operation = next(running)
                for result in state.results[t]:
                    operation = running.send(result)
                here = path + ((t, *(each for each in operation if not callable(each))),)
                for after in [] if state.asleep[t] else state.step(t, *operation):
                    moved = True
                    if after.key() not in seen:
                        seen.add(after.key())
                        stack.append((after, here))
            except StopIteration:
                ended += 1
            except (AssertionError, Broken) as error:
                raise Broken(f"{error}; {path}") from None
        if not moved and ended < len(threads):
            raise Broken(f"all threads wait; {path}")
    return len(seen)
