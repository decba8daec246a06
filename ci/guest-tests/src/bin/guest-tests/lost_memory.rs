//! Tests the loss of memory that a guest is using. The VM should pause and report the reason,
//! whichever thread accesses the memory, and the VMM should survive.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::pool::create_keys;
use guest_tests::runner::{skip, this_tests_dir};
use guest_tests::user::need_root;
use guest_tests::{Guest, Pool};

use crate::dax::{EXT4, HEAP, HEAP_BYTES};
use crate::pmem::{file, guest_with};
use crate::raw_volume::wait_for_bytes;
use crate::volume::IO_LIMIT;
use crate::zones::{MIB, wait_until_plugged};

guest_tests::tests![
    guest_that_reads_truncated_memory_is_paused: 300 (long) on [V6_12, V6_1 extended] x 2,
    vmm_survives_device_writes_to_truncated_memory x 2,
    truncated_memory_is_not_written_to_a_disk_as_zeros: 300 x 2,
    pause_for_a_truncated_pool_names_all_its_users: 300 x 2,
    a_guest_that_reads_bad_memory_is_paused x 2,
];

fn cut(path: &Path, len_bytes: u64) -> Result<()> {
    Ok(File::options().write(true).open(path)?.set_len(len_bytes)?)
}

/// Labels of the memory that `flag` provides.
fn labels(flag: &str) -> [(&'static str, &str); 2] {
    let (source, key) = flag.split_once(' ').unwrap_or((flag, ""));
    [("source", source.trim_start_matches('-')), ("key", key)]
}

/// Waits until the VM is paused, and all interfaces report which memory is lost and how. `flags`
/// are the flags that provided the memory.
fn wait_until_paused(guest: &Guest, flags: &[&str], how: &str) -> Result<()> {
    guest.wait_until("the VM is paused", IO_LIMIT, || {
        Ok(guest.get("vm.info")?["state"] == "Paused")
    })?;
    // Lost memory that has not been accessed yet may be found later.
    guest.wait_until("all lost memory is named", IO_LIMIT, || {
        let metrics = guest.metrics()?;
        let is_lost = |flag: &&str| metrics.value("foreshore_memory_lost", &labels(flag));
        Ok(flags.iter().map(is_lost).collect::<Result<Vec<_>>>()?.iter().all(|lost| *lost == 1.0))
    })?;
    ensure!(
        guest.metric("foreshore_memory_lost", &labels("--memory"))? == 0.0,
        "Boot memory is lost"
    );
    let reason = guest.get("vm.info")?["pause_reason"].clone();
    let reason = reason.as_str().context("The VM has no pause_reason")?;
    let log = guest.vmm_log()?;
    for words in [flags[0], how] {
        ensure!(reason.contains(words), "{words:?} is missing in {reason:?}");
        ensure!(
            log.contains("The VM is paused") && log.contains(words),
            "{words:?} is missing in\n{log}"
        );
    }
    let refused = guest.try_api("PUT", "vm.resume", None)?;
    ensure!(refused.status == 409 && refused.body.contains(how), "{refused:?}");
    ensure!(guest.get("vm.info")?["state"] == "Paused", "The VM was resumed");
    Ok(())
}

/// No exit reports the loss, so without a pause the vCPU would retry forever.
fn guest_that_reads_truncated_memory_is_paused() -> Result<()> {
    let path = file(&this_tests_dir(), "file", 16, "host")?;
    let flag = format!("--pmem file={}", path.display());
    let guest = guest_with(&format!("file={}", path.display())).boot()?;
    wait_for_bytes(&guest)?;
    cut(&path, 5 * MIB)?;
    let read = "exec dd if=/dev/pmem0 of=/dev/null bs=1M skip=8 count=1 iflag=direct";
    // The VMM also checks files at regular intervals. Therefore, the VM may be paused before the
    // guest confirms that the script has started.
    let read = guest.start_script(IO_LIMIT, read);
    wait_until_paused(&guest, &[&flag], "truncated to 5 MiB, but the guest has mapped 16 MiB")?;
    drop(read);
    // A file that is extended to its old length has lost its content.
    cut(&path, 16 * MIB)?;
    let refused = guest.try_api("PUT", "vm.resume", None)?;
    ensure!(refused.status == 409, "{refused:?}");
    cut(&path, 5 * MIB)?;
    let refused = guest.try_api("PUT", "vm.reboot", None)?;
    ensure!(refused.status >= 400 && refused.body.contains("5 MiB"), "{refused:?}");
    cut(&path, 16 * MIB)?;
    guest.command("vm.boot")?;
    guest.wait_for_shell(IO_LIMIT)?;
    wait_for_bytes(&guest)?;
    ensure!(guest.get("vm.info")?["pause_reason"].is_null(), "The VM still has a pause_reason");
    ensure!(
        guest.metric("foreshore_memory_lost", &labels(&flag))? == 0.0,
        "Memory lost before the reboot still counts"
    );
    guest.run("dd if=/dev/pmem0 of=/dev/null bs=1M iflag=direct")?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn device_range(guest: &Guest) -> Result<(u64, u64)> {
    let iomem = guest.run("cat /proc/iomem")?;
    let line = iomem.lines().find(|line| line.contains("namespace0.0"));
    let line = line.with_context(|| format!("No namespace in\n{iomem}"))?;
    let (range, _) = line.split_once(" : ").context("The line has no range")?;
    let (first, last) = range.trim().split_once('-').context("The line has no range")?;
    Ok((u64::from_str_radix(first, 16)?, u64::from_str_radix(last, 16)? + 1))
}

/// A driver may place its buffers in lost memory. When a device accesses them, the VMM should
/// survive.
fn vmm_survives_device_writes_to_truncated_memory() -> Result<()> {
    const RNG: &str = "0x1044";
    let path = file(&this_tests_dir(), "file", 16, "x")?;
    let flag = format!("--pmem file={}", path.display());
    let guest = guest_with(&format!("file={}", path.display())).boot()?;
    wait_for_bytes(&guest)?;
    let (first, end) = device_range(&guest)?;
    let attack = format!("exec guest-tool hostile-range {RNG} {first:#x} {end:#x} /run/never");
    let attack = guest.start_script(IO_LIMIT, &attack)?;
    guest.wait_until("the device has written there", IO_LIMIT, || {
        let content = fs::read(&path)?;
        Ok(content.chunks(4096).any(|page| page[256..].iter().any(|byte| *byte != 0)))
    })?;
    cut(&path, 0)?;
    wait_until_paused(&guest, &[&flag], "truncated to 0")?;
    drop(attack);
    Ok(())
}

/// The source of a disk write is truncated during the write. The write should fail and change
/// nothing.
fn truncated_memory_is_not_written_to_a_disk_as_zeros() -> Result<()> {
    const SEED: u64 = 0x1057_0000_0000_0000;
    let dir = this_tests_dir();
    let path = file(&dir, "file", 32, "x")?;
    let flag = format!("--pmem file={}", path.display());
    let image = sparse_file("image", 2 * HEAP_BYTES)?;
    let guest = guest_with(&format!("file={}", path.display()))
        .argument("--disk", &format!("path={}", image.display()))
        .boot()?;
    wait_for_bytes(&guest)?;
    EXT4.make(&guest)?;
    let transfer = format!("exec guest-tool map-transfer {HEAP} {HEAP_BYTES} {SEED} /dev/vda");
    let mut transfer = guest.start_script(IO_LIMIT, &transfer)?;
    ensure!(
        transfer.next_line().as_deref() == Some("written"),
        "The transfer did not start: {:?}",
        transfer.finish()
    );
    cut(&path, 0)?;
    wait_until_paused(&guest, &[&flag], "truncated to 0")?;
    drop(transfer);
    guest.kill9()?;
    let mut content = vec![0; HEAP_BYTES as usize];
    File::open(&image)?.read_exact_at(&mut content, 0)?;
    let (words, _) = content.as_chunks::<8>();
    for (word, index) in words.iter().zip(0..) {
        let word = u64::from_le_bytes(*word);
        ensure!(word == SEED + index, "Word {index} of the image is {word:#x}");
    }
    Ok(())
}

/// Lent memory and volumes are in one file. A pool cannot be opened while a part of its file is
/// missing. When the part is back, the pool is unchanged.
fn pause_for_a_truncated_pool_names_all_its_users() -> Result<()> {
    let pool = Pool::create("256M")?;
    let (memory, volume) = (
        format!("--pm-memory pool={}", pool.name()),
        format!("--pm-volume pool={},name=data", pool.name()),
    );
    let guest = Guest::builder()
        .memory("size=384M")
        .pressure("fixed,size=64M")
        .pm_memory(&format!("pool={},size=64M", pool.name()))
        .pm_volume(&format!(
            "pool={},name=data,size=32M,interface=nvdimm,{}",
            pool.name(),
            create_keys()
        ))
        .boot()?;
    wait_until_plugged(&guest, "pm", 64 * MIB, IO_LIMIT)?;
    guest.wait_until_run("/dev/pmem0s exists", IO_LIMIT, "test -b /dev/pmem0s")?;
    guest.run("dd if=/dev/urandom of=/dev/pmem0s bs=64k count=16 oflag=direct")?;
    let pool_bytes = fs::metadata(pool.path())?.len();
    cut(pool.path(), 4 * MIB)?;
    // As in the tests above, the VM may be paused before the guest confirms the start.
    let read =
        guest.start_script(IO_LIMIT, "exec dd if=/dev/pmem0s of=/dev/null bs=64k iflag=direct");
    wait_until_paused(&guest, &[&memory, &volume], "truncated to 4 MiB")?;
    drop(read);
    let refused = guest.try_api("PUT", "vm.reboot", None)?;
    ensure!(refused.status >= 400 && refused.body.contains("cut short"), "{refused:?}");
    cut(pool.path(), pool_bytes)?;
    guest.kill9()
}

/// The kernel removes a bad page from all processes, and raises a signal for each access to it.
fn a_guest_that_reads_bad_memory_is_paused() -> Result<()> {
    need_root("poison a page")?;
    let path = file(&this_tests_dir(), "file", 16, "x")?;
    let flag = format!("--pmem file={}", path.display());
    let guest = guest_with(&format!("file={}", path.display())).boot()?;
    wait_for_bytes(&guest)?;
    guest.run("dd if=/dev/pmem0 of=/dev/null bs=1M iflag=direct")?;
    if !poison(&path, 8 * MIB)? {
        return skip("the host's kernel lacks CONFIG_MEMORY_FAILURE");
    }
    let read = "exec dd if=/dev/pmem0 of=/dev/null bs=1M skip=8 count=1 iflag=direct";
    let read = guest.start_script(IO_LIMIT, read)?;
    wait_until_paused(&guest, &[&flag], "a page is bad")?;
    drop(read);
    Ok(())
}

/// Makes the kernel treat the page at `offset` of a file as bad. Returns false if the kernel does
/// not support this (madvise(2), MADV_HWPOISON).
fn poison(path: &Path, offset: u64) -> Result<bool> {
    let file = File::options().read(true).write(true).open(path)?;
    let (len, prot) = (4096, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the mapping is new, and only the kernel accesses its memory.
    unsafe {
        let fd = file.as_raw_fd();
        let page =
            libc::mmap(ptr::null_mut(), len, prot, libc::MAP_SHARED, fd, offset as libc::off_t);
        ensure!(page != libc::MAP_FAILED, "Cannot map {}", path.display());
        let result = libc::madvise(page, len, libc::MADV_HWPOISON);
        let error = std::io::Error::last_os_error();
        libc::munmap(page, len);
        if result != 0 && error.raw_os_error() == Some(libc::EINVAL) {
            return Ok(false);
        }
        ensure!(result == 0, "madvise: {error}");
    }
    Ok(true)
}
