#include "train/wrappers/wrapper_functions.h"

#include "tessera/train/registries.h"
#include "train/config/overlap_names.h"

namespace tessera::train {

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

int64_t bytes_of(const std::vector<StateSlice>& slices) {
  int64_t bytes = 0;
  for (const auto& slice : slices)
    for (const auto& [name, tensor] : slice.state.tensors)
      bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const OptimizerPlan& plan,
    const std::vector<std::pair<std::vector<at::Tensor>, OptionMap>>& groups) {
  std::vector<torch::optim::OptimizerParamGroup> made;
  for (const auto& [tensors, options] : groups)
    made.emplace_back(tensors, registry::optimizers().options_for(plan.type, options));
  return plan.factory()(std::move(made));
}

at::Tensor own_parameter(const torch::nn::Module& module, const std::string& name) {
  return module.named_parameters(true)[name].detach();
}

void read_buffers(OptionReader& options, BufferSync& buffers) {
  options.read_enum("buffers", buffers,
                    {{"broadcast", BufferSync::broadcast},
                     {"mean", BufferSync::mean},
                     {"none", BufferSync::none}},
                    "how the ranks' buffers (running statistics) become the same after each step: "
                    "rank 0's, the mean of floating-point ones, or not");
}

void read_overlap(OptionReader& options, std::optional<Overlap>& overlap) {
  const bool given = options.given("overlap");
  Overlap value = Overlap::backward;
  options.read_enum("overlap", value, overlap_names(),
                    "when communication runs beside computation: never, within backward and the "
                    "update, or also during the next forward; unless given, background where ranks "
                    "are on several hosts");
  if (given) overlap = value;
}

void read_wire(OptionReader& options, WireOptions& wire, bool gathers) {
  const std::vector<std::pair<std::string, WireFormat>> formats{{"float32", WireFormat::float32},
                                                                {"bfloat16", WireFormat::bfloat16},
                                                                {"int8", WireFormat::int8}};
  auto inner = options.map("wire");
  inner.read_enum("gradients", wire.gradients, formats,
                  "how sums of gradients travel between hosts, with error feedback");
  if (gathers)
    inner.read_enum("parameters", wire.parameters, formats,
                    "how gathered parameters travel between hosts");
  else
    inner.refuse("parameters",
                 "no option here, because every rank updates all parameters and none travel");
  inner.finish();
}

const std::vector<std::pair<std::string, Partition>>& partition_names() {
  static const std::vector<std::pair<std::string, Partition>> known{
      {"flat", Partition::flat}, {"whole", Partition::whole}, {"first_fit", Partition::first_fit}};
  return known;
}

void add_shared_frozen(std::vector<ParameterShard>& shards, const torch::nn::Module& module,
                       const ProcessGroup& group) {
  if (group.local_rank() != 0) return;
  for (const auto& [name, parameter] : named_parameters(module)) {
    if (parameter.requires_grad()) continue;
    // The parameter itself refuses writes.
    const auto memory = at::from_blob(
        parameter.data_ptr(), parameter.sizes(), parameter.strides(), [kept = parameter](void*) {},
        parameter.options().requires_grad(false));
    shards.push_back(whole_shard(name, memory));
  }
}

}  // namespace tessera::train
