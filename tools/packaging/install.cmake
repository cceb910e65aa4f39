# What is installed and where, what finds it there (find_package, pkg-config, man, completion), the
# reference as pages, and the Debian package.
set(PG_LUA_CDIR lib/lua/5.4 CACHE STRING "Where the compiled Lua module is installed")
set(PG_LUA_DIR share/lua/5.4 CACHE STRING "Where the Lua files are installed")

# ---- program and Lua module -------------------------------------------------------------------
if(TARGET pg_program)
  install(TARGETS pg_program RUNTIME DESTINATION bin)
  install(TARGETS pg_module LIBRARY DESTINATION ${PG_LUA_CDIR}/perigee)
  install(DIRECTORY lua/perigee DESTINATION ${PG_LUA_DIR} FILES_MATCHING PATTERN "*.lua")
  install(DIRECTORY lua/doc DESTINATION ${PG_LUA_DIR}/perigee FILES_MATCHING PATTERN "*.md") # help()
  install(DIRECTORY recipes DESTINATION share/perigee)

  # The manual and completions say what the program says about itself. A sanitized program is for
  # tests, not for installation.
  if(NOT PG_SANITIZE AND NOT PG_FUZZ AND NOT PG_EMULATE_CUDA)
    set(pages "")
    foreach(page man:perigee.1:share/man/man1 bash:perigee:share/bash-completion/completions
                 zsh:_perigee:share/zsh/vendor-completions)
      string(REPLACE ":" ";" page ${page})
      list(GET page 0 format)
      list(GET page 1 name)
      list(GET page 2 folder)
      set(output ${CMAKE_BINARY_DIR}/manual/${name})
      file(GLOB_RECURSE described CONFIGURE_DEPENDS lua/perigee/commands/*.lua)
      add_custom_command(OUTPUT ${output}
        COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/manual
        COMMAND pg_program run ${CMAKE_SOURCE_DIR}/tools/packaging/manual.lua ${format} > ${output}
        DEPENDS pg_program tools/packaging/manual.lua lua/perigee/cli.lua lua/perigee/commands.lua
                ${described}
        VERBATIM)
      list(APPEND pages ${output})
      install(FILES ${output} DESTINATION ${folder})
    endforeach()
    add_custom_target(manual ALL DEPENDS ${pages})
  endif()
endif()
install(FILES LICENSE README.md DESTINATION share/doc/perigee)

# ---- C library ----------------------------------------------------------------------------------
# The public headers are those that perigee.h includes.
file(STRINGS core/perigee.h PG_PUBLIC_HEADERS REGEX "^#include \"")
list(TRANSFORM PG_PUBLIC_HEADERS REPLACE "#include \"(.*)\"" "core/\\1")
list(APPEND PG_PUBLIC_HEADERS core/perigee.h)
install(FILES ${PG_PUBLIC_HEADERS} DESTINATION include/perigee/core)
install(FILES kernels/dtype.h DESTINATION include/perigee/kernels)
target_include_directories(perigee INTERFACE $<INSTALL_INTERFACE:include>)
install(TARGETS perigee EXPORT PerigeeTargets ARCHIVE DESTINATION lib)
install(EXPORT PerigeeTargets NAMESPACE Perigee:: DESTINATION lib/cmake/Perigee)

include(CMakePackageConfigHelpers)
configure_package_config_file(tools/packaging/PerigeeConfig.cmake.in
  ${CMAKE_BINARY_DIR}/PerigeeConfig.cmake INSTALL_DESTINATION lib/cmake/Perigee)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/PerigeeConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/PerigeeConfig.cmake ${CMAKE_BINARY_DIR}/PerigeeConfigVersion.cmake
  DESTINATION lib/cmake/Perigee)
configure_file(tools/packaging/perigee.pc.in ${CMAKE_BINARY_DIR}/perigee.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/perigee.pc DESTINATION lib/pkgconfig)

# ---- the reference as pages ---------------------------------------------------------------------
find_program(PG_LDOC ldoc)
if(PG_LDOC)
  add_custom_target(pages
    COMMAND ${PG_LDOC} --fatalwarnings -q -c ${CMAKE_SOURCE_DIR}/tools/packaging/config.ld
            -d ${CMAKE_BINARY_DIR}/pages ${CMAKE_SOURCE_DIR}/lua/perigee/init.lua
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/tools/packaging VERBATIM)
endif()

# ---- Debian package (cpack -G DEB) --------------------------------------------------------------
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME perigee)
set(CPACK_PACKAGE_CONTACT "The Perigee authors <perigee@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Trainer for language models, driven from Lua")
set(CPACK_PACKAGE_DESCRIPTION "A C core that owns the transformer, the data loader and the
optimizers, a Lua module that writes experiments with it, and a program with a prompt.")
set(CPACK_PACKAGE_VERSION ${PG_VERSION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# The OpenMP build by name: any BLAS would satisfy what the library's own dependency says.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libopenblas0-openmp, lua5.4")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "gnuplot-nox")
set(CPACK_STRIP_FILES ON)
include(CPack)
