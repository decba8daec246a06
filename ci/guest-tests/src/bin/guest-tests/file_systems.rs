//! Tests of file systems on a volume, through every interface: they are created, mounted, filled
//! up, unmounted, and checked with their own tools. Also tests partitions.

use anyhow::{Context, Result, bail, ensure};
use guest_tests::{Guest, Image, Pool};

use crate::volume::IO_LIMIT;

guest_tests::tests![
    each_holds_on_some_interface: 400 (long) on [V6_12Generic],
    all_hold_on_an_nvdimm: 900 (extended) on [V6_12Generic] x 2 => all_hold_on(NVDIMM),
    all_hold_on_virtio_blk: 900 (extended) on [V6_12Generic] x 2 => all_hold_on(VIRTIO_BLK),
    all_hold_on_virtio_pmem: 1200 (extended) on [V6_12Generic] => all_hold_on(VIRTIO_PMEM),
];

#[derive(Clone, Copy)]
pub(crate) struct FileSystem {
    pub(crate) name: &'static str,
    pub(crate) make: &'static str,
    /// Command that checks the file system without changing it, and fails if it finds an error.
    pub(crate) check: &'static str,
}

const EXT4: FileSystem = FileSystem { name: "ext4", make: "mkfs.ext4 -q -F", check: "e2fsck -fn" };
pub(crate) const XFS: FileSystem =
    FileSystem { name: "xfs", make: "mkfs.xfs -q -f", check: "xfs_repair -n" };
pub(crate) const F2FS: FileSystem =
    FileSystem { name: "f2fs", make: "mkfs.f2fs -q -f", check: "fsck.f2fs -f --dry-run" };
/// With `--mixed`, data and metadata share their space. Separate areas would hardly fit on a small
/// volume.
pub(crate) const BTRFS: FileSystem =
    FileSystem { name: "btrfs", make: "mkfs.btrfs -q -f --mixed", check: "btrfs check --readonly" };
const ALL: [FileSystem; 4] = [EXT4, XFS, F2FS, BTRFS];

#[derive(Clone, Copy)]
struct Interface {
    name: &'static str,
    /// Pattern of the disk's path in /sys. The pattern matches only disks of this interface.
    path: &'static str,
    /// Space to fill with files. The space is small because each sector takes time. The rest is
    /// allocated in advance.
    space_mib: u64,
}

const NVDIMM: Interface =
    Interface { name: "nvdimm", path: "*/ACPI0012:*/block/pmem*s", space_mib: 24 };
const VIRTIO_BLK: Interface =
    Interface { name: "virtio-blk", path: "*/virtio*/block/vd*", space_mib: 24 };
/// Interface with four exits per sector.
const VIRTIO_PMEM: Interface =
    Interface { name: "virtio-pmem", path: "*/virtio*/ndbus*/block/pmem*s", space_mib: 4 };

/// XFS requires 300 MiB.
pub(crate) const VOLUME_MIB: u64 = 320;

/// Boots a guest with one volume per interface and all file systems.
fn boot(pool: &Pool, volumes: &[(Interface, u64)]) -> Result<Guest> {
    let mut builder =
        Guest::builder().image(Image::FileSystems).memory("size=512M").pressure("off");
    for (interface, size_mib) in volumes {
        let name = interface.name;
        pool.create_volume(name, &format!("{size_mib}M"))?;
        builder = builder.pm_volume(&format!("pool={},name={name},interface={name}", pool.name()));
    }
    builder.boot()
}

fn node(guest: &Guest, interface: Interface) -> Result<String> {
    let find = format!(
        "for disk in /sys/block/*; do case $(readlink -f $disk) in {}) basename $disk; exit;; esac; done; exit 1",
        interface.path
    );
    guest.wait_until_run(&format!("the disk of {} exists", interface.name), IO_LIMIT, &find)?;
    Ok(format!("/dev/{}", guest.run(&find)?.trim()))
}

