#!/bin/sh
# Makes one cluster of the nodes, unless they are one already: half of them primaries that share the slots, and for each
# a replica. Ends when all of them serve.
set -eu
export REDISCLI_AUTH="$VALKEY_OPERATOR_PASSWORD"
ask() { node=$1; shift; valkey-cli --user operator -h "$node" "$@"; }
addresses=""
for node in $VALKEY_NODES; do addresses="$addresses $(getent hosts "$node" | cut -d ' ' -f 1)"; done
first=${VALKEY_NODES%% *}
if ask "$first" cluster info | grep -q '^cluster_known_nodes:1[^0-9]*$'; then
  # shellcheck disable=SC2086 - several words
  ask "$first" --cluster create $(printf '%s:6379 ' $addresses) --cluster-replicas 1 --cluster-yes
else
  # After a start of all of them, each may have the address that another one had: they are introduced anew.
  for address in $addresses; do ask "$first" cluster meet "$address" 6379; done
fi
for node in $VALKEY_NODES; do
  until ask "$node" cluster info | grep -q '^cluster_state:ok'; do sleep 1; done
done
