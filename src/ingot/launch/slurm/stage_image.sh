# shellcheck shell=bash
# Copy an image to a node's own disk, named by its SHA-256 and checked by it: once, while other processes wait. A complete
# copy has its final name. The images used last stay. Used by job scripts and by `ingot launch image stage`.
# shellcheck disable=SC2317,SC2329  # called on the nodes
stage_image() { # IMAGE FOLDER DIGEST [HOW_MANY_STAY]
  local copy=$2/$3.sqsh draft=$2/.$3.draft
  mkdir -p "$2" && exec 9>"$2/.lock" && flock 9 || return
  if [[ $(stat -c %s "$copy" 2>/dev/null) != $(stat -Lc %s "$1") ]]; then
    rm -f "$2"/.*.draft # of killed processes
    cp "$1" "$draft" || return
    echo "$3  $draft" | sha256sum --check --status || { rm -f "$draft" && return 3; }
    sync "$draft" && mv "$draft" "$copy" || return
  fi
  # shellcheck disable=SC2012  # the names are hashes
  touch "$copy" && ls -t "$2"/*.sqsh | tail -n +$((${4:-2} + 1)) | xargs -r rm -f
}
