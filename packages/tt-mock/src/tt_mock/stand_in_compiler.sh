#!/bin/bash
# Stands in for Tenstorrent's compiler of device kernels, so that ttnn builds its programs on a mock cluster.
# Every kernel becomes the same stub that returns at once, linked as ttnn asks, for its loader checks the file.
# It refuses to work for anything but a mock cluster: a real device would run stubs.
set -e
if [[ " $* " == *" --version "* || " $* " == *" -dumpversion "* ]]; then
    echo "riscv-tt-elf-g++ (tenstorrent/sfpi:$STAND_IN_VERSION) 15.1.0"
    exit
fi
if [[ -z $TT_METAL_MOCK_CLUSTER_DESC_PATH ]]; then
    echo "stand-in compiler: it builds for mock clusters only" >&2
    exit 1
fi
linking=() script="" output="" depends="" source=/dev/null
while (($#)); do
    case $1 in
        -o) output=$2 && shift ;;
        -MF) depends=$2 && shift ;;
        -include | -x) shift ;;
        -T?*) script=${1#-T} ;;
        -L?*) linking+=("$1") ;;
        -Wl,--just-symbols=*) linking+=("${1#-Wl,}") ;;
        *.cc | *.cpp | *.c | *.S | *.h) source=$1 ;;
    esac
    shift
done
stub=$(dirname "$0")/stub.o
if [[ -n $script ]]; then
    exec riscv64-unknown-elf-ld -m elf32lriscv -nostdlib --no-relax --emit-relocs --no-warn-mismatch \
        -z max-page-size=16 -z common-page-size=16 "${linking[@]}" -T "$script" "$stub" -o "$output"
fi
if [[ $output == *.o ]]; then cp -f "$stub" "$output"; else : >"$output"; fi
if [[ -n $depends ]]; then echo "$output: $source" >"$depends"; fi
