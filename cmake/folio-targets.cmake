# The targets of the package, from folio_INCLUDE_DIR, folio_LIBRARY_DIR and folio_VERSION; the same file
# serves the build tree and the installed package.
#
#   folio::folio         link the shared library
#   folio::folio_static  link the static library and what it needs
#   folio::headers       headers only, for a host that dlopens folio_PLUGIN
string(REGEX MATCH "^[0-9]+" folio_VERSION_MAJOR "${folio_VERSION}")

add_library(folio::headers INTERFACE IMPORTED)
set_target_properties(folio::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${folio_INCLUDE_DIR}")

add_library(folio::folio SHARED IMPORTED)
set_target_properties(folio::folio PROPERTIES
  IMPORTED_LOCATION "${folio_LIBRARY_DIR}/libfolio.so.${folio_VERSION}"
  IMPORTED_SONAME "libfolio.so.${folio_VERSION_MAJOR}"
  INTERFACE_INCLUDE_DIRECTORIES "${folio_INCLUDE_DIR}")

# What `rustc --print native-static-libs` says; the test native_static_libs compares.
add_library(folio::folio_static STATIC IMPORTED)
set_target_properties(folio::folio_static PROPERTIES
  IMPORTED_LOCATION "${folio_LIBRARY_DIR}/libfolio.a"
  INTERFACE_INCLUDE_DIRECTORIES "${folio_INCLUDE_DIR}"
  INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl;c")

# What a host that loads Folio at run time gives to dlopen.
set(folio_PLUGIN "${folio_LIBRARY_DIR}/libfolio.so.${folio_VERSION_MAJOR}")
