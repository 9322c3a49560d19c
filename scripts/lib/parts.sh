# SPDX-License-Identifier: BSL-1.0
# Sourced by the scripts that run one part after the other: part NAME COMMAND..., and at the end finish_parts.
#
# A part that fails does not keep the later ones from running. Exit code 77 means that it was left out. A command may add a text to `outcome`.

summary=()
failed=0

part() {
    local name=$1 start=$SECONDS status=0
    shift
    echo
    echo "=== $name"
    outcome=''
    "$@" || status=$?
    case $status in
        0) summary+=("$name: passed in $((SECONDS - start)) s$outcome") ;;
        77) summary+=("$name: left out$outcome") ;;
        *) failed=1 summary+=("$name: FAILED after $((SECONDS - start)) s$outcome") ;;
    esac
    return 0
}

finish_parts() {
    echo
    echo "=== in all: $SECONDS s"
    printf '%s\n' "${summary[@]}"
    exit "$failed"
}
