#!/bin/sh
# Make sure the MQTT broker of the demo and the tests is there. Does nothing where it already is.
set -eu

PATH="$PATH:/usr/sbin:/usr/local/sbin"
if command -v mosquitto >/dev/null 2>&1; then
    exit 0
fi

remedy() {
    echo "mosquitto (the MQTT broker) is not installed and could not be installed from here." >&2
    echo "  Debian, Ubuntu, JetPack:  sudo apt-get install mosquitto" >&2
    echo "  Fedora:                   sudo dnf install mosquitto" >&2
    echo "  macOS:                    brew install mosquitto" >&2
    echo "Then run the same command again." >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 || remedy
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    remedy
fi

echo "Installing mosquitto with apt …"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq || true
$as_root apt-get install -y -qq --no-install-recommends mosquitto >/dev/null || remedy
# Debian starts a broker on port 1883 when it can; ours run on ports of their own.
command -v mosquitto >/dev/null 2>&1 || remedy
