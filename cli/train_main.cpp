#include <cstdio>
#include <exception>

#include "tessera/error.h"
#include "tessera/train.h"

int main(int argc, char** argv) {
  try {
    return tessera::train_main(argc, argv);
  } catch (const tessera::UsageError& error) {
    std::fprintf(stderr, "tessera train: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera train: %s\n", error.what());
    return 1;
  }
}
