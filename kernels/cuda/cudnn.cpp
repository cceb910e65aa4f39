/* The cuDNN plugin: attention as graphs of cudnn-frontend, built once per shape.
 *
 * The graphs have been built for sm_90 by cuDNN 9.19 (cudnn_graph_test.c) but never run on a GPU.
 *
 * Tensors are described as they lie, [batch, heads, time, head_dim] with the strides of [batch,
 * time, heads, head_dim]. cuDNN's statistics are max + log(sum of exponentials) of the scaled
 * scores in natural units, which is the lse of kernels.h. On sm_90 its deterministic backward keeps
 * time x time bf16 values of every head in the workspace.
 *
 * cuDNN is C++ underneath and the frontend throws: nothing leaves the functions of the table. */
#include "cudnn_plugin.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>
#include <exception>
#include <map>
#include <math.h>
#include <memory>
#include <new>
#include <stdio.h>
#include <string.h>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace fe = cudnn_frontend;
typedef std::shared_ptr<fe::graph::Tensor_attributes> tensor;

static constexpr size_t MOST_PLANS = 128; /* sequences of any length may be asked for */

enum : int64_t { QUERY = 1, KEY, VALUE, OUT, LSE, DOUT, DQUERY, DKEY, DVALUE };

struct earlier {
  bool operator()(const pg_cudnn_shape &a, const pg_cudnn_shape &b) const {
    return std::tie(a.batch, a.time, a.heads, a.head_dim, a.ld, a.backward) <
           std::tie(b.batch, b.time, b.heads, b.head_dim, b.ld, b.backward);
  }
};

struct plan {
  std::unique_ptr<fe::graph::Graph> graph;
  size_t workspace = 0;
  std::string why; /* not empty: the shape cannot be used */
};

struct pg_cudnn {
  cudnnHandle_t handle = NULL;
  std::shared_ptr<fe::DeviceProperties> properties; /* instead of a device */
  std::map<pg_cudnn_shape, plan, earlier> plans;
};

/* The first line of a message; gives -1. */
static int refuse(char *text, size_t size, const char *message) {
  snprintf(text, size, "%.*s", (int)strcspn(message, "\n"), message);
  return -1;
}

/* ---- the library --------------------------------------------------------------------------- */
/* libcudnn ends the process when it cannot load this part of itself: see to it beforehand, in its
 * own folder first, as libcudnn does. */
static bool load_graph_library(char *text, size_t size) {
  static const char *const file = "libcudnn_graph.so.9";
  Dl_info self;
  void *part = NULL;
  if (dladdr((void *)cudnnGetVersion, &self) && self.dli_fname && strchr(self.dli_fname, '/')) {
    std::string path(self.dli_fname);
    part = dlopen((path.substr(0, path.rfind('/') + 1) + file).c_str(), RTLD_NOW);
  }
  if (!part) part = dlopen(file, RTLD_NOW);
  if (part && dlsym(part, "cudnnGetVersion") && dlsym(part, "cudnnBackendExecute")) return true;
  const char *why = dlerror();
  refuse(text, size, why ? why : "libcudnn_graph.so.9 is not of this version");
  return false;
}

