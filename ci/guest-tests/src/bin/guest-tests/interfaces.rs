//! Tests that a volume has the same content through every interface, and only one user at a time.

use anyhow::{Context, Result};
use guest_tests::guest::GuestBuilder;
use guest_tests::{Guest, Pool};

use crate::volume::{IO_LIMIT, check_acknowledged, guest_with, pool_with_volume};

guest_tests::tests![
    a_volume_goes_through_its_interfaces_and_keeps_its_content: 300 (extended) x several,
];

struct Attachment {
    interface: &'static str,
    cpus: u32,
    disk: &'static str,
}

const ATTACHMENTS: [Attachment; 3] = [
    Attachment { interface: "nvdimm", cpus: 2, disk: "/dev/pmem0s" },
    Attachment { interface: "virtio-blk", cpus: 2, disk: "/dev/vda" },
    Attachment { interface: "virtio-pmem", cpus: 1, disk: "/dev/pmem0s" },
];

impl Attachment {
    fn builder(&self, pool: &Pool) -> GuestBuilder {
        guest_with(pool, &format!("interface={}", self.interface)).cpus(self.cpus)
    }
}

/// Each boot uses a different interface, reads everything written before, and writes more. The last
/// interface is the same as the first one.
fn a_volume_goes_through_its_interfaces_and_keeps_its_content() -> Result<()> {
    let pool = pool_with_volume()?;
    let mut acknowledged = String::new();
    for (boot, attachment) in ATTACHMENTS.iter().chain(&ATTACHMENTS[..1]).enumerate() {
        let guest = attachment.builder(&pool).boot()?;
        guest.wait_until_run(
            "the disk exists",
            IO_LIMIT,
            &format!("test -b {}", attachment.disk),
        )?;
        if boot == 0 {
            // Uses as few writes as possible. If each write costs four flushes to a disk, even
            // these take a minute.
            let make = format!(
                "mkfs.ext4 -q -N 1024 -E lazy_journal_init=1,nodiscard {}",
                attachment.disk
            );
            guest.run_within(IO_LIMIT, &make)?;
        }
        guest.run(&format!("mkdir -p /mnt/data && mount -t ext4 {} /mnt/data", attachment.disk))?;
        check_acknowledged(&guest, &acknowledged)
            .with_context(|| format!("Interface {}", attachment.interface))?;
        acknowledged += &write_files(&guest, 12)?;
        guest.run("umount /mnt/data")?;
        guest.no_kernel_complaints()?;
        guest.power_off()?;
        pool.check()?;
    }
    Ok(())
}

/// Writes files until `count` files have been acknowledged, and returns their lines.
fn write_files(guest: &Guest, count: u32) -> Result<String> {
    let mut writer =
        guest.start_script(IO_LIMIT, "exec guest-tool write-files /mnt/data/files 20000")?;
    let mut acknowledged = String::new();
    for _ in 0..count {
        acknowledged += &(writer.next_line().context("The writer ended")? + "\n");
    }
    drop(writer);
    guest.wait_until_run("the writer has ended", IO_LIMIT, "! pidof guest-tool")?;
    Ok(acknowledged)
}
