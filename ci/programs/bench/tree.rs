//! A kernel-like tree on F2FS on a BTT volume: unpacked, and packed again.

use std::time::Duration;

use anyhow::{Context, Result};
use guest_tests::runner::this_tests_dir;
use guest_tests::wait_until;

use crate::samples::{Row, Samples, median};
use crate::vmm::{Disk, Extras, Vm, Vmm};
use crate::volume::{VOLUME_BYTES, make_pool, write_btt_file};
use guest_tests::host_memory;

/// A fiftieth of a kernel's source.
const FILES: u32 = 1700;
const REPEATS: usize = 3;
const DISK_LIMIT: Duration = Duration::from_secs(60);

/// Each way to a volume, and QEMU's NVDIMM.
pub fn measure(vmms: &[&Vmm], samples: &mut Samples) -> Result<()> {
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
            // The interfaces of a volume are ours.
            Vmm::Other { .. } => {}
        }
    }
    Ok(())
}

/// One guest: the medians of its repeats are its samples. Each repeat begins with a new file
/// system.
fn time(vmm: &Vmm, disk: Disk, node: &str, rows: [Row; 2], samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let vm = vmm.start(&Extras { file_systems: true, disk, ..Extras::default() })?;
    vm.wait_for_shell()?;
    let there = format!("test -b /dev/{node}");
    wait_until("the disk is there", DISK_LIMIT, || Ok(vm.try_run(&there)?.code == 0))?;
    vm.run(&format!(
        "guest-tool write-tree /tmp/tree 1 {FILES} && tar cf /tmp/tree.tar -C /tmp tree && rm -r /tmp/tree"
    ))?;
    let mut times_s = [Vec::new(), Vec::new()];
    // The first one touches everything for the first time.
    for repeat in 0..=REPEATS {
        vm.run(&format!(
            "mkfs.f2fs -q -f /dev/{node} && mkdir -p /mnt/f && mount -t f2fs /dev/{node} /mnt/f"
        ))?;
        let untar_s = time_once(&vm, "tar xf /tmp/tree.tar -C /mnt/f && sync")?;
        vm.run("echo 3 >/proc/sys/vm/drop_caches")?;
        let tar_s = time_once(&vm, "tar cf - -C /mnt/f tree | cat >/dev/null")?;
        vm.run("umount /mnt/f")?;
        if repeat > 0 {
            times_s[0].push(untar_s);
            times_s[1].push(tar_s);
        }
    }
    for (row, times) in rows.into_iter().zip(&times_s) {
        samples.add(row, vmm.name(), median(times).context("No repeats")?);
    }
    Ok(())
}

fn time_once(vm: &Vm, command: &str) -> Result<f64> {
    let total = vm.run(&format!("guest-tool time '{command}'"))?;
    let total_us: f64 =
        total.trim().parse().with_context(|| format!("guest-tool time says {total:?}"))?;
    Ok(total_us / 1e6)
}
