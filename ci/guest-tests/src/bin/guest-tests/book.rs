//! Runs the commands of the book and of README.md that need a VM, in the order of each page.
//!
//! A page becomes one bash script. Its VMMs run in the background, and each one starts after the
//! guest of the previous one has ended. If a page calls the API but starts no VM, the script starts
//! one with [`OPTIONS`]. These options also replace the ellipsis in `foreshore ...`.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use foreshore_cli::book::script::{GuestLine, guest_blocks, map_paths};
use guest_tests::disk::LimitedTmpfs;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Image, Kernel};

/// Page with commands that need a VM.
struct Page {
    name: &'static str,
    text: &'static str,
    /// Options of `foreshore ...` in addition to [`OPTIONS`].
    more: &'static [(&'static str, &'static str)],
    /// Words that the output of the commands must contain.
    expected: &'static [&'static str],
}

impl Page {
    const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text, more: &[], expected: &[] }
    }

    const fn with(self, more: &'static [(&'static str, &'static str)]) -> Self {
        Self { more, ..self }
    }

    const fn expect(self, expected: &'static [&'static str]) -> Self {
        Self { expected, ..self }
    }
}

macro_rules! page {
    ($name:literal) => {
        Page::new($name, include_str!(concat!("../../../../../", $name)))
    };
}

const README: Page =
    page!("README.md").expect(&["REQUESTED", "\npm ", "foreshore_memory_plugged_bytes"]);
const CHOOSE_A_POLICY: Page = page!("docs/how-to/choose-a-policy.md").expect(&["psi,idle=20s"]);
const CHOOSE_AN_INTERFACE: Page = page!("docs/how-to/choose-an-interface.md");
const MOVE: Page = page!("docs/how-to/move-from-cloud-hypervisor.md");
const TROUBLESHOOT: Page =
    page!("docs/how-to/troubleshoot.md").expect(&["Running", "REQUESTED", "LENDABLE"]);
const UPGRADE: Page = page!("docs/how-to/upgrade.md").expect(&["clean"]);
const WATCH: Page = page!("docs/how-to/watch.md").expect(&["REQUESTED", "LENDABLE"]);
const API: Page = page!("docs/reference/api.md").expect(&["\"state\":\"Running\""]);
const BALLOON: Page = page!("docs/reference/balloon.md");
const BOOT: Page = page!("docs/reference/boot.md");
const CONFINEMENT: Page = page!("docs/reference/confinement.md");
const CPUS: Page = page!("docs/reference/cpus.md").with(&[("--cpus", "boot=1,max=4")]);
const DISKS: Page = page!("docs/reference/disks.md");
const EVENTS: Page = page!("docs/reference/events.md");
const HOTPLUG: Page = page!("docs/reference/hotplug.md").expect(&["\"id\":\"d1\""]);
const MEMORY: Page = page!("docs/reference/memory.md");
const PROGRAMS: Page = page!("docs/reference/programs.md").expect(&["build_version", "REQUESTED"]);
const PVPANIC: Page = page!("docs/reference/pvpanic.md");
const VOLUMES: Page = page!("docs/reference/volumes.md");
const VSOCK: Page = page!("docs/reference/vsock.md");
const WATCHDOG: Page = page!("docs/reference/watchdog.md");
const TRY_IT: Page = page!("docs/tutorials/try-it.md").expect(&["REQUESTED", "clean"]);

guest_tests::tests![
    readme: 240 => run(&README),
    try_it: 600 (long) => run(&TRY_IT),
    choose_a_policy: 300 (long) => run(&CHOOSE_A_POLICY),
    choose_an_interface (long) => run(&CHOOSE_AN_INTERFACE),
    move_from_cloud_hypervisor (long) => run(&MOVE),
    troubleshoot (long) => run(&TROUBLESHOOT),
    upgrade: 240 (long) => run(&UPGRADE),
    watch: 240 (long) => run(&WATCH),
    api (long) => run(&API),
    balloon (long) => run(&BALLOON),
    boot (long) => run(&BOOT),
    confinement (long) => run(&CONFINEMENT),
    cpus (long) x several => run(&CPUS),
    disks: 240 (long) => run(&DISKS),
    events (long) => run(&EVENTS),
    hotplug (long) => run(&HOTPLUG),
    memory: 240 (long) => run(&MEMORY),
    programs (long) => run(&PROGRAMS),
    pvpanic (long) => run(&PVPANIC),
    volumes (long) => run(&VOLUMES),
    vsock (long) => run(&VSOCK),
    watchdog (long) => run(&WATCHDOG),
];

