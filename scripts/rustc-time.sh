#!/usr/bin/env bash
# As RUSTC_WRAPPER: runs the compiler, and adds a line `CRATE CPU-SECONDS` to the file RLOOD_RUSTC_TIMES.
name=-
for ((i = 1; i < $#; i++)); do
    if [[ ${!i} == --crate-name ]]; then
        next=$((i + 1))
        name=${!next}
        break
    fi
done
TIMEFORMAT='%U %S'
exec 3>&1 4>&2
times=$({ time "$@" >&3 2>&4; } 2>&1)
status=$?
[[ $name == ___ || $name == - ]] || awk -v name="$name" '{ print name, $1 + $2 }' <<<"$times" >>"$RLOOD_RUSTC_TIMES"
exit "$status"
