#!/bin/sh
# Becomes a Sentinel. What it learns it writes into its configuration, which is kept; the passwords are those of the
# environment at each start.
set -eu
umask 077
here=$(dirname "$0")
mine=/data/sentinel.conf
hash() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }
[ -e "$mine" ] || cat >"$mine" <<END
port 26379
bind * -::*
protected-mode no
dir /data
sentinel monitor agents $VALKEY_FIRST 6379 2
END
sed -i -E '/^(user|sentinel (auth-user|auth-pass|sentinel-user|sentinel-pass|down-after-milliseconds|failover-timeout)) /d' "$mine"
{
  sed -e '/^#/d' -e "s/@STORE@/$(hash "$VALKEY_PASSWORD")/" -e "s/@REPLICA@/$(hash "$VALKEY_REPLICA_PASSWORD")/" \
    -e "s/@OPERATOR@/$(hash "$VALKEY_OPERATOR_PASSWORD")/" "$here/sentinel.acl"
  cat <<END
sentinel sentinel-user sentinel
sentinel sentinel-pass $VALKEY_REPLICA_PASSWORD
sentinel auth-user agents sentinel
sentinel auth-pass agents $VALKEY_REPLICA_PASSWORD
sentinel down-after-milliseconds agents $VALKEY_DOWN_AFTER
sentinel failover-timeout agents 10000
END
} >>"$mine"
exec valkey-server "$mine" --sentinel
