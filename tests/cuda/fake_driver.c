/* A CUDA driver without a device, for cudnn_graph_test.c: it takes kernels in and gives them out,
 * which is all that cuDNN wants of a driver while it plans. Everything else answers that there is
 * no device. */

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, NO_DEVICE = 100 }; /* of CUresult */

/* clang-format off */
#define ABSENT(X)                                                                                  \
  X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxGetLimit) X(cuCtxPopCurrent) X(cuCtxPushCurrent)     \
  X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxReset)   \
  X(cuDevicePrimaryCtxRetain) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuGetErrorName)        \
  X(cuInit) X(cuKernelGetAttribute) X(cuKernelSetAttribute) X(cuLaunchCooperativeKernel)           \
  X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuLibraryLoadFromFile) X(cuLinkAddData)                  \
  X(cuLinkAddData_v2) X(cuLinkAddFile_v2) X(cuLinkComplete) X(cuLinkCreate) X(cuLinkCreate_v2)     \
  X(cuLinkDestroy) X(cuMemcpyDtoH_v2) X(cuModuleGetFunction) X(cuModuleGetGlobal_v2)               \
  X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary) X(cuModuleUnload)             \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuOccupancyMaxPotentialClusterSize)             \
  X(cuStreamGetCtx) X(cuStreamSynchronize) X(cuTensorMapEncodeTiled)
/* clang-format on */
#define DEFINE(name)                                                                               \
  EXPORT int name(void);                                                                           \
  int name(void) {                                                                                 \
    return NO_DEVICE;                                                                              \
  }
ABSENT(DEFINE)

EXPORT int cuDeviceGetCount(int *count);
int cuDeviceGetCount(int *count) {
  *count = 0;
  return NO_DEVICE;
}
EXPORT int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}
static int something;
EXPORT int cuLibraryLoadData(void **library);
int cuLibraryLoadData(void **library) {
  *library = &something;
  return SUCCESS;
}
EXPORT int cuLibraryGetKernel(void **kernel);
int cuLibraryGetKernel(void **kernel) {
  *kernel = &something;
  return SUCCESS;
}
EXPORT int cuLibraryUnload(void *library);
int cuLibraryUnload(void *library) {
  (void)library;
  return SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char **text);
int cuGetErrorString(int error, const char **text) {
  *text = error ? "no device" : "no error";
  return SUCCESS;
}
