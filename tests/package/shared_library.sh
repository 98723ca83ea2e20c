#!/bin/sh
# shared_library.sh LIBRARY SONAME: the library is called SONAME, is never unmapped, exports folio_*
# and nothing else, needs no library beyond the C runtime's, and has less than 24 MiB without its symbols.
# STRIP is the strip for its architecture.
set -eu
dynamic=$(readelf -dW "$1")

fail() {
    echo "$1" >&2
    exit 1
}
echo "$dynamic" | grep -q "soname: \[$2\]" || fail "the soname is not $2"
echo "$dynamic" | grep -q NODELETE || fail "the library lacks -z nodelete"

symbols=$(nm -D --defined-only "$1" | awk '{ print $3 }')
echo "$symbols" | grep -qx folio_get_api || fail "folio_get_api is not exported"
strangers=$(echo "$symbols" | grep -v '^folio_' || true)
[ -z "$strangers" ] || fail "exported although not folio_*: $strangers"

needed=$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
strangers=$(echo "$needed" | grep -Ev '^(libgcc_s|libc|libm|libdl|libpthread|ld-linux[-a-z0-9_]*)\.so\.[0-9]+$' || true)
[ -z "$strangers" ] || fail "needs a library beyond the C runtime: $strangers"

stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
"${STRIP:-strip}" --strip-unneeded -o "$stripped" "$1"
bytes=$(wc -c <"$stripped")
[ "$bytes" -lt $((24 << 20)) ] || fail "$bytes bytes without its symbols; 24 MiB is the limit"
