#!/bin/sh
# readme.sh README COMPILER INCLUDE_DIR: the C code of the README compiles as it stands.
set -eu
code=$(sed -n '/^```c$/,/^```$/p' "$1" | sed '/^```/d')
[ -n "$code" ] || { echo "the README has no C code" >&2; exit 1; }
printf '#include <stdlib.h>\n%s\n' "$code" |
    "$2" -x c -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$3" -
