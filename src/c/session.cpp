#include <algorithm>
#include <functional>

#include "c/arrays.h"
#include "c/objects.h"
#include "tessera/detail/c_group.h"
#include "tessera/module_state_dict.h"

using tessera::c::check_arguments;
using tessera::c::need;
using tessera::c::tensor_of;
using tessera::detail::c_call;

namespace {

tessera_session* session_of(tessera::Config config, const tessera_group& group) {
  auto made = std::make_unique<tessera_session>(
      tessera_session{tessera::TrainingSession(std::move(config), group.group), {}});
  for (const auto& [name, parameter] : tessera::named_parameters(made->session.model()))
    made->names.push_back(name);
  return made.release();
}

const tessera::ProcessGroup& ranks_of(const tessera_session& session) {
  return session.session.wrapper().group();
}

/// The parameters of a binding, which computes the loss.
struct Given : torch::nn::Module {
  Given(void* const* parameters, const char* const* names, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      need(parameters[i], "tessera_session_create_over", "a parameter");
      need(names[i], "tessera_session_create_over", "a name");
      const auto& tensor = *static_cast<at::Tensor*>(parameters[i]);
      if (!tensor.defined() || !tensor.is_leaf())
        throw tessera::UsageError(std::string("tessera_session_create_over: parameter ") +
                                  names[i] + " is undefined or no leaf; expected a leaf");
      // Names of Python's modules have dots, which register_parameter() refuses.
      parameters_.insert(names[i], tensor);
    }
  }
};

/// A config whose model is `module`.
tessera::Config config_over(const char* text, std::shared_ptr<Given> module,
                            tessera_forward forward, void* context) {
  static const bool once = [] {
    tessera::registry::models().add(
        "Tensors",
        [](tessera::OptionReader& options) {
          options.finish();
          return tessera::ModelPlan();
        },
        "tensors of a program; see tessera/c.h");
    return true;
  }();
  (void)once;
  auto config = tessera::parse_config(text, {"model={type: Tensors, deferred: false}"});
  config.model.plan.make = [=](const tessera::ModelContext&) {
    tessera::TrainedModel model;
    model.module = module;
    model.loss = [=](const tessera::Batch& batch) {
      at::Tensor inputs = batch.inputs, targets = batch.targets, loss;
      const int code = forward(context, &inputs, &targets, &loss);
      if (code != 0 || !loss.defined())
        throw tessera::Error("tessera_session_step: forward returned " + std::to_string(code) +
                             (loss.defined() ? "" : " and no loss") + "; expected 0 and a loss");
      return tessera::Losses{{"loss", loss}};
    };
    return model;
  };
  return config;
}

}  // namespace

