#!/bin/sh
# Writes the users with the passwords of the environment, hashed, and becomes the server.
set -eu
umask 077
here=$(dirname "$0")
hash() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }
sed -e '/^#/d' -e "s/@NAMESPACE@/$NAMESPACE/g" -e "s/@STORE@/$(hash "$VALKEY_PASSWORD")/" \
  -e "s/@OPERATOR@/$(hash "$VALKEY_OPERATOR_PASSWORD")/" "$here/users.acl" >/tmp/users.acl
exec valkey-server "$here/valkey.conf" --maxmemory "$VALKEY_MAXMEMORY" --appendfsync "$VALKEY_APPENDFSYNC"
