#!/bin/sh
# What a container of the image runs.
#   ray-head                   the cluster's head: no worker is placed on it
#   worker                     a node with room for MOEYARD_WORKER_CPUS (default 1) ranks
#   router MODEL [options]     joins the cluster and runs `moeyard serve MODEL --ray-address ... [options]`
#   check ray-head|worker|router   exit 0 when that role is healthy
#   anything else              is run as a command
# RAY_GCS_ADDRESS (default ray-head:6379) says where the head is.
set -eu

gcs=${RAY_GCS_ADDRESS:-ray-head:6379}
# Activations travel over ZMQ, so Ray's object store can be small; its own choice would be a third of the memory.
store=134217728

# The address that the other containers know this one by.
address() { hostname -i | cut -d ' ' -f 1; }

connect() { python -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()' "$@"; }

case ${1:-} in
ray-head)
    exec ray start --head --block --disable-usage-stats --include-dashboard=false --num-cpus=0 \
        --object-store-memory="$store" --node-ip-address="$(address)" --port="${gcs##*:}"
    ;;
worker)
    exec ray start --block --disable-usage-stats --address="$gcs" --num-cpus="${MOEYARD_WORKER_CPUS:-1}" \
        --object-store-memory="$store" --node-ip-address="$(address)"
    ;;
router)
    shift
    # A Ray driver needs a node of the cluster on its own host; this one offers no room for workers.
    ray start --disable-usage-stats --address="$gcs" --num-cpus=0 --object-store-memory="$store" \
        --node-ip-address="$(address)"
    exec moeyard serve "$@" --ray-address "$gcs" --host 0.0.0.0 --port 8000
    ;;
check)
    case ${2:-} in
    ray-head) connect "$(address)" "${gcs##*:}" ;;
    worker) python -c 'import psutil, sys; sys.exit("raylet" not in {p.info["name"] for p in psutil.process_iter(["name"])})' ;;
    router) python -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8000/readyz", timeout=4)' ;;
    *) echo "check what? ray-head, worker or router" >&2; exit 2 ;;
    esac
    ;;
*)
    exec "$@"
    ;;
esac
