#!/bin/sh
# native_static_libs.sh RUSTC COMPILER LIBRARY NAME...: the libraries that folio::folio_static states (the
# names) are those that Rust's standard library asks for, and the static library needs no other one. Order
# and repetition mean nothing: they are shared libraries.
set -eu
rustc=$1 compiler=$2 library=$3
shift 3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Of an empty crate, which takes no time: with --print, cargo would compile Folio once more.
echo >"$folder/empty.rs"
"$rustc" --crate-type staticlib --print native-static-libs="$folder/asked" -o "$folder/libempty.a" "$folder/empty.rs"
sorted() { tr ' ' '\n' | sed 's/^-l//; /^$/d' | sort -u | paste -sd ' ' -; }
asked=$(sorted <"$folder/asked")
stated=$(echo "$*" | sorted)
[ "$asked" = "$stated" ] || { echo "cmake/folio-targets.cmake links \"$stated\", but rustc asks for \"$asked\"" >&2; exit 1; }

libraries=$(printf ' -l%s' "$@")
# shellcheck disable=SC2086  # a list of options
"$compiler" -shared -nostdlib -o "$folder/whole.so" -Wl,--no-undefined \
    -Wl,--whole-archive "$library" -Wl,--no-whole-archive $libraries -lgcc ||
    { echo "the static library needs more than \"$stated\"" >&2; exit 1; }
