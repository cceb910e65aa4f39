/* What the binding files share. Each userdata is made in one order: create it empty, set its
 * metatable, acquire the resource, so that an error at any point leaves an object that the
 * collector can free. A binding checks, converts, calls and returns. Misuse raises an error;
 * failures of the world return nil, "NAME: text", "NAME".
 *
 * Lifetimes. Lua finalises in any order, so parents and children are tied together in C: a
 * pgl_object is counted. `users` need its resource (its own userdata until it is closed, and
 * children such as a context's tensors); `readers` need it unless it was closed (a model's
 * parameter objects); other `references` need only the struct, to see whether it was closed.
 * close() marks the object at once and frees the resource when the last user is gone.
 */
#ifndef PGL_BIND_H
#define PGL_BIND_H

#include "../../core/internal.h"
#include "../../core/json.h"
#include "../../core/perigee.h"
#include <lauxlib.h>
#include <lua.h>

/* ---- objects (object.c) ---------------------------------------------------------------- */
typedef struct pgl_object pgl_object;

typedef struct pgl_kind {
  const char *type; /* name of the metatable, "perigee.model" */
  const char *name; /* in messages, "model" */
  int uservalues;
  void (*release)(pgl_object *o); /* frees o->resource, which is not NULL */
} pgl_kind;

struct pgl_object {
  const pgl_kind *kind;
  pgl_object *parent; /* used until the resource is released, referenced until freed; or NULL */
  void *resource;
  int64_t references, users, readers;
  bool closed;   /* by close(); any use raises from then on */
  bool released; /* the resource was freed */
};

extern const pgl_kind pgl_context_kind, pgl_model_kind, pgl_run_kind, pgl_panel_kind,
    pgl_optimizer_kind, pgl_tokenizer_kind, pgl_metrics_kind, pgl_comm_kind, pgl_trial_kind;

/* Push a userdata of this kind with an object without resource, child of `parent` (may be NULL,
 * else its userdata is on the stack). The caller stores into ->resource. */
pgl_object *pgl_new(lua_State *L, const pgl_kind *kind, pgl_object *parent);
/* The object at `arg`; raises unless it is of this kind and neither it nor a parent is closed. */
pgl_object *pgl_check(lua_State *L, int arg, const pgl_kind *kind);
/* Raise when o or a parent is closed; `what` names the thing that was used. */
void pgl_check_open(lua_State *L, const pgl_object *o, const char *what);
void pgl_hold(pgl_object *o); /* one more user and reference */
void pgl_drop(pgl_object *o);
void pgl_read(pgl_object *o); /* one more reader and reference */
void pgl_unread(pgl_object *o);
void pgl_watch(pgl_object *o); /* one more reference */
void pgl_unwatch(pgl_object *o);
/* The context at the root of o's parents, as an object and itself. */
pgl_object *pgl_root(pgl_object *o);
pg_context *pgl_context(pgl_object *o);
/* Make the metatable of a kind: close, __gc, __close, __tostring and the methods. */
void pgl_define(lua_State *L, const pgl_kind *kind, const luaL_Reg *methods);

/* Push an empty box for a C resource that must survive errors; set *box to acquire. pgl_disown
 * releases it now. */
void **pgl_own(lua_State *L, void (*release)(void *resource));
void pgl_disown(void **box);

/* ---- failures and arguments (args.c) ---------------------------------------------------- */
/* Return pgl_fail(L, ctx, status): raises for PG_EINVAL and PG_ESTATE, else nil, text, name. */
int pgl_fail(lua_State *L, pg_context *ctx, int status);
int pgl_fail_text(lua_State *L, int status, const char *text);
/* nil, text, name from errno after an operation on `path`. */
int pgl_fail_errno(lua_State *L, int error, const char *what, const char *path);
/* A context for core functions that only leave messages: no device, no memory accounts. */
void pgl_scratch(struct pg_context *ctx);

/* Push a short description of a value for messages: `number 3`, `string "x"`, `nil`, `table`. */
const char *pgl_describe(lua_State *L, int index);
/* Positional arguments, strict: no conversion between strings and numbers. */
double pgl_number(lua_State *L, int arg, const char *name);
int64_t pgl_integer(lua_State *L, int arg, const char *name, int64_t min, int64_t max);
bool pgl_boolean(lua_State *L, int arg, const char *name);
const char *pgl_string(lua_State *L, int arg, const char *name); /* without zero bytes */
const char *pgl_bytes(lua_State *L, int arg, const char *name, size_t *size);

