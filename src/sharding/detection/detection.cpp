#include "sharding/detection/detection.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/library.h>

#include "tessera/error.h"

namespace tessera::sharding {
namespace {

void find(const at::Tensor& tensor, bool written, std::vector<PageUse>& uses) {
  if (auto* page = Page::of(tensor)) uses.push_back({page, tensor.storage_offset(), written});
  else if (written) Page::check_orphan_write(tensor);
}

void find(const c10::IValue& value, bool written, std::vector<PageUse>& uses) {
  if (value.isTensor()) {
    find(value.toTensor(), written, uses);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) find(item.toTensor(), written, uses);
  }
}

/// False for operators whose schema declares a write although they change no element.
bool changes_elements(const std::string& name) {
  return name != "aten::requires_grad_" && name != "aten::retain_grad" && name != "aten::detach_" &&
         name != "aten::set_data";
}

/// Returns the first use of a page; its page is null if there is none.
PageUse before_operator(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  thread_local std::vector<PageUse> uses;
  uses.clear();
  const auto& declared = schema.arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    find(arguments[i], alias && alias->isWrite() && changes_elements(schema.name()), uses);
  }
  if (uses.empty()) return {};
  for (auto& use : uses) use.overload = schema.overload_name();
  if (declared.size() > 1 && arguments[1].isDouble()) uses[0].number = arguments[1].toDouble();
  else if (declared.size() > 1 && arguments[1].isInt()) uses[0].number = arguments[1].toInt();
  for (size_t i = 0; i < std::min<size_t>(2, declared.size()); ++i)
    if (arguments[i].isTensor() && !arguments[i].toTensor().key_set().has(kDetectionKey))
      uses[0].other = &arguments[i].toTensor();
  const auto first = uses[0];
  notify_owners(uses, schema.name());
  return first;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto use =
      before_operator(schema, stack->data() + stack->size() - schema.arguments().size());
  run_undetected(use, schema.name(), [&] {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDetectionKey),
                       stack);
  });
}

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

bool start_detection() {
  static const bool started = [] {
    try {
      // Never destroyed: wrappers that are static objects still use it.
      auto* const library =
          new torch::Library(torch::Library::IMPL, "_", kDetectionKey, __FILE__, __LINE__);
      library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    } catch (const c10::Error&) {
      return false;
    }
    register_frequent_operators();
    return true;
  }();
  return started;
}

void require_detection(const std::string& subject, const char* expected) {
  if (start_detection()) return;
  throw UsageError(fmt::format(
      "{} must detect the use of tensors, and another library of this process has taken the "
      "dispatch key TESTING_ONLY_GenericWrapper for that; expected {}",
      subject, expected));
}

bool start_detection_for(const char* component, int rank, const char* what, const char* option) {
  if (start_detection()) return true;
  if (rank == 0) {
    spdlog::warn(
        "tessera: {}: another library has taken the dispatch key that detects the use of {}, so {} "
        "is off",
        component, what, option);
  }
  return false;
}

}  // namespace tessera::sharding
