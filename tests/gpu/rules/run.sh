#!/bin/sh
# Builds the rule programs with the C compiler alone and runs them on a driver:
#
#     tests/gpu/rules/run.sh [library]      libcuda.so.1 when none is named
#
# The status is 0 when every answer was the expected one.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
for source in "$here"/*.c; do
    name=$(basename "$source" .c)
    if ! ${CC:-cc} -std=c11 -D_GNU_SOURCE -O1 -w -pthread -I"$here/../../../src" \
        "$source" -o "$out/$name" -ldl; then
        status=1
        continue
    fi
    echo "# $name"
    "$out/$name" "$@" || status=1
done
exit $status
