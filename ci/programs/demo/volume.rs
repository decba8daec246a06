//! Phase 4: the rest of the pool serves as a disk that survives the VMM and is used through another
//! interface.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};

use crate::{claim, event, phase, with_volume};

const IO_LIMIT: Duration = Duration::from_secs(180);
const MOUNT: &str = "mkdir -p /mnt/data && mount -t ext4 /dev/pmem0s /mnt/data";
const FILES: &str = "/mnt/data/files";
/// Number of files to acknowledge before the kill.
const FILES_BEFORE_KILL: usize = 60;

/// Files that a guest has reported as durable. A file outside of the VM has a line for each of
/// them, with name and hash.
struct Acknowledged {
    path: PathBuf,
    lines: Vec<String>,
}

impl Acknowledged {
    fn new() -> Result<Self> {
        let path = this_tests_dir().join("acknowledged.log");
        fs::write(&path, "")?;
        Ok(Self { path, lines: Vec::new() })
    }

    fn add(&mut self, line: String) -> Result<()> {
        let mut log = fs::File::options().append(true).open(&self.path)?;
        writeln!(log, "{line}").context("Cannot log an acknowledged file")?;
        self.lines.push(line);
        Ok(())
    }

    /// Reads `count` more lines from a writer.
    fn take(&mut self, writer: &mut Script, count: usize) -> Result<()> {
        for _ in 0..count {
            self.add(writer.next_line().context("The writer ended")?)?;
        }
        Ok(())
    }

    /// Checks that all of these files exist in the guest and are complete.
    fn check(&self, guest: &Guest) -> Result<()> {
        guest.run(": >/tmp/list")?;
        for lines in self.lines.chunks(200) {
            guest.run(&format!("cat >>/tmp/list <<'END'\n{}\nEND", lines.join("\n")))?;
        }
        let checked =
            guest.run_within(IO_LIMIT, &format!("guest-tool check-files {FILES} /tmp/list"))?;
        let expected = format!("checked {}", self.lines.len());
        ensure!(
            checked.trim() == expected,
            "check-files printed {checked:?} instead of {expected:?}"
        );
        claim(
            true,
            &format!("all {} acknowledged files are present and complete", self.lines.len()),
        )
    }
}

/// Kills the running guest during a write, and checks the files twice.
pub(crate) fn show(guest: Guest, vm: &GuestBuilder, pool: &Pool) -> Result<()> {
    phase(4, "a volume of the same pool survives SIGKILL and changes its interface");
    let mut acknowledged = Acknowledged::new()?;
    write_and_kill(guest, &mut acknowledged)?;
    pool.check()?;
    claim(true, "pmvol check finds no damage after the kill")?;

    let restarted = with_volume(vm, pool, "nvdimm").name("restarted-nvdimm").boot()?;
    event("restarted with nvdimm");
    mount(&restarted)?;
    claim(true, "the file system mounts with nvdimm and two vCPUs")?;
    acknowledged.check(&restarted)?;
    write_more(&restarted, &mut acknowledged)?;
    unmount(&restarted)?;
    restarted.power_off()?;
    pool.check()?;

    let other =
        with_volume(vm, pool, "virtio-pmem").name("restarted-virtio-pmem").cpus(1).boot()?;
    event("restarted with virtio-pmem");
    mount(&other)?;
    claim(true, "the file system mounts with virtio-pmem and one vCPU")?;
    acknowledged.check(&other)?;
    write_more(&other, &mut acknowledged)?;
    acknowledged.check(&other)?;
    unmount(&other)?;
    other.power_off()?;
    pool.check()?;
    claim(true, "pmvol check finds no damage at the end")
}

fn write_and_kill(guest: Guest, acknowledged: &mut Acknowledged) -> Result<()> {
    wait_for_disk(&guest)?;
    guest.run_within(IO_LIMIT, &format!("mkfs.ext4 -q /dev/pmem0s && {MOUNT}"))?;
    event("files with fsync");
    let mut writer = start_writer(&guest)?;
    acknowledged.take(&mut writer, FILES_BEFORE_KILL)?;
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    event("VMM killed (SIGKILL)");
    // A line that left the VM before the kill counts as an acknowledgment.
    while let Some(line) = writer.next_line() {
        acknowledged.add(line)?;
    }
    println!(
        "  the VMM was killed while the guest wrote; {} files were acknowledged",
        acknowledged.lines.len()
    );
    Ok(())
}

fn start_writer(guest: &Guest) -> Result<Script> {
    guest.start_script(IO_LIMIT, &format!("exec guest-tool write-files {FILES} 20000"))
}

fn write_more(guest: &Guest, acknowledged: &mut Acknowledged) -> Result<()> {
    let mut writer = start_writer(guest)?;
    acknowledged.take(&mut writer, 20)?;
    drop(writer);
    guest.wait_until_run("the writer has ended", IO_LIMIT, "! pidof guest-tool")
}

fn wait_for_disk(guest: &Guest) -> Result<()> {
    guest.wait_until_run("/dev/pmem0s exists", IO_LIMIT, "test -b /dev/pmem0s")
}

fn mount(guest: &Guest) -> Result<()> {
    wait_for_disk(guest)?;
    guest.run_within(IO_LIMIT, MOUNT).map(drop)
}

fn unmount(guest: &Guest) -> Result<()> {
    guest.run_within(IO_LIMIT, "umount /mnt/data && e2fsck -fn /dev/pmem0s")?;
    guest.no_kernel_complaints()
}
