# The libraries that folio::folio_static states (STATED) are those that rustc asked for (FILE). They are
# shared libraries, for which order and repetition mean nothing.
file(READ "${FILE}" asked)
string(STRIP "${asked}" asked)
string(REPLACE " " ";" asked "${asked}")
list(TRANSFORM asked REPLACE "^-l" "")
foreach(libraries IN ITEMS asked STATED)
  list(REMOVE_DUPLICATES ${libraries})
  list(SORT ${libraries})
endforeach()
if(NOT asked STREQUAL STATED)
  message(FATAL_ERROR "cmake/folio-targets.cmake links \"${STATED}\", but rustc asks for \"${asked}\"")
endif()
