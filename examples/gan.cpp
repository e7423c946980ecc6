// Trains two models that have an optimizer each: see docs/models.md.
// On two ranks: gan -n 2 gan.yaml parallel.type=FullyShardedDataParallel
#include <tessera/tessera.h>

struct MlpImpl : torch::nn::Module {
  struct Options {
    int64_t in = 2, width = 32, out = 2;
    void read(tessera::OptionReader& options) {
      options.read("in", in, "features of the input", tessera::kAtLeastOne);
      options.read("width", width, "hidden units", tessera::kAtLeastOne);
      options.read("out", out, "features of the output", tessera::kAtLeastOne);
    }
  };
  explicit MlpImpl(const Options& o)
      : layers(register_module(
            "layers", torch::nn::Sequential(torch::nn::Linear(o.in, o.width), torch::nn::Tanh(),
                                            torch::nn::Linear(o.width, o.out)))) {}
  torch::Tensor forward(torch::Tensor x) { return layers->forward(x); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(Mlp);

/// Points on a circle.
struct Circle : tessera::Dataset {
  int64_t size() const override { return 1000; }
  std::string describe() const override { return "a circle"; }
  tessera::Batch get(const std::vector<int64_t>& samples) const override {
    const auto angle = torch::tensor(samples, torch::kFloat) * (2 * M_PI / 1000);
    return {torch::stack({angle.cos(), angle.sin()}, 1), {}, {}};
  }
};

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

tessera::Losses train(tessera::StepModels& models, const tessera::Batch& batch) {
  auto &generator = models["generator"], &discriminator = models["discriminator"];
  const auto fake = generator.forward(torch::randn({batch.inputs.size(0), 8}));

  const auto discriminator_loss = loss_of(discriminator.forward(batch.inputs), 1) +
                                  loss_of(discriminator.forward(fake.detach()), 0);
  discriminator.update_params(discriminator_loss);

  const auto frozen = discriminator.freeze();  // until the end of the function
  const auto generator_loss = loss_of(discriminator.forward(fake), 1);
  generator.update_params(generator_loss);
  return {{"generator_loss", generator_loss}, {"discriminator_loss", discriminator_loss}};
}

int main(int argc, char** argv) {
  tessera::registry::models().add<Mlp>("Mlp");
  tessera::registry::datasets().add<Circle>("Circle");
  tessera::registry::train_steps().add_plan(
      "gan", {.models = {"generator", "discriminator"}, .train = train});
  return tessera::train_main(argc, argv);
}
