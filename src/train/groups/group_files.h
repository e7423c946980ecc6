#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/checkpoint_store.h"
#include "tessera/optim/state_slice.h"

// The files that a checkpoint has of each group. Group 0 has the names and files of a run without
// groups; every other group has its parameters beside its optimizer state, its buffers, and its
// state.json. Local.

namespace tessera::train {

/// The group, of a run that had `groups` groups, from whose state group `number` continues.
inline int group_to_resume(int number, int groups) { return number % groups; }

std::string slice_set_of(int group);
std::string state_file_of(int group);

// The following do nothing for group 0.

/// Adds the parameters of `shards` to `slices`, one for each shard.
void add_parameters(int group, const std::vector<ParameterShard>& shards,
                    std::vector<StateSlice>& slices);
/// Takes the parameters from loaded `slices`, one for each of `shards`, and writes them to the
/// shards. A shard whose slice has none stays as it is.
void load_parameters(int group, std::vector<StateSlice>& slices,
                     const std::vector<ParameterShard>& shards);
/// On one rank of each group.
void add_buffers(CheckpointWriter& writer, int group, const torch::nn::Module& module);
void load_buffers(const Checkpoint& checkpoint, int group, torch::nn::Module& module);

// Averages.

/// Removes the tensors `name` from the states of all slices and returns them, one for each slice;
/// undefined: the slice has none.
std::vector<at::Tensor> take_from(std::vector<StateSlice>& slices, const std::string& name);
/// `saved`, taken from `slice`, in the form of `own`. Older checkpoints state no strides and have
/// whole tensors row by row.
at::Tensor in_form_of(const at::Tensor& own, const at::Tensor& saved, const StateSlice& slice);

}  // namespace tessera::train