/* Option tables. `what` names the table in messages. The getters answer whether the key is there
 * and leave *value alone when it is not; strings live as long as the table. */
void pgl_table(lua_State *L, int index, const char *what, const char *const *keys);
bool pgl_raw(lua_State *L, int index, const char *key); /* pushes the value, nothing when nil */
bool pgl_get_number(lua_State *L, int index, const char *what, const char *key, double *value);
bool pgl_get_integer(lua_State *L, int index, const char *what, const char *key, int64_t min,
                     int64_t max, int64_t *value);
bool pgl_get_boolean(lua_State *L, int index, const char *what, const char *key, bool *value);
bool pgl_get_string(lua_State *L, int index, const char *what, const char *key, const char **value);
void pgl_need(lua_State *L, bool found, const char *what, const char *key);
/* Set fields of the table at the top. */
void pgl_set_number(lua_State *L, const char *key, double value);
void pgl_set_integer(lua_State *L, const char *key, int64_t value);
void pgl_set_string(lua_State *L, const char *key, const char *value);
void pgl_set_boolean(lua_State *L, const char *key, bool value);

/* ---- tensors (tensor.c) ----------------------------------------------------------------- */
#define PGL_TENSOR "perigee.tensor"
/* Fields of the registry and of the module: the methods of tensors, and those of parameters beside
 * their fields. Lua modules may add some. */
#define PGL_TENSOR_METHODS "perigee.tensor_methods"
#define PGL_PARAMETER_METHODS "perigee.parameter_methods"
typedef struct pgl_tensor {
  pg_tensor *tensor;
  pgl_object *context; /* used */
  pgl_object *owner;   /* referenced: the model or run whose memory this shows; or NULL */
  bool scaled;         /* stands for factor times ->tensor: see tensor_scaled.c */
  double factor;
} pgl_tensor;
/* Push an empty tensor. Call pgl_tensor_bind before filling ->tensor. */
pgl_tensor *pgl_push_tensor(lua_State *L);
void pgl_tensor_bind(pgl_tensor *t, pgl_object *context, pgl_object *owner);
/* Tell the collector about a tensor just made; the last step of a binding, since finalisers may
 * run. */
void pgl_tensor_made(lua_State *L, const pgl_tensor *t);
/* Before and after Lua optimizers work in an update: see tensor.c. */
void pgl_tensors_begin(pg_context *ctx);
void pgl_tensors_end(lua_State *L, const pg_context *ctx);
pgl_tensor *pgl_check_tensor(lua_State *L, int arg);
/* The same without making the numbers of one that stands for a multiple: its ->tensor counts
 * ->factor times. */
pgl_tensor *pgl_check_multiple(lua_State *L, int arg);
/* tensor_scaled.c. Make r, bound, stand for factor times t if that can wait; false when not. */
bool pgl_scale_later(pgl_tensor *r, const pgl_tensor *t, double factor);
void pgl_scale_now(lua_State *L, pgl_tensor *r);
void pgl_scale_never(pgl_tensor *r);                /* r goes away */
pgl_tensor *pgl_test_tensor(lua_State *L, int arg); /* NULL when it is something else */
/* The list { {name, tensor}, ... } at `index`, in a userdata that is pushed and points into Lua's
 * values: nothing may run finalisers while it is in use. */
pg_named_tensor *pgl_named_tensors(lua_State *L, int index, const char *what, size_t *count);
/* Push a view of all of t, or nil when t is NULL. */
int pgl_push_view(lua_State *L, const pg_tensor *t, pgl_object *context, pgl_object *owner);
/* "[4, 3]", pushed. */
const char *pgl_push_shape(lua_State *L, const pg_tensor *t);
int pgl_tensor_close(lua_State *L);    /* close(), __gc and __close */
void pgl_open_tensor(lua_State *L);    /* metatable, and constructors into the table at top */
void pgl_tensor_methods(lua_State *L); /* tensor_methods.c: into the metatable at the top */
/* Functions into the table at the top: tensor_files.c, tensor_order.c. */
void pgl_tensor_files(lua_State *L);
void pgl_tensor_order(lua_State *L);
/* tensor_access.c: methods into the table at the top, which becomes __index of the metatable below
 */
