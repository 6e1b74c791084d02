#!/bin/sh
# Put Debian's prometheus and promtool under .tools/ for the tests: no root, no service, nothing installed.
# Does nothing where both are on PATH or already there; on a machine without apt-get says so and succeeds (the tests
# that need them are then skipped, with that reason).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
target="$root/.tools/prometheus"

if [ -x "$target/usr/bin/promtool" ] && [ -x "$target/usr/bin/prometheus" ]; then exit 0; fi
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "get_prometheus: no apt-get here; install prometheus and promtool to run the tests that need them" >&2
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# The lists of the machine serve when they are there. Otherwise fetch lists of our own, which needs no root.
if ! apt-get -qq -o APT::Sandbox::User=root download prometheus >log 2>&1; then
    mkdir -p state/lists/partial cache/archives/partial
    own="-o Dir::State=$work/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$work/cache"
    own="$own -o APT::Sandbox::User=root -o Debug::NoLocking=1"
    # shellcheck disable=SC2086
    if ! { apt-get -qq $own update && apt-get -qq $own download prometheus; } >>log 2>&1; then
        echo "get_prometheus: could not download the package prometheus:" >&2
        tail -n 5 log >&2
        exit 1
    fi
fi
dpkg-deb -x prometheus_*.deb unpacked
mkdir -p "$root/.tools"
rm -rf "$target"
mv unpacked "$target"
