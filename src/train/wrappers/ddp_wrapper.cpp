#include "tessera/distributed_data_parallel.h"
#include "tessera/train/registries.h"
#include "train/config/read_component.h"
#include "train/wrappers/called_module.h"
#include "train/wrappers/whole_wrapper.h"
#include "train/wrappers/wrapper_functions.h"

namespace tessera::train {
namespace {

/// Every rank has the whole model; after backward all ranks have the same mean gradient.
class DdpWrapper : public WholeWrapper {
 public:
  DdpWrapper(WrapperContext context, const DistributedDataParallelOptions& options,
             const std::optional<Overlap>& overlap, CommHookPlan::Instance hook)
      : WholeWrapper(std::move(context)),
        hook_(std::move(hook)),
        shares_(options.share_parameters),
        ddp_(CalledModule{model_.module}, group_,
             with_overlap(with_hook(options, hook_), overlap, group_)) {
    buffers_are_equal_ = options.buffers != BufferSync::none;
  }

  /// An evaluation is no forward of DistributedDataParallel, which would communicate.
  at::Tensor call(const std::function<at::Tensor()>& function) override {
    return at::GradMode::is_enabled() ? ddp_(function) : function();
  }
  void shadow_backward() override { ddp_.shadow_backward(); }
  std::unique_ptr<NoSync> no_sync() override {
    return std::unique_ptr<NoSync>(new NoSync(ddp_.no_sync()));
  }
  Joinable* joinable() override { return &ddp_; }
  void end_step(StepEnd end) override { ddp_.end_step(end); }
  void wait() override { ddp_.wait(); }
  std::vector<ParameterShard> loaded_shards() override {
    if (!shares_) return WholeWrapper::loaded_shards();
    auto result = shards();
    add_shared_frozen(result, *model_.module, group_);
    return result;
  }
  MemoryUse memory() override {
    MemoryUse use = WholeWrapper::memory();
    use.parameters = ddp_.parameter_bytes();
    return use;
  }
  MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const override {
    MemoryUse use = WholeWrapper::unsharded(ranks);
    use.parameters = 0;
    for (const auto& parameter : model_.module->parameters())
      use.parameters += static_cast<int64_t>(parameter.nbytes());
    return use;
  }
  MemoryUse formula(const MemoryUse& unsharded) const override {
    MemoryUse use = WholeWrapper::formula(unsharded);
    use.parameters = ddp_.parameter_bytes();
    return use;
  }

  std::vector<std::pair<std::string, at::Tensor>> extra_state() override {
    if (!hook_.state) return {};
    const auto state = hook_.state();
    return {state.begin(), state.end()};
  }
  void load_extra_state(const std::vector<std::pair<std::string, at::Tensor>>& state) override {
    if (hook_.load_state) hook_.load_state({state.begin(), state.end()});
    else ModelWrapper::load_extra_state(state);
  }

 protected:
  int64_t gradient_bytes() const override { return ddp_.gradient_bytes(); }

 private:
  static DistributedDataParallelOptions with_hook(DistributedDataParallelOptions options,
                                                  const CommHookPlan::Instance& hook) {
    options.comm_hook = hook.hook;
    return options;
  }

  CommHookPlan::Instance hook_;
  bool shares_;  // frozen parameters
  DistributedDataParallel<CalledModule> ddp_;
};

}  // namespace

WrapperPlan read_ddp(OptionReader& options) {
  DistributedDataParallelOptions ddp;
  options.read("first_bucket_mb", ddp.first_bucket_mb, "MiB of gradients in the first bucket",
               kPositive);
  double cap = 25;
  const bool cap_given = options.given("bucket_cap_mb");
  options.read("bucket_cap_mb", cap,
               "MiB of gradients in each other bucket; unless given, chosen from the time of "
               "all-reduces where ranks are on several hosts",
               kPositive);
  if (cap_given) ddp.bucket_cap_mb = cap;
  options.read("find_unused_parameters", ddp.find_unused_parameters,
               "some parameters may get no gradient");
  options.read("static_graph", ddp.static_graph, "the set of used parameters never changes");
  options.read("share_parameters", ddp.share_parameters,
               "the ranks of a host have one copy of the frozen parameters, in memory that they "
               "share");
  read_buffers(options, ddp.buffers);
  read_wire(options, ddp.wire, false);
  std::optional<Overlap> overlap;
  read_overlap(options, overlap);
  const auto hook = read_component(registry::comm_hooks(), options, "comm_hook", "none",
                                   "how gradients are communicated");
  options.finish();
  WrapperPlan plan;
  plan.make = [ddp, overlap, hook](WrapperContext context) {
    return std::make_unique<DdpWrapper>(std::move(context), ddp, overlap, hook.make());
  };
  return plan;
}

}  // namespace tessera::train
