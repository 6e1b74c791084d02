#!/bin/sh
# Entry point of the image's containers.
#   ray-head                   the cluster's head: no worker is placed on it
#   worker                     a node with room for MOEYARD_WORKER_CPUS (default 1) ranks
#   router MODEL [options]     joins the cluster and runs `moeyard serve MODEL --ray-address ... [options]`
#   check ray-head|node|worker|router   exit 0 when that role is healthy, otherwise a line that says what is wrong
#   anything else              is run as a command
# RAY_GCS_ADDRESS (default ray-head:6379) says where the head is, MOEYARD_ROUTER_URL (default http://router:8000) where
# a worker asks which ranks it should have, MOEYARD_ADDRESS by which address the others know this container (default:
# its first one), MOEYARD_STOP_SECONDS (default 30) how long a router may take to stop, MOEYARD_CONTAINER_HOME where the
# files beside this one are.
#
# Each role ends when any process of it does, so that the container's restart policy starts it again: `ray start --block`
# watches its own processes, router.py the router's.
set -eu

gcs=${RAY_GCS_ADDRESS:-ray-head:6379}
router=${MOEYARD_ROUTER_URL:-http://router:8000}
home=${MOEYARD_CONTAINER_HOME:-/opt/moeyard}
# Activations travel over ZMQ, so Ray's object store can be small. Ray's default is a third of the memory.
store=134217728

# The address at which other containers reach this one.
address() { echo "${MOEYARD_ADDRESS:-$(hostname -i | cut -d ' ' -f 1)}"; }

# A restarted container still has its old files, including logs of dead sessions.
forget_sessions() { rm -rf "${RAY_TMPDIR:-/tmp}/ray"; }

case ${1:-} in
ray-head)
    forget_sessions
    exec ray start --head --block --disable-usage-stats --include-dashboard=false --num-cpus=0 \
        --object-store-memory="$store" --node-ip-address="$(address)" --port="${gcs##*:}"
    ;;
worker)
    forget_sessions
    exec ray start --block --disable-usage-stats --address="$gcs" --num-cpus="${MOEYARD_WORKER_CPUS:-1}" \
        --object-store-memory="$store" --node-ip-address="$(address)"
    ;;
router)
    shift
    forget_sessions
    # A Ray driver needs a node of the cluster on its own host; this one offers no room for workers. After a restart of
    # the head the workers join again one by one: the router waits for as many as it needs, for a month if it must.
    exec python "$home/router.py" "${MOEYARD_STOP_SECONDS:-30}" \
        ray start --block --disable-usage-stats --address="$gcs" --num-cpus=0 \
        --object-store-memory="$store" --node-ip-address="$(address)" \
        -- moeyard serve "$@" --ray-address "$gcs" --wait-for-cluster 2592000 --host "${MOEYARD_HOST:-0.0.0.0}" --port 8000
    ;;
check)
    case ${2:-} in
    ray-head) exec python "$home/health.py" ray-head "$(address):${gcs##*:}" ;;
    node) exec python "$home/health.py" node ;;
    worker) exec python "$home/health.py" worker "$(address)" "$router" ;;
    router) exec python "$home/health.py" router "http://${MOEYARD_ADDRESS:-127.0.0.1}:8000" ;;
    *) echo "check what? ray-head, node, worker or router" >&2; exit 2 ;;
    esac
    ;;
*)
    exec "$@"
    ;;
esac
