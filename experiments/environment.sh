# Makes the project's Python environment; source it, then call `ensure_environment [EXTRA ...]`.
#
# Sets VENV_PYTHON, the interpreter to run. Read from the caller's environment:
#   PYTHON  the interpreter to build from (default: the first of python3, python3.12, python3.11,
#           python3.13, python3.10 that runs and is supported)
#   VENV    the folder of the environment (default: .venv in the checkout)
# The environment is built once and reused until setup.py, pyproject.toml or the pins change. Extras
# only add up, so scripts that ask for different ones share it. An interrupted build is repaired.

_checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_supported="3.10 3.11 3.12 3.13"

_fail() {
  echo "error: $*" >&2
  return 1
}

# Prints "3.11" for a Python that runs, nothing for one that does not.
_version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

_state() {
  if [[ -n "$1" ]]; then echo "is Python $1"; else echo "does not run"; fi
}

_is_supported() {
  [[ -n "$1" && " $_supported " == *" $1 "* ]]
}

_absolute() {
  case "$1" in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
  esac
}

# Prints the absolute path of the interpreter to build from.
_find_python() {
  local candidate version
  if [[ -n "${PYTHON:-}" ]]; then
    version="$(_version_of "$PYTHON")"
    if ! _is_supported "$version"; then
      _fail "PYTHON=$PYTHON $(_state "$version"); set it to a Python 3.10, 3.11, 3.12 or 3.13," \
        "the versions TensorFlow 2.20 is built for."
      return 1
    fi
    _absolute_command "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13 python3.10 python; do
    if _is_supported "$(_version_of "$candidate")"; then
      _absolute_command "$candidate"
      return
    fi
  done
  _fail "no Python 3.10 to 3.13 on the PATH (python3 $(_state "$(_version_of python3)"));" \
    "TensorFlow 2.20 needs one: install it, or set PYTHON=/path/to/python3.12."
}

_absolute_command() {
  _absolute "$(command -v "$1")"
}

# Changes whenever another installation is called for.
_requirements_hash() {
  local file
  for file in setup.py pyproject.toml third_party/constraints.txt; do
    cksum < "$_checkout/$file"
  done | cksum | tr -c '0-9\n' '-'
}

# _create_environment BASE_PYTHON FOLDER: an environment with pip, in place of whatever is there.
_create_environment() {
  local base="$1" folder="$2"
  local -a options=(--clear)
  if ! "$base" -c 'import ensurepip' 2>/dev/null; then
    options+=(--without-pip)  # Debian's python3 without python3-venv; its pip can still fill it.
  fi
  if ! "$base" -m venv "${options[@]}" "$folder" ||
    { [[ ${#options[@]} -gt 1 ]] &&
      ! "$base" -m pip --python "$folder/bin/python" install --quiet pip; }; then
    _fail "$base cannot make a virtual environment in $folder; install its venv package (Debian," \
      "Ubuntu: apt install python$(_version_of "$base")-venv), or set PYTHON to another Python."
    return 1
  fi
  : > "$folder/.made_by_ssl_influence"
}

_environment_works() {
  _is_supported "$(_version_of "$1/bin/python")" && "$1/bin/python" -m pip --version >/dev/null 2>&1
}

ensure_environment() {
  local folder base hash wanted recorded="" extras="" extra
  folder="$(_absolute "${VENV:-$_checkout/.venv}")"
  VENV_PYTHON="$folder/bin/python"
  local installed="$folder/.ssl_influence_installed" installing="$folder/.ssl_influence_installing"
  local made="$folder/.made_by_ssl_influence"

  mkdir -p "$(dirname "$folder")" || return 1
  if command -v flock >/dev/null; then  # Two scripts started together build it once.
    exec 9> "$folder.lock" || return 1
    if ! flock -n 9; then
      echo "Waiting for another script that is making $folder."
      flock 9 || return 1
    fi
  fi

  local rebuild=""
  if [[ -z "$(ls -A "$folder" 2>/dev/null)" ]]; then
    rebuild="new"
  elif ! _environment_works "$folder"; then
    rebuild="it is incomplete"
  elif [[ -e "$made" && -e "$installing" ]]; then
    rebuild="its installation was interrupted"
  elif [[ -n "${PYTHON:-}" && "$(_version_of "$PYTHON")" != "$(_version_of "$VENV_PYTHON")" ]]; then
    rebuild="PYTHON asks for another version"
  fi
  if [[ -n "$rebuild" && "$rebuild" != new && -n "${VENV:-}" && ! -e "$made" ]]; then
    _fail "VENV=$VENV holds something else than a working environment of the wanted Python" \
      "(3.10 to 3.13); remove it or name another folder."
    return 1
  fi
  if [[ -n "$rebuild" ]]; then
    base="$(_find_python)" || return 1
    if [[ "$rebuild" == new ]]; then
      echo "Making $folder with Python $(_version_of "$base") ($base)."
    else
      echo "Making $folder anew with Python $(_version_of "$base") ($base): $rebuild."
    fi
    _create_environment "$base" "$folder" || return 1
  fi

  # The record is the hash, then the extras that were asked for so far.
  hash="$(_requirements_hash)"
  wanted=" $* "
  if [[ -e "$installed" ]]; then
    read -r recorded extras < "$installed" || true
    local missing=""
    for extra in "$@"; do
      [[ " $extras " == *" $extra "* ]] || missing=1
    done
    if [[ "$recorded" == "$hash" && -z "$missing" ]]; then
      _release
      return 0
    fi
  fi
  for extra in $extras; do
    [[ "$wanted" == *" $extra "* ]] || wanted+="$extra "
  done
  wanted="$(echo $wanted)"
  echo "Installing ssl_influence${wanted:+ with the extras: $wanted} (some minutes the first time)."
  echo "unfinished $extras" > "$installed"
  : > "$installing"
  local status=0
  # seqeval, wanted by "text", has only a source release, which older pips cannot build in place.
  (cd "$_checkout" && "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --use-pep517 \
    -c third_party/constraints.txt -e ".${wanted:+[${wanted// /,}]}") || status=$?
  rm -f "$installing"
  if [[ $status -ne 0 ]]; then
    _fail "pip could not install into $folder; its message is above. Running this again goes on from here."
    return 1
  fi
  echo "$hash $wanted" > "$installed"
  _release
}

_release() {
  if command -v flock >/dev/null; then
    exec 9>&-
  fi
}
