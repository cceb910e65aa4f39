-- From a checkout: luarocks make tools/packaging/perigee-scm-1.rockspec
rockspec_format = "3.0"
package = "perigee"
version = "scm-1"
source = { url = "git+file://." } -- `luarocks make` builds the folder it is started in
description = {
  summary = "An embeddable trainer for language models, driven from Lua",
  license = "MIT",
  labels = { "machine-learning" },
}
dependencies = { "lua ~> 5.4" }
external_dependencies = {
  UV = { header = "uv.h" },
  PCRE2 = { header = "pcre2.h" },
  JANSSON = { header = "jansson.h" },
  PROTOBUF = { header = "protobuf-c/protobuf-c.h" },
  OPENSSL = { header = "openssl/evp.h" },
  EDIT = { header = "histedit.h" },
}
build = {
  type = "cmake",
  variables = {
    CMAKE_INSTALL_PREFIX = "$(PREFIX)",
    PG_LUA_DIR = "$(LUADIR)",
    PG_LUA_CDIR = "$(LIBDIR)",
    PG_TESTS = "OFF",
  },
}
