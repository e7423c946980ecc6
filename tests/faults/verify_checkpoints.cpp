// verify_checkpoints < PATHS
// Each line names the folder of a checkpoint, of which every byte is checked, or a safetensors
// file, of which all tensors are loaded. Prints one line for each: "sound", "unsound: …" or
// "refused: …".
#include <algorithm>
#include <iostream>
#include <string>

#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"

int main() {
  for (std::string path; std::getline(std::cin, path);) {
    std::string line = "sound";
    try {
      if (path.ends_with(".safetensors")) {
        const tessera::SafetensorsFile file(path);
        for (const auto& name : file.names()) file.load(name);
        std::cout << line << std::endl;
        continue;
      }
      const tessera::Checkpoint checkpoint(path);
      checkpoint.verify();
      if (!checkpoint.unsound().empty()) line = "unsound: " + checkpoint.unsound();
    } catch (const tessera::Error& error) {
      line = std::string("refused: ") + error.what();
    }
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::cout << line << std::endl;
  }
}
