# Start the agent with the Python that the image's torchrun has: it is the one with PyTorch.
#
#   sh start.sh TORCHRUN FOLDER OPTIONS ARGS...
#
# TORCHRUN is a program or Python itself, FOLDER has the agent's files. The rest is for the agent.

# A shim may run any program, such as bash, and a folder may be called python.
is_python() {
  case "${1##*/}" in python*) return 0 ;; esac
  return 1
}

# The first line of a script may be: /usr/bin/env -S NAME=VALUE python3 -E
python_in() {
  set -f
  for word in $1; do
    word=${word#-S}
    case "$word" in *=*) continue ;; esac
    if is_python "$word"; then echo "$word"; return; fi
  done
}

python_of() {
  if is_python "$1"; then echo "$1"; return; fi
  script=$(command -v "$1") || return
  { IFS= read -r first; IFS= read -r second; } < "$script"
  first=${first#'#!'}
  first=${first# }
  case "$first" in
    */env\ *) python_in "${first#* }" ;;
    # pip writes a long path, or one with spaces, into the second line: '''exec' PATH "$0" "$@"
    */sh)
      path=${second#"'''exec' "}
      case "$path" in
        "$second") ;;
        \"*) path=${path#\"}; echo "${path%%\"*}" ;;
        *) echo "${path%% *}" ;;
      esac ;;
    *) echo "${first%% *}" ;;
  esac
}

python=
for candidate in "$(python_of "$1" 2> /dev/null)" python3 python; do
  if is_python "$candidate" && command -v "$candidate" > /dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  advice="Use an image with PyTorch, or set spec.torchrun.python to the path of its Python."
  case "$PATH" in *'$('*)
    advice='Kubernetes does not expand $(PATH): give the whole path in env.' ;;
  esac
  # The status shows the beginning of this line, and a PATH may be long.
  echo "ddpjob: found no Python: neither $1, python3 nor python is on the PATH. $advice" \
    "PATH=$PATH" >&2
  exit 127
fi
folder=$2
shift 2
exec "$python" -IS "$folder" agent "$@"
