# What the scripts under ci/ share. Sourced, never run: the sourcing script has set -euo pipefail.
#
# They end with `main "$@"; exit` on one line: bash reads a script while it runs it, and goes on somewhere in one that was edited
# meanwhile, for an hour perhaps.

# The user's settings change neither images nor what is read from programs' output. bash imports exported functions, which
# would take the place of programs.
# shellcheck disable=SC2046 # a list
unset -f $(compgen -A function)
unset CDPATH MODPROBE_OPTIONS
umask 022
# Programs of the distribution. A script that makes images sets PATH to this: a program of the user's does not count.
# shellcheck disable=SC2034 # those scripts read it
SYSTEM_PATH=/usr/sbin:/usr/bin:/sbin:/bin
# An ordinary user's PATH lacks what makes file systems and finds modules. cargo and QEMU may be the user's own.
USER_PATH=$PATH:/usr/sbin:/sbin
export PATH=$USER_PATH
# There is no such file, so mke2fs uses its own defaults instead of /etc/mke2fs.conf.
export MKE2FS_CONFIG=/nonexistent/mke2fs.conf

ROOT=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)
CI_DIR=$ROOT/target/ci
# Packages are the same for every checkout: a machine with several may share them.
DEB_CACHE=${FORESHORE_DEB_CACHE:-$CI_DIR/debs}
KERNELS_LOCK=$ROOT/ci/kernels.lock
TARGET_TRIPLE=x86_64-unknown-linux-gnu
BIN_DIR=$ROOT/target/$TARGET_TRIPLE/release

# What programs print is parsed, and times are written: in one language, whatever the user's.
export LC_ALL=C.UTF-8

say() { printf '%s: %s\n' "${SAY_AS:-$(basename "$0")}" "$*" >&2; }
die() { say "$*"; exit 1; }

# Steps of this run, and the second in which each began.
step_names=() step_starts=()

# begin_step NAME: ends the step before, for print_step_times.
begin_step() {
    step_names+=("$1")
    step_starts+=("$SECONDS")
}

# print_step_times: a line per step with its seconds, and the sum.
print_step_times() {
    local i end
    for i in "${!step_names[@]}"; do
        end=${step_starts[i + 1]:-$SECONDS}
        printf '  %5d s  %s\n' $((end - step_starts[i])) "${step_names[i]}"
    done
    printf '  %5d s  in all\n' "$SECONDS"
}

# usage: the comment at the head of the script that runs.
usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//p}' "$0"; }
# refuse WHAT...: for a command line that nothing can be made of; before any work is done.
refuse() { say "$* (--help says what there is)"; exit 2; }

# How often a long build says that it goes on, where nobody sees cargo's own progress.
BUILD_NEWS_S=30

# run_cargo ARGUMENT...: on a terminal cargo shows how far it is. Elsewhere that would be a line for each of many
# crates: a line now and then stands for them; warnings and errors come through.
run_cargo() {
    if [ -t 2 ]; then cargo "$@"; return; fi
    # Its bar is the one place where it says of how many steps.
    CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=always CARGO_TERM_PROGRESS_WIDTH=80 cargo "$@" 2>&1 | cargo_news
}

# A bar looks so, and the next one, or a line, is written over it: "    Building [===>      ] 3/19: serde(build)   \r".
CARGO_BAR='Building \[[^]]*\] ([0-9]+)/([0-9]+):'

cargo_news() {
    local line='' part status=0 crates=0 crate='' steps='' began=$SECONDS said=$SECONDS
    until [ "$status" = 1 ]; do
        status=0
        # Above 128: nothing came, or no whole line. 1: the end.
        IFS= read -r -t 1 part || status=$?
        line+=$part
        # The last of several: what is before it is as long as can be.
        if [[ $line =~ .*$CARGO_BAR ]]; then steps="${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} steps done, "; fi
        line=${line##*$'\r'}
        if [ "$status" -le 1 ]; then
            case $line in
                '   Compiling '* | '    Checking '*)
                    crates=$((crates + 1))
                    read -r _ crate _ <<<"$line" ;;
                # The other things cargo says of itself.
                '' | '    Finished '* | '    Building ['* | '    Updating '* | '  Downloaded '* | ' Downloading '* | '  Executable '*) ;;
                *) printf '%s\n' "$line" >&2 ;;
            esac
            line=''
        fi
        if [ $((SECONDS - said)) -ge "$BUILD_NEWS_S" ]; then
            said=$SECONDS
            say "cargo is at work: $steps$crates crates begun in $((SECONDS - began)) s${crate:+, the last of them $crate}"
        fi
    done
    [ "$said" = "$began" ] || say "cargo is done: $crates crates in $((SECONDS - began)) s"
}

