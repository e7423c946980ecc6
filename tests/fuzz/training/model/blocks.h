#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "fuzz/training/case.h"

namespace tessera::fuzz {

/// Vocabulary of the tokens that embeddings look up.
constexpr int kVocabulary = 11;

/// The input of a block.
struct Flow {
  at::Tensor hidden;   ///< batch x length x channels, floating point
  at::Tensor tokens;   ///< batch x length, int64, 0 <= token < kVocabulary
  bool branch = true;  ///< Whether blocks of kind "conditional" use their layer.
  int expert = 0;      ///< The layer that blocks of kind "experts" use.
};

/// A layer that maps batch x length x `in` to batch x length x `out()`.
class Block : public torch::nn::Module {
 public:
  explicit Block(int out) : out_(out) {}
  virtual at::Tensor run(const Flow& flow) = 0;
  int out() const { return out_; }

 private:
  int out_;
};

/// The kinds of blocks from which models are drawn first. There is "complex", too.
const std::vector<std::string>& block_kinds();

/// Value "out": channels of the output, for kinds that can
/// change their number.
std::shared_ptr<Block> make_block(const Item& which, int in);

// The kinds are made in three files; each function returns null for a kind of another file.
std::shared_ptr<Block> make_layer_block(const Item& which, int in);
std::shared_ptr<Block> make_stateful_block(const Item& which, int in);
std::shared_ptr<Block> make_unusual_block(const Item& which, int in);

}  // namespace tessera::fuzz
