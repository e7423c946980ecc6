/* The C interface of Tessera, for Fortran, bindings of other languages, and programs in C.

   It has only C types, and no exception leaves it. Every function returns TESSERA_OK or one of the
   other codes; tessera_last_error() then has the text. Functions are collective and block unless
   marked "Local.": every rank of the group calls them, in the same order. An object is for one
   thread at a time. Arrays are not copied on CPUs, and not kept. After an error a handle that was
   to be made is NULL.

   docs/c.md has a program. The functions are those of tessera/train/training_session.h, where more
   is said about each. */
#ifndef TESSERA_C_H
#define TESSERA_C_H

#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* Grows when something is added. What is there stays as it is. */
#define TESSERA_C_VERSION 1
/* TESSERA_C_VERSION of the library. Local. */
int tessera_c_version(void);

enum {
  TESSERA_OK = 0,
  TESSERA_USAGE_ERROR = 1,  /* a wrong config, argument or order of calls */
  TESSERA_BROKEN_WORLD = 2, /* another rank is lost; the group has ended */
  TESSERA_ERROR = 3         /* all else: memory, files, libtorch */
};
/* The text of the last error in this thread; "" if there was none. Valid until the thread's next
   call. Local. */
const char* tessera_last_error(void);

enum {
  TESSERA_FLOAT32 = 0,
  TESSERA_FLOAT64 = 1,
  TESSERA_INT32 = 2,
  TESSERA_INT64 = 3,
  TESSERA_UINT8 = 4
};
/* An array of the caller in the memory of the host. */
typedef struct tessera_array {
  void* data;             /* may be NULL where an extent is 0 */
  int32_t dtype;          /* TESSERA_FLOAT32, ... */
  int32_t dims;           /* number of extents, 1 to 8 */
  const int64_t* shape;   /* the extents, that of the samples first */
  const int64_t* strides; /* in elements; NULL: the last extent is contiguous. Fortran's
                             x(values, samples) is shape {samples, values} with NULL. */
} tessera_array;

/* The ranks that train together. */
typedef struct tessera_group tessera_group;
/* The world that a launcher describes in environment variables: `tessera run`, torchrun, Slurm,
   mpirun. Without such variables a world of one rank. */
int tessera_group_from_environment(tessera_group** group);
/* Local. */
int tessera_group_rank(const tessera_group* group, int* rank);
int tessera_group_size(const tessera_group* group, int* size);
/* In place; the sum over the ranks times `scale`. */
int tessera_group_all_reduce(tessera_group* group, const tessera_array* values, double scale);
/* Local. Sessions of the group stay valid. NULL does nothing. */
void tessera_group_free(tessera_group* group);

/* Loads a shared object whose static initialisers add components to the registries
   (tessera/train/registries.h): models, losses, optimizers. A name that is taken is an error. The
   initialisers must not throw. Local. */
int tessera_load_components(const char* path);

/* The trainer without its loop. */
typedef struct tessera_session tessera_session;
typedef struct tessera_step {
  int64_t step;     /* its number, from 0 */
  int64_t samples;  /* of all ranks; 0: nothing happened */
  double loss;      /* mean over them */
  double grad_norm; /* NaN without an update */
  double lr;
  int32_t updated; /* 0: the step was left out */
  int32_t stopped; /* 1: tessera_request_stop() was called on some rank */
} tessera_step;

/* `config`: YAML as in docs/config.md, without a section data. Resumes from its newest checkpoint,
   if there is one. */
int tessera_session_create(const char* config, const tessera_group* group,
                           tessera_session** session);
/* One step with this rank's samples; NULL: it has none. `done` may be NULL. */
int tessera_session_step(tessera_session* session, const tessera_array* inputs,
                         const tessera_array* targets, tessera_step* done);
/* Writes the model's prediction to `outputs`, whose shape is that of the prediction and whose dtype
   may be another one. NULL for both: this rank has no rows. */
int tessera_session_predict(tessera_session* session, const tessera_array* inputs,
                            const tessera_array* outputs);
/* The mean loss over the samples of all ranks, in evaluation mode. */
int tessera_session_evaluate(tessera_session* session, const tessera_array* inputs,
                             const tessera_array* targets, double* loss);
/* Steps done, also before a resumption. Local. */
int tessera_session_steps(const tessera_session* session, int64_t* steps);
/* The number of parameters and the name of each, valid as long as the session. Local. */
int tessera_session_weights(const tessera_session* session, int64_t* count);
int tessera_session_weight_name(const tessera_session* session, int64_t number, const char** name);
/* Copies a whole parameter into an array on rank `rank`; other ranks may give NULL. */
int tessera_session_get_weight(tessera_session* session, const char* name, int rank,
                               const tessera_array* weight);
/* Sets a whole parameter; every rank gives the same values. */
int tessera_session_set_weight(tessera_session* session, const char* name,
                               const tessera_array* weight);
/* Writes a checkpoint to checkpoint.folder. */
int tessera_session_save(tessera_session* session);
/* The last checkpoint, train.save, the end of the log. */
int tessera_session_finish(tessera_session* session);
/* Local; it does not finish. NULL does nothing. */
void tessera_session_free(tessera_session* session);
/* The next step of every session saves a checkpoint and says `stopped`. May be called from a signal
   handler. Local. */
void tessera_request_stop(int signal);

/* For bindings of libtorch: a session over tensors of the caller, in place of a model of the
   config. A tensor is an at::Tensor*. The config has no section model. */

/* Computes the mean loss of this rank's samples from the parameters, and assigns it to `loss`, an
   at::Tensor*. `inputs` and `targets` are those of tessera_session_step(), as at::Tensor*; a tensor
   that was not given is undefined. Returns 0, or another number for an error. */
typedef int (*tessera_forward)(void* context, void* inputs, void* targets, void* loss);
/* `parameters`: at::Tensor* of leaves, with their names; the session trains these tensors, with
   parallel.type DistributedDataParallel, ZeroRedundancyOptimizer, DistributedOptimizer or
   FullyShardedDataParallel, under which they hold values only within `forward`. */
int tessera_session_create_over(const char* config, const tessera_group* group,
                                void* const* parameters, const char* const* names, int64_t count,
                                tessera_forward forward, void* context, tessera_session** session);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
