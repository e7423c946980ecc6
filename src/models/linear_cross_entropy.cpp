#include "models/linear_cross_entropy.h"

#include <algorithm>
#include <limits>

#include "models/refuse_create_graph.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMostLogits = int64_t{1} << 23;
constexpr int64_t kMostClasses = 65536;
constexpr int64_t kIgnored = -100;  // as in at::cross_entropy_loss

struct Gradients {
  at::Tensor rows, weight;  // undefined where none is needed
};

/// The loss of some tokens, chunk by chunk.
class Chunks {
 public:
  Chunks(at::Tensor rows, at::Tensor weight, at::Tensor targets, const CrossEntropyChunks& sizes)
      : rows_(std::move(rows)),
        weight_(std::move(weight)),
        targets_(std::move(targets)),
        sum_type_(at::promote_types(rows_.scalar_type(), at::kFloat)),
        sizes_(sizes),
        counts_(targets_.ne(kIgnored)) {}

  /// The loss. Adds to the gradients that are defined, for the gradient `grad_loss` of the loss.
  at::Tensor run(const Gradients& gradients, const at::Tensor& grad_loss) const {
    at::Tensor losses = at::empty({rows_.size(0), 1}, rows_.options().dtype(sum_type_));
    // The gradient of each token's loss.
    const at::Tensor grad_losses =
        (counts_.to(sum_type_) / counts_.sum().clamp_min(1) * grad_loss).unsqueeze(1);
    for (int64_t begin = 0; begin < rows_.size(0); begin += sizes_.tokens) {
      const int64_t end = std::min(rows_.size(0), begin + sizes_.tokens);
      losses.slice(0, begin, end)
          .copy_(chunk(begin, end, grad_losses.slice(0, begin, end), gradients));
    }
    // A product would give NaN for ignored tokens with infinite losses.
    return losses.masked_fill_(counts_.logical_not().unsqueeze(1), 0).sum() / counts_.sum();
  }

  static bool any(const Gradients& gradients) {
    return gradients.rows.defined() || gradients.weight.defined();
  }

  Gradients zeros(bool of_rows, bool of_weight) const {
    const auto like = [&](const at::Tensor& tensor) {
      return at::zeros(tensor.sizes(), tensor.options().dtype(sum_type_));
    };
    return {of_rows ? like(rows_) : at::Tensor(), of_weight ? like(weight_) : at::Tensor()};
  }

 private:
  int64_t classes() const { return weight_.size(0); }

  at::Tensor logits(const at::Tensor& rows, int64_t first, int64_t last) const {
    return at::mm(rows, weight_.slice(0, first, last).t()).to(sum_type_);
  }

  /// The positions of the targets among the classes [first, last), and true for those within.
  std::pair<at::Tensor, at::Tensor> places(int64_t begin, int64_t end, int64_t first,
                                           int64_t last) const {
    const at::Tensor index = (targets_.slice(0, begin, end) - first).unsqueeze(1);
    return {index.clamp(0, last - first - 1), index.ge(0).logical_and_(index.lt(last - first))};
  }

  /// The losses of the tokens [begin, end), [tokens, 1].
  at::Tensor chunk(int64_t begin, int64_t end, const at::Tensor& grad_losses,
                   const Gradients& gradients) const {
    if (sizes_.classes >= classes()) return whole_rows(begin, end, grad_losses, gradients);
    const at::Tensor rows = rows_.slice(0, begin, end);
    at::Tensor sum, chosen;
    for (int64_t first = 0; first < classes(); first += sizes_.classes) {
      const int64_t last = std::min(classes(), first + sizes_.classes);
      const at::Tensor part = logits(rows, first, last);
      const auto [place, here] = places(begin, end, first, last);
      const at::Tensor found = part.gather(1, place);
      const at::Tensor part_sum = at::logsumexp(part, 1, true);
      sum = first == 0 ? part_sum : at::logaddexp(sum, part_sum);
      chosen = first == 0 ? found : at::where(here, found, chosen);
    }
    for (int64_t first = 0; any(gradients) && first < classes(); first += sizes_.classes) {
      const int64_t last = std::min(classes(), first + sizes_.classes);
      const at::Tensor probabilities = logits(rows, first, last).sub_(sum).exp_();
      add_gradients(probabilities, grad_losses, begin, end, first, gradients);
    }
    return sum - chosen;
  }

  /// chunk() where it has all classes: in the memory of the logits alone.
  at::Tensor whole_rows(int64_t begin, int64_t end, const at::Tensor& grad_losses,
                        const Gradients& gradients) const {
    at::Tensor values = logits(rows_.slice(0, begin, end), 0, classes());
    const at::Tensor chosen = values.gather(1, places(begin, end, 0, classes()).first);
    at::Tensor largest = values.amax(1, true);
    largest.masked_fill_(largest.abs().eq(std::numeric_limits<double>::infinity()), 0);
    values.sub_(largest).exp_();
    const at::Tensor sum = values.sum(1, true);
    if (any(gradients)) add_gradients(values.div_(sum), grad_losses, begin, end, 0, gradients);
    return sum.log().add_(largest).sub_(chosen);
  }

  /// `probabilities` of the classes from `first` on; they are overwritten.
  void add_gradients(const at::Tensor& probabilities, const at::Tensor& grad_losses, int64_t begin,
                     int64_t end, int64_t first, const Gradients& gradients) const {
    const int64_t last = first + probabilities.size(1);
    const auto [place, here] = places(begin, end, first, last);
    probabilities.scatter_add_(1, place, here.to(sum_type_).neg_());
    const at::Tensor grad_logits = probabilities.mul_(grad_losses).to(rows_.scalar_type());
    const auto add = [](at::Tensor to, const at::Tensor& a, const at::Tensor& b) {
      if (to.scalar_type() == a.scalar_type()) to.addmm_(a, b);
      else to.add_(at::mm(a, b));
    };
    if (gradients.rows.defined())
      add(gradients.rows.slice(0, begin, end), grad_logits, weight_.slice(0, first, last));
    if (gradients.weight.defined())
      add(gradients.weight.slice(0, first, last), grad_logits.t(), rows_.slice(0, begin, end));
  }