# build_programs: the programs, the clients and the guests' images, which contain some of the programs.
build_programs() {
    begin_step "release build"
    build_binaries || return
    begin_step "release build of the API clients"
    say "building the API clients of the tests"
    # Apart: features are those of all that is built at once, and clients want more of hyper than the VMM has.
    as_job cargo_in_root build --release -p client-tests || { say "the build of the clients failed"; return 1; }
    begin_step "guest images"
    as_job_with_root "$ROOT/guest/image/build"
}

build_binaries() {
    say "building the programs (cargo build --release)"
    [ -e "$BIN_DIR/foreshore" ] || say "the first build takes 4 to 7 minutes on two cores, later ones seconds"
    as_job cargo_in_root build --release --bins || { say "the build failed"; return 1; }
}

cargo_in_root() { cd "$ROOT" && run_cargo "$@"; }

as_root() {
    require_root "$@"
    if [ "$(id -u)" -eq 0 ]; then "$@"
    # A job cannot ask for a password: it would be stopped for reading from the terminal.
    else sudo ${FORESHORE_IS_JOB:+-n} "$@"
    fi
}

# require_root COMMAND...: ends the script if as_root has no way to run the command.
require_root() {
    [ "$(id -u)" -eq 0 ] || have_command sudo || die "needs root for: $* (neither root nor sudo here)"
}

# sudo_advice: prints a remedy if sudo would ask a job for a password. sudo remembers the last one for
# some minutes only, and a job may need root later than that.
sudo_advice() {
    if [ "$(id -u)" -ne 0 ] && [ -n "${FORESHORE_IS_JOB:-}" ] && ! sudo -n true 2>/dev/null; then
        echo ": sudo asks for a password, which no job can give. Run \`sudo -v\`, and then this script again"
    fi
}

have_command() { command -v "$1" >/dev/null; }

# refresh_package_lists: at most once per run of a script.
refresh_package_lists() {
    [ -z "${PACKAGE_LISTS_FRESH:-}" ] || return 0
    say "refreshing the package lists (apt-get update)"
    as_root apt-get update -qq || die "apt-get update failed$(sudo_advice)"
    PACKAGE_LISTS_FRESH=1
}

# install_packages PACKAGE...
install_packages() {
    say "installing by apt: $*"
    # Checked here, because the first attempt below discards its errors.
    require_root apt-get install
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    refresh_package_lists
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        die "apt could not install: $*$(sudo_advice)"
}

# download_deb PACKAGE[=VERSION]: leaves the .deb in DEB_CACHE, prints nothing; fails when the mirror lacks it.
download_deb() {
    mkdir -p "$DEB_CACHE"
    local attempt
    for attempt in 1 2; do
        # The sandbox user cannot write where we can; we verify what arrives ourselves.
        (cd "$DEB_CACHE" && apt-get download -q -o APT::Sandbox::User=root "$1") >/dev/null 2>&1 && return 0
        [ "$attempt" = 2 ] || refresh_package_lists
    done
    return 1
}

# deb_file PACKAGE VERSION: the name apt-get download gives (it percent-encodes the epoch's colon).
deb_file() { printf '%s/%s_%s_amd64.deb' "$DEB_CACHE" "$1" "${2//:/%3a}"; }

# package_tree PACKAGE: prints the directory a Debian package is unpacked in, fetching it if it is not there.
package_tree() {
    local package=$1 tree=$CI_DIR/packages/$1 deb
    if [ ! -d "$tree" ]; then
        deb=$(cached_deb "$package")
        if [ -z "$deb" ]; then
            say "fetching $package"
            download_deb "$package" || die "the mirror has no package $package"
            deb=$(cached_deb "$package")
        fi
        rm -rf "$tree.new"
        mkdir -p "$tree.new"
        dpkg -x "$deb" "$tree.new"
        mv "$tree.new" "$tree"
    fi
    printf '%s' "$tree"
}

