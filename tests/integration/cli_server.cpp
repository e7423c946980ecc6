// tessera-weights and tessera-train, as many times as weights_test.py needs them: fork_server.h.

#include "harness/fork_server.h"

// The programs' main functions.
int weights_program(int argc, char** argv);
int train_program(int argc, char** argv);

int main() {
  return tessera::testing::serve([](int argc, char** argv) {
    return std::string(argv[0]) == "tessera-train" ? train_program(argc, argv)
                                                   : weights_program(argc, argv);
  });
}