extern "C" {

int tessera_session_create(const char* config, const tessera_group* group,
                           tessera_session** session) {
  return c_call([&] {
    const char* const function = "tessera_session_create";
    need(session, function, "session");
    *session = nullptr;
    need(config, function, "config");
    need(group, function, "group");
    *session = session_of(tessera::parse_config(config), *group);
  });
}

int tessera_session_create_over(const char* config, const tessera_group* group,
                                void* const* parameters, const char* const* names, int64_t count,
                                tessera_forward forward, void* context, tessera_session** session) {
  return c_call([&] {
    const char* const function = "tessera_session_create_over";
    need(session, function, "session");
    *session = nullptr;
    need(config, function, "config");
    need(group, function, "group");
    need(parameters, function, "parameters");
    need(names, function, "names");
    need(reinterpret_cast<const void*>(forward), function, "forward");
    if (count < 1)
      throw tessera::UsageError(std::string(function) + ": count is " + std::to_string(count) +
                                "; expected 1 or more");
    const auto module = std::make_shared<Given>(parameters, names, count);
    *session = session_of(config_over(config, module, forward, context), *group);
  });
}

int tessera_session_step(tessera_session* session, const tessera_array* inputs,
                         const tessera_array* targets, tessera_step* done) {
  return c_call([&] {
    need(session, "tessera_session_step", "session");
    tessera::Batch batch;
    check_arguments(ranks_of(*session), [&] {
      batch.inputs = tensor_of(inputs, "tessera_session_step: inputs");
      batch.targets = tensor_of(targets, "tessera_session_step: targets");
    });
    const auto step = session->session.step(batch);
    if (done != nullptr)
      *done = {step.step, step.samples, step.loss,   step.grad_norm,
               step.lr,   step.updated, step.stopped};
  });
}

int tessera_session_predict(tessera_session* session, const tessera_array* inputs,
                            const tessera_array* outputs) {
  return c_call([&] {
    need(session, "tessera_session_predict", "session");
    at::Tensor rows;
    check_arguments(ranks_of(*session),
                    [&] { rows = tensor_of(inputs, "tessera_session_predict: inputs"); });
    const at::Tensor result = session->session.predict(rows);
    if (!rows.defined() || rows.size(0) == 0) return;
    need(outputs, "tessera_session_predict", "outputs");
    tessera::c::copy_to(*outputs, result, "tessera_session_predict: outputs");
  });
}

int tessera_session_evaluate(tessera_session* session, const tessera_array* inputs,
                             const tessera_array* targets, double* loss) {
  return c_call([&] {
    need(session, "tessera_session_evaluate", "session");
    at::Tensor rows, wanted;
    check_arguments(ranks_of(*session), [&] {
      need(loss, "tessera_session_evaluate", "loss");
      rows = tensor_of(inputs, "tessera_session_evaluate: inputs");
      wanted = tensor_of(targets, "tessera_session_evaluate: targets");
    });
    *loss = session->session.evaluate(rows, wanted).at("loss");
  });
}

int tessera_session_steps(const tessera_session* session, int64_t* steps) {
  return c_call([&] {
    need(session, "tessera_session_steps", "session");
    need(steps, "tessera_session_steps", "steps");
    *steps = session->session.steps();
  });
}

int tessera_session_weights(const tessera_session* session, int64_t* count) {
  return c_call([&] {
    need(session, "tessera_session_weights", "session");
    need(count, "tessera_session_weights", "count");
    *count = static_cast<int64_t>(session->names.size());
  });
}

int tessera_session_weight_name(const tessera_session* session, int64_t number, const char** name) {
  return c_call([&] {
    need(session, "tessera_session_weight_name", "session");
    need(name, "tessera_session_weight_name", "name");
    const auto count = static_cast<int64_t>(session->names.size());
    if (number < 0 || number >= count)
      throw tessera::UsageError("tessera_session_weight_name: number " + std::to_string(number) +
                                "; expected 0 to " + std::to_string(count - 1));
    *name = session->names[static_cast<size_t>(number)].c_str();
  });
}

int tessera_session_get_weight(tessera_session* session, const char* name, int rank,
                               const tessera_array* weight) {
  return c_call([&] {
    need(session, "tessera_session_get_weight", "session");
    need(name, "tessera_session_get_weight", "name");
    tessera::ModelWrapper& wrapper = session->session.wrapper();
    const int size = wrapper.group().size();
    if (rank < 0 || rank >= size)
      throw tessera::UsageError("tessera_session_get_weight: rank " + std::to_string(rank) +
                                "; expected 0 to " + std::to_string(size - 1));
    const auto& names = session->names;
    if (std::find(names.begin(), names.end(), name) == names.end())
      throw tessera::UsageError(std::string("tessera_session_get_weight: no parameter ") + name +
                                "; expected a name of tessera_session_weight_name()");
    const at::Tensor whole = wrapper.whole_parameter(name, rank);
    if (wrapper.group().rank() != rank) return;
    need(weight, "tessera_session_get_weight", "weight");
    tessera::c::copy_to(*weight, whole.detach(),
                        "tessera_session_get_weight: " + std::string(name));
  });
}

int tessera_session_set_weight(tessera_session* session, const char* name,
                               const tessera_array* weight) {
  return c_call([&] {
    need(session, "tessera_session_set_weight", "session");
    at::Tensor values;
    check_arguments(ranks_of(*session), [&] {
      need(name, "tessera_session_set_weight", "name");
      need(weight, "tessera_session_set_weight", "weight");
      values = tensor_of(*weight, "tessera_session_set_weight: weight");
    });
    session->session.set_weight(name, values);
  });
}

int tessera_session_save(tessera_session* session) {
  return c_call([&] {
    need(session, "tessera_session_save", "session");
    session->session.save();
  });
}

int tessera_session_finish(tessera_session* session) {
  return c_call([&] {
    need(session, "tessera_session_finish", "session");
    session->session.finish();
  });
}

void tessera_session_free(tessera_session* session) { delete session; }

void tessera_request_stop(int signal) { tessera::request_stop(signal); }

}  // extern "C"
