# shellcheck shell=bash
# What the five scripts share; each sources it with its own arguments: the folder to work in, a way to show each command
# as it runs, and training on Slurm, or on this machine where no Slurm answers.

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! command -v ingot >/dev/null; then
  PATH=$EXAMPLES/../.venv/bin:$PATH
fi
if [[ $# -ne 1 ]]; then
  echo "usage: $0 FOLDER   (new, or one to continue in; on a cluster, on a file system that all nodes see)" >&2
  exit 2
fi
mkdir -p "$1"
cd "$1" || exit
PROCESSES=1 # of the small form, on each of two nodes
answers=''  # whether Slurm does

# A command, as one would type it (on standard error, as `set -x` does), and what it says.
show() {
  {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
  } >&2
  "$@"
}

# Text and tokenizers for the small form, in the folder text.
make_text() {
  "$(dirname "$(command -v ingot)")/python" "$EXAMPLES/small_text.py" text
}

# Whether Slurm's commands are here, and a Slurm that answers them; asked once.
has_slurm() {
  if [[ -z $answers ]]; then
    answers=no
    if command -v sbatch >/dev/null && timeout 20 sinfo --noheader >/dev/null 2>&1; then
      answers=yes
    fi
  fi
  [[ $answers == yes ]]
}

# The run or preparation in a folder, until it has ended; fails if it failed.
await() {
  local state=''
  while :; do
    state=$(ingot status "$1" | sed -n 's/^state: \([a-z ]*\).*/\1/p')
    case $state in
      finished) return 0 ;;
      queued | starting | running | restarting | waiting | stopping | ending | suspended | held | unknown) sleep 2 ;;
      *)
        echo "$1 is $state" >&2
        ingot logs --errors "$1" >&2
        return 1
        ;;
    esac
  done
}

# train RUN: what FULL (at full size) or SMALL describes, whose save_folder is RUN.
train() {
  if [[ $SIZE == full ]]; then
    show ingot launch slurm "${FULL[@]}"
    await "$1"
  elif has_slurm; then
    show ingot launch slurm "${SMALL[@]}" -N 2 --processes-per-node "$PROCESSES" --profile cpu --time 30
    await "$1"
    show ingot logs "$1"
  else
    echo
    echo "No Slurm answers here, so the job of the full size is only written, to job.sh, and the small form trained by"
    echo "processes of this machine."
    show ingot launch slurm "${FULL[@]}" --dry-run >job.sh
    grep '^#SBATCH' job.sh
    show ingot launch local "${SMALL[@]}" --profile cpu --processes-per-node "$((2 * PROCESSES))"
  fi
}
