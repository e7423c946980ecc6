#include "tessera/checkpoint_store.h"

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/store/checkpoint_store_impl.h"
#include "checkpoint/store/run_folder.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

void check(const std::string& folder, const CheckpointStoreOptions& options) {
  if (folder.empty()) throw UsageError("checkpoint: the folder's name is empty");
  if (options.keep_last < 1) {
    throw UsageError(
        fmt::format("checkpoint: keep_last is {}; expected at least 1", options.keep_last));
  }
  if (options.keep_every < 0) {
    throw UsageError(fmt::format("checkpoint: keep_every is {}; expected steps, or 0 for none",
                                 options.keep_every));
  }
}

void check_reachable(const std::string& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0)
    throw UsageError(fmt::format("checkpoint: {}: {}", folder, errno_text(errno)));
  if (!S_ISDIR(status.st_mode))
    throw UsageError(fmt::format("checkpoint: {} is not a folder", folder));
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw UsageError(
        fmt::format("checkpoint: {}: cannot be written: {}", folder, errno_text(errno)));
  }
}

}  // namespace

CheckpointStore::CheckpointStore(const std::string& folder, ProcessGroup group,
                                 CheckpointStoreOptions options)
    : impl_(std::make_shared<Impl>(
          Impl{store::without_trailing_slashes(folder), std::move(group), options, {}, {}})) {
  Impl& impl = *impl_;
  agree(impl.group, [&] {
    check(folder, options);
    struct stat status {};
    if (::stat(impl.folder.c_str(), &status) != 0) {
      if (const auto error = make_folder(impl.folder))
        throw Error(fmt::format("checkpoint: {}: making the folder failed: {}", impl.folder,
                                error.message()));
    }
    check_reachable(impl.folder);
  });
  impl.places = store::find_places(impl.group, impl.folder);
  agree(impl.group, [&] {
    if (!impl.leads()) return;
    impl.lock = store::FolderLock(impl.folder);
    store::remove_leftovers(impl.folder, impl.lock.alone());
    if (impl.places.shared()) store::settle_replaced(impl.folder);
  });
  agree(impl.group, [&] {
    check_reachable(impl.folder);
    AtomicFile("checkpoint", impl.folder + "/trial").rehearse();
  });
}

CheckpointStore::~CheckpointStore() = default;
CheckpointStore::CheckpointStore(const CheckpointStore&) = default;
CheckpointStore& CheckpointStore::operator=(const CheckpointStore&) = default;

const std::string& CheckpointStore::folder() const { return impl_->folder; }
bool CheckpointStore::shared() const { return impl_->places.shared(); }
bool CheckpointStore::leads() const { return impl_->leads(); }
const CheckpointStoreOptions& CheckpointStore::options() const { return impl_->options; }
const ProcessGroup& CheckpointStore::group() const { return impl_->group; }

}  // namespace tessera