void pgl_tensor_access(lua_State *L);

/* ---- models and runs --------------------------------------------------------------------- */
typedef struct pgl_model {
  pg_model *model;
  pg_activations *generation; /* one sequence, made by the first core.generate */
  pgl_object *run;            /* the run whose gradients hang on the parameters; not counted */
} pgl_model;
#define PGL_PARAMETER "perigee.parameter"
typedef struct pgl_parameter {
  pgl_object *model; /* read */
  pg_parameter *parameter;
} pgl_parameter;
pgl_parameter *pgl_check_parameter(lua_State *L, int arg);
/* Push the parameter's userdata from the list that the model's userdata at `model` keeps. */
void pgl_push_parameter(lua_State *L, int model, const pg_parameter *p);
/* The table at `index` as a resolved configuration; raises when it is not one. */
void pgl_read_config(lua_State *L, int index, pg_model_config *config);
/* PG_F32 or PG_BF16 from "fp32" (also nil) or "bf16". */
pg_dtype pgl_compute(lua_State *L, int arg);
void pgl_push_config(lua_State *L, const pg_model_config *config);
void pgl_open_model(lua_State *L);

typedef struct pgl_run {
  pg_run *run;
  char *data, *val; /* folder and glob of the validation shards */
  int64_t micro;
  bool busy;               /* inside a step: Lua optimizers may be running */
  bool alone;              /* the other ranks wait: nothing may be called that takes them all */
  pgl_object **optimizers; /* used: descriptors outlive the run */
  size_t optimizer_count;
  pgl_object *comm; /* used; NULL: a single process */
} pgl_run;
/* A step in progress. Lua-defined optimizers find their state and their run here. */
typedef struct pgl_frame {
  lua_State *L;
  pgl_object *run;
  bool failed; /* the error object is at PGL_FRAME_ERROR of the frame's function */
  bool hosted; /* an optimizer written in Lua was called */
  struct pgl_frame *previous;
} pgl_frame;
enum { PGL_FRAME_RUN = 1, PGL_FRAME_MODEL = 2, PGL_FRAME_ERROR = 3 }; /* stack of run:step */
extern _Thread_local pgl_frame *pgl_frames;
/* Begin work that may call optimizers written in Lua, on the stack { run, model, nil }.
 * pgl_frame_end raises the error of such an optimizer, and returns true unless `status` is an
 * error; then its results are pushed. */
void pgl_frame_begin(lua_State *L, pgl_frame *frame, pgl_object *run);
bool pgl_frame_end(lua_State *L, pgl_frame *frame, int status);
/* Keep an optimizer's userdata at `arg` with the run's at `run`. */
int pgl_run_keep(lua_State *L, int run, int arg);
void pgl_push_run_model(lua_State *L, int run); /* the model's userdata */
/* The options table at `index` of a run; strings live as long as it. *val: the validation shards'
 * glob. Returns the communicator's object or NULL. */
pgl_object *pgl_read_run_options(lua_State *L, int index, pg_run_options *options,
                                 const char **val);
/* The run at `arg`, which must not be inside a step. */
pgl_object *pgl_check_run(lua_State *L, int arg, const char *method);
int pgl_run_validate(lua_State *L); /* methods in geometry.c */
int pgl_run_hilbert(lua_State *L);
/* A model to evaluate, and activations for it that keep nothing for a backward pass. */
typedef struct pgl_evaluation {
  const pg_model *model;
  pg_activations *activations;
  void **box; /* owns them, on the stack; to be disowned: the context may be closed before garbage
                 is collected */
} pgl_evaluation;
/* The model at `arg`. 0, or the number of results of pgl_fail. Finalisers may run: what else was
 * checked is to be checked again. */
int pgl_evaluate(lua_State *L, int arg, int64_t sequences, pgl_evaluation *e);
/* The models at 1 and 2, likewise. */
int pgl_evaluate_both(lua_State *L, pgl_evaluation both[2]);
int pgl_run_functional(lua_State *L); /* methods in functional.c */
int pgl_run_functional_from(lua_State *L);
int pgl_run_bottleneck(lua_State *L); /* bottleneck.c */
/* A list of token ids; pushes the memory that holds them. */
const int32_t *pgl_targets(lua_State *L, int arg, int64_t *count);
/* Raise unless there is a row of hidden states for each of `count` targets. */
void pgl_check_states(lua_State *L, const char *what, const pgl_tensor *hidden, int64_t count);
/* Fields of the table at the top: lists of that member of items[count], a C array of structs of
 * `size` bytes; its members are int64_t when `whole`, else double. */
