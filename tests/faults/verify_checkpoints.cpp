// verify_checkpoints < FOLDERS
// Checks every byte of the checkpoint whose folder each line names. Prints one line for each:
// "sound", "unsound: …" or "refused: …".
#include <algorithm>
#include <iostream>
#include <string>

#include "tessera/checkpoint_store.h"
#include "tessera/error.h"

int main() {
  for (std::string folder; std::getline(std::cin, folder);) {
    std::string line = "sound";
    try {
      const tessera::Checkpoint checkpoint(folder);
      checkpoint.verify();
      if (!checkpoint.unsound().empty()) line = "unsound: " + checkpoint.unsound();
    } catch (const tessera::Error& error) {
      line = std::string("refused: ") + error.what();
    }
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::cout << line << std::endl;
  }
}
