#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/pickle_writer.h"
#include "checkpoint/pickle/torch_archive_writer.h"
#include "tessera/error.h"
#include "tessera/optim/torch_optimizer_state.h"

namespace tessera {
namespace {

using safetensors::in_quotes;

class StateFileWriter {
 public:
  StateFileWriter(const OptimizerStateDict& dict, const std::string& path)
      : dict_(dict), path_(path), where_("torch file: " + path + ": ") {}

  void write() {
    out_.begin_dict();
    out_.text("state");
    write_states();
    out_.text("param_groups");
    out_.begin_list();
    int64_t next = 0;
    for (const auto& group : dict_.groups) write_group(group, next);
    out_.end_list();
    out_.end_dict();
    pickle::TorchArchiveWriter archive(path_, out_.finish());
    for (size_t i = 0; i < tensors_.size(); ++i) archive.write(std::to_string(i), tensors_[i]);
    archive.commit();
  }

 private:
  void write_states() {
    out_.begin_dict();
    int64_t number = 0;
    for (const auto& group : dict_.groups) {
      for (const auto& name : group.parameters) {
        const auto found = dict_.state.find(name);
        if (found != dict_.state.end()) {
          out_.integer(number);
          write_state(name, found->second);
        }
        ++number;
      }
    }
    out_.end_dict();
  }

  void write_state(const std::string& parameter, const ParamState& state) {
    out_.begin_dict();
    for (const auto& [name, value] : state.scalars) {
      if (name.find('.') != name.npos || name == "func_evals")
        throw UsageError(where_ + "optimizer state of " + in_quotes(parameter) + " has " +
                         in_quotes(name) + "; LBFGS's state cannot be written for Python");
      out_.text(name);
      if (name == "step") tensor(parameter, steps(value));
      else if (const auto* integer = std::get_if<int64_t>(&value)) out_.integer(*integer);
      else out_.real(std::get<double>(value));
    }
    for (const auto& [name, value] : state.tensors) {
      out_.text(name);
      tensor(parameter, value);
    }
    out_.end_dict();
  }

  /// PyTorch counts steps in float32, which is exact up to 2^24.
  static at::Tensor steps(const ScalarValue& value) {
    constexpr int64_t kExact = 1 << 24;
    const int64_t count = std::visit([](auto v) { return static_cast<int64_t>(v); }, value);
    return at::scalar_tensor(count, count <= kExact ? at::kFloat : at::kDouble);
  }

  void tensor(const std::string& parameter, const at::Tensor& value) {
    const std::string who = where_ + "optimizer state of " + in_quotes(parameter) + " ";
    out_.tensor(pickle::dtype_name_of(who, value.scalar_type()), std::to_string(tensors_.size()),
                value.sizes().vec());
    tensors_.push_back(value);
  }

  void write_group(const OptimizerStateDict::Group& group, int64_t& next) {
    out_.begin_dict();
    for (const auto& [name, value] : group.options) {
      out_.text(name);
      write_option(name, value);
    }
    for (const char* name : {"maximize", "capturable", "differentiable"}) {
      if (group.options.count(name) > 0) continue;
      out_.text(name);
      out_.boolean(false);
    }
    for (const char* name : {"foreach", "fused"}) {
      out_.text(name);
      out_.none();
    }
    out_.text("params");
    out_.begin_list();
    for (size_t i = 0; i < group.parameters.size(); ++i) out_.integer(next++);
    out_.end_list();
    out_.end_dict();
  }

  void write_option(const std::string& name, const OptionValue& value) {
    if (const auto* flag = std::get_if<bool>(&value)) return out_.boolean(*flag);
    if (const auto* integer = std::get_if<int64_t>(&value)) return out_.integer(*integer);
    if (const auto* number = std::get_if<double>(&value)) return out_.real(*number);
    if (const auto* text = std::get_if<std::string>(&value)) return out_.text(*text);
    const auto* list = std::get_if<std::vector<double>>(&value);
    if (list == nullptr)
      throw UsageError(where_ + "option " + in_quotes(name) + " cannot be written for Python");
    out_.begin_tuple();
    for (const double number : *list) out_.real(number);
    out_.end_tuple();
  }

  const OptimizerStateDict& dict_;
  const std::string& path_;
  std::string where_;
  pickle::PickleWriter out_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace

void save_torch_optimizer_state(const OptimizerStateDict& dict, const std::string& path) {
  StateFileWriter(dict, path).write();
}

}  // namespace tessera
