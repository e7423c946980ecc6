#include "fsdp/paging/detection.h"

#include <algorithm>
#include <mutex>

#include <ATen/record_function.h>
#include <spdlog/spdlog.h>
#include <torch/library.h>

#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

void find(const at::Tensor& tensor, bool written, std::vector<PageUse>& uses) {
  if (auto* page = Page::of(tensor)) uses.push_back({page, tensor.storage_offset(), written, {}});
}

void find(const c10::IValue& value, bool written, std::vector<PageUse>& uses) {
  if (value.isTensor()) {
    find(value.toTensor(), written, uses);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) find(item.toTensor(), written, uses);
    }
  }
}

/// False for operators whose schema declares a write although they change no element.
bool changes_elements(const std::string& name) {
  return name != "aten::requires_grad_" && name != "aten::retain_grad" && name != "aten::detach_" &&
         name != "aten::set_data";
}

void before_operator(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  thread_local std::vector<PageUse> uses;
  uses.clear();
  const auto& declared = schema.arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    find(arguments[i], alias && alias->isWrite() && changes_elements(schema.name()), uses);
  }
  for (auto& use : uses) use.overload = schema.overload_name();
  if (!uses.empty()) notify_owners(uses, schema.name());
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  before_operator(schema, stack->data() + stack->size() - schema.arguments().size());
  const NoDetection no_detection;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDetectionKey),
                     stack);
}

/// Registers the fallback for the life of the process; it costs nothing for tensors without the
/// key. Returns false if another library has one.
bool take_key() {
  static const bool taken = [] {
    try {
      static torch::Library library(torch::Library::IMPL, "_", kDetectionKey, __FILE__, __LINE__);
      library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
      register_frequent_operators();
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return taken;
}

std::unique_ptr<at::ObserverContext> on_function(const at::RecordFunction& function) {
  if (NoDetection::active()) return nullptr;
  const NoDetection no_detection;
  std::vector<PageUse> uses;
  for (const auto& value : function.inputs()) find(value, false, uses);
  if (uses.empty()) return nullptr;
  try {
    notify_owners(uses, std::string_view(function.name()));
  } catch (const std::exception& error) {
    // libtorch allows no exception here. The operator will fail because the page has no memory.
    spdlog::error("tessera: {}", error.what());
  }
  return nullptr;
}

std::mutex recording_mutex;
int recording_users = 0;
at::CallbackHandle recording_handle;

}  // namespace

void notify_owners(c10::ArrayRef<PageUse> uses, std::string_view op) {
  PageOwner* owner = uses[0].page->owner();
  if (uses.size() == 1) {
    if (owner) owner->need(uses, op);
    return;
  }
  const auto same_owner = [&](const PageUse& use) { return use.page->owner() == owner; };
  if (std::all_of(uses.begin(), uses.end(), same_owner)) {
    if (owner) owner->need(uses, op);
    return;
  }
  std::vector<PageUse> mine, others;
  std::partition_copy(uses.begin(), uses.end(), std::back_inserter(mine),
                      std::back_inserter(others), same_owner);
  notify_owners(mine, op);
  notify_owners(others, op);
}

ParameterDetection start_detection(ParameterDetection wanted) {
  if (wanted != ParameterDetection::record_function && take_key())
    return ParameterDetection::dispatch_key;
  if (wanted != ParameterDetection::record_function) {
    throw UsageError(
        "FullyShardedDataParallel: option detection: another library of this process has a "
        "fallback "
        "on the dispatch key that detects the use of parameters; expected a process without that "
        "library (record_function works without the key, but does not refuse wrong uses)");
  }
  std::lock_guard lock(recording_mutex);
  if (recording_users++ == 0) {
    recording_handle = at::addGlobalCallback(at::RecordFunctionCallback(on_function)
                                                 .needsInputs(true)
                                                 .scopes({at::RecordScope::FUNCTION}));
  }
  return ParameterDetection::record_function;
}

void stop_detection(ParameterDetection mechanism) {
  if (mechanism != ParameterDetection::record_function) return;
  std::lock_guard lock(recording_mutex);
  if (--recording_users == 0) at::removeCallback(recording_handle);
}

}  // namespace tessera::fsdp
