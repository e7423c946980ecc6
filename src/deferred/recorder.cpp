#include "deferred/recorder.h"

#include <algorithm>
#include <unordered_set>

#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include "deferred/registry.h"
#include "memory/placement_allocator.h"

namespace tessera::deferred {
namespace {

using Names = std::unordered_set<std::string>;

/// Changes of metadata that have no tag inplace_view in every version.
const Names& metadata_operators() {
  static const Names names{"aten::resize_", "aten::set_", "aten::as_strided_", "aten::detach_"};
  return names;
}

/// These write every element of their first argument and read none of it.
bool overwrites(const std::string& name) {
  static const Names names{"aten::uniform_", "aten::normal_",      "aten::fill_",
                           "aten::zero_",    "aten::copy_",        "aten::bernoulli_",
                           "aten::random_",  "aten::exponential_", "aten::log_normal_",
                           "aten::cauchy_",  "aten::geometric_"};
  return names.count(name) > 0;
}

bool gives_view(const c10::OperatorHandle& op) {
  const auto& results = op.schema().returns();
  const auto* alias = results.empty() ? nullptr : results[0].alias_info();
  return (alias && !alias->isWrite()) || op.hasTag(at::Tag::inplace_view) ||
         metadata_operators().count(op.schema().name()) > 0;
}

bool makes_unwritten_memory(const std::string& name) {
  return name.starts_with("aten::empty") || name == "aten::new_empty";
}

/// True if the operator only calls others: it has no kernel of its own, or autocast's casts come
/// first.
bool only_calls_others(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  return keys.has_any(c10::autocast_dispatch_keyset) ||
         (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
          !op.hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

/// True if its parts are recorded in its place: the operator is a factory or a copy. Its parts
/// write to their results in place, and take the generator as an argument.
bool consists_of_others(const c10::OperatorHandle& op, bool takes_tensors) {
  static const Names copies{"aten::clone",      "aten::_to_copy",     "aten::rand_like",
                            "aten::randn_like", "aten::randint_like", "aten::zeros_like",
                            "aten::ones_like",  "aten::full_like"};
  const auto& name = op.schema().name();
  return (!takes_tensors || copies.count(name) > 0) && !makes_unwritten_memory(name) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

std::optional<size_t> generator_of(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (schema.arguments()[i].name() == "generator") return i;
  return std::nullopt;
}

/// Tensors whose elements differ from the values in their memory (conj, neg).
constexpr c10::DispatchKeySet kLazyBits{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative};

/// One operator while it is recorded.
class Recording {
 public:
  Recording(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), operation_(std::make_shared<Operation>(Operation{op})) {
    const auto arguments = torch::jit::last(stack, schema_.arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      operation_->stack.push_back(replace_tensors(arguments[i], [&](const at::Tensor& tensor) {
        tensors_.push_back(tensor);
        if (tensor.defined() && tensor.key_set().has_any(kLazyBits))
          reason_ = "takes a conjugated or negated view";
        regions_.push_back(registry_.find(tensor));
        if (regions_.back() && alias && alias->isWrite()) written_.insert(regions_.back());
        return at::Tensor();
      }));
    }
    if (written_.size() > 1) reason_ = "writes to several large tensors";
    operation_->generator = generator_of(schema_);
    if (!operation_->generator && op.hasTag(at::Tag::nondeterministic_seeded))
      reason_ = "draws from a generator that is not an argument";
  }

  bool takes_tensors() const { return !tensors_.empty(); }

  /// Before the operator runs: notes its inputs, and gives the regions their contents.
  void begin(const c10::IValue* arguments) {
    whole_ = overwrites_whole();
    for (size_t i = 0; i < tensors_.size(); ++i) note_argument(i);
    if (operation_->generator) {
      const auto& given = arguments[*operation_->generator];
      const auto generator =
          given.isGenerator() ? given.toGenerator() : at::detail::getDefaultCPUGenerator();
      if (generator.device().is_cpu()) operation_->generator_state = generator.get_state();
      else reason_ = "draws from a generator of another device";
    }
    for (size_t i = 0; i < regions_.size(); ++i)
      if (regions_[i]) registry_.bring(regions_[i], !(whole_ && i == 0));
  }

  /// After it has run: adds it to the logs of the regions that it wrote or made.
  void end(const torch::jit::Stack& stack) {
    const auto results = torch::jit::last(stack, schema_.returns().size());
    std::unordered_set<RegionPtr> made;
    for (size_t i = 0; i < results.size(); ++i) {
      replace_tensors(results[i], [&](const at::Tensor& tensor) {
        const auto region = registry_.find(tensor);
        if (!region || std::count(regions_.begin(), regions_.end(), region)) return tensor;
        if (!results[i].isTensor()) registry_.give_up(region, text("returns a list"));
        operation_->results.push_back({i, region, Extent(tensor)});
        made.insert(region);
        return tensor;
      });
    }
    if (!made.empty() && !written_.empty()) reason_ = "makes a tensor and writes to another";
    if (!makes_unwritten_memory(schema_.name()))
      for (const auto& region : made) add_to(region, true);
    for (const auto& region : written_) add_to(region, whole_);
    put_away();
  }

  /// The operator threw and may have written a part of its results.
  void fail() {
    for (const auto& region : written_) registry_.give_up(region, text("failed"));
    put_away();
  }

 private:
  std::string text(const std::string& reason) const { return schema_.name() + " " + reason; }

  bool overwrites_whole() const {
    return written_.size() == 1 && regions_[0] && written_.count(regions_[0]) &&
           overwrites(schema_.name()) && tensors_[0].is_contiguous() &&
           tensors_[0].nbytes() == tensors_[0].storage().nbytes() &&
           std::count(regions_.begin(), regions_.end(), regions_[0]) == 1;
  }

  void note_argument(size_t i) {
    const auto& tensor = tensors_[i];
    const auto& region = regions_[i];
    Argument argument;
    if (region) {
      if (region->state == Region::State::fresh && region->mapping.touched())
        registry_.give_up(region, "it was written by address before " + schema_.name());
      argument.written = written_.count(region) > 0;
      if (!argument.written) argument.read = region;
      argument.version = region->version();
      argument.extent.emplace(tensor);
      if (region->state == Region::State::ordinary && !(whole_ && i == 0))
        reason_ = "reads memory that is not deferred";
    } else if (tensor.defined()) {
      if (!tensor.device().is_cpu() || tensor.nbytes() >= memory::kMinPlacementBytes)
        reason_ = "reads large memory from outside";
      else argument.value = tensor.detach().clone();
    }
    operation_->arguments.push_back(std::move(argument));
  }

  void add_to(const RegionPtr& region, bool overwrites) {
    if (region->state == Region::State::ordinary) return;
    if (!reason_.empty()) return registry_.give_up(region, text(reason_));
    region->log.push_back({operation_, overwrites, {}});
    region->state = Region::State::present;
    ++registry_.stats.operators;
    used_.insert(region);
  }

  void put_away() {
    for (const auto& region : regions_)
      if (region) registry_.put_away(region);
    for (const auto& region : used_) registry_.put_away(region);
  }

  Registry& registry_ = Registry::instance();
  const c10::FunctionSchema& schema_;
  std::shared_ptr<Operation> operation_;
  std::vector<at::Tensor> tensors_;
  std::vector<RegionPtr> regions_;  // of tensors_; null for a tensor in no region
  std::unordered_set<RegionPtr> written_, used_;
  bool whole_ = false;
  std::string reason_;  // why it cannot be repeated
};

void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecordingKey);
  const std::lock_guard lock(Registry::instance().mutex);
  if (only_calls_others(op, keys)) return op.redispatchBoxed(rest, stack);
  if (gives_view(op)) {
    const c10::impl::ExcludeDispatchKeyGuard off(kRecordingKey);
    return op.redispatchBoxed(rest, stack);
  }
  // The recorder's own operators on tensors must not be recorded.
  std::optional<Recording> recording;
  {
    const Unrecorded unrecorded;
    recording.emplace(op, *stack);
  }
  if (consists_of_others(op, recording->takes_tensors())) return op.redispatchBoxed(rest, stack);
  {
    const Unrecorded unrecorded;
    recording->begin(stack->data() + stack->size() - op.schema().arguments().size());
  }
  try {
    const c10::impl::ExcludeDispatchKeyGuard off(kRecordingKey);
    op.redispatchBoxed(rest, stack);
  } catch (...) {
    const Unrecorded unrecorded;
    recording->fail();
    throw;
  }
  const Unrecorded unrecorded;
  recording->end(*stack);
}

}  // namespace

bool& deferring() {
  thread_local bool on = false;
  return on;
}

bool start_recording() {
  static const bool started = [] {
    try {
      static torch::Library library(torch::Library::IMPL, "_", kRecordingKey, __FILE__, __LINE__);
      library.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return started;
}

}  // namespace tessera::deferred
