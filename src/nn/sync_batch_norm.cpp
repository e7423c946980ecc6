#include "tessera/step/sync_batch_norm.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kSyncBatchNorm = "SyncBatchNorm";

/// All dimensions except the channel dimension.
std::vector<int64_t> batch_dims(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

/// `channels` [C] as a view that broadcasts along `input` [N, C, …].
at::Tensor along(const at::Tensor& channels, const at::Tensor& input) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = channels.numel();
  return channels.view(sizes);
}

at::ScalarType compute_dtype(const at::Tensor& input) {
  return input.element_size() < static_cast<int64_t>(sizeof(float)) ? at::kFloat
                                                                    : input.scalar_type();
}

struct Moments {
  at::Tensor mean, var;  // float64 [C], on the input's device; var is the biased variance
  double count = 0;
};

/// The device on which the ranks exchange sums: the input's, so that the host does not wait, or the
/// CPU where the group does not support it.
at::Device meeting_place(const at::Tensor& input, const ProcessGroup& group) {
  return group.moves(input.device().type()) ? input.device() : group.control_device();
}

/// The sum over the ranks of a number that the host has.
double sum_on_host(double number, ProcessGroup& group) {
  auto sum = at::full({1}, number, at::TensorOptions().dtype(at::kDouble));
  group.all_reduce(sum, 1, "count of a SyncBatchNorm");
  return sum.item<double>();
}

/// The moments of the batch of all ranks, combined from the moments of each rank's batch by the
/// rule of Chan et al. (1983). Collective.
Moments global_moments(const at::Tensor& input, ProcessGroup& group) {
  const auto channels = input.size(1);
  const auto options = at::TensorOptions().dtype(at::kDouble).device(input.device());
  auto mine = at::zeros({2 * channels + 1}, options);
  const auto count = static_cast<double>(input.numel() / std::max<int64_t>(channels, 1));
  if (count > 0) {
    const auto [var, mean] = at::var_mean(input.to(compute_dtype(input)),
                                          at::IntArrayRef(batch_dims(input)), false, false);
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(var);
    mine[2 * channels].fill_(count);
  }
  const auto place = meeting_place(input, group);
  const auto gathered = group.all_gather(mine.to(place)).view({group.size(), 2 * channels + 1});
  const auto all = gathered.to(input.device());
  const auto means = all.narrow(1, 0, channels), vars = all.narrow(1, channels, channels),
             counts = all.narrow(1, 2 * channels, 1);
  Moments result;
  result.count = place.is_cpu() ? gathered.narrow(1, 2 * channels, 1).sum().item<double>()
                                : sum_on_host(count, group);
  if (result.count == 0)
    throw UsageError(fmt::format(
        "{}: the batch is empty on all ranks; expected a sample on at least one", kSyncBatchNorm));
  result.mean = (means * counts).sum(0) / result.count;
  result.var = ((vars + (means - result.mean).square()) * counts).sum(0) / result.count;
  return result;
}

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(ProcessGroup g) : group(std::move(g)) {}
  ProcessGroup group;
};

/// (input − mean) · invstd · weight + bias. Its backward takes into account that mean and invstd
/// depend on the inputs of all ranks.
class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& invstd, double count,
                            ProcessGroup group) {
    const auto dtype = compute_dtype(input);
    const auto normal =
        (input.to(dtype) - along(mean.to(dtype), input)) * along(invstd.to(dtype), input);
    context->save_for_backward({input, weight, mean, invstd});
    context->saved_data["count"] = count;
    context->saved_data["input"] = input.requires_grad();
    context->saved_data["group"] =
        c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(std::move(group)));
    return (normal * along(weight.to(dtype), input) + along(bias.to(dtype), input))
        .to(input.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3];
    const auto dtype = compute_dtype(input);
    const auto dims = batch_dims(input);
    const auto dy = gradients[0].to(dtype);
    const auto normal =
        (input.to(dtype) - along(mean.to(dtype), input)) * along(invstd.to(dtype), input);
    const auto sums =
        at::stack({dy.sum(at::IntArrayRef(dims)), (dy * normal).sum(at::IntArrayRef(dims))})
            .to(at::kDouble);
    at::Tensor input_gradient;
    if (context->saved_data["input"].toBool()) {
      auto group = static_cast<GroupHolder&>(*context->saved_data["group"].toCapsule()).group;
      auto total = sums.to(meeting_place(input, group), at::kDouble, false, true);
      group.all_reduce(total, 1, "sums of a SyncBatchNorm");
      total = (total.to(input.device()) / context->saved_data["count"].toDouble()).to(dtype);
      const auto centered = dy - along(total[0], input) - normal * along(total[1], input);
      input_gradient =
          (centered * along((invstd * weight).to(dtype), input)).to(input.scalar_type());
    }
    const auto none = at::Tensor();
    return {input_gradient,
            sums[1].to(weight.scalar_type()),
            sums[0].to(weight.scalar_type()),
            none,
            none,
            none,
            none};
  }
};

