#!/bin/sh
# documented_code.sh COMPILER INCLUDE_DIR FILE.md ...: every block of C code in the documents compiles.
set -eu
compiler=$1 include_dir=$2
shift 2
blocks=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for document in "$@"; do
    rm -f "$folder"/*.c
    awk -v folder="$folder" '
        /^```c$/ { file = folder "/" ++count ".c"; next }
        /^```/ { file = "" }
        file { print > file }' "$document"
    for block in "$folder"/*.c; do
        [ -e "$block" ] || continue
        "$compiler" -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$include_dir" "$block" ||
            { echo "$document: the code above does not compile" >&2; exit 1; }
        blocks=$((blocks + 1))
    done
done
[ $blocks -gt 0 ] || { echo "the documents have no C code" >&2; exit 1; }
