// tessera-weights and tessera-train, as many times as weights_test.py needs them: fork_server.h.

#include "harness/fork_server.h"

#define main weights_program
#include "../../cli/weights_main.cpp"
#undef main

#include "tessera/train.h"

int main() {
  return tessera::testing::serve([](int argc, char** argv) {
    return std::string(argv[0]) == "tessera-train" ? tessera::train_main(argc, argv)
                                                   : weights_program(argc, argv);
  });
}