/// Paths of the book, and their paths below the test's directory.
const PATHS: [(&str, &str); 8] = [
    ("/run/foreshore/web.sock", "vm.sock"),
    ("/run/vm.sock", "vm.sock"),
    ("/run/vm.vsock", "vm.vsock"),
    ("/dev/shm/pool", "pool"),
    ("/pm/pool", "pm-pool"),
    ("POOL", "pm-pool"),
    ("/images/", "images/"),
    ("/var/tmp/trace.jsonl", "trace.jsonl"),
];

/// Files that pages name, below the test's directory.
const IMAGES: [&str; 5] =
    ["base.raw", "root.raw", "images/root.raw", "images/data.raw", "images/d.raw"];
const IMAGE_BYTES: u64 = 64 << 20;
/// Size of the pool that pages use but do not create. A file on tmpfs takes memory only for chunks
/// in use.
const POOL_SIZE: &str = "16G";
const POOL_RESERVE: &str = "9G";
/// Size of the file system for the pools and images of a page, which are sparse.
const TMPFS_MIB: u64 = 32 << 10;

/// Options of `foreshore ...`, unless the command has the flag. Paths are those of the book, or
/// below the test's directory.
const OPTIONS: [(&str, &str); 10] = [
    ("--kernel", "vmlinuz"),
    ("--initramfs", "initrd.img"),
    ("--cmdline", "'console=ttyS0 loglevel=5'"),
    ("--serial", "file=console.log"),
    ("--console", "off"),
    ("--memory", "size=512M,hotplug_method=virtio-mem,hotplug_size=512M"),
    ("--pm-memory", "pool=/pm/pool,size=2G"),
    ("--disk", "path=base.raw,image_type=raw"),
    ("--vsock", "cid=3,socket=agent.vsock"),
    ("--api-socket", "/run/vm.sock"),
];

/// Configuration for `create`, which the pages take from another VM.
const VM_JSON: &str = r#"{
    "payload": {"kernel": "vmlinuz", "initramfs": "initrd.img", "cmdline": "console=hvc0"},
    "memory": {"size": 536870912},
    "console": {"mode": "Off"}
}"#;

