/* The cuDNN plugin's graphs, built by the real cuDNN for the description of an H200, without one:
 * cuDNN checks its support, chooses algorithms and loads their kernels into fake_driver.c. What
 * they would compute is compared in cuda_attention_test.c, on a GPU. */
#include "kernels/cuda/cudnn_plugin.h"
#include "tests/unit/unit.h"

#include <dlfcn.h>

/* cuDNN's own form, as it writes it for a device at hand. */
static const char h200[] =
    "{\"deviceName\":\"NVIDIA H200\",\"deviceVer\":900,\"driverVer\":13000,\"cudaDeviceId\":0,"
    "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"multiProcessorCount\":132,"
    "\"warpSize\":32,\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
    "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"maxCtasPerSM\":32,"
    "\"regsPerBlock\":65536,\"maxRegistersPerSM\":65536,\"maxSharedMemoryPerBlock\":49152,"
    "\"maxSharedMemoryPerBlockOptin\":232448,\"reservedSharedMemoryPerBlock\":1024,"
    "\"l2CacheSize\":62914560,\"totalGlobalMem\":150000000000,\"smClockRateKHz\":1980000,"
    "\"memClockRateKHz\":3201000}";

static const pg_cudnn_api *api;
static pg_cudnn *cudnn;
static char version[400];

static int plan(int64_t batch, int64_t time, int64_t heads, int64_t dim, int backward,
                size_t *workspace, char *text, size_t size) {
  const pg_cudnn_shape s = {batch, time, heads, dim, heads * dim, backward};
  text[0] = 0;
  *workspace = 0;
  return api->plan(cudnn, &s, workspace, text, size);
}

TEST(shapes) {
  static const struct {
    int64_t time, dim;
  } shapes[] = {{1024, 64}, {1024, 128}, {1023, 72}, {1023, 128}, {37, 64}, {37, 256}, {2, 8}};
  CHECK(!strncmp(version, "cuDNN ", 6), "said \"%s\"", version);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int backward = 0; backward < 2; backward++) {
      size_t workspace;
      char text[400];
      CHECK(plan(2, shapes[i].time, 3, shapes[i].dim, backward, &workspace, text, sizeof text) == 0,
            "%s, time %lld, head_dim %lld: %s", backward ? "backward" : "forward",
            (long long)shapes[i].time, (long long)shapes[i].dim, text);
      if (!backward) CHECK(workspace < 1 << 20, "forward takes %zu bytes", workspace);
    }
}

/* attention_path.cu cuts a call in proportion to its workspace. */
TEST(workspace_grows_with_the_heads) {
  size_t whole, half, head;
  char text[400];
  CHECK(plan(8, 1024, 12, 64, 1, &whole, text, sizeof text) == 0, "%s", text);
  CHECK(plan(4, 1024, 12, 64, 1, &half, text, sizeof text) == 0, "%s", text);
  CHECK(plan(1, 1024, 1, 64, 1, &head, text, sizeof text) == 0, "%s", text);
  CHECK(half <= whole / 2 + (1 << 16), "%zu of %zu bytes", half, whole);
  CHECK(head <= whole / 96 + (1 << 16), "%zu of %zu bytes", head, whole);
}

/* A part of the heads: rows farther apart than the part is wide. */
TEST(part_of_the_heads) {
  for (int backward = 0; backward < 2; backward++) {
    const pg_cudnn_shape s = {1, 256, 3, 64, 12 * 64, backward};
    size_t workspace;
    char text[400] = "";
    CHECK(api->plan(cudnn, &s, &workspace, text, sizeof text) == 0, "%s", text);
  }
}

TEST(refusals) {
  size_t workspace;
  char text[400];
  for (int again = 0; again < 2; again++) {
    CHECK(plan(2, 37, 2, 18, 0, &workspace, text, sizeof text) == -1 && text[0], "head_dim 18");
    CHECK(plan(2, 1, 2, 64, 1, &workspace, text, sizeof text) == -1 && text[0],
          "one position, backward");
    CHECK(!strchr(text, '\n'), "several lines");
  }
  const pg_cudnn_shape s = {2, 37, 2, 64, 2 * 64, 0};
  const pg_cudnn_tensors none = {0};
  CHECK(api->run(cudnn, &s, &none, NULL, text, sizeof text) == -1, "ran without a device");
}

TEST(no_device) {
  const pg_cudnn_options options = {0};
  pg_cudnn *other = NULL;
  char text[400] = "";
  CHECK(api->open(&options, &other, text, sizeof text) == -1 && !other);
  CHECK(strstr(text, "does not start"), "said \"%s\"", text);
  api->close(other);
}

int main(void) {
  const pg_cudnn_api *(*get)(void) = NULL;
  const pg_cudnn_options options = {.properties = h200};
  if (!dlopen(PG_FAKE_DRIVER, RTLD_NOW | RTLD_GLOBAL)) {
    printf("%s\n", dlerror());
    return 1;
  }
  void *plugin = dlopen(PG_PLUGIN_PATH, RTLD_NOW | RTLD_LOCAL);
  if (plugin) *(void **)&get = dlsym(plugin, "pg_cudnn_plugin");
  if (!get) {
    printf("%s\n", dlerror());
    return 77;
  }
  api = get();
  if (api->open(&options, &cudnn, version, sizeof version) < 0) {
    printf("this cuDNN does not plan for a described device: %s\n", version);
    return 77;
  }
  RUN(shapes);
  RUN(workspace_grows_with_the_heads);
  RUN(part_of_the_heads);
  RUN(refusals);
  RUN(no_device);
  api->close(cudnn);
  return unit_report();
}
