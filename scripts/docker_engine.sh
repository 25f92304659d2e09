#!/bin/bash
# A private Docker engine for machines that can pull no image (CI without a registry); needs root.
#
#   scripts/docker_engine.sh start          start it, print DOCKER_HOST=unix://...
#   scripts/docker_engine.sh rootfs FILE    pack a Python image's files out of Debian packages
#   scripts/docker_engine.sh stop           remove its containers and end it
#
# TURNGYM_ENGINE_DIR   where socket, images and logs live (default /tmp/turngym-engine)
# TURNGYM_ROOTFS_PIP   Python packages to put into the rootfs, for example "numpy sympy"
set -euo pipefail

dir=${TURNGYM_ENGINE_DIR:-/tmp/turngym-engine}
socket=$dir/docker.sock

api() { curl --fail --silent --unix-socket "$socket" "$@"; }

install_engine() {
  command -v dockerd >/dev/null && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends docker.io >&2
}

start() {
  install_engine
  mkdir -p "$dir"
  if ! api http://engine/_ping >/dev/null; then
    # Sessions have no network, so neither bridge nor firewall rules are needed: the engine then
    # starts in any container or VM, whatever its kernel offers.
    setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/dockerd.pid" \
      --host "unix://$socket" --bridge=none --iptables=false --ip6tables=false \
      --log-level=error >"$dir/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 200); do api http://engine/_ping >/dev/null && break; sleep 0.1; done
    api http://engine/_ping >/dev/null || { tail -n 20 "$dir/dockerd.log" >&2; exit 1; }
  fi
  echo "DOCKER_HOST=unix://$socket"
}

rootfs() {
  local out skip
  out=$(realpath "$1")
  work=$(mktemp -d)  # not local: the trap runs after this function
  trap 'rm -rf "$work"' EXIT
  # What only package management or perl asks for does not run in a sandbox.
  skip='^(perl|libperl|libdb|libgdbm|dpkg|tar$|debianutils|install-info|mailcap|readline-common)'
  apt-cache show dash >/dev/null 2>&1 || apt-get update -qq
  mkdir -p "$work/debs" "$work/root"
  apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances python3 dash coreutils base-files netbase libstdc++6 |
    grep '^[a-z]' | sort -u | grep -vE "$skip" >"$work/list"
  (cd "$work/debs" && xargs apt-get download -qq -o APT::Sandbox::User=root <"$work/list" >/dev/null)
  for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
  cd "$work/root"
  mkdir -p proc sys dev etc bin tmp workspace
  chmod 1777 tmp workspace
  ln -sf dash bin/sh
  printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'sandbox:x:1000:1000::/workspace:/bin/sh' >etc/passwd
  printf '%s\n' 'root:x:0:' 'sandbox:x:1000:' >etc/group
  rm -rf usr/share/{doc,man,locale,lintian,bug}
  if [ -n "${TURNGYM_ROOTFS_PIP:-}" ]; then
    # shellcheck disable=SC2086  # a list of packages
    python3 -m pip install -qq --root-user-action=ignore --only-binary=:all: --target usr/lib/python3/dist-packages \
      --python-version "$(readlink usr/bin/python3 | tr -d a-z)" \
      $TURNGYM_ROOTFS_PIP
  fi
  tar --create --file "$out" .
}

stop() {
  [ -f "$dir/dockerd.pid" ] || return 0
  local pid
  pid=$(cat "$dir/dockerd.pid")
  for id in $(api 'http://engine/containers/json?all=1' | grep -o '"Id":"[0-9a-f]*"' | cut -d'"' -f4); do
    api -X DELETE "http://engine/containers/$id?force=1" || true
  done
  kill "$pid"
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
  kill -9 "$pid"
}

case ${1:-} in
  start) start ;;
  rootfs) rootfs "${2:?usage: $0 rootfs FILE}" ;;
  stop) stop ;;
  *) sed -n '2,10p' "$0" >&2; exit 2 ;;
esac
