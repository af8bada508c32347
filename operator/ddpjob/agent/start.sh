# Start the agent with the Python that the image's torchrun has: it is the one with PyTorch.
#
#   sh start.sh TORCHRUN FOLDER OPTIONS ARGS...
#
# TORCHRUN is a program or Python itself, FOLDER has the agent's files. The rest is for the agent.

python_of() {
  case "${1##*/}" in python*) echo "$1"; return ;; esac
  script=$(command -v "$1") || return
  { IFS= read -r first; IFS= read -r second; } < "$script"
  first=${first#'#!'}
  first=${first# }
  case "$first" in
    */env\ *) echo "${first##* }" ;;
    *python*) echo "${first%% *}" ;;
    # pip writes a long path, or one with spaces, into the second line: '''exec' PATH "$0" "$@"
    */sh)
      path=${second#"'''exec' "}
      case "$path" in
        "$second") ;;
        \"*) path=${path#\"}; echo "${path%%\"*}" ;;
        *) echo "${path%% *}" ;;
      esac ;;
  esac
}

python=
for candidate in "$(python_of "$1" 2> /dev/null)" python3 python; do
  if [ -n "$candidate" ] && command -v "$candidate" > /dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "ddpjob: the image has no Python: found neither $1, python3 nor python. Use an image with" \
    "PyTorch, or set spec.torchrun.python to the path of its Python." >&2
  exit 127
fi
folder=$2
shift 2
exec "$python" -IS "$folder" agent "$@"