  at::Tensor rows_, weight_, targets_;
  at::ScalarType sum_type_;
  CrossEntropyChunks sizes_;
  at::Tensor counts_;  // which tokens count
};

struct ChunkedCrossEntropy : torch::autograd::Function<ChunkedCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight, const at::Tensor& targets, int64_t tokens,
                            int64_t classes, bool differentiated) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Chunks chunks(rows, weight, targets, {tokens, classes});
    // A float16 gradient may underflow without the loss's scale, and only backward knows the scale.
    const bool at_once = differentiated && rows.scalar_type() != at::kHalf;
    const bool of_rows = rows.requires_grad(), of_weight = weight.requires_grad();
    const Gradients gradients = chunks.zeros(at_once && of_rows, at_once && of_weight);
    const at::Tensor loss = chunks.run(gradients, at::ones({}, rows.options().dtype(at::kFloat)));
    context->save_for_backward({rows, weight, targets});
    auto& data = context->saved_data;
    data["tokens"] = tokens;
    data["classes"] = classes;
    data["of_rows"] = of_rows;
    data["of_weight"] = of_weight;
    if (gradients.rows.defined()) data["grad_rows"] = gradients.rows;
    if (gradients.weight.defined()) data["grad_weight"] = gradients.weight;
    return loss;
  }

  static variable_list backward(AutogradContext* context, variable_list grad_loss) {
    refuse_create_graph("cross entropy", "the loss in chunks");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const Gradients gradients = taken_or_computed(*context, saved, grad_loss[0]);
    const auto as = [](const at::Tensor& gradient, const at::Tensor& input) {
      return gradient.defined() ? gradient.to(input.scalar_type()) : gradient;
    };
    return {as(gradients.rows, saved[0]), as(gradients.weight, saved[1]), {}, {}, {}, {}};
  }

 private:
  /// The first backward takes the gradients of forward. A further one computes them again.
  static Gradients taken_or_computed(AutogradContext& context, const variable_list& saved,
                                     const at::Tensor& grad_loss) {
    auto& data = context.saved_data;
    const auto take = [&](const char* key) {
      const auto found = data.find(key);
      if (found == data.end()) return at::Tensor();
      const at::Tensor gradient = found->second.toTensor();
      data.erase(found);
      return gradient.mul_(grad_loss);
    };
    Gradients gradients{take("grad_rows"), take("grad_weight")};
    if (Chunks::any(gradients)) return gradients;
    const Chunks chunks(saved[0], saved[1], saved[2],
                        {data["tokens"].toInt(), data["classes"].toInt()});
    gradients = chunks.zeros(data["of_rows"].toBool(), data["of_weight"].toBool());
    chunks.run(gradients, grad_loss);
    return gradients;
  }
};

/// True for targets that are neither a class nor kIgnored.
at::Tensor wrong_targets(const at::Tensor& targets, int64_t classes) {
  return targets.lt(0).logical_or_(targets.ge(classes)).logical_and_(targets.ne(kIgnored));
}

void check_targets(const at::Tensor& targets, int64_t classes) {
  const at::Tensor wrong = wrong_targets(targets, classes);
  if (wrong.any().item<bool>()) {
    throw UsageError("cross entropy: a target is " +
                     std::to_string(targets.masked_select(wrong)[0].item<int64_t>()) +
                     "; expected 0 to " + std::to_string(classes - 1) +
                     ", or -100 for a token that does not count");
  }
}

}  // namespace

CrossEntropyChunks CrossEntropyChunks::of(int64_t classes) {
  const int64_t width = std::min(classes, kMostClasses);
  return {std::max<int64_t>(1, kMostLogits / std::max<int64_t>(1, width)), width};
}

at::Tensor chunked_cross_entropy(const at::Tensor& rows, const at::Tensor& weight,
                                 const at::Tensor& targets, const CrossEntropyChunks& chunks) {
  // Under autocast the product has autocast's dtype, as at::linear's has.
  const auto dtype = compat::autocast_dtype(rows).value_or(rows.scalar_type());
  return ChunkedCrossEntropy::apply(rows.to(dtype), weight.to(dtype), targets, chunks.tokens,
                                    chunks.classes, at::GradMode::is_enabled());
}

namespace {

at::Tensor checked_cross_entropy(const at::Tensor& rows, const at::Tensor& weight,
                                 const at::Tensor& targets) {
  const auto chunks = CrossEntropyChunks::of(weight.size(0));
  if (rows.size(0) * weight.size(0) <= chunks.tokens * chunks.classes) {
    const at::Tensor logits = at::linear(rows, weight);
    return at::cross_entropy_loss(logits.to(at::promote_types(logits.scalar_type(), at::kFloat)),
                                  targets);
  }
  return chunked_cross_entropy(rows, weight, targets, chunks);
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& rows, const at::Tensor& weight,
                                const at::Tensor& targets) {
  const int64_t classes = weight.size(0);
  if (targets.device().is_cpu()) {
    check_targets(targets, classes);
    return checked_cross_entropy(rows, weight, targets);
  }
  const at::Tensor wrong = wrong_targets(targets, classes);
  const at::Tensor loss = checked_cross_entropy(rows, weight, targets.masked_fill(wrong, kIgnored));
  return loss.masked_fill(wrong.any(), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace tessera
