#include "tessera/data/batch_loader.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <latch>
#include <mutex>
#include <stop_token>
#include <thread>

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include "tessera/detail/own_process.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Sets the calling thread's number of OpenMP threads to one. at::set_num_threads() would also
/// change the initial number of threads that start later. The function is looked up at run time,
/// because the OpenMP library is the one that libtorch is linked with.
void use_one_openmp_thread() {
  at::get_num_threads();  // libtorch sets its default for this thread on the first such call
  if (void* const set = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads"))
    reinterpret_cast<void (*)(int)>(set)(1);
}

[[noreturn]] void rethrow_naming(int64_t iteration, const std::exception_ptr& error) {
  const std::string place = "BatchLoader: iteration " + std::to_string(iteration) + ": ";
  try {
    std::rethrow_exception(error);
  } catch (const UsageError& e) {
    throw UsageError(place + e.what());
  } catch (const c10::Error& e) {
    throw Error(place + compat::first_line(e.what()));
  } catch (const std::exception& e) {
    throw Error(place + e.what());
  } catch (...) {
    throw Error(place + "an exception that is not a std::exception");
  }
}

void require_options(const Dataset* dataset, bool has_samples, int64_t first, int64_t end,
                     const BatchLoaderOptions& options) {
  const auto refuse = [](const std::string& reason) { throw UsageError("BatchLoader: " + reason); };
  if (dataset == nullptr || !has_samples)
    refuse("the dataset or samples_of is null, expected a dataset and a function");
  if (first < 0 || end < first) {
    refuse("iterations [" + std::to_string(first) + ", " + std::to_string(end) +
           "), expected 0 ≤ first ≤ end");
  }
  if (options.threads < 1)
    refuse("threads is " + std::to_string(options.threads) + ", expected 1 or more");
  if (options.depth < 0)
    refuse("depth is " + std::to_string(options.depth) + ", expected 0 or more");
}

void require_rows(const Dataset& dataset, const std::string& name, const at::Tensor& tensor,
                  size_t samples) {
  const bool fits = tensor.dim() > 0 && tensor.size(0) == static_cast<int64_t>(samples);
  if (fits) return;
  const auto rows = tensor.dim() > 0 ? std::to_string(tensor.size(0)) + " rows" : "no dimension";
  throw UsageError("data: " + dataset.describe() + ": " + name + " has " + rows + " for " +
                   std::to_string(samples) + " samples; expected one row a sample");
}

}  // namespace

Batch load_batch(const Dataset& dataset, const std::vector<int64_t>& samples) {
  Batch batch = dataset.get(samples);
  if (!batch.inputs.defined())
    throw UsageError("data: " + dataset.describe() + ": inputs is an undefined tensor");
  require_rows(dataset, "inputs", batch.inputs, samples.size());
  if (batch.targets.defined()) require_rows(dataset, "targets", batch.targets, samples.size());
  for (const auto& [name, tensor] : batch.extra)
    if (tensor.defined()) require_rows(dataset, "extra." + name, tensor, samples.size());
  return batch;
}

class BatchLoader::Impl {
 public:
  const detail::OwnProcess process;

  Impl(std::shared_ptr<const Dataset> dataset,
       std::function<std::vector<int64_t>(int64_t)> samples_of, int64_t first, int64_t end,
       const BatchLoaderOptions& options)
      : dataset_(std::move(dataset)),
        samples_of_(std::move(samples_of)),
        end_(end),
        depth_(options.depth),
        next_(first),
        begun_(first) {
    require_options(dataset_.get(), samples_of_ != nullptr, first, end, options);
    // A thread sets itself up before this returns. Later the process may be ending, and libtorch's
    // thread settings may already be destroyed.
    const int threads = std::min(options.threads, options.depth);
    const auto set_up = std::make_shared<std::latch>(threads);
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, set_up](const std::stop_token& stop) {
        use_one_openmp_thread();
        set_up->count_down();
        work(stop);
      });
    }
    set_up->wait();
  }

  ~Impl() {
    for (std::jthread& thread : threads_) thread.request_stop();
  }

  Batch next() {
    const auto begin = std::chrono::steady_clock::now();
    const int64_t iteration = this->iteration();
    if (iteration == end_) {
      throw UsageError("BatchLoader: no iteration is left, the last one was " +
                       std::to_string(end_ - 1));
    }
    Loaded loaded = depth_ == 0 ? load_here(iteration) : take(iteration);
    waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (loaded.error) rethrow_naming(iteration, loaded.error);
    return std::move(loaded.batch);
  }

  int64_t iteration() const {
    const std::lock_guard lock(mutex_);
    return next_;
  }
  double waited() const { return waited_; }

 private:
  struct Loaded {
    Batch batch;
    std::exception_ptr error;
  };

  Loaded load(int64_t iteration) const {
    const at::NoGradGuard no_grad;
    Loaded loaded;
    try {
      loaded.batch = load_batch(*dataset_, samples_of_(iteration));
    } catch (...) {
      loaded.error = std::current_exception();
    }
    return loaded;
  }

  Loaded load_here(int64_t iteration) {
    ++next_;
    return load(iteration);
  }

  Loaded take(int64_t iteration) {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return loaded_.count(iteration) > 0; });
    Loaded loaded = std::move(loaded_.extract(iteration).mapped());
    ++next_;
    lock.unlock();
    slot_free_.notify_one();
    return loaded;
  }

  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (slot_free_.wait(lock, stop, [&] { return begun_ < end_ && begun_ - next_ < depth_; }) &&
           !stop.stop_requested()) {
      const int64_t iteration = begun_++;
      lock.unlock();
      Loaded loaded = load(iteration);
      lock.lock();
      loaded_.emplace(iteration, std::move(loaded));
      ready_.notify_one();
    }
  }

  const std::shared_ptr<const Dataset> dataset_;
  const std::function<std::vector<int64_t>(int64_t)> samples_of_;
  const int64_t end_;
  const int64_t depth_;
  double waited_ = 0;  // used only by the thread that calls next()

  mutable std::mutex mutex_;
  std::condition_variable_any slot_free_;  // fewer than depth_ batches are begun
  std::condition_variable ready_;          // a batch was loaded
  int64_t next_;                           // the iteration that next() returns
  int64_t begun_;                          // iterations [next_, begun_) are loaded or being loaded
  std::map<int64_t, Loaded> loaded_;
  std::vector<std::jthread> threads_;  // last, so that they end before the members that they use
};

BatchLoader::BatchLoader(std::shared_ptr<const Dataset> dataset,
                         std::function<std::vector<int64_t>(int64_t iteration)> samples_of,
                         int64_t first_iteration, int64_t end_iteration,
                         const BatchLoaderOptions& options)
    : impl_(std::make_unique<Impl>(std::move(dataset), std::move(samples_of), first_iteration,
                                   end_iteration, options)) {}

BatchLoader::~BatchLoader() {
  if (impl_ && !impl_->process.is_this()) (void)impl_.release();
}

Batch BatchLoader::next() { return impl_->next(); }
int64_t BatchLoader::iteration() const { return impl_->iteration(); }
double BatchLoader::waited() const { return impl_->waited(); }

}  // namespace tessera
