# The cuDNN plugin, lib/perigee/perigee_cudnn.so, where cuDNN and the headers of cudnn-frontend are
# (the Python package nvidia-cudnn-frontend, say, or a folder that PG_CUDNN_FRONTEND names).
set(PG_CUDNN_FRONTEND "" CACHE PATH "Folder of cudnn_frontend.h, if it is not found")
file(GLOB packages LIST_DIRECTORIES true
     /usr/lib/python3*/site-packages /usr/local/lib/python3*/dist-packages
     $ENV{HOME}/.local/lib/python3*/site-packages $ENV{VIRTUAL_ENV}/lib/python3*/site-packages)
set(folders ${toolkit} /usr/local/cuda)
foreach(package ${packages})
  list(APPEND folders ${package} ${package}/nvidia/cudnn)
endforeach()
find_path(PG_CUDNN_INCLUDE cudnn.h HINTS ${folders} PATH_SUFFIXES include)
find_library(PG_CUDNN NAMES cudnn libcudnn.so.9 HINTS ${folders} PATH_SUFFIXES lib64 lib)
find_library(PG_CUDART cudart HINTS ${folders} PATH_SUFFIXES lib64 lib)
find_library(PG_NVRTC nvrtc HINTS ${folders} PATH_SUFFIXES lib64 lib)
find_path(PG_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${PG_CUDNN_FRONTEND} ${folders}
          PATH_SUFFIXES include)

set(version 0)
if(PG_CUDNN_FRONTEND_INCLUDE)
  file(READ ${PG_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h text)
  string(REGEX REPLACE ".*FRONTEND_MAJOR_VERSION ([0-9]+).*FRONTEND_MINOR_VERSION ([0-9]+).*"
         "\\1.\\2" version "${text}")
endif()
set(missing "")
if(NOT PG_CUDNN OR NOT PG_CUDNN_INCLUDE)
  set(missing "cuDNN")
elseif(NOT PG_CUDART OR NOT PG_NVRTC)
  set(missing "CUDA runtime and NVRTC")
elseif(version VERSION_LESS 1.13) # statistics and diagonal bands under their present names
  set(missing "cudnn-frontend 1.13 or later (Python package nvidia-cudnn-frontend)")
endif()
if(missing)
  message(STATUS "No ${missing}: attention through cuDNN is left out")
  return()
endif()

# Forty thousand lines of headers that compile in half the time at -O1.
enable_language(CXX)
cmake_path(GET PG_CUDNN PARENT_PATH cudnn_folder)
add_library(perigee_cudnn MODULE ${CMAKE_CURRENT_LIST_DIR}/cudnn.cpp)
target_compile_options(perigee_cudnn PRIVATE -Wall -Wextra -fvisibility=hidden -O1
                                             $<$<BOOL:${PG_WERROR}>:-Werror>)
target_compile_definitions(perigee_cudnn PRIVATE CUDNN_FRONTEND_SKIP_JSON_LIB)
target_include_directories(perigee_cudnn SYSTEM PRIVATE ${PG_CUDNN_FRONTEND_INCLUDE}
                           ${PG_CUDNN_INCLUDE} ${toolkit}/include)
target_link_libraries(perigee_cudnn PRIVATE ${PG_CUDNN} ${PG_NVRTC} ${PG_CUDART} ${CMAKE_DL_LIBS})
target_link_options(perigee_cudnn PRIVATE LINKER:--no-undefined)
set_target_properties(perigee_cudnn PROPERTIES
                      PREFIX "" CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON
                      BUILD_RPATH "${cudnn_folder};${libraries}"
                      INSTALL_RPATH "${cudnn_folder};${libraries}"
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/perigee)
install(TARGETS perigee_cudnn LIBRARY DESTINATION lib/perigee)
