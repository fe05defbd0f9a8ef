#!/bin/sh
# Names what this machine lacks for `make demo` and `make test`, each with its remedy. Silent when nothing is missing; a browser
# and CMake are optional, and a note.
# PYTHON (default python3) is the interpreter that .venv will be made with; CXX (default g++) is Inductor's compiler.
PYTHON=${PYTHON:-python3}
if [ -z "${CXX:-}" ]; then
    # The compiler that Inductor looks for when CXX is not set.
    if [ "$(uname -s)" = Darwin ]; then CXX=clang++; else CXX=g++; fi
fi
missing=0

lacks() { # what, remedy
    echo "missing: $1" >&2
    echo "    remedy: $2" >&2
    missing=1
}

has() { command -v "$1" >/dev/null 2>&1; }

if ! has "$PYTHON" || ! "$PYTHON" -c '' >/dev/null 2>&1; then
    lacks "Python 3.11 or newer ($PYTHON is not there, or does not start)" \
        "apt-get install python3 python3-venv python3-dev, or name another one: make PYTHON=python3.12 ..."
elif ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    lacks "Python 3.11 or newer ($PYTHON is $("$PYTHON" -c 'import platform; print(platform.python_version())'))" \
        "apt-get install python3.11 python3.11-venv python3.11-dev, then: make PYTHON=python3.11 ..."
else
    if ! "$PYTHON" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        lacks "the venv module of $PYTHON" "apt-get install python3-venv"
    fi
    header=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
    if [ ! -f "$header" ]; then
        lacks "the C headers of $PYTHON ($header), which Inductor's kernels include" "apt-get install python3-dev"
    fi
fi

if ! has git; then
    lacks "git" "apt-get install git"
fi

# shellcheck disable=SC2086  # CXX may carry arguments, as in 'ccache g++'
if ! has ${CXX%% *}; then
    lacks "a C++ compiler ($CXX), which Inductor calls" "apt-get install g++, or name another one: CXX=clang++ make ..."
elif ! printf '#include <vector>\nint main() { return 0; }\n' | $CXX -x c++ -fsyntax-only - >/dev/null 2>&1; then
    lacks "a working C++ compiler ($CXX cannot compile a program that includes <vector>)" \
        "apt-get install --reinstall g++, or name another one: CXX=clang++ make ..."
fi

if ! [ -x "${FXSHARD_BROWSER:-}" ] && ! has chromium && ! has chromium-browser && ! has google-chrome; then
    echo "note: without Chromium the tests of the HTML report in a browser are skipped" >&2
    echo "    remedy: apt-get install chromium, or name one: FXSHARD_BROWSER=/path/to/chrome" >&2
fi

if ! has cmake; then
    echo "note: without CMake the test of examples/cpp, which runs a compiled program without Python, is skipped" >&2
    echo "    remedy: apt-get install cmake g++" >&2
fi

if [ "$missing" -ne 0 ]; then
    echo "fxshard: install what is missing above, then run make again" >&2
fi
exit "$missing"
