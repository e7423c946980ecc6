#include "fsdp/model/unit_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include <fmt/format.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

constexpr size_t kRoot = 0;

struct Node {
  std::string name;
  size_t parent = kRoot;  // in the tree of units
};

class Planner {
 public:
  Planner(const WrapPolicy& policy, std::set<std::string> ignored)
      : policy_(policy), ignored_(std::move(ignored)) {}

  UnitPlan plan(torch::nn::Module& root) {
    find(root, "");
    nodes_.push_back({"", kRoot});
    assign(root, "", kRoot);
    UnitPlan result;
    result.parameters = std::move(parameters_);
    std::vector<std::vector<size_t>> members(nodes_.size());
    for (size_t i = 0; i < owner_.size(); ++i) members[owner_[i]].push_back(i);
    std::vector<size_t> unit_of(nodes_.size(), 0);  // a node comes before its children
    for (size_t n = 0; n < nodes_.size(); ++n) {
      unit_of[n] = unit_of[nodes_[n].parent];
      if (n != kRoot && members[n].empty()) continue;
      const size_t parent = unit_of[n];
      unit_of[n] = result.units.size();
      result.units.push_back({nodes_[n].name, parent, std::move(members[n])});
    }
    return result;
  }

 private:
  static std::string join(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  bool ignored(const std::string& path) const { return ignored_.count(path) > 0; }

  /// Finds the modules that the policy chooses, children before parents. Returns the parameters
  /// that are in no unit yet.
  std::set<const void*> find(torch::nn::Module& module, const std::string& path) {
    std::set<const void*> open;
    if (!visited_.insert(&module).second || (!path.empty() && ignored(path))) return open;
    for (const auto& parameter : module.named_parameters(false)) {
      const auto name = join(path, parameter.key());
      if (!parameter.value().defined() || ignored(name)) continue;
      const auto* key = parameter.value().unsafeGetTensorImpl();
      numel_[key] = parameter.value().numel();
      open.insert(key);
    }
    for (const auto& child : module.named_children())
      open.merge(find(*child.value(), join(path, child.key())));
    if (path.empty() || !policy_) return open;
    int64_t unwrapped = 0;
    for (const auto* key : open) unwrapped += numel_[key];
    if (policy_(module, path, unwrapped)) {
      chosen_.insert(&module);
      open.clear();
    }
    return open;
  }

  /// Assigns every parameter to the unit of its module, parents before children. A parameter of
  /// several modules goes to the nearest unit that contains all of them.
  void assign(torch::nn::Module& module, const std::string& path, size_t node) {
    if (!path.empty() && ignored(path)) return;
    const bool first = assigned_.emplace(&module, node).second;
    if (first && !path.empty() && chosen_.count(&module)) {
      nodes_.push_back({path, node});
      node = nodes_.size() - 1;
      assigned_[&module] = node;
    } else if (!first) {
      return;  // a module in two places is one module
    }
    for (const auto& parameter : module.named_parameters(false)) {
      const auto name = join(path, parameter.key());
      if (!parameter.value().defined() || ignored(name)) continue;
      const auto [found, fresh] =
          index_.emplace(parameter.value().unsafeGetTensorImpl(), parameters_.size());
      if (fresh) {
        parameters_.push_back({name, parameter.value()});
        owner_.push_back(node);
      } else {
        owner_[found->second] = common(owner_[found->second], node);
      }
    }
    for (const auto& child : module.named_children())
      assign(*child.value(), join(path, child.key()), node);
  }

  size_t common(size_t a, size_t b) const {
    std::set<size_t> above{a};
    while (a != kRoot) above.insert(a = nodes_[a].parent);
    while (!above.count(b)) b = nodes_[b].parent;
    return b;
  }

  const WrapPolicy& policy_;
  std::set<std::string> ignored_;
  std::set<const torch::nn::Module*> visited_, chosen_;
  std::map<const void*, int64_t> numel_;
  std::vector<Node> nodes_;
  std::map<const torch::nn::Module*, size_t> assigned_;
  std::unordered_map<const void*, size_t> index_;
  std::vector<sharding::NamedTensor> parameters_;
  std::vector<size_t> owner_;
};

}  // namespace

UnitPlan plan_units(torch::nn::Module& root, const WrapPolicy& policy,
                    const std::vector<std::string>& ignored) {
  std::vector<std::string> known;
  for (const auto& item : root.named_modules("", false)) known.push_back(item.key());
  for (const auto& item : root.named_parameters()) known.push_back(item.key());
  for (const auto& name : ignored)
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError(
          fmt::format("FullyShardedDataParallel: option ignored_states contains {}, which the "
                      "module does not have{}",
                      name, did_you_mean(name, known)));
  return Planner(policy, {ignored.begin(), ignored.end()}).plan(root);
}

}  // namespace tessera::fsdp
