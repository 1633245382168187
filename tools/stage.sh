#!/usr/bin/env bash
# stage.sh NAME COMMAND...: runs the command, then says whether it held and how long it took.
name=$1
shift
start=$EPOCHREALTIME
"$@" && outcome=passed || { code=$?; outcome=FAILED; }
printf '%s: %s in %.1f s\n' "$name" "$outcome" "$(awk "BEGIN { print $EPOCHREALTIME - $start }")" >&2
exit "${code:-0}"
