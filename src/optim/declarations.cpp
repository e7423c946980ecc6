#include "optim/declarations.h"

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "optim/master_weights.h"
#include "optim/torch_fields.h"

namespace tessera {

namespace {

// Declarations are process-wide, as classes are.
struct Declarations {
  std::mutex mutex;
  std::unordered_map<std::type_index, StateAdapter> adapters;
  std::unordered_set<std::type_index> element_wise;
};

Declarations& declarations() {
  static auto* const all =
      new Declarations;  // never destroyed: optimizers in static storage may still use it
  return *all;
}

template <class... Optimizers>
bool is_exactly(const torch::optim::Optimizer& optimizer) {
  return ((typeid(optimizer) == typeid(Optimizers)) || ...);
}

}  // namespace

void declare_state(std::type_index optimizer, StateAdapter adapter) {
  auto& all = declarations();
  const std::lock_guard lock(all.mutex);
  all.adapters[optimizer] = std::move(adapter);
}

void declare_element_wise(std::type_index optimizer) {
  auto& all = declarations();
  const std::lock_guard lock(all.mutex);
  all.element_wise.insert(optimizer);
}

bool is_element_wise(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (const auto* masters = dynamic_cast<const optim::MasterWeights*>(&optimizer))
    return is_element_wise(masters->inner());
  if (dynamic_cast<const ElementWise*>(&optimizer) != nullptr ||
      is_exactly<SGD, Adam, AdamW, Adagrad, RMSprop>(optimizer))
    return true;
  auto& all = declarations();
  const std::lock_guard lock(all.mutex);
  return all.element_wise.count(typeid(optimizer)) != 0;
}

std::optional<StateAdapter> optim::declared_adapter(const torch::optim::Optimizer& optimizer) {
  auto& all = declarations();
  const std::lock_guard lock(all.mutex);
  const auto found = all.adapters.find(typeid(optimizer));
  return found == all.adapters.end() ? std::nullopt : std::optional<StateAdapter>(found->second);
}

}  // namespace tessera