void check_input(const at::Tensor& input, int64_t channels, int rank) {
  if (input.dim() >= 2 && input.size(1) == channels) return;
  throw UsageError(
      fmt::format("{}: rank {}: the input is [{}]; expected [N, {}, …]", kSyncBatchNorm, rank,
                  fmt::join(input.sizes().begin(), input.sizes().end(), ", "), channels));
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(torch::nn::BatchNormOptions opts, ProcessGroup group)
    : options(std::move(opts)), group_(std::move(group)) {
  const auto channels = options.num_features();
  if (options.affine()) {
    weight = at::ones({channels});
    bias = at::zeros({channels});
  }
  if (options.track_running_stats()) {
    running_mean = at::zeros({channels});
    running_var = at::ones({channels});
    num_batches_tracked = at::zeros({}, at::kLong);
  }
  register_tensors(true);
}

void SyncBatchNormImpl::register_tensors(bool trainable) {
  if (weight.defined()) {
    weight = register_parameter("weight", weight, trainable);
    bias = register_parameter("bias", bias, trainable);
  }
  if (!running_mean.defined()) return;
  running_mean = register_buffer("running_mean", running_mean);
  running_var = register_buffer("running_var", running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", num_batches_tracked);
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  const auto channels = options.num_features();
  check_input(input, channels, group_.rank());
  if (!is_training()) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, !running_mean.defined(),
                          0, options.eps(), false);
  }
  Moments moments;
  {
    at::NoGradGuard no_grad;
    moments = global_moments(input, group_);
    if (moments.count < 2) {
      throw UsageError(fmt::format(
          "{}: all ranks together have one value for each channel; training mode expects "
          "two or more",
          kSyncBatchNorm));
    }
    if (running_mean.defined()) {
      num_batches_tracked.add_(1);
      const double momentum = options.momentum()
                                  ? *options.momentum()
                                  : 1.0 / static_cast<double>(num_batches_tracked.item<int64_t>());
      running_mean.mul_(1 - momentum)
          .add_((moments.mean * momentum).to(running_mean.scalar_type()));
      const double unbiased = moments.count / (moments.count - 1);
      running_var.mul_(1 - momentum)
          .add_((moments.var * (momentum * unbiased)).to(running_var.scalar_type()));
    }
  }
  const auto invstd = (moments.var + options.eps()).rsqrt();
  const auto plain = at::TensorOptions().dtype(compute_dtype(input)).device(input.device());
  return Normalize::apply(input, weight.defined() ? weight : at::ones({channels}, plain),
                          bias.defined() ? bias : at::zeros({channels}, plain), moments.mean,
                          invstd, moments.count, group_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", ranks=" << group_.size() << ")";
}

namespace {

/// The SyncBatchNorm that replaces `module`; null if `module` is not a BatchNorm.
std::shared_ptr<SyncBatchNormImpl> synced(const std::shared_ptr<torch::nn::Module>& module,
                                          const ProcessGroup& group) {
  const auto from = [&](const auto* plain) {
    return std::make_shared<SyncBatchNormImpl>(*plain, group, nullptr);
  };
  if (const auto* plain = module->as<torch::nn::BatchNorm1dImpl>()) return from(plain);
  if (const auto* plain = module->as<torch::nn::BatchNorm2dImpl>()) return from(plain);
  if (const auto* plain = module->as<torch::nn::BatchNorm3dImpl>()) return from(plain);
  return nullptr;
}

bool is_batch_norm(const torch::nn::Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() || module.as<torch::nn::BatchNorm2dImpl>() ||
         module.as<torch::nn::BatchNorm3dImpl>();
}

void find_irreplaceable(torch::nn::Module& module, const std::string& path,
                        std::vector<std::string>& fixed) {
  const bool replaceable = module.as<torch::nn::SequentialImpl>() != nullptr;
  for (const auto& child : module.named_children()) {
    const auto name = path.empty() ? child.key() : path + "." + child.key();
    if (is_batch_norm(*child.value()) && !replaceable) fixed.push_back(name);
    find_irreplaceable(*child.value(), name, fixed);
  }
}

void convert(torch::nn::Module& module, const std::string& path, const ProcessGroup& group,
             std::vector<std::string>& converted) {
  const auto children = module.named_children();
  auto* sequence = module.as<torch::nn::SequentialImpl>();
  size_t index = 0;
  for (const auto& child : children) {
    const auto name = path.empty() ? child.key() : path + "." + child.key();
    if (const auto layer = sequence ? synced(child.value(), group) : nullptr) {
      *(sequence->begin() + static_cast<int64_t>(index)) = torch::nn::AnyModule(layer);
      module.replace_module(child.key(), layer);
      converted.push_back(name);
    } else {
      convert(*child.value(), name, group, converted);
    }
    ++index;
  }
}

}  // namespace

std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, ProcessGroup group) {
  std::vector<std::string> fixed, converted;
  if (is_batch_norm(module)) fixed.push_back("the module itself");
  find_irreplaceable(module, "", fixed);
  if (!fixed.empty()) {
    throw UsageError(fmt::format(
        "convert_sync_batch_norm: rank {}: only elements of a torch::nn::Sequential can "
        "be replaced. These layers are not elements of one: {}; expected their members "
        "to be declared as tessera::SyncBatchNorm",
        group.rank(), fmt::join(fixed, ", ")));
  }
  const auto own = group.split(0);
  convert(module, "", *own, converted);
  return converted;
}

}  // namespace tessera
