#include <dlfcn.h>

#include "c/arrays.h"
#include "c/objects.h"
#include "tessera/config/registry.h"
#include "tessera/detail/c_group.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

thread_local std::string last_error;

int failed(int code, const std::exception& error) {
  last_error = message_of(error);
  return code;
}

}  // namespace

int detail::c_call(const std::function<void()>& body) {
  last_error.clear();
  try {
    body();
    return TESSERA_OK;
  } catch (const BrokenWorldError& error) {
    return failed(TESSERA_BROKEN_WORLD, error);
  } catch (const UsageError& error) {
    return failed(TESSERA_USAGE_ERROR, error);
  } catch (const std::exception& error) {
    return failed(TESSERA_ERROR, error);
  } catch (...) {
    last_error = "an exception that is no std::exception";
    return TESSERA_ERROR;
  }
}

tessera_group* detail::c_group(ProcessGroup group) { return new tessera_group{std::move(group)}; }

}  // namespace tessera

using tessera::c::need;
using tessera::detail::c_call;

extern "C" {

int tessera_c_version(void) { return TESSERA_C_VERSION; }

const char* tessera_last_error(void) { return tessera::last_error.c_str(); }

int tessera_group_from_environment(tessera_group** group) {
  return c_call([&] {
    need(group, "tessera_group_from_environment", "group");
    *group = nullptr;
    *group = tessera::detail::c_group(tessera::init_process_group());
  });
}

int tessera_group_rank(const tessera_group* group, int* rank) {
  return c_call([&] {
    need(group, "tessera_group_rank", "group");
    need(rank, "tessera_group_rank", "rank");
    *rank = group->group.rank();
  });
}

int tessera_group_size(const tessera_group* group, int* size) {
  return c_call([&] {
    need(group, "tessera_group_size", "group");
    need(size, "tessera_group_size", "size");
    *size = group->group.size();
  });
}

int tessera_group_all_reduce(tessera_group* group, const tessera_array* values, double scale) {
  return c_call([&] {
    need(group, "tessera_group_all_reduce", "group");
    at::Tensor given;
    tessera::c::check_arguments(group->group, [&] {
      need(values, "tessera_group_all_reduce", "values");
      given = tessera::c::tensor_of(*values, "tessera_group_all_reduce: values", true);
    });
    const at::Tensor dense = given.contiguous();
    group->group.all_reduce(dense, scale);
    if (!dense.is_same(given)) given.copy_(dense);
  });
}

void tessera_group_free(tessera_group* group) { delete group; }

int tessera_load_components(const char* path) {
  return c_call([&] {
    need(path, "tessera_load_components", "path");
    const std::string function = "tessera_load_components: ";
    std::string refused;
    tessera::detail::registration_error() = &refused;
    const void* const loaded = ::dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    tessera::detail::registration_error() = nullptr;
    if (loaded == nullptr)
      throw tessera::UsageError(function + ::dlerror() + "; expected a shared object");
    if (!refused.empty()) throw tessera::UsageError(function + path + ": " + refused);
  });
}

}  // extern "C"
