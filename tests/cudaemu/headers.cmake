# NVIDIA's headers: sets PG_CUDA_INCLUDE, PG_CUBLASLT_INCLUDE and PG_NCCL_INCLUDE, where they are.
# They lie beside nvcc, where Debian or the installer put them, or from Python packages.
find_program(PG_NVCC nvcc PATHS /usr/local/cuda/bin)
if(PG_NVCC)
  file(REAL_PATH ${PG_NVCC} nvcc)
  cmake_path(GET nvcc PARENT_PATH nvcc)
  cmake_path(GET nvcc PARENT_PATH nvcc)
endif()
file(GLOB pip_folders /usr/lib/python3*/site-packages/nvidia/*/include
     /usr/local/lib/python3*/dist-packages/nvidia/*/include
     $ENV{HOME}/.local/lib/python3*/site-packages/nvidia/*/include
     $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/*/include)
set(cuda_folders ${nvcc}/include /usr/local/cuda/include ${pip_folders})
find_path(PG_CUDA_INCLUDE cuda_runtime.h HINTS ${cuda_folders})
find_path(PG_CUBLASLT_INCLUDE cublasLt.h HINTS ${cuda_folders})
find_path(PG_NCCL_INCLUDE nccl.h HINTS ${cuda_folders})
