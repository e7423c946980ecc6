#pragma once

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <string>

#include <torch/torch.h>
#include <unistd.h>

#include "tessera/data/idx_dataset.h"
#include "tessera/models/image_classifier.h"

namespace tessera {

/// A folder of what scripts/make_synthetic_idx.py makes: 2000 and 400 images of 12 x 12 in 6
/// classes. Gone afterwards.
class SyntheticImages {
 public:
  SyntheticImages()
      : folder((std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string()) {
    if (::mkdtemp(folder.data()) == nullptr) {
      throw std::runtime_error("mkdtemp");
    }
    const std::string command = "python3 '" TESSERA_SOURCE_DIR "/scripts/make_synthetic_idx.py' '" +
                                folder + "' --train 2000 --test 400 --size 12 --classes 6";
    if (std::system(command.c_str()) != 0) {
      throw std::runtime_error(command);
    }
  }
  ~SyntheticImages() { std::filesystem::remove_all(folder); }
  SyntheticImages(const SyntheticImages&) = delete;

  /// "train" or "t10k".
  IdxOptions part(const std::string& name) const {
    return {folder + "/" + name + "-images-idx3-ubyte", folder + "/" + name + "-labels-idx1-ubyte",
            6};
  }

  std::string folder;
};

/// Of all images, in evaluation mode.
inline double accuracy(ImageClassifierImpl& model, const IdxDataset& data) {
  const at::NoGradGuard no_grad;
  model.eval();
  std::vector<int64_t> all(static_cast<size_t>(data.size()));
  std::iota(all.begin(), all.end(), int64_t{0});
  const Batch batch = data.get(all);
  const at::Tensor right = model.forward(batch.inputs).argmax(1) == batch.targets;
  model.train();
  return right.to(at::kDouble).mean().item<double>();
}

}  // namespace tessera