# cached_deb PACKAGE: the newest .deb of it in the cache, or nothing.
cached_deb() { find "$DEB_CACHE" -maxdepth 1 -name "$1_*.deb" -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 | cut -d' ' -f2-; }

# measured_on: what figures are measured on, in a line: our programs by their commit and, where the host is emulated, by which
# QEMU: a mended one (ci/nested/mend-qemu) says of itself that it is the other.
measured_on() {
    local ours qemu
    ours="foreshore $(git -C "$ROOT" describe --always --dirty --abbrev=12 2>/dev/null || echo 'of no commit')"
    if [ "$("$ROOT/ci/nested/host" --which)" = direct ]; then
        echo "$ours; this machine: $(awk -F ': ' '/^model name/ { print $2; exit }' /proc/cpuinfo), Linux $(uname -r)"
        return
    fi
    qemu=$("$ROOT/ci/nested/mend-qemu")
    echo "$ours; emulated, Linux $(kernel_field 6.12 version), $("$qemu" --version | head -n 1)$(
        [ "$qemu" = "$(command -v qemu-system-x86_64)" ] || echo ', mended'), sha256 $(sha256sum <"$qemu" | cut -d ' ' -f 1)"
}

# kernel_names: the names in the lock, in its order.
kernel_names() { awk '!/^#/ && NF { print $1 }' "$KERNELS_LOCK"; }

# kernel_field NAME FIELD: package, version or sha256 of a kernel in the lock.
kernel_field() {
    local column
    case $2 in package) column=2 ;; version) column=3 ;; sha256) column=4 ;; *) die "no field $2 in kernels.lock" ;; esac
    awk -v name="$1" -v column="$column" '!/^#/ && $1 == name { print $column }' "$KERNELS_LOCK"
}

# kernel_tree NAME, kernel_release NAME, kernel_image NAME: of a kernel that ci/setup has unpacked.
kernel_tree() { printf '%s/kernels/%s' "$CI_DIR" "$(kernel_field "$1" package)"; }
kernel_release() { basename "$(echo "$(kernel_tree "$1")"/lib/modules/*)"; }
kernel_image() { echo "$(kernel_tree "$1")"/boot/vmlinuz-*; }

# inputs_key FILE...: changes when any of the files (or files below the directories) does.
inputs_key() {
    find "$@" -type f -printf '%p %s %T@\n' | LC_ALL=C sort | sha256sum | cut -d' ' -f1
}

# stage_busybox DIR: busybox and a link for each thing it can do.
stage_busybox() {
    local applet
    mkdir -p "$1/bin" "$1/sbin"
    cp "$(command -v busybox)" "$1/bin/busybox"
    for applet in $("$1/bin/busybox" --list); do
        [ "$applet" = busybox ] || ln -sf /bin/busybox "$1/bin/$applet"
    done
}

# stage_modules KERNEL DIR MODULE...: the modules and all they need, unpacked, with their indexes. A module that is built into this
# kernel is left out.
#
# kmod's configuration of this machine (/etc/modprobe.d, /etc/depmod.d) does not count. Packages have `install` commands there
# that take a module's place, ndctl one for libnvdimm.
stage_modules() {
    local kernel=$1 dir=$2 release tree path target needed
    shift 2
    release=$(kernel_release "$kernel")
    tree=$(kernel_tree "$kernel")
    target=$dir/lib/modules/$release
    mkdir -p "$target"
    cp "$tree/lib/modules/$release"/modules.{builtin,builtin.modinfo,order} "$target/"
    needed=$(modprobe -C /dev/null -S "$release" -d "$tree" -a --show-depends "$@") ||
        die "kernel $kernel lacks a module of: $*"
    awk '$1 == "insmod" { print $2 }' <<<"$needed" | sort -u | while read -r path; do
        path=${path#"$tree/lib/modules/$release/"}
        mkdir -p "$target/$(dirname "$path")"
        case $path in
            *.xz) xz -dc "$tree/lib/modules/$release/$path" >"$target/${path%.xz}" ;;
            *) cp "$tree/lib/modules/$release/$path" "$target/$path" ;;
        esac
    done
    depmod -C /dev/null -b "$dir" "$release"
}

