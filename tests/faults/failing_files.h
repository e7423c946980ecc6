#pragma once

// A library that makes file operations of a process fail. It is loaded before the C library, with
// LD_PRELOAD or because the program links it first. Operations on paths that begin with a chosen
// text are counted, and one of them fails: with an errno, by moving fewer bytes, or by SIGKILL.
//
// A program calls the functions below. For one that does not, the environment says the same:
// FAILING_FILES_UNDER (the beginning of the paths), FAILING_FILES_AT (the number of the operation;
// 0: count only), FAILING_FILES_HOW (EIO, ENOSPC, ESTALE, EMFILE, EINTR, short or kill; with "+" at
// its end all later operations fail, too; "fsync:EIO" counts calls of fsync alone),
// FAILING_FILES_LACKS (a list of exchange, flock, tmpfile: what the file system does not have),
// FAILING_FILES_RANK (failures only in the process with this RANK; -1: only in those without one),
// FAILING_FILES_LOG (a file that gets a line for each operation).

extern "C" {

/// Counts the operations of the calling thread, or of all threads, that `how` can be done to, from
/// now on, and does it to operation number `at`. "" ends that.
void failing_files_begin(const char* under, const char* how, long at, bool all_threads);
/// The operations since then.
long failing_files_count();
/// As FAILING_FILES_LACKS.
void failing_files_lack(const char* what);
}
