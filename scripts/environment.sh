# Sourced by the scripts that need a Python environment: finds a Python that really runs and lets bootstrap.py do the rest.
# Kept to bash 3.2. Variables are called _gpu_*, see scripts/gpu.

_gpu_bootstrap=${BASH_SOURCE[0]%/*}/gpu_skills/bootstrap.py

# A version manager may offer a command for a version that is not installed, so being on the PATH says little.
_gpu_runs() {
  "$1" -I -c "import sys; assert sys.version_info >= (3, 11)$2" </dev/null >/dev/null 2>&1
}

# Sets _gpu_python to the first that can make environments, or else to one that uv can make them for.
_gpu_find_python() {
  _gpu_python=
  if [ -n "${GPU_PYTHON-}" ]; then
    _gpu_runs "$GPU_PYTHON" "" && _gpu_python=$GPU_PYTHON
    return
  fi
  for _gpu_name in python3.14 python3.13 python3.12 python3.11 python3 python; do
    command -v "$_gpu_name" >/dev/null || continue
    if _gpu_runs "$_gpu_name" "; import ensurepip, venv"; then
      _gpu_python=$_gpu_name
      return
    fi
    [ -n "$_gpu_python" ] || ! _gpu_runs "$_gpu_name" "" || _gpu_python=$_gpu_name
  done
  if [ -z "$_gpu_python" ] && command -v uv >/dev/null; then
    _gpu_name=$(uv python find --no-project --no-python-downloads '>=3.11' 2>/dev/null)
    [ -z "$_gpu_name" ] || ! _gpu_runs "$_gpu_name" "" || _gpu_python=$_gpu_name
  fi
}

# make_environment LOCK [--remake] -- [the caller's arguments]
# Prints the folder of an environment with exactly the locked packages, made now if need be. On failure: one line on
# stderr, the error document on stdout if the arguments ask for JSON, and status 1.
make_environment() {
  _gpu_find_python
  if [ -n "$_gpu_python" ]; then
    "$_gpu_python" -I -B "$_gpu_bootstrap" "${OSTYPE%%[0-9]*}-$HOSTTYPE" "$@"
    return
  fi
  _gpu_message="no Python 3.11 or newer runs here"
  _gpu_next="install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python; or: uv python install 3.12)"
  if [ -n "${GPU_PYTHON-}" ]; then
    _gpu_message="the Python that GPU_PYTHON names is not 3.11 or newer, or does not run"
    _gpu_next="set GPU_PYTHON to one that is, or unset it"
  fi
  printf 'gpu: %s; next: %s [missing_program]\n' "$_gpu_message" "$_gpu_next" >&2
  case " $* " in
    *" --json "*)
      printf '{"format": 1, "error": {"code": "missing_program", "message": "%s", ' "$_gpu_message"
      printf '"next_step": "%s", "retryable": false, "may_be_billing": false, "details": {}}}\n' "$_gpu_next"
      ;;
  esac
  return 1
}
