/* The C interface in C: c_program OWN_COMPONENTS. Prints losses; rank r has r + 2 samples. */
#include <math.h>
#include <stdio.h>

#include "tessera/c.h"

static int check(int code) {
  if (code != TESSERA_OK) printf("error %d: %s\n", code, tessera_last_error());
  return code;
}

int main(int argc, char** argv) {
  const char* const config =
      "model: {type: Line, seed: 4}\n"
      "loss: {type: mse}\n"
      "optimizer: {type: SGD, lr: 0.1}\n"
      "parallel: {type: DistributedDataParallel}\n";
  const char* const refusing =
      "model: {type: Refusing}\nloss: {type: mse}\noptimizer: {type: SGD, lr: 0.1}\n";
  tessera_group* group = NULL;
  tessera_session* session = NULL;
  int rank = -1, size = -1, step;
  if (argc != 2 || tessera_c_version() != TESSERA_C_VERSION) return 2;
  if (check(tessera_load_components(argv[1]))) return 1;
  if (check(tessera_group_from_environment(&group))) return 1;
  if (check(tessera_group_rank(group, &rank)) || check(tessera_group_size(group, &size))) return 1;
  /* The shared object has a copy of UsageError's type, which must be the library's. */
  if (tessera_session_create(refusing, group, &session) != TESSERA_USAGE_ERROR) return 3;
  if (check(tessera_session_create(config, group, &session))) return 1;
  for (step = 0; step < 4; ++step) {
    float inputs[12][3], targets[12][2];
    int64_t count = rank + 2, i, first = step * 100 + rank * (rank + 3) / 2;
    int64_t inputs_shape[2], targets_shape[2];
    tessera_array x = {NULL, TESSERA_FLOAT32, 2, NULL, NULL};
    tessera_array y = {NULL, TESSERA_FLOAT32, 2, NULL, NULL};
    tessera_step done;
    for (i = 0; i < count; ++i) {
      const double t = 0.1 * (double)(first + i);
      inputs[i][0] = (float)sin(t), inputs[i][1] = (float)cos(t), inputs[i][2] = 1;
      targets[i][0] = (float)sin(2 * t), targets[i][1] = (float)cos(3 * t);
    }
    inputs_shape[0] = targets_shape[0] = count;
    inputs_shape[1] = 3, targets_shape[1] = 2;
    x.data = inputs, x.shape = inputs_shape;
    y.data = targets, y.shape = targets_shape;
    if (check(tessera_session_step(session, &x, &y, &done))) return 1;
    if (rank == 0) printf("step %d, loss %.7f, %d samples\n", (int)done.step, done.loss, (int)done.samples);
  }
  if (check(tessera_session_finish(session))) return 1;
  tessera_session_free(session);
  tessera_group_free(group);
  return 0;
}