static int start(pg_cudnn *c, const pg_cudnn_options *options, char *text, size_t size) {
  const size_t version = cudnnGetVersion(); /* 91900 */
  if (options->properties) {
    const std::string json(options->properties);
    c->properties = std::make_shared<fe::DeviceProperties>();
    auto status = c->properties->deserialize(std::vector<uint8_t>(json.begin(), json.end()));
    if (status.is_bad()) return refuse(text, size, status.get_message().c_str());
  } else {
    cudnnStatus_t status = cudnnCreate(&c->handle);
    if (status == CUDNN_STATUS_SUCCESS)
      status = cudnnSetStream(c->handle, (cudaStream_t)options->stream);
    if (status != CUDNN_STATUS_SUCCESS) {
      snprintf(text, size, "cuDNN %zu.%zu.%zu does not start: %s", version / 10000,
               version / 100 % 100, version % 100, cudnnGetErrorString(status));
      return -1;
    }
  }
  snprintf(text, size, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
  return 0;
}

static void close_cudnn(pg_cudnn *c) {
  if (!c) return;
  try {
    c->plans.clear();
  } catch (...) {
  }
  if (c->handle) cudnnDestroy(c->handle);
  delete c;
}

static int open_cudnn(const pg_cudnn_options *options, pg_cudnn **out, char *text, size_t size) {
  pg_cudnn *c = NULL;
  *out = NULL;
  try {
    if (!load_graph_library(text, size)) return -1;
    c = new pg_cudnn();
    if (start(c, options, text, size) == 0) {
      *out = c;
      return 0;
    }
  } catch (const std::exception &e) {
    refuse(text, size, e.what());
  } catch (...) {
    refuse(text, size, "cuDNN does not start");
  }
  close_cudnn(c);
  return -1;
}

/* ---- graphs -------------------------------------------------------------------------------- */
static std::vector<int64_t> sides(const pg_cudnn_shape &s) {
  return {s.batch, s.heads, s.time, s.head_dim};
}
static std::vector<int64_t> strides(const pg_cudnn_shape &s) {
  return {s.time * s.ld, s.head_dim, s.ld, 1};
}

static tensor input(fe::graph::Graph &g, const pg_cudnn_shape &s, const char *name, int64_t uid) {
  return g.tensor(fe::graph::Tensor_attributes()
                      .set_name(name)
                      .set_uid(uid)
                      .set_dim(sides(s))
                      .set_stride(strides(s))
                      .set_data_type(fe::DataType_t::BFLOAT16));
}
static void output(const tensor &t, const pg_cudnn_shape &s, int64_t uid) {
  t->set_output(true)
      .set_uid(uid)
      .set_dim(sides(s))
      .set_stride(strides(s))
      .set_data_type(fe::DataType_t::BFLOAT16);
}
static void statistics(const tensor &t, const pg_cudnn_shape &s) {
  t->set_uid(LSE)
      .set_dim({s.batch, s.heads, s.time, 1})
      .set_stride({s.heads * s.time, s.time, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

/* Causal: query i meets keys up to i + 0, counted from the upper left corner. */
template <class Attributes> static Attributes causal(const pg_cudnn_shape &s) {
  Attributes a;
  a.set_name("attention")
      .set_attn_scale((float)(1.0 / sqrt((double)s.head_dim)))
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  return a;
}

static void describe(fe::graph::Graph &g, const pg_cudnn_shape &s) {
  g.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const tensor query = input(g, s, "query", QUERY), key = input(g, s, "key", KEY);
  const tensor value = input(g, s, "value", VALUE);
  if (!s.backward) {
    auto results =
        g.sdpa(query, key, value, causal<fe::graph::SDPA_attributes>(s).set_generate_stats(true));
    output(results[0], s, OUT);
    statistics(results[1], s);
    results[1]->set_output(true);
    return;
  }
  const tensor out = input(g, s, "out", OUT), dout = input(g, s, "dout", DOUT);
  const tensor lse = g.tensor(fe::graph::Tensor_attributes().set_name("lse"));
  statistics(lse, s);
  auto gradients = g.sdpa_backward(
      query, key, value, out, dout, lse,
      causal<fe::graph::SDPA_backward_attributes>(s).set_deterministic_algorithm(true));
  output(gradients[0], s, DQUERY);
  output(gradients[1], s, DKEY);
  output(gradients[2], s, DVALUE);
}

/* A good status, or the step that failed. */
static fe::error_t build(pg_cudnn *c, const pg_cudnn_shape &s, plan &p) {
  std::unique_ptr<fe::graph::Graph> g(new fe::graph::Graph());
  int64_t bytes = 0;
  if (c->properties) {
    g->set_device_properties(c->properties);
    g->set_sm_version(90);
  }
  describe(*g, s);
  fe::error_t status = g->validate();
  if (status.is_good()) status = g->build_operation_graph(c->handle);
  if (status.is_good())
    status = g->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK});
  if (status.is_good()) status = g->check_support();
  if (status.is_good()) status = g->build_plans();
  if (status.is_good()) status = g->get_workspace_size(bytes);
  if (status.is_good()) {
    p.workspace = (size_t)(bytes > 0 ? bytes : 0);
    p.graph = std::move(g);
    p.why.clear();
  }
  return status;
}

/* The plan of a shape, built at its first call. Graphs that queued work still uses are not freed.
 */
static plan &find(pg_cudnn *c, const pg_cudnn_shape &s) {
  auto at = c->plans.find(s);
  if (at != c->plans.end()) return at->second;
  if (c->plans.size() >= MOST_PLANS) {
    if (c->handle) cudaDeviceSynchronize();
    c->plans.clear();
  }
  plan &p = c->plans[s];
  p.why = "cuDNN has no algorithm";
  try {
    fe::error_t status = build(c, s, p);
    if (status.is_bad() && !status.get_message().empty()) p.why = status.get_message();
  } catch (const std::exception &e) {
    p.why = e.what();
  }
  return p;
}

static int plan_shape(pg_cudnn *c, const pg_cudnn_shape *s, size_t *workspace, char *text,
                      size_t size) {
  try {
    const plan &p = find(c, *s);
    if (!p.why.empty()) return refuse(text, size, p.why.c_str());
    *workspace = p.workspace;
    return 0;
  } catch (...) {
    return refuse(text, size, "no host memory for a graph of cuDNN");
  }
}

static int run_shape(pg_cudnn *c, const pg_cudnn_shape *s, const pg_cudnn_tensors *t,
                     void *workspace, char *text, size_t size) {
  if (c->properties) return refuse(text, size, "there is no device to run on");
  try {
    plan &p = find(c, *s);
    if (!p.why.empty()) return refuse(text, size, p.why.c_str());
    std::unordered_map<int64_t, void *> pack = {
        {QUERY, t->query}, {KEY, t->key}, {VALUE, t->value}, {OUT, t->out}, {LSE, t->lse}};
    if (s->backward)
      pack.insert({{DOUT, t->dout}, {DQUERY, t->dquery}, {DKEY, t->dkey}, {DVALUE, t->dvalue}});
    fe::error_t status = p.graph->execute(c->handle, pack, workspace);
    if (status.is_good()) return 0;
    p.why = "cuDNN failed: " + status.get_message();
    return refuse(text, size, p.why.c_str());
  } catch (const std::exception &e) {
    return refuse(text, size, e.what());
  } catch (...) {
    return refuse(text, size, "cuDNN failed");
  }
}

extern "C" __attribute__((visibility("default"))) const pg_cudnn_api *pg_cudnn_plugin(void) {
  static const pg_cudnn_api api = {open_cudnn, close_cudnn, plan_shape, run_shape};
  return &api;
}
