# What the scripts under ci/ share. Sourced, never run: the sourcing script has set -euo pipefail.
#
# They end with `main "$@"; exit` on one line: bash reads a script while it runs it, and goes on somewhere in one that was edited
# meanwhile, for an hour perhaps.

# The user's settings do not change what is read from programs' output. bash imports exported functions, which would take the
# place of programs.
# shellcheck disable=SC2046 # a list
unset -f $(compgen -A function)
unset CDPATH
umask 022
# An ordinary user's PATH lacks what makes file systems and finds modules.
export PATH=$PATH:/usr/sbin:/sbin
# What programs print is parsed, and times are written: in one language, whatever the user's.
export LC_ALL=C.UTF-8

ROOT=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)
CI_DIR=$ROOT/target/ci
BIN_DIR=$ROOT/target/x86_64-unknown-linux-gnu/release

say() { printf '%s: %s\n' "${SAY_AS:-$(basename "$0")}" "$*" >&2; }
die() { say "$*"; exit 1; }

# usage: the comment at the head of the script that runs.
usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p}' "$0"; }
# refuse WHAT...: for a command line that nothing can be made of; before any work is done.
refuse() { say "$* (--help says what there is)"; exit 2; }

# xtask TASK [ARGUMENT...]: a task that speaks in this script's name.
xtask() { SAY_AS=$SAY_AS "$ROOT/ci/xtask/run" "$@"; }

# build_programs: the programs, the clients and the guests' images, which contain some of the programs.
build_programs() {
    as_job xtask build programs || return
    as_job xtask build clients || return
    as_job_with_root "$ROOT/guest/image/build"
}

have_command() { command -v "$1" >/dev/null; }

# in_background COMMAND...: a job that is a process group of its own, which Ctrl-C does not reach: end_jobs ends it, and the
# hosts in it. (A guest test on this machine itself is a group of its own again, and ends with its runner.)
in_background() {
    trap 'end_jobs 129' HUP
    trap 'end_jobs 130' INT
    trap 'end_jobs 143' TERM
    set -m
    FORESHORE_IS_JOB=yes "$@" </dev/null &
    set +m
}

# how_ended STATUS: prints what an exit status of ci/nested/host means.
how_ended() {
    case $1 in
        124) echo "time limit reached" ;;
        125) echo "the host failed" ;;
        *)
            local signal
            if [ "$1" -gt 128 ] && signal=$(kill -l $(($1 - 128)) 2>/dev/null); then echo "SIG$signal"
            else echo "exit code $1"; fi ;;
    esac
}

# as_job COMMAND...: runs the command as a job and returns its exit status. A signal to this script then ends the job as well:
# while bash waits for a command in the foreground, it runs no trap, or dies and leaves the command behind.
as_job() {
    local status=0
    in_background "$@"
    wait "$!" || status=$?
    trap - INT TERM HUP
    return "$status"
}

# as_job_with_root COMMAND...: the same for a command that may need root. Where sudo would ask for a password at the terminal, it
# runs in the foreground, because a job cannot ask. Ctrl-C ends it there as well.
as_job_with_root() {
    if asks_for_password; then "$@"; else as_job "$@"; fi
}

asks_for_password() {
    [ "$(id -u)" -ne 0 ] && [ -z "${FORESHORE_IS_JOB:-}" ] && (: </dev/tty) 2>/dev/null && have_command sudo &&
        ! sudo -n true 2>/dev/null
}

# end_jobs STATUS: ends all jobs, then this script with that exit status.
end_jobs() {
    trap '' INT TERM HUP
    local job running tries
    running=$(jobs -rp)
    for job in $running; do
        kill -- "-$job" 2>/dev/null || true
        # A stopped job ends when it goes on.
        kill -CONT -- "-$job" 2>/dev/null || true
    done
    wait
    # A host takes a moment to end its QEMU. Who starts anew at once is not to find it.
    for job in $running; do
        for ((tries = 0; tries < 100; tries++)); do
            kill -0 -- "-$job" 2>/dev/null || break
            sleep 0.1
        done
    done
    exit "$1"
}

# Boots of the emulated host that one thing may take, where the emulation breaks kernels (docs/testing.md).
HOST_BOOTS=3

# host_kernel_died STATUS DIR: whether the emulated host's kernel or QEMU, not what ran on it, ended the boot that has left
# its log in DIR. A host without memory was killed by what ran in it: that is a result. The last three marks are those of
# ci/nested/host.
host_kernel_died() {
    local console=$2/host-console.log
    [ "$1" -eq 125 ] && [ -e "$console" ] &&
        grep -qE 'Kernel panic - not syncing|^host: (a CPU triple-faulted|QEMU was ended by signal|the host stood still)' "$console" &&
        ! grep -qE 'Kernel panic - not syncing: (Out of memory|System is deadlocked)' "$console"
}

# broken_guest DIR: prints which of the guests' consoles in DIR has the emulation's mark, a breakpoint or a debug
# exception that nobody set (has_the_mark in ci/guest-tests/src/runner.rs). Fails if none has, or if there was no
# emulated host.
broken_guest() {
    local consoles
    [ -e "$1/host-console.log" ] && consoles=$(grep -lsE 'Oops: int3| exc_debug_kernel\+' "$1"/*.console.log) && basename "${consoles%%$'\n'*}"
}

# unbroken DIR COMMAND...: runs a command that boots the host and leaves its logs in DIR. Where the emulation broke a
# kernel, the command's failure says nothing: DIR's files go to DIR/broken-N, and the command runs anew.
unbroken() {
    local dir=$1 status broken
    shift
    broken_boots=0
    while :; do
        status=0
        "$@" || status=$?
        [ "$status" -ne 0 ] || return 0
        if host_kernel_died "$status" "$dir"; then broken="the host's kernel"
        elif broken=$(broken_guest "$dir"); then broken="a guest's kernel ($broken)"
        else return "$status"; fi
        broken_boots=$((broken_boots + 1))
        say "THE EMULATION BROKE $broken: this run says nothing (docs/testing.md)"
        if [ "$broken_boots" -ge "$HOST_BOOTS" ]; then
            say "that was run $broken_boots of at most $HOST_BOOTS"
            return "$status"
        fi
        mkdir -p "$dir/broken-$broken_boots"
        find "$dir" -maxdepth 1 -type f -exec mv -t "$dir/broken-$broken_boots" {} +
        say "its logs are in ${dir#"$ROOT/"}/broken-$broken_boots; run $((broken_boots + 1)) of at most $HOST_BOOTS begins"
    done
}

# say_if_broken: at the end, where it is not overlooked.
say_if_broken() {
    [ "$broken_boots" -eq 0 ] ||
        say "runs that said nothing, because the emulation broke a kernel (docs/testing.md): $broken_boots"
}
