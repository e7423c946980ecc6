#include <array>
#include <utility>

#include <torch/library.h>

#include "sharding/detection/detection.h"

namespace tessera::sharding {
namespace {

/// The pages among the arguments of one operator.
struct SeenPages {
  std::array<PageUse, 8> uses;  // the first alone has a value without a call of see()
  size_t count = 0;
  const c10::StorageImpl* last = nullptr;

  SeenPages() { uses[0].page = nullptr; }

  void see(const at::Tensor& tensor, bool written = false) {
    if (!tensor.key_set().has(kDetectionKey)) {
      uses[0].other = &tensor;
      return;
    }
    // If an operator takes two tensors of a page (weight and bias), one use is enough.
    const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (storage == last) return;
    auto* page = Page::of(tensor);
    if (!page) {
      if (written) Page::check_orphan_write(tensor);
      return;
    }
    last = storage;
    uses[count++] = {page, tensor.storage_offset(), written};
  }
  void see(at::Tensor& tensor) { see(std::as_const(tensor), true); }
  void see(const c10::optional<at::Tensor>& tensor) {
    if (tensor) see(*tensor);
  }
  void see(const at::Scalar& number) {
    if (count > 0 && !number.isComplex()) uses[0].number = number.toDouble();
  }
  template <class Other>
  void see(const Other&) {}
};

template <class Op, class Schema = typename Op::schema>
struct DetectedOperator;

/// The kernel of an operator with the operator's native signature. A tensor that it writes to is
/// its first argument.
template <class Op, class Result, class... Arguments>
struct DetectedOperator<Op, Result(Arguments...)> {
  static_assert(sizeof...(Arguments) <= std::tuple_size_v<decltype(SeenPages::uses)>);

  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    SeenPages seen;
    (seen.see(arguments), ...);
    seen.uses[0].overload = Op::overload_name;
    if (seen.count > 0) notify_owners({seen.uses.data(), seen.count}, Op::name);
    return run_undetected(seen.uses[0], Op::name, [&]() -> Result {
      return Op::redispatch(
          keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDetectionKey),
          std::forward<Arguments>(arguments)...);
    });
  }

  static void add_to(torch::Library& library) {
    const std::string overload = Op::overload_name;
    library.impl((overload.empty() ? Op::name : std::string(Op::name) + "." + overload).c_str(),
                 &run);
  }
};

template <class... Ops>
void add_all(torch::Library& library) {
  (DetectedOperator<Ops>::add_to(library), ...);
}

}  // namespace

void register_frequent_operators() {
  using namespace at::_ops;
  static auto& library =  // never destroyed, as in start_detection()
      *new torch::Library(torch::Library::IMPL, "aten", kDetectionKey, __FILE__, __LINE__);
  // Transposes, and the operator that they consist of, read no element. The operators that use
  // their results are detected.
  for (const char* name : {"t", "transpose.int", "as_strided"})
    library.impl(name, torch::CppFunction::makeFallthrough());
  add_all<linear, mm, addmm, matmul, view, detach, embedding, layer_norm, native_layer_norm,
          native_layer_norm_backward, add__Tensor, mul__Scalar, mul__Tensor, zero_>(library);
}

}  // namespace tessera::sharding
