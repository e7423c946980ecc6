#pragma once

#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>

#include <torch/types.h>

#include "harness/temporary_folder.h"
#include "tessera/data/idx_dataset.h"
#include "tessera/models/image_classifier.h"

namespace tessera {

/// A temporary folder with the output of scripts/make_synthetic_idx.py: 2000 training and 400 test
/// images of 12 x 12 pixels in 6 classes.
class SyntheticImages {
 public:
  SyntheticImages() {
    const std::string command = "python3 '" TESSERA_SOURCE_DIR "/scripts/make_synthetic_idx.py' '" +
                                folder() + "' --train 2000 --test 400 --size 12 --classes 6";
    if (std::system(command.c_str()) != 0) throw std::runtime_error(command);
  }

  const std::string& folder() const { return folder_.path(); }

  /// `name` is "train" or "t10k".
  IdxOptions part(const std::string& name) const {
    return {folder_.path(name + "-images-idx3-ubyte"), folder_.path(name + "-labels-idx1-ubyte"),
            6};
  }

 private:
  testing::TemporaryFolder folder_;
};

/// The share of all images that `model` classifies correctly, in evaluation mode.
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