typedef struct pgl_column {
  const char *name;
  size_t offset;
} pgl_column;
void pgl_set_columns(lua_State *L, const void *items, size_t size, int64_t count,
                     const pgl_column *columns, size_t n, bool whole);
int pgl_run_prediction(lua_State *L); /* methods in first_order.c */
int pgl_run_measure_noise(lua_State *L);
int pgl_run_noise(lua_State *L);
int pgl_run_trial(lua_State *L); /* methods in trial.c */
int pgl_run_gradients(lua_State *L);
int pgl_run_rewind(lua_State *L);
void pgl_push_step(lua_State *L, const pg_step *step);
void pgl_open_run(lua_State *L);
void pgl_open_trial(lua_State *L);
void pgl_open_estimate(lua_State *L);

/* ---- optimizers (optimizer.c) ------------------------------------------------------------ */
typedef struct pgl_optimizer {
  const pg_optimizer *descriptor; /* a registered one, or &own */
  pg_optimizer own;
  pg_hyper hypers[PG_MAX_HYPERS];
  pg_slot slots[PG_MAX_SLOTS];
} pgl_optimizer;
/* Overwrite the values named in the table at `index`; raises for unknown names and wrong kinds. */
void pgl_read_hypers(lua_State *L, int index, const pg_optimizer *o, double values[PG_MAX_HYPERS]);
void pgl_push_hyper(lua_State *L, const pg_hyper *hyper, const double *value);
int pgl_host_increment(const pg_increment_group *group, void *self); /* optimizer_host.c */
int pgl_define_optimizer(lua_State *L);
void pgl_open_optimizer(lua_State *L);

/* ---- JSON (json.c) ------------------------------------------------------------------------ */
/* The value at `index` as JSON into *box (a box of pgl_own with release pgl_json_release). */
void pgl_json_build(lua_State *L, int index, void **box);
void pgl_json_release(void *value);
void pgl_json_push(lua_State *L, const json_t *value);
void pgl_open_json(lua_State *L);

/* ---- the rest: each adds its functions to the table at the top ------------------------------ */
int pgl_profile_start(lua_State *L); /* methods of a context, in profile.c */
int pgl_profile_stop(lua_State *L);
void pgl_open_context(lua_State *L);
void pgl_open_comm(lua_State *L);
void pgl_open_data(lua_State *L);
void pgl_open_tokenizer(lua_State *L);
void pgl_open_geometry(lua_State *L);
void pgl_open_functional(lua_State *L);
void pgl_open_bottleneck(lua_State *L);
void pgl_open_logits(lua_State *L);
void pgl_open_first_order(lua_State *L);
void pgl_open_rows(lua_State *L);
void pgl_open_oracle(lua_State *L);
void pgl_open_metrics(lua_State *L);
void pgl_open_events(lua_State *L);
void pgl_open_files(lua_State *L);
void pgl_open_signals(lua_State *L);
void pgl_open_guard(lua_State *L);
void pgl_open_socket(lua_State *L);
void pgl_open_line(lua_State *L);
void pgl_open_bench(lua_State *L);
void pgl_open_system(lua_State *L);
void pgl_open_process(lua_State *L);
/* A context is about to be freed: signals must not cancel it any more. */
void pgl_signals_forget(pg_context *ctx);
bool pgl_signals_pending(void);
/* Contexts that a guarded call cancels when it is cut off (guard.c). */
bool pgl_guard_know(pg_context *ctx); /* false: no memory */
void pgl_guard_forget(pg_context *ctx);
void pgl_guard_signal(void);        /* in the signal handler */
int pgl_guard_cut(void);            /* not 0: the guarded call in progress must end */
void pgl_guard_check(lua_State *L); /* raise then */
/* The descriptor of the socket at `arg`. */
int pgl_socket_descriptor(lua_State *L, int arg);
/* "avx512" for the kernels of this context. */
const char *pgl_cpu_level(const pg_context *ctx);

__attribute__((visibility("default"))) int luaopen_perigee_core(lua_State *L);

#endif
