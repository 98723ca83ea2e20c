# The libraries that folio::folio_static states (STATED) are those that rustc asked for (FILE).
file(READ "${FILE}" asked)
string(STRIP "${asked}" asked)
list(TRANSFORM STATED PREPEND "-l")
list(JOIN STATED " " stated)
if(NOT stated STREQUAL asked)
  message(FATAL_ERROR "cmake/folio-targets.cmake links \"${stated}\", but rustc asks for \"${asked}\"")
endif()
