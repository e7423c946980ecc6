#include <algorithm>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/io/atomic_file.h"
#include "fsdp/state_rules.h"
#include "sharding/bucket.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"

namespace tessera {

using namespace fsdp;
using nlohmann::json;
using State = std::vector<std::pair<std::string, at::Tensor>>;

namespace {

std::string shard_name(int rank, int world) {
  return fmt::format("rank-{:05d}-of-{:05d}.safetensors", rank, world);
}

}  // namespace

// [Note: sharded files] A rank's file has its shard of each parameter, one-dimensional in the
// parameter's memory order, of which index.json has shape, strides and, for each file, where the
// shard begins. Buffers are in rank 0's. Any world size reads the runs that it needs.

void FullyShardedDataParallelBase::save_sharded_state_dict(const std::string& folder) {
  auto& core = core_->core();
  core.require_idle("save_sharded_state_dict");
  auto& group = core.model.shard_group;
  const bool first_replica = core.model.replicas.rank() == 0;
  std::string problem;
  try {
    if (core.model.world.rank() == 0) std::filesystem::create_directories(folder);
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  try {
    if (first_replica) {
      State mine;
      json layout = json::object();  // the file tells by itself what its shards are
      for (const auto* shard : core.shards()) {
        const auto& [name, tensor] = core.model.parameters[shard->parameter];
        mine.emplace_back(name, sharding::in_memory_order(shard->tensor.detach()));
        layout[name] = {{"shape", tensor.sizes().vec()},
                        {"strides", tensor.strides().vec()},
                        {"begin", shard->begin}};
      }
      if (core.model.world.rank() == 0) {
        for (const auto& [name, buffer] : buffers(core)) mine.emplace_back(name, buffer.detach());
      }
      save_safetensors(
          (std::filesystem::path(folder) / shard_name(group.rank(), group.size())).string(), mine,
          {{"format", "tessera-sharded"},
           {"rank", std::to_string(group.rank())},
           {"world", std::to_string(group.size())},
           {"layout", layout.dump()}});
    }
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  try {
    if (core.model.world.rank() == 0) {
      json index = {{"format", "tessera-sharded"},
                    {"version", 1},
                    {"world", group.size()},
                    {"parameters", json::object()},
                    {"buffers", json::object()}};
      for (size_t i = 0; i < core.model.parameters.size(); ++i) {
        const auto [f, member] = core.model.places[i];
        const auto& flat = core.model.flats[f];
        json shards = json::array();
        for (int r = 0; r < group.size(); ++r) {
          const int64_t from = std::clamp(flat.layout.offset(member), flat.layout.segment_begin(r),
                                          flat.layout.segment_begin(r) + flat.layout.counts()[r]);
          const int64_t to = std::clamp(flat.layout.offset(member) + flat.layout.size(member),
                                        flat.layout.segment_begin(r),
                                        flat.layout.segment_begin(r) + flat.layout.counts()[r]);
          shards.push_back({{"begin", std::clamp<int64_t>(from - flat.layout.offset(member), 0,
                                                          flat.layout.size(member))},
                            {"numel", to - from}});
        }
        const auto& tensor = core.model.parameters[i].tensor;
        index["parameters"][core.model.parameters[i].name] = {{"shape", tensor.sizes().vec()},
                                                              {"strides", tensor.strides().vec()},
                                                              {"dtype", c10::toString(flat.dtype)},
                                                              {"shards", shards}};
      }
      for (const auto& [name, buffer] : buffers(core))
        index["buffers"][name] = {{"shape", buffer.sizes().vec()}};
      const auto path = std::filesystem::path(folder) / "index.json";
      const auto text = index.dump(1);
      AtomicFile file("sharded state", path.string());
      file.write_at(text.data(), text.size(), 0);
      file.commit();
    }
  } catch (const std::exception& error) {
    problem = fmt::format("{}: save_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
}

void FullyShardedDataParallelBase::load_sharded_state_dict(const std::string& folder) {
  auto& core = core_->core();
  core.require_idle("load_sharded_state_dict");
  at::NoGradGuard no_grad;
  std::string problem;
  json index;
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  try {
    const auto path = std::filesystem::path(folder) / "index.json";
    std::ifstream in(path);
    if (!in) throw Error(path.string() + ": cannot be read");
    index = json::parse(in);
    if (index.value("format", "") != "tessera-sharded" || index.value("version", 0) != 1)
      throw Error(path.string() + ": is not the index of a sharded state of version 1");
    const int world = index.at("world");
    for (int r = 0; r < world; ++r)
      files.push_back(std::make_unique<SafetensorsFile>(
          (std::filesystem::path(folder) / shard_name(r, world)).string()));
    std::map<std::string, std::vector<int64_t>> given;
    for (const char* kind : {"parameters", "buffers"}) {
      for (const auto& item : index.at(kind).items())
        given[item.key()] = item.value().at("shape").get<std::vector<int64_t>>();
    }
    problem = mismatch(core, given);
  } catch (const std::exception& error) {
    problem = fmt::format("{}: load_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
  core.residency->release_all();
  try {
    for (size_t i = 0; i < core.model.parameters.size(); ++i) {
      const auto& name = core.model.parameters[i].name;
      const auto& entry = index.at("parameters").at(name);
      const auto& tensor = core.model.parameters[i].tensor;
      const auto& shard = core.model.shard_of(i);
      const bool same_order =
          entry.at("strides").get<std::vector<int64_t>>() == tensor.strides().vec();
      const auto& shards = entry.at("shards");
      // Another memory order: the whole is put together first.
      const int64_t begin = same_order ? shard.begin : 0,
                    end = same_order ? shard.begin + shard.numel : tensor.numel();
      at::Tensor run;
      for (size_t r = 0; r < files.size(); ++r) {
        const int64_t there = shards.at(r).at("begin"), numel = shards.at(r).at("numel");
        const int64_t from = std::max(begin, there), to = std::min(end, there + numel);
        if (!run.defined())
          run = at::empty({end - begin}, at::TensorOptions().dtype(files[r]->scalar_type(name)));
        if (from < to)
          files[r]->load_slice(name, from - there, to - from,
                               run.narrow(0, from - begin, to - from));
      }
      if (same_order) sharding::in_memory_order(shard.tensor.detach()).copy_(run);
      else
        core.take_shard(
            i, run.as_strided(tensor.sizes(), entry.at("strides").get<std::vector<int64_t>>()));
    }
    for (auto& [name, buffer] : buffers(core)) buffer.copy_(files.at(0)->load(name));
  } catch (const std::exception& error) {
    problem = fmt::format("{}: load_sharded_state_dict: {}", core.prefix(), error.what());
  }
  agree(core, problem);
}

}  // namespace tessera
