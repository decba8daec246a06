//! Measures unpacking and packing a tree that resembles kernel source, on F2FS on a BTT volume.

use anyhow::Result;
use guest_tests::runner::this_tests_dir;

use crate::samples::{Row, Samples};
use crate::vmm::{Disk, Extras, Vmm};
use crate::volume::{VOLUME_BYTES, make_pool, write_btt_file};

/// Number of files. The number is a fiftieth of the number in the kernel's source.
const FILES: u32 = 1700;
const REPEATS: usize = 3;

pub(crate) fn measure(vmms: &[&Vmm], samples: &mut Samples) -> Result<()> {
    for vmm in vmms {
        match vmm {
            Vmm::Foreshore => {
                let pool = make_pool(&this_tests_dir())?;
                for (interface, disk, rows) in [
                    ("nvdimm", "pmem0s", [Row::NvdimmUntar, Row::NvdimmTar]),
                    ("virtio-blk", "vda", [Row::EngineUntar, Row::EngineTar]),
                    ("virtio-pmem", "pmem0s", [Row::VirtioPmemUntar, Row::VirtioPmemTar]),
                ] {
                    let volume = format!("pool={},name=data,interface={interface}", pool.display());
                    time(vmm, Disk::Volume(volume), disk, rows, samples)?;
                }
            }
            Vmm::Qemu => {
                let file = this_tests_dir().join("nvdimm");
                write_btt_file(&file)?;
                let disk = Disk::NvdimmFile(file, VOLUME_BYTES);
                time(vmm, disk, "pmem0s", [Row::NvdimmUntar, Row::NvdimmTar], samples)?;
            }
            // Only Foreshore supports these interfaces of a volume.
            Vmm::Unconfined | Vmm::Other { .. } => {}
        }
    }
    Ok(())
}

/// Adds the medians of several runs in one guest. Each run starts with a new file system.
fn time(vmm: &Vmm, disk: Disk, node: &str, rows: [Row; 2], samples: &mut Samples) -> Result<()> {
    let vm = vmm.boot(&Extras { file_systems: true, disk, ..Extras::default() })?;
    vm.wait_for_path(&format!("/dev/{node}"))?;
    vm.run(&format!(
        "guest-tool write-tree /tmp/tree 1 {FILES} && tar cf /tmp/tree.tar -C /tmp tree && rm -r /tmp/tree"
    ))?;
    let time_s =
        |command| vm.number(&format!("guest-tool time '{command}'")).map(|total_us| total_us / 1e6);
    samples.add_medians(rows, vmm.name(), REPEATS, || {
        vm.run(&format!(
            "mkfs.f2fs -q -f /dev/{node} && mkdir -p /mnt/f && mount -t f2fs /dev/{node} /mnt/f"
        ))?;
        let untar_s = time_s("tar xf /tmp/tree.tar -C /mnt/f && sync")?;
        vm.run("echo 3 >/proc/sys/vm/drop_caches")?;
        let tar_s = time_s("tar cf - -C /mnt/f tree | cat >/dev/null")?;
        vm.run("umount /mnt/f")?;
        Ok([untar_s, tar_s])
    })
}
