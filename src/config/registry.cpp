#include "tessera/config/registry.h"

namespace tessera {

std::string*& detail::registration_error() {
  thread_local std::string* error = nullptr;
  return error;
}

}  // namespace tessera
