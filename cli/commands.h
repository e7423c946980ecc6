#pragma once

namespace tessera::cli {

/// Exit code for a mistake on the command line, as of torchrun and shells.
constexpr int kUsageExit = 2;

/// The commands of `tessera`. argv[0] is the name of the command. They return the exit code.
int run_command(int argc, char** argv);
int train_command(int argc, char** argv);
int report_command(int argc, char** argv);

}  // namespace tessera::cli