/// Tests the life cycle of a file system on a disk.
///
/// 1. Create and mount it. A file without data occupies the space beyond `space_mib`.
/// 2. Fill it until a file does not fit, and read all other files from the disk.
/// 3. Unmount and check it, mount it again, and read the files. Remove a third of them. Unmount and
///    check it again.
fn exercise(guest: &Guest, disk: &str, file_system: FileSystem, space_mib: u64) -> Result<()> {
    let FileSystem { name, make, check } = file_system;
    let run = |description: &str, command: &str| {
        guest
            .run_within(IO_LIMIT, command)
            .with_context(|| format!("{name} on {disk}: {description}"))
    };
    let mount = format!("mkdir -p /mnt/{name} && mount -t {name} {disk} /mnt/{name}");
    run("make and mount", &format!("{make} {disk} >/dev/null && {mount}"))?;
    let ballast = format!(
        "free=$(df -Pm /mnt/{name} | awk 'NR == 2 {{ print $4 }}')
        [ $free -le {space_mib} ] || fallocate -l $((free - {space_mib}))M /mnt/{name}/ballast"
    );
    run("set room apart", &ballast)?;
    let seed = u64::from(name.as_bytes()[0]);
    let count = run("fill", &format!("guest-tool fill-files /mnt/{name} {seed}"))?;
    let count = count.trim();
    let read = format!("guest-tool check-filled /mnt/{name} {seed} {count}");
    let clean = format!("umount /mnt/{name} && {check} {disk} 2>&1");
    run("read from the disk", &format!("echo 3 >/proc/sys/vm/drop_caches; {read}"))?;
    run("unmount and check", &clean)?;
    run("mount and read again", &format!("{mount} && {read}"))?;
    run("remove and check", &format!("rm /mnt/{name}/d*/f*[147] && sync && {clean}"))?;
    Ok(())
}

/// Replaces the content of a disk with two GPT partitions. Checks that the kernel finds them when
/// it reads the partition table again, and that the second one can contain a file system.
fn partition(guest: &Guest, disk: &str) -> Result<()> {
    let run = |description: &str, command: &str| {
        guest
            .run_within(IO_LIMIT, command)
            .with_context(|| format!("Partitions on {disk}: {description}"))
    };
    let table = format!(
        "printf 'label: gpt\\nsize=4M\\n,\\n' | sfdisk -q --wipe always --no-tell-kernel {disk}"
    );
    run("make", &table)?;
    let device_name = disk.trim_start_matches("/dev/");
    let find = format!(
        "blockdev --rereadpt {disk} && cd /sys/block/{device_name} && cat {device_name}1/size {device_name}2/size size"
    );
    let found = run("look", &find)?;
    let sizes: Vec<u64> = found.lines().map(str::parse).collect::<Result<_, _>>()?;
    let [first, second, all] = sizes[..] else { bail!("Not exactly two partitions: {found:?}") };
    // The kernel reports units of 512 bytes. Outside of the partitions are the partition table, its
    // copy, and padding to a MiB.
    ensure!(first == 8192, "The first partition has {first} of 8192 sectors");
    ensure!(first + second + 3 * 2048 > all, "The second partition has {second} of {all} sectors");
    run("use the second", &format!("mkfs.ext4 -q -F {disk}2 && e2fsck -fn {disk}2 2>&1"))?;
    Ok(())
}

fn each_holds_on_some_interface() -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = boot(&pool, &[(NVDIMM, VOLUME_MIB), (VIRTIO_BLK, 128), (VIRTIO_PMEM, 64)])?;
    for (interface, file_systems) in
        [(NVDIMM, &[XFS][..]), (VIRTIO_BLK, &[F2FS, BTRFS]), (VIRTIO_PMEM, &[EXT4])]
    {
        let disk = node(&guest, interface)?;
        for file_system in file_systems {
            exercise(&guest, &disk, *file_system, interface.space_mib)?;
        }
        partition(&guest, &disk)?;
    }
    end(guest, &pool)
}

fn end(guest: Guest, pool: &Pool) -> Result<()> {
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn all_hold_on(interface: Interface) -> Result<()> {
    let pool = Pool::create("384M")?;
    let guest = boot(&pool, &[(interface, VOLUME_MIB)])?;
    let disk = node(&guest, interface)?;
    for file_system in ALL {
        exercise(&guest, &disk, file_system, 3 * interface.space_mib)?;
    }
    partition(&guest, &disk)?;
    end(guest, &pool)
}
