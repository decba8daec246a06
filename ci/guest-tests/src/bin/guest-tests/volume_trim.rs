//! Tests of the agent's command `trim`, which releases space of mapped thin volumes.

use anyhow::{Result, ensure};
use guest_tests::user::need_root;
use guest_tests::{Guest, Image, Pool};

use crate::file_systems::{BTRFS, F2FS, FileSystem, VOLUME_MIB, XFS};
use crate::volume::{IO_LIMIT, guest_with};
use crate::volume_thin::USERFAULTS;
use crate::zones::MIB;

guest_tests::tests![
    trim_releases_the_chunks_of_deleted_files: 400 on [V6_12, V6_1 long] x 2 =>
        trim_releases_the_chunks("nvdimm"),
    trim_releases_the_chunks_by_virtio_pmem: 400 (extended) => trim_releases_the_chunks("virtio-pmem"),
    trim_releases_the_chunks_of_xfs_and_f2fs: 600 (long) on [V6_12Generic] x 2,
];

/// A quarter of the deleted file.
const MIN_RELEASED_BYTES: u64 = 16 * MIB;

fn volume_metric(guest: &Guest, name: &str) -> Result<u64> {
    Ok(guest.metric(&format!("foreshore_volume_{name}"), &[("volume", "data")])? as u64)
}

fn trim_releases_the_chunks(interface: &str) -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("256M")?;
    let volume = format!("size=128M,create=on,interface={interface}");
    let guest = guest_with(&pool, &volume).boot()?;
    guest.wait_until_run("the disk exists", IO_LIMIT, "test -b /dev/pmem0s")?;
    guest.run_within(
        IO_LIMIT,
        "mkfs.ext4 -q -E nodiscard /dev/pmem0s && mkdir -p /mnt/t && mount -t ext4 /dev/pmem0s /mnt/t && \
         dd if=/dev/urandom of=/mnt/t/keep bs=1M count=2 && sync && sha256sum /mnt/t/keep > /tmp/sum",
    )?;
    for round in 1..=2 {
        guest.run_within(IO_LIMIT, "dd if=/dev/urandom of=/mnt/t/file bs=1M count=64 && sync")?;
        let full = volume_metric(&guest, "allocated_bytes")?;
        let before = volume_metric(&guest, "released_bytes_total")?;
        let trim = "rm /mnt/t/file && foreshore-agent trim /mnt/t";
        let printed = guest.run_within(IO_LIMIT, trim)?;
        let trimmed = volume_metric(&guest, "allocated_bytes")?;
        let released = volume_metric(&guest, "released_bytes_total")? - before;
        // 16 MiB of the free space stay available to the guest during the command, and the blocks
        // of other sectors and of lanes keep chunks.
        ensure!(
            released >= MIN_RELEASED_BYTES,
            "Round {round}: {released} bytes of {full}: {printed}"
        );
        ensure!(trimmed <= full - released + 4 * MIB, "Round {round}: {trimmed} of {full} bytes");
        ensure!(printed.starts_with("pmem0s: "), "{printed}");
        ensure!(printed.contains(&format!("({released} bytes) released")), "{printed}");
    }
    guest.run_within(
        IO_LIMIT,
        "umount /mnt/t && e2fsck -fn /dev/pmem0s && mount -t ext4 /dev/pmem0s /mnt/t && \
         sha256sum -c /tmp/sum && dd if=/dev/urandom of=/tmp/file bs=1M count=64 && \
         cp /tmp/file /mnt/t/file && sync && echo 3 >/proc/sys/vm/drop_caches && \
         cmp /tmp/file /mnt/t/file",
    )?;

    let refused = guest.try_run(IO_LIMIT, "foreshore-agent trim /proc")?;
    let text =
        "/proc is on a file system of type 0x9fa0, but trim supports only ext4, XFS and F2FS";
    ensure!(refused.code == 1 && refused.stderr.contains(text), "{}", refused.stderr);
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check().map(drop)
}

fn trim_releases_the_chunks_of_xfs_and_f2fs() -> Result<()> {
    need_root(USERFAULTS)?;
    let pool = Pool::create("512M")?;
    let volume = format!("size={VOLUME_MIB}M,create=on,interface=nvdimm");
    let guest = guest_with(&pool, &volume).image(Image::FileSystems).boot()?;
    guest.wait_until_run("the disk exists", IO_LIMIT, "test -b /dev/pmem0s")?;
    for FileSystem { name, make, check } in [XFS, F2FS] {
        guest.run_within(
            IO_LIMIT,
            &format!(
                "{make} /dev/pmem0s && mkdir -p /mnt/t && mount -t {name} /dev/pmem0s /mnt/t && \
                 dd if=/dev/urandom of=/mnt/t/keep bs=1M count=2 && sync && \
                 sha256sum /mnt/t/keep > /tmp/sum && \
                 dd if=/dev/urandom of=/mnt/t/file bs=1M count=64 && sync && rm /mnt/t/file"
            ),
        )?;
        let before = volume_metric(&guest, "released_bytes_total")?;
        let printed = guest.run_within(IO_LIMIT, "foreshore-agent trim /mnt/t")?;
        let released = volume_metric(&guest, "released_bytes_total")? - before;
        ensure!(released >= MIN_RELEASED_BYTES, "{name}: {released} bytes: {printed}");
        guest.run_within(
            IO_LIMIT,
            &format!(
                "umount /mnt/t && {check} /dev/pmem0s && mount -t {name} /dev/pmem0s /mnt/t && \
                 sha256sum -c /tmp/sum && umount /mnt/t"
            ),
        )?;
    }
    let FileSystem { name, make, .. } = BTRFS;
    let mount = format!("{make} /dev/pmem0s && mount -t {name} /dev/pmem0s /mnt/t");
    guest.run_within(IO_LIMIT, &mount)?;
    let refused = guest.try_run(IO_LIMIT, "foreshore-agent trim /mnt/t")?;
    let text = "(Btrfs does not tell where on its disk a file is)";
    ensure!(refused.code == 1 && refused.stderr.contains(text), "{}", refused.stderr);
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}
