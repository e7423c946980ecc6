#include "optim/master_weights.h"

#include <algorithm>
#include <string>

#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include "optim/plain_math.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kName = "with_master_weights";

bool is_copied(const at::Tensor& param) {
  return param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf;
}

at::Tensor copy_of(const at::Tensor& param) {
  return is_copied(param) ? param.detach().to(at::kFloat) : param;
}

using Tensors = std::vector<at::Tensor>;

/// Parameters with gradients, and their copies, which are converted together.
struct Pack {
  Tensors params, copies;
  int64_t numel = 0;
};

/// Beyond it a conversion takes more memory than launches are worth.
constexpr int64_t kTogether = int64_t{1} << 23;

/// On an accelerator tensors of one device and dtype are together, so that a conversion is one
/// launch for all.
void add_to_packs(std::vector<Pack>& packs, const at::Tensor& param, const at::Tensor& copy) {
  const bool listed = param.grad().layout() == at::kStrided &&
                      optim::is_listed(param, param.grad()) && copy.strides() == param.strides();
  const auto takes = [&](const Pack& pack) {
    const auto& first = pack.params[0];
    return optim::is_listed(first, first.grad()) && first.device() == param.device() &&
           first.scalar_type() == param.scalar_type() && pack.numel + param.numel() <= kTogether;
  };
  auto found = listed ? std::find_if(packs.begin(), packs.end(), takes) : packs.end();
  if (found == packs.end()) found = packs.emplace(packs.end());
  found->params.push_back(param);
  found->copies.push_back(copy);
  found->numel += param.numel();
}

/// The tensors' elements in one tensor; of a single tensor that tensor.
at::Tensor joined(const Tensors& tensors) {
  if (tensors.size() == 1) return tensors[0].detach();
  Tensors runs;
  for (const auto& tensor : tensors)
    runs.push_back(tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset()));
  return at::cat(runs);
}

/// The windows of `all`, a result of joined(), with the shapes of `tensors`.
Tensors divided(const at::Tensor& all, const Tensors& tensors) {
  if (tensors.size() == 1) return {all};
  Tensors parts;
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    parts.push_back(all.as_strided(tensor.sizes(), tensor.strides(), begin));
    begin += tensor.numel();
  }
  return parts;
}

/// Elements that were written since they were rounded from the copies replace those of the copies.
/// The comparison is one of values: ZeroRedundancyOptimizer's shards and the parameters are
/// different tensors over the same memory, so no version counter tells.
void follow_writes(const Pack& pack) {
  const at::Tensor values = joined(pack.params);
  at::Tensor copy = joined(pack.copies);
  const at::Tensor rounded = copy.to(values.scalar_type());
  if (values.is_cpu() && values.equal(rounded)) return;  // on a device the host would wait
  at::where_out(copy, values.eq(rounded), copy, values.to(at::kFloat));
  if (pack.copies.size() > 1) optim::copy_list(pack.copies, divided(copy, pack.copies));
}

void set_gradients(const Pack& pack) {
  Tensors grads;
  for (const auto& param : pack.params) grads.push_back(param.grad());
  const auto parts = divided(joined(grads).to(at::kFloat), pack.copies);
  for (size_t i = 0; i < parts.size(); ++i) pack.copies[i].mutable_grad() = parts[i];
}

void round_copies(const Pack& pack) {
  Tensors params;
  for (const auto& param : pack.params) params.push_back(param.detach());
  if (params.size() == 1) params[0].copy_(pack.copies[0]);
  else optim::copy_list(params, divided(joined(pack.copies).to(params[0].scalar_type()), params));
  for (const auto& copy : pack.copies) copy.mutable_grad() = at::Tensor();
}

std::unique_ptr<torch::optim::OptimizerOptions> defaults_of(const OptimizerFactory& factory) {
  const auto example =
      factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})});
  if (dynamic_cast<const torch::optim::LBFGS*>(example.get()))
    throw UsageError(
        std::string(kName) +
        ": the optimizer is LBFGS, which evaluates the loss within an update; expected "
        "one that updates once a step, such as AdamW");
  return example->defaults().clone();
}

std::string key_of(size_t group, size_t index) {
  return std::string(optim::MasterWeights::kMaster) + "/" + std::to_string(group) + "/" +
         std::to_string(index);
}

}  // namespace

namespace optim {

MasterWeights::MasterWeights(std::vector<torch::optim::OptimizerParamGroup> groups,
                             const OptimizerFactory& factory)
    : Optimizer(groups, defaults_of(factory)) {
  std::vector<torch::optim::OptimizerParamGroup> copies;
  for (auto& group : groups) {
    for (auto& param : group.params()) param = copy_of(param);
    copies.push_back(group);
    stepped_.emplace_back(group.params().size(), 0);
  }
  inner_ = factory(std::move(copies));
  for (size_t g = 0; g < groups.size(); ++g)
    copy_options(inner_->param_groups()[g], param_groups_[g]);
}

void MasterWeights::extend() {
  const at::NoGradGuard no_grad;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& params = param_groups_[g].params();
    if (g == inner_->param_groups().size()) {
      tessera::add_param_group(*inner_,
                               {std::vector<at::Tensor>(), param_groups_[g].options().clone()});
      stepped_.emplace_back();
    }
    auto& copies = inner_->param_groups()[g].params();
    for (size_t i = copies.size(); i < params.size(); ++i) {
      copies.push_back(copy_of(params[i]));
      stepped_[g].push_back(0);
      tessera::clear_state(*inner_, copies[i]);  // the first state, where the class has one
    }
  }
}

