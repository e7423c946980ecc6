#include "tessera/train.h"

int main(int argc, char** argv) { return tessera::train_main(argc, argv); }
