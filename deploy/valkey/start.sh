#!/bin/sh
# Writes the users with the passwords of the environment, hashed, and becomes the server.
# Further words of its command line are the server's. MORE_RIGHTS, VALKEY_REPLICA_PASSWORD and VALKEY_SENTINELS are set
# where there are several servers: see ../cluster.yml and ../sentinel.yml.
set -eu
umask 077
here=$(dirname "$0")
hash() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }
users() {
  sed -e '/^#/d' -e "s/@NAMESPACE@/$NAMESPACE/g" -e "s/@STORE@/$(hash "$VALKEY_PASSWORD")/" \
    -e "s/@OPERATOR@/$(hash "$VALKEY_OPERATOR_PASSWORD")/" -e "s/@REPLICA@/$(hash "${VALKEY_REPLICA_PASSWORD:-}")/" \
    -e "s/^user distributed-state .*/& ${MORE_RIGHTS:-}/" "$@"
}
users "$here/users.acl" >/tmp/users.acl
if [ -n "${VALKEY_REPLICA_PASSWORD:-}" ]; then
  users "$here/replication.acl" >>/tmp/users.acl
  printf 'masteruser replica\nmasterauth %s\n' "$VALKEY_REPLICA_PASSWORD" >/tmp/replication.conf
  set -- --include /tmp/replication.conf "$@"
fi
# The Sentinels know who the primary is, and nobody else does: a server that took itself for it after a failover would
# bring back what was replaced. At the very first start they name the one that they were given.
if [ -n "${VALKEY_SENTINELS:-}" ]; then
  primary=""
  while [ -z "$primary" ]; do
    for sentinel in $VALKEY_SENTINELS; do
      [ -n "$primary" ] || primary=$(REDISCLI_AUTH=$VALKEY_OPERATOR_PASSWORD timeout 2 valkey-cli --user operator \
        -h "$sentinel" -p 26379 --raw sentinel get-master-addr-by-name agents 2>/dev/null | head -n 1) || true
    done
    [ -n "$primary" ] || sleep 1
  done
  [ "$primary" = "$VALKEY_ADDRESS" ] || set -- --replicaof "$primary" 6379 "$@"
fi
exec valkey-server "$here/valkey.conf" --maxmemory "$VALKEY_MAXMEMORY" --appendfsync "$VALKEY_APPENDFSYNC" "$@"