template <class Visit>
void MasterWeights::visit_copies(const Visit& visit) {
  for (size_t g = 0; g < param_groups_.size(); ++g)
    for (size_t i = 0; i < stepped_[g].size(); ++i)
      if (auto& param = param_groups_[g].params()[i]; is_copied(param))
        visit(param, inner_->param_groups()[g].params()[i]);
}

torch::Tensor MasterWeights::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  extend();
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    copy_options(param_groups_[g], inner_->param_groups()[g]);
    for (size_t i = 0; i < stepped_[g].size(); ++i)
      stepped_[g][i] |= param_groups_[g].params()[i].grad().defined();
  }
  std::vector<Pack> packs;
  visit_copies([&](const at::Tensor& param, const at::Tensor& copy) {
    copy.mutable_grad() = at::Tensor();
    if (param.grad().defined()) add_to_packs(packs, param, copy);
  });
  for (const auto& pack : packs) {
    follow_writes(pack);
    set_gradients(pack);
  }
  inner_->step();
  for (const auto& pack : packs) round_copies(pack);
  for (size_t g = 0; g < param_groups_.size(); ++g)  // an optimizer may change them
    copy_options(inner_->param_groups()[g], param_groups_[g]);
  return loss;
}

std::optional<MasterWeights::Place> MasterWeights::find(const at::Tensor& param) const {
  for (size_t g = 0; g < stepped_.size(); ++g)
    for (size_t i = 0; i < stepped_[g].size(); ++i)
      if (param_groups_[g].params()[i].is_same(param)) return Place{g, i};
  return std::nullopt;
}

MasterWeights::Place MasterWeights::place_of(const at::Tensor& param) {
  extend();
  if (const auto place = find(param)) return *place;
  throw UsageError(std::string(kName) + ": the parameter is in no group of this optimizer");
}

at::Tensor& MasterWeights::copy_at(Place place) {
  return inner_->param_groups()[place.group].params()[place.index];
}

/// A tensor that read_state() has returned stays as it is.
void MasterWeights::use_copy(Place place, at::Tensor copy) {
  inner_->state().erase(compat::state_key(copy_at(place)));
  copy_at(place) = std::move(copy);
}

std::optional<ParamState> MasterWeights::read_state(const at::Tensor& param) const {
  const auto place = find(param);
  if (!place) return std::nullopt;
  const auto& copy = inner_->param_groups()[place->group].params()[place->index];
  auto state = get_state(*inner_, copy);
  if (!stepped_[place->group][place->index] || !is_copied(param)) return state;
  if (!state) state.emplace();
  state->tensors[kMaster] = copy;
  return state;
}

void MasterWeights::replace_state(const at::Tensor& param, const ParamState& state) {
  const Place place = place_of(param);
  ParamState rest = state;
  const auto found = rest.tensors.find(kMaster);
  if (is_copied(param) && found != rest.tensors.end()) {
    const auto& given = found->second;
    if (given.sizes() != param.sizes() || given.scalar_type() != at::kFloat ||
        given.device() != param.device())
      throw UsageError("set_state: " + std::string(kMaster) + " is of " + c10::str(given.sizes()) +
                       ", " + c10::str(given.scalar_type()) + ", " + given.device().str() +
                       "; expected " + c10::str(param.sizes()) + ", Float, " +
                       param.device().str());
    use_copy(place, given.detach());
    rest.tensors.erase(found);
  }
  if (rest.tensors.empty() && rest.scalars.empty()) tessera::clear_state(*inner_, copy_at(place));
  else tessera::set_state(*inner_, copy_at(place), rest);
  stepped_[place.group][place.index] = 1;
}

void MasterWeights::reset_state(const at::Tensor& param) {
  const Place place = place_of(param);
  if (is_copied(param)) use_copy(place, copy_of(param));
  tessera::clear_state(*inner_, copy_at(place));
  stepped_[place.group][place.index] = 0;
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive inner;
  inner_->save(inner);
  archive.write("optimizer", inner);
  for (size_t g = 0; g < stepped_.size(); ++g)
    for (size_t i = 0; i < stepped_[g].size(); ++i)
      if (stepped_[g][i] && is_copied(param_groups_[g].params()[i]))
        archive.write(key_of(g, i), inner_->param_groups()[g].params()[i], /*is_buffer=*/true);
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  extend();
  torch::serialize::InputArchive inner;
  if (!archive.try_read("optimizer", inner))
    throw UsageError(std::string(kName) +
                     ": the archive has no master weights; expected one that such an optimizer "
                     "has saved, or a state dict");
  inner_->load(inner);
  const at::NoGradGuard no_grad;
  for (size_t g = 0; g < stepped_.size(); ++g)
    for (size_t i = 0; i < stepped_[g].size(); ++i)
      if (at::Tensor saved; archive.try_read(key_of(g, i), saved, /*is_buffer=*/true)) {
        copy_at({g, i}).copy_(saved);
        stepped_[g][i] = 1;
      }
  for (size_t g = 0; g < param_groups_.size(); ++g)
    copy_options(inner_->param_groups()[g], param_groups_[g]);
}

}  // namespace optim

OptimizerFactory with_master_weights(OptimizerFactory factory) {
  return [factory = std::move(factory)](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<optim::MasterWeights>(std::move(groups), factory);
  };
}

}  // namespace tessera