# merged_root NAME PACKAGE...: prints a directory with the packages unpacked over one another.
merged_root() {
    local root=$CI_DIR/roots/$1 package
    shift
    if [ "$(cat "$root/packages" 2>/dev/null)" != "$*" ]; then
        rm -rf "$root"
        mkdir -p "$root"
        for package in "$@"; do cp -al "$(package_tree "$package")/." "$root/"; done
        echo "$*" >"$root/packages"
    fi
    printf '%s' "$root"
}

# stage_programs ROOT DIR PROGRAM...: the programs and every shared object they need, from ROOT alone.
stage_programs() {
    local root=$1 dir=$2 loader=lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 libraries object
    shift 2
    libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu
    mkdir -p "$dir/lib64"
    ln -sf "/$loader" "$dir/lib64/ld-linux-x86-64.so.2"
    {
        printf '%s\n' "$loader" "$@"
        for object in "$@"; do
            "$root/$loader" --library-path "$libraries" --list "$root/$object" || die "$object lacks a shared object"
        done | sed -n "s|.* => \($root/[^ ]*\) .*|\1|p" | sed "s|^$root/||"
    } | sort -u | while read -r object; do
        mkdir -p "$dir/$(dirname "$object")"
        # A program of its own takes busybox's place in PATH; busybox's shell still prefers its own mke2fs (say mkfs.ext4).
        rm -f "$dir/bin/$(basename "$object")"
        cp -L "$root/$object" "$dir/$object"
    done
}

EXT4_PACKAGES="libc6 e2fsprogs libext2fs2 libcom-err2 libblkid1 libuuid1 libss2"

# stage_ext4_programs DIR: to make, check and enlarge file systems.
stage_ext4_programs() {
    # shellcheck disable=SC2086 # a list
    stage_programs "$(merged_root ext4 $EXT4_PACKAGES)" "$1" sbin/mke2fs sbin/mkfs.ext4 sbin/e2fsck sbin/fsck.ext4 \
        sbin/resize2fs
}

XFS_PACKAGES="libc6 xfsprogs libblkid1 libuuid1 libinih1 liburcu8"

# stage_xfs_programs DIR: to make file systems.
stage_xfs_programs() {
    # shellcheck disable=SC2086 # a list
    stage_programs "$(merged_root xfs $XFS_PACKAGES)" "$1" sbin/mkfs.xfs
}

FILE_SYSTEM_PACKAGES="libc6 xfsprogs f2fs-tools btrfs-progs fdisk libblkid1 libuuid1 libinih1 liburcu8 libselinux1
    libpcre2-8-0 libudev1 zlib1g liblzo2-2 libzstd1 libfdisk1 libsmartcols1 libreadline8 libtinfo6"

# stage_file_system_programs DIR: to make and check all the others, and to partition.
stage_file_system_programs() {
    # shellcheck disable=SC2086 # a list
    stage_programs "$(merged_root file-systems $FILE_SYSTEM_PACKAGES)" "$1" sbin/mkfs.xfs sbin/xfs_repair \
        sbin/mkfs.f2fs sbin/fsck.f2fs sbin/mkfs.btrfs bin/btrfs sbin/sfdisk
}

# What one more emulated host has of its own beside its guests' memory: QEMU, and the pages of its disks.
HOST_OVERHEAD_MIB=1024
MAX_HOSTS=4

# hosts_at_once MIB: how many emulated hosts with one CPU and so much memory each this machine can run at once. Where
# guests run on the machine itself, that is the one host.
hosts_at_once() {
    local hosts room way
    way=$("$ROOT/ci/nested/host" --which) || exit
    hosts=$(nproc)
    room=$(awk -v each=$(($1 + HOST_OVERHEAD_MIB)) '/^MemAvailable:/ { print int($2 / 1024 / each) }' /proc/meminfo)
    [ "$hosts" -le "$room" ] || hosts=$room
    [ "$hosts" -le "$MAX_HOSTS" ] || hosts=$MAX_HOSTS
    if [ "$hosts" -lt 1 ] || [ "$way" = direct ]; then hosts=1; fi
    echo "$hosts"
}

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

wait_for_jobs() {
    wait
    trap - INT TERM HUP
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
