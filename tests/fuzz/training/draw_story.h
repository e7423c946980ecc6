#pragma once

#include "fuzz/training/case.h"
#include "fuzz/training/vary.h"

namespace tessera::fuzz {

/// What a wrapper and a story must avoid, because it is not what they are about.
struct Limits {
  Theme theme = Theme::any;
  bool partly_used = false;  ///< Some parameter may get no gradient.
  bool buffers = true;
  bool exact = true;
  bool norms = false;          ///< Clips by the norm, which is not promised to be exact.
  bool value_clips = true;     ///< libtorch 1.13 has no clamp for float16 on the CPU.
  bool short_numbers = false;  ///< The model has parameters of 16 bits.
  bool moves = true;           ///< The story may go on with another wrapper.
  bool mixed = false;          ///< Wrappers may compute in bfloat16.
  int ignorable = -1;          ///< A part that a wrapper may ignore.
};

/// A wrapper for a model that has its layers. It is in generate.cpp.
Item random_wrapper(Random& random, const Limits& limits, int world);

/// Draws the events of a case that has all else.
void add_story(Random& random, const Limits& limits, Case& which);

}  // namespace tessera::fuzz