/// Functions that start and end a VMM in the background, and wait for its guest.
const FUNCTIONS: &str = r#"
vmm= followers=
has_ready_guest() { grep -qs 'foreshore-guest: ready' console.log vmm.out "$OUT/console.log"; }
# bash may have reaped the VMM already, and then it is not a zombie.
is_over() { ! kill -0 "$vmm" 2>/dev/null || grep -qs '^State:.Z' "/proc/$vmm/status"; }
until_guest_is_ready() {
    until has_ready_guest; do
        if is_over; then cat vmm.out; return 1; fi
        sleep 0.2
    done
}
until_connected() {
    until [ "$(grep -c ' 03 [0-9 ]*/.*/vm.sock$' /proc/net/unix)" -ge "$1" ]; do sleep 0.2; done
    # A connection receives only events after its request. A later client that has received one
    # shows that the server has read the requests of the earlier ones.
    foreshore-remote --api-socket "$PWD/vm.sock" events --json >probe & probe=$!
    size=640M
    until [ -s probe ]; do
        foreshore-remote --api-socket "$PWD/vm.sock" resize-zone --id dram --size $size
        [ $size = 640M ] && size=576M || size=640M
        sleep 0.2
    done
    kill $probe
    rm probe
}
end_vmm() {
    [ -n "$vmm" ] || return 0
    kill "$vmm" 2>/dev/null || true
    wait "$vmm" || { cat vmm.out; return 1; }
    for follower in $followers; do wait "$follower"; done
    for output in *.followed; do [ ! -e "$output" ] || [ -s "$output" ]; done
    rm -f console.log vmm.out "$OUT/console.log" ./*.followed
    vmm= followers=
}
"#;

fn run(page: &Page) -> Result<()> {
    let tmpfs = LimitedTmpfs::create(TMPFS_MIB)?;
    let dir = tmpfs.dir();
    let blocks = guest_blocks(page.text).with_context(|| page.name.to_owned())?;
    let lines: Vec<_> = blocks.into_iter().flatten().collect();
    ensure!(!lines.is_empty(), "{} has no command for a VMM", page.name);
    prepare(dir, &lines)?;
    let script = map_paths(&script(page, &lines), dir, &PATHS);
    let output = this_tests_dir().join("commands.log");
    let file = File::create(&output)?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut bash = Command::new("bash");
    bash.args(["-e", "-o", "pipefail", "-c", &format!("{FUNCTIONS}{script}")]);
    bash.current_dir(dir).env("PATH", format!("{}:{path}", dir.join("bin").display()));
    bash.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let status = bash.status().context("Cannot start bash")?;
    let text = fs::read_to_string(&output)?;
    ensure!(status.success(), "{}: {status}\n{script}\n{text}", page.name);
    for word in page.expected {
        ensure!(text.contains(word), "{}: no {word:?} in the output: {text}", page.name);
    }
    Ok(())
}

/// Creates the files that the pages name, and a pool unless `lines` create one.
fn prepare(dir: &Path, lines: &[GuestLine]) -> Result<()> {
    let (kernel, initramfs) = (Kernel::V6_12.path(), Image::Basic.path(Kernel::V6_12));
    for folder in ["bin", "images", "target/ci/guests", "target/ci/kernels/a/boot"] {
        fs::create_dir_all(dir.join(folder))?;
    }
    for (file, name) in [
        (&kernel, "vmlinuz"),
        (&initramfs, "initrd.img"),
        // Files of `ci/demo`. A unit test of ci/xtask checks that `ci/demo` creates them at these
        // paths.
        (&kernel, "target/ci/kernels/a/boot/vmlinuz-6.12-cloud-amd64"),
        (&initramfs, "target/ci/guests/basic-6.12.img"),
    ] {
        // The VMM opens only regular files.
        fs::copy(file, dir.join(name)).with_context(|| format!("Cannot copy {file:?}"))?;
    }
    for name in IMAGES {
        File::create(dir.join(name))?.set_len(IMAGE_BYTES)?;
    }
    fs::write(dir.join("vm.json"), VM_JSON)?;
    add_cargo(dir)?;
    let creates_pool =
        |line: &GuestLine| line.text.contains("pmvol create") && line.text.contains("/pm/pool");
    if !lines.iter().any(creates_pool) {
        let pool = dir.join("pm-pool");
        let mut pmvol = Command::new("pmvol");
        pmvol.arg("create").arg(pool).args(["--size", POOL_SIZE, "--reserve", POOL_RESERVE]);
        ensure!(pmvol.stdout(Stdio::null()).status()?.success(), "Cannot create a pool");
    }
    Ok(())
}

/// Adds a `cargo` that does nothing, because the programs under test are already in PATH.
fn add_cargo(dir: &Path) -> Result<()> {
    let cargo = dir.join("bin/cargo");
    fs::write(&cargo, "#!/bin/sh\n[ \"$*\" = 'build --release' ]\n")?;
    Ok(fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755))?)
}

/// Builds the script of a page.
fn script(page: &Page, lines: &[GuestLine]) -> String {
    let (mut script, mut has_vmm, mut followers) = (String::new(), false, 0);
    let mut add = |line: &str| writeln!(script, "{line}").expect("a string");
    for line in lines {
        let calls = |name: &str| line.programs.iter().any(|program| program == name);
        if calls("foreshore") {
            start(&line.text, page.more).iter().for_each(|line| add(line));
            (has_vmm, followers) = (true, 0);
            continue;
        }
        if !has_vmm && (calls("foreshore-remote") || calls("curl")) {
            start("foreshore ...", page.more).iter().for_each(|line| add(line));
            has_vmm = true;
        }
        if line.text.contains("events") {
            followers += 1;
            add(&follow(&line.text, followers));
        } else if calls("foreshore-sim") {
            // The VMM records a report each second, and writes the last ones when it ends.
            add("until [ \"$(wc -l <trace.jsonl)\" -ge 10 ]; do sleep 0.2; done");
            add("end_vmm");
            has_vmm = false;
            add(&line.text);
        } else {
            add(&line.text);
        }
    }
    add("end_vmm");
    script
}

/// Starts a command that prints events in the background until the VMM ends, and causes events of
/// the source `foreshore`.
fn follow(line: &str, number: usize) -> String {
    format!(
        "{{ {line}; }} >{number}.followed & followers=\"$followers $!\"\nuntil_connected {number}"
    )
}

/// Returns the lines that start a VMM in the background, and wait for its guest, or for the VMM if
/// the command line has no console.
fn start(line: &str, more: &[(&str, &str)]) -> Vec<String> {
    let line = line.split(" #").next().unwrap_or(line).trim_end();
    let line = line.trim_end_matches('&').trim_end();
    let words: BTreeSet<_> = line.split_whitespace().collect();
    let mut options = String::new();
    if line.contains("...") {
        for (flag, value) in OPTIONS.iter().chain(more) {
            if !words.contains(flag) {
                write!(options, " {flag} {value}").expect("a string");
            }
        }
    }
    let mut lines = vec![
        "end_vmm".to_owned(),
        format!("{}{options} </dev/null >>vmm.out 2>&1 &", line.replace(" ...", "")),
        "vmm=$!".to_owned(),
    ];
    if line.contains("...") || line.contains("console=") {
        lines.push("until_guest_is_ready".to_owned());
    } else if line.contains("--api-socket") {
        lines.push("foreshore-remote --api-socket /run/vm.sock ping --wait >/dev/null".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_every_page_with_commands_for_a_vmm() {
        let pages = [
            README,
            CHOOSE_A_POLICY,
            CHOOSE_AN_INTERFACE,
            MOVE,
            TROUBLESHOOT,
            UPGRADE,
            WATCH,
            API,
            BALLOON,
            BOOT,
            CONFINEMENT,
            CPUS,
            DISKS,
            EVENTS,
            HOTPLUG,
            MEMORY,
            PROGRAMS,
            PVPANIC,
            VOLUMES,
            VSOCK,
            WATCHDOG,
            TRY_IT,
        ];
        assert_eq!(pages.len(), TESTS.len());
        let names: BTreeSet<_> = pages.iter().map(|page| page.name.to_owned()).collect();
        let expected = foreshore_cli::book::script::pages_with_guest_blocks();
        let expected: BTreeSet<_> =
            expected.iter().map(|page| page.display().to_string()).collect();
        assert_eq!(names, expected);
    }

    #[test]
    fn command_is_completed_and_started_in_the_background() {
        let lines = start("foreshore ... --memory size=1G &  # comment", &[]);
        assert!(lines[1].starts_with("foreshore --memory size=1G --kernel vmlinuz"), "{lines:?}");
        assert!(!lines[1].contains("virtio-mem") && lines[1].ends_with("2>&1 &"), "{lines:?}");
        let lines = start("foreshore --api-socket /run/vm.sock &", &[]);
        let expected = "foreshore --api-socket /run/vm.sock </dev/null >>vmm.out 2>&1 &";
        assert_eq!(lines[..3], ["end_vmm", expected, "vmm=$!"]);
        assert!(lines[3].contains("ping --wait"), "{lines:?}");
    }
}
