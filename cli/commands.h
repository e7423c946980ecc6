#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Exit code for a mistake on the command line; torchrun and shells use it too.
constexpr int kUsageExit = 2;

/// Calls `body`, which parses the command line with `app` and runs the command. Prints help and
/// mistakes.
int run_app(const CLI::App& app, const std::function<int()>& body);

/// The commands of `tessera`. argv[0] is the name of the command. They return the exit code.
int run_command(int argc, char** argv);
int train_command(int argc, char** argv);
int report_command(int argc, char** argv);

}  // namespace tessera::cli
