//! Tests that no content of a guest's disks ends the VMM or prevents the next start. The reason is
//! that the user of the host has declared the type of each file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::guest::{GuestBuilder, Image};
use guest_tests::{Guest, Pool};

guest_tests::tests![
    guest_reboots_with_signatures_on_its_disks: 240 (long),
];

const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// Magic and version of QCOW2 (docs/interop/qcow2.txt of QEMU).
const QCOW2: &str = "printf 'QFI\\373\\0\\0\\0\\3'";

fn file(name: &str, size_bytes: u64, head: &[u8]) -> Result<PathBuf> {
    let path = sparse_file(name, size_bytes)?;
    File::options().write(true).open(&path)?.write_all_at(head, 0)?;
    Ok(path)
}

/// Returns the first bytes of a pool. A guest can write them to any of its disks.
fn head_of_a_pool() -> Result<Vec<u8>> {
    let pool = Pool::create("64M")?;
    let mut head = vec![0; 8 * MIB as usize];
    File::open(pool.path())?.read_exact_at(&mut head, 0)?;
    fs::remove_file(pool.path())?;
    Ok(head)
}

fn wait_for_devices(guest: &Guest) -> Result<()> {
    let find_devices = "for device in vda vdb pmem0 pmem1; do test -b /dev/$device || test -b /dev/${device}s || exit 1; done";
    guest.wait_until_run("its devices exist", LIMIT, find_devices)
}

fn guest_reboots_with_signatures_on_its_disks() -> Result<()> {
    let head = head_of_a_pool()?;
    let (qcow, other) = (file("qcow", 16 * MIB, b"")?, file("other", 16 * MIB, b"")?);
    let (bytes, source) = (file("bytes", 16 * MIB, b"")?, file("source", 8 * MIB, &head)?);
    let pool = Pool::create("256M")?;
    pool.create_volume("data", "64M")?;
    let builder: GuestBuilder = Guest::builder()
        .memory("size=384M")
        .pressure("off")
        .image(Image::Ndctl)
        .argument("--disk", &format!("path={}", qcow.display()))
        .argument("--disk", &format!("path={}", other.display()))
        .argument("--disk", &format!("path={},readonly=on", source.display()))
        .argument("--pmem", &format!("file={}", bytes.display()))
        .pm_volume(&format!("pool={},name=data,interface=nvdimm", pool.name()));
    let guest = builder.boot()?;
    wait_for_devices(&guest)?;
    guest.run(&format!("{QCOW2} | dd of=/dev/vda conv=notrunc,fsync 2>/dev/null"))?;
    guest.run("dd if=/dev/vdc of=/dev/vdb bs=1M conv=fsync 2>/dev/null")?;
    // The volume's device is /dev/pmem?s, so the pattern matches only the file given with --pmem.
    guest.run(
        "for bytes in /dev/pmem?; do dd if=/dev/vdc of=$bytes bs=1M conv=fsync 2>/dev/null; done",
    )?;
    let replace_btt = "volume=$(ndctl list -N -m sector | grep -o 'namespace[0-9.]*' | head -n 1); \
        ndctl create-namespace -f -e $volume -m fsdax && sync";
    guest.run_within(LIMIT, replace_btt)?;
    let stays = |guest: &Guest, boot: &str| -> Result<()> {
        wait_for_devices(guest)?;
        let magic = guest.run("head -c 3 /dev/vda")?;
        ensure!(magic == "QFI", "{boot}: the disk begins with {magic:?} instead of QFI");
        guest
            .run("cmp -n 8388608 /dev/vdb /dev/vdc")
            .with_context(|| format!("{boot}: the disk lost the copy of a pool"))?;
        // The replaced namespace also matches the pattern /dev/pmem?.
        let pmem = "for bytes in /dev/pmem?; do cmp -n 8388608 $bytes /dev/vdc 2>/dev/null && exit 0; done; exit 1";
        guest
            .run(pmem)
            .with_context(|| format!("{boot}: the file of --pmem lost the copy of a pool"))?;
        let modes = guest.run("ndctl list -N")?;
        ensure!(modes.contains("fsdax"), "{boot}: the volume's namespace is gone: {modes}");
        Ok(())
    };
    guest.reboot_from_inside()?;
    stays(&guest, "A reboot from inside")?;
    guest.command("vm.shutdown")?;
    guest.command("vm.boot")?;
    guest.wait_for_shell(LIMIT)?;
    stays(&guest, "vm.boot")?;
    guest.power_off()?;
    let guest = builder.name("again").boot()?;
    stays(&guest, "A new start")?;
    guest.power_off()?;
    ensure!(pool.info()?["volumes"] == 1, "The pool has lost its volume");
    Ok(())
}
