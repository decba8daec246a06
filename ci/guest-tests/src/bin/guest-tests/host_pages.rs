//! Tests of host memory for a guest: shared, in huge pages, prefaulted, or from a file.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::GuestBuilder;
use guest_tests::runner::this_tests_dir;
use guest_tests::user::{need_proc, need_root};
use guest_tests::{Guest, skip, wait_until};
use pmem_volume::media::{OnPageLost, Watch};
use serde_json::json;

use crate::zones::{MIB, mem_total_mib, wait_until_plugged, zone};

guest_tests::tests![
    odd_number_of_mebibytes_is_fully_usable,
    shared_memory_is_counted_once_and_goes_back: 180 (long),
    a_balloon_gives_shared_memory_back: 120 (extended),
    memory_is_prefaulted_on_request: 120 (long),
    memory_options_are_set_on_the_mappings: 120 (extended),
    a_balloon_in_huge_pages_takes_memory_from_the_guest: 240 (long),
    a_guest_runs_in_huge_pages_which_run_out_and_go_back: 300 (long),
    huge_pages_are_prefaulted_on_request: 180,
    lost_huge_page_is_replaced_and_its_neighbors_stay,
    boot_memory_is_of_a_file_of_huge_pages: 300 (extended),
    boot_memory_is_of_a_file: 180 (long),
];

const LIMIT: Duration = Duration::from_secs(60);
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Writable mapping of at least `min_bytes` in the VMM. The writable mapping is guest memory.
struct Mapping {
    name: String,
    flags: Vec<String>,
    fields: Vec<(String, u64)>,
}

impl Mapping {
    fn bytes(&self, field: &str) -> Result<u64> {
        let found = self.fields.iter().find(|(name, _)| name == field);
        Ok(found.with_context(|| format!("{} has no {field}", self.name))?.1)
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|other| other == flag)
    }
}

fn mappings(guest: &Guest, min_bytes: u64) -> Result<Vec<Mapping>> {
    let smaps = fs::read_to_string(need_proc(guest.pid(), "smaps")?)?;
    let mut found: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        match (first.strip_suffix(':'), found.last_mut()) {
            (None, _) => {
                let name = line.split_whitespace().skip(5).collect::<Vec<_>>().join(" ");
                found.push(Mapping { name, flags: Vec::new(), fields: Vec::new() });
            }
            (Some("VmFlags"), Some(mapping)) => {
                mapping.flags = line.split_whitespace().skip(1).map(str::to_owned).collect();
            }
            (Some(field), Some(mapping)) => {
                let kib = line.split_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok());
                mapping.fields.extend(kib.map(|kib| (field.to_owned(), kib * 1024)));
            }
            (Some(_), None) => {}
        }
    }
    let is_large = |mapping: &Mapping| mapping.bytes("Size").is_ok_and(|bytes| bytes >= min_bytes);
    found.retain(|mapping| mapping.has("wr") && is_large(mapping));
    ensure!(!found.is_empty(), "The VMM has no mapping of {min_bytes} bytes and more");
    Ok(found)
}

fn odd_number_of_mebibytes_is_fully_usable() -> Result<()> {
    let guest = Guest::builder().memory("size=385M").boot()?;
    has_all_odd_mebibytes(&guest, 385)?;
    // Without prefault, only memory that has been touched is resident.
    let resident = zone(&guest, "dram")?.resident_bytes;
    ensure!(
        (20 * MIB..=200 * MIB).contains(&resident),
        "{resident} bytes are resident without prefault"
    );
    guest.no_kernel_complaints()
}

/// Checks that a guest can use its memory up to its size, which is not a multiple of 2 MiB.
fn has_all_odd_mebibytes(guest: &Guest, mib: u64) -> Result<()> {
    let last = guest.run("grep 'System RAM' /proc/iomem | tail -n 1")?;
    ensure!(
        last.contains(&format!("-{:08x}", mib * MIB - 1)),
        "The last range of memory is {last:?}"
    );
    ensure!(mem_total_mib(guest)? + 85 > mib, "MemTotal is {} MiB", mem_total_mib(guest)?);
    let shown = guest.get("vm.info")?["memory_actual_size"].as_u64();
    ensure!(shown == Some(mib * MIB), "vm.info has the size {shown:?}");
    Ok(())
}

/// Returns the sum of a field over all mappings of memfds.
fn of_memory_files(guest: &Guest, field: &str) -> Result<u64> {
    let all = mappings(guest, 2 * MIB)?;
    all.iter()
        .filter(|mapping| mapping.name.starts_with("/memfd:"))
        .map(|mapping| mapping.bytes(field))
        .sum()
}

/// Returns the host memory in the VMM's open memfds, which contain plugged memory.
fn in_memory_files(guest: &Guest) -> Result<u64> {
    let is_memory = |path: &Path| {
        fs::read_link(path)
            .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:foreshore"))
    };
    let (mut bytes, mut files) = (0, 0);
    for file in fs::read_dir(need_proc(guest.pid(), "fd")?)? {
        let path = file?.path();
        if is_memory(&path) {
            bytes += fs::metadata(&path)?.blocks() * 512;
            files += 1;
        }
    }
    ensure!(files > 0, "The VMM has no file of shared memory");
    Ok(bytes)
}

fn shared_memory_is_counted_once_and_goes_back() -> Result<()> {
    let memory = "size=257M,shared=on,hotplug_method=virtio-mem,hotplug_size=512M";
    let guest = Guest::builder().memory(memory).pressure("off").boot()?;
    has_all_odd_mebibytes(&guest, 257)?;
    let plugged = |mib: u64| wait_until_plugged(&guest, "dram", mib * MIB, LIMIT);
    guest.put("vm.resize", json!({ "desired_ram": 769 * MIB }))?;
    plugged(512)?;
    let hog = guest.hog(350, LIMIT)?;
    let [rss, pss] = ["Rss", "Pss"].map(|field| of_memory_files(&guest, field));
    let (rss, pss) = (rss?, pss?);
    ensure!(
        rss >= 350 * MIB && rss == pss,
        "Rss {rss} differs from Pss {pss}: pages are mapped twice"
    );
    // The rest is the VMM's own memory. The rest should not include a second copy of guest
    // memory.
    let other_rss_bytes = guest.rss_bytes()?.saturating_sub(rss);
    ensure!(
        other_rss_bytes < 100 * MIB,
        "{other_rss_bytes} bytes are resident beside the guest's memory"
    );
    let plugged_in = in_memory_files(&guest)?;
    ensure!(plugged_in >= 150 * MIB, "Only {plugged_in} bytes are in the file of plugged memory");
    drop(hog);
    guest.put("vm.resize", json!({ "desired_ram": 257 * MIB }))?;
    plugged(0)?;
    let left = of_memory_files(&guest, "Rss")?;
    ensure!(left <= 257 * MIB, "{left} bytes of shared memory are left of 257 MiB");
    // The memory should be removed from the file, not only from the page tables.
    let left = in_memory_files(&guest)?;
    ensure!(left == 0, "{left} bytes of unplugged memory are left in its file");
    guest.no_kernel_complaints()
}

fn a_balloon_gives_shared_memory_back() -> Result<()> {
    let builder = Guest::builder().memory("size=513M,shared=on").argument("--balloon", "size=0");
    let guest = builder.pressure("off").boot()?;
    let hog = guest.hog(300, LIMIT)?;
    drop(hog);
    let before = zone(&guest, "dram")?.resident_bytes;
    ensure!(before >= 300 * MIB, "{before} bytes are resident");
    guest.put("vm.resize", json!({ "desired_balloon": 256 * MIB }))?;
    guest.wait_until("the memory in the balloon is the host's", LIMIT, || {
        Ok(zone(&guest, "dram")?.resident_bytes + 150 * MIB <= before)
    })?;
    let failed = guest.metric("foreshore_balloon_discard_failures_total", &[])?;
    ensure!(failed == 0.0, "The host refused to free pages {failed} times");
    guest.no_kernel_complaints()
}

/// Plugged memory should also be fully resident. [`odd_number_of_mebibytes_is_fully_usable`] tests
/// memory without `prefault`.
fn memory_is_prefaulted_on_request() -> Result<()> {
    for keys in ["prefault=on", "prefault=on,shared=on"] {
        let plug = "hotplug_method=virtio-mem,hotplug_size=128M,hotplugged_size=128M";
        let guest =
            Guest::builder().memory(&format!("size=256M,{keys},{plug}")).pressure("off").boot()?;
        wait_until_plugged(&guest, "dram", 128 * MIB, LIMIT)?;
        let resident = zone(&guest, "dram")?.resident_bytes;
        ensure!(resident == 384 * MIB, "{keys}: {resident} bytes are resident");
    }
    Ok(())
}

fn memory_options_are_set_on_the_mappings() -> Result<()> {
    for (keys, expected_flag, unexpected_flag) in [
        ("mergeable=on", "mg", ""),
        ("thp=off", "nh", "hg"),
        ("thp=on", "hg", "nh"),
        ("reserve=on", "ac", "nr"),
        ("reserve=off", "nr", "mg"),
    ] {
        let guest = Guest::builder().memory(&format!("size=256M,{keys}")).boot()?;
        for mapping in mappings(&guest, 256 * MIB)? {
            ensure!(
                mapping.has(expected_flag) && !mapping.has(unexpected_flag),
                "{keys}: {} {:?}",
                mapping.name,
                mapping.flags
            );
            let huge = mapping.bytes("AnonHugePages")?;
            ensure!(keys != "thp=off" || huge == 0, "thp=off: {huge} bytes are of huge pages");
        }
    }
    Ok(())
}

/// Reservation of 2 MiB huge pages on the host. Drop releases it.
struct SetAside {
    pages: u64,
}

impl SetAside {
    /// Reserves huge pages. Returns `None` if the host does not support them or does not have
    /// enough contiguous memory.
    fn pages(pages: u64) -> Result<Option<Self>> {
        if !Path::new(HUGE_PAGES).exists() {
            return Ok(None);
        }
        need_root("reserve huge pages")?;
        let path = format!("{HUGE_PAGES}/nr_hugepages");
        fs::write(&path, pages.to_string()).with_context(|| format!("Cannot write {path}"))?;
        let aside = Self { pages };
        Ok((Self::number("nr_hugepages")? == pages).then_some(aside))
    }

    fn number(name: &str) -> Result<u64> {
        let text = fs::read_to_string(format!("{HUGE_PAGES}/{name}"))?;
        text.trim().parse().with_context(|| format!("{name}: {text:?}"))
    }

    fn used(&self) -> Result<u64> {
        Ok(self.pages - Self::number("free_hugepages")?)
    }

    /// Returns the number of huge pages that are neither in use nor reserved.
    fn available(&self) -> Result<u64> {
        Ok(Self::number("free_hugepages")? - Self::number("resv_hugepages")?)
    }

    /// Waits until all pages are free after the VM has ended.
    fn all_are_back(&self) -> Result<()> {
        wait_until("all huge pages are the host's again", LIMIT, || {
            Ok(self.available()? == self.pages)
        })
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        // An error is ignored, because the next test checks its own reservation.
        let _ = fs::write(format!("{HUGE_PAGES}/nr_hugepages"), "0");
    }
}

/// Reason for skipping a test on a host without enough huge pages.
const NO_HUGE_PAGES: &str = "the host does not find so many huge pages of 2 MiB";

fn in_huge_pages(keys: &str) -> GuestBuilder {
    Guest::builder().memory(&format!("hugepages=on,hugepage_size=2M,{keys}")).pressure("off")
}

fn a_balloon_in_huge_pages_takes_memory_from_the_guest() -> Result<()> {
    let Some(aside) = SetAside::pages(128)? else { return skip(NO_HUGE_PAGES) };
    let guest =
        in_huge_pages("size=256M").argument("--balloon", "size=0,free_page_reporting=on").boot()?;
    // 1. Freed memory is returned to the host in whole huge pages. It is allocated again when the
    //    guest uses it.
    drop(guest.hog(100, LIMIT)?);
    let metrics = || guest.metrics();
    guest.wait_until("freed huge pages are the host's", LIMIT, || {
        Ok(metrics()?.value("foreshore_balloon_given_back_bytes_total", &[("by", "report")])?
            >= (32 * MIB) as f64)
    })?;
    drop(guest.hog(100, LIMIT)?);
    // 2. Memory in the balloon is not available to the guest, but its pages remain allocated to the
    //    VM.
    let before = mem_total_mib(&guest)?;
    let resize = |bytes: u64| guest.put("vm.resize", json!({ "desired_balloon": bytes }));
    resize(64 * MIB)?;
    guest.wait_until("64 MiB are in the balloon", LIMIT, || {
        Ok(mem_total_mib(&guest)? == before - 64)
    })?;
    let parts =
        metrics()?.value("foreshore_balloon_refused_pages_total", &[("reason", "huge-page")])?;
    ensure!(parts >= 8192.0, "{parts} pages of huge pages stay with the VM");
    resize(0)?;
    guest.wait_until("the balloon is empty", LIMIT, || Ok(mem_total_mib(&guest)? == before))?;
    drop(guest.hog(100, LIMIT)?);
    guest.no_kernel_complaints()?;
    drop(guest);
    aside.all_are_back()
}

fn a_guest_runs_in_huge_pages_which_run_out_and_go_back() -> Result<()> {
    let builder = in_huge_pages("size=256M,hotplug_method=virtio-mem,hotplug_size=256M");
    let Some(none) = SetAside::pages(0)? else { return skip(NO_HUGE_PAGES) };
    let refusal = builder.expect_refusal()?;
    ensure!(
        refusal.message.contains(
            "cannot allocate 256 MiB of huge pages of 2 MiB; the host has 0 of them free"
        ),
        "{}",
        refusal.message
    );
    drop(none);
    let Some(aside) = SetAside::pages(176)? else { return skip(NO_HUGE_PAGES) };
    let guest = builder.boot()?;
    ensure!(aside.available()? == 48, "The guest's huge pages are not set aside");
    let resize = |mib: u64| guest.put("vm.resize", json!({ "desired_ram": mib * MIB }));
    let plugged = |mib: u64| wait_until_plugged(&guest, "dram", mib * MIB, LIMIT);
    // 1. A request exceeds the host's huge pages. The guest gets the available ones, and the API
    //    reports the reason.
    resize(512)?;
    plugged(96)?;
    ensure!(
        zone(&guest, "dram")?.state == "stuck",
        "The zone reached a size that exceeds the host's memory"
    );
    let shown = guest.get("vm.memory")?.to_string();
    let reason = format!("huge-pages: the host cannot provide the {} bytes", 256 * MIB);
    ensure!(shown.contains(&reason), "{shown}");
    let refused = guest.metric(
        "foreshore_memory_refused_requests_total",
        &[("zone", "dram"), ("reason", "huge-pages")],
    )?;
    ensure!(refused >= 1.0, "The metrics count no refused request");
    ensure!(aside.available()? == 0, "The host has huge pages left");
    let hog = guest.hog(220, LIMIT)?;
    let used = aside.used()?;
    ensure!(used * 2 >= 220, "{used} huge pages are in use by a guest that uses 220 MiB");
    guest.wait_until("all huge pages in use count as resident", LIMIT, || {
        let used = aside.used()?;
        let resident = zone(&guest, "dram")?.resident_bytes;
        // A page that the VMM has written and the guest has not touched yet may exist only in the
        // file.
        Ok((used * 2 - 8..=used * 2).contains(&(resident / MIB)))
    })?;
    drop(hog);
    // 2. Unplugged pages are returned to the host.
    resize(256)?;
    plugged(0)?;
    ensure!(aside.available()? == 48, "{} of 48 huge pages are back", aside.available()?);
    // 3. Pages that are plugged again are zeroed and usable.
    resize(352)?;
    plugged(96)?;
    drop(guest.hog(220, LIMIT)?);
    guest.no_kernel_complaints()?;
    // 4. There are not enough pages for two machines, so a reboot should reuse the pages of the
    //    previous machine.
    guest.reboot_from_inside()?;
    guest.power_off()?;
    aside.all_are_back()
}

fn huge_pages_are_prefaulted_on_request() -> Result<()> {
    let Some(aside) = SetAside::pages(192)? else { return skip(NO_HUGE_PAGES) };
    let keys = "size=256M,prefault=on,hotplug_method=virtio-mem,hotplug_size=128M";
    let guest = in_huge_pages(keys).boot()?;
    ensure!(aside.used()? == 128, "{} huge pages are in useinstead of 128", aside.used()?);
    guest.put("vm.resize", json!({ "desired_ram": 320 * MIB }))?;
    wait_until_plugged(&guest, "dram", 64 * MIB, LIMIT)?;
    ensure!(aside.used()? == 160, "{} huge pages are in useinstead of 160", aside.used()?);
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    aside.all_are_back()
}

/// Mounted hugetlbfs. Drop unmounts it.
struct HugeFiles(PathBuf);

#[derive(Default)]
struct LostPages(AtomicUsize);

impl OnPageLost for LostPages {
    fn page_lost(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Tests the VMM's SIGBUS handler on hugetlbfs memory, without a guest.
fn lost_huge_page_is_replaced_and_its_neighbors_stay() -> Result<()> {
    const HUGE: usize = 2 << 20;
    const LEN: usize = 3 * HUGE;
    let Some(aside) = SetAside::pages(3)? else { return skip(NO_HUGE_PAGES) };
    let files = HugeFiles::mount()?;
    let path = files.0.join("memory");
    let file = fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    file.set_len(LEN as u64)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let map = unsafe {
        libc::mmap(ptr::null_mut(), LEN, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    ensure!(map != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    let lost = Arc::new(LostPages::default());
    let start = map as usize;
    // SAFETY: only this test accesses the range, and no longer after the watch has been dropped.
    let watch = unsafe { Watch::new(start..start + LEN, Arc::clone(&lost) as _) }?;
    // SAFETY: the address is within the mapping.
    let byte = |at: usize| unsafe { ptr::read_volatile((start + at) as *const u8) };
    // SAFETY: the range is the whole mapping, and no other code has a pointer to it.
    unsafe { ptr::write_bytes(map.cast::<u8>(), 0x5a, LEN) };
    ensure!(aside.used()? == 3, "{} huge pages are in useinstead of 3", aside.used()?);
    file.set_len(2 * HUGE as u64)?;
    ensure!(
        lost.0.load(Ordering::Relaxed) == 0,
        "A lost page was replaced before the first access"
    );
    // The first access is in the middle of a page, and the whole page should be replaced.
    let pages = [
        (2 * HUGE + 5 * 4096 + 8, 0),
        (2 * HUGE, 0),
        (LEN - 1, 0),
        (0, 0x5a),
        (2 * HUGE - 1, 0x5a),
    ];
    for (at, expected) in pages {
        ensure!(byte(at) == expected, "{:#x} is read at {at:#x}, not {expected:#x}", byte(at));
    }
    let count = lost.0.load(Ordering::Relaxed);
    ensure!(count == 1, "{count} pages are lost, not 1");
    drop(watch);
    // SAFETY: the range was mapped above and is no longer used.
    unsafe { libc::munmap(map, LEN) };
    drop(file);
    fs::remove_file(&path)?;
    aside.all_are_back()
}

impl HugeFiles {
    fn mount() -> Result<Self> {
        let dir = this_tests_dir().join("huge");
        fs::create_dir_all(&dir)?;
        let mount = format!("mount -t hugetlbfs -o pagesize=2M none {}", dir.display());
        ensure!(Command::new("sh").args(["-c", &mount]).status()?.success(), "`{mount}` failed");
        Ok(Self(dir))
    }
}

impl Drop for HugeFiles {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn boot_memory_is_of_a_file_of_huge_pages() -> Result<()> {
    let Some(aside) = SetAside::pages(144)? else { return skip(NO_HUGE_PAGES) };
    let files = HugeFiles::mount()?;
    let builder = |size: &str, file: &Path, keys: &str| {
        let zone = format!("id=mem0,size={size},file={}{keys}", file.display());
        Guest::builder().memory("size=0").argument("--memory-zone", &zone).pressure("off")
    };
    // One configuration needs more pages than available. Another has a size that is not a multiple
    // of a page.
    let refusal = builder("512M", &files.0, "").expect_refusal()?;
    ensure!(
        refusal
            .message
            .contains("cannot allocate 512 MiB of huge pages of 2 MiB; the host has 144 of them"),
        "{}",
        refusal.message
    );
    let refusal = builder("257M", &files.0, "").expect_refusal()?;
    ensure!(
        refusal.message.contains("not a multiple of the huge page size 2 MiB"),
        "{}",
        refusal.message
    );
    // 1. A directory: the file has no name, and disappears together with the VM.
    let guest = builder("256M", &files.0, "").boot()?;
    ensure!(aside.available()? == 16, "The guest's huge pages are not set aside");
    let name = mappings(&guest, 256 * MIB)?.remove(0).name;
    ensure!(
        name.contains("(deleted)") && name.starts_with(&files.0.display().to_string()),
        "{name}"
    );
    drop(guest.hog(100, LIMIT)?);
    ensure!(aside.used()? * 2 >= 100, "{} huge pages are in use", aside.used()?);
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    aside.all_are_back()?;
    // 2. A file: the guest owns it while the VM exists. The file keeps its pages until it is
    //    removed.
    let file = files.0.join("memory");
    fs::File::create(&file)?.set_len(256 * MIB)?;
    let guest = builder("256M", &file, ",shared=on,prefault=on").boot()?;
    ensure!(aside.used()? == 128, "{} huge pages are in useinstead of 128", aside.used()?);
    let refusal = builder("256M", &file, ",shared=on").expect_refusal()?;
    ensure!(refusal.message.contains("locked"), "{}", refusal.message);
    guest.reboot_from_inside()?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    fs::remove_file(&file)?;
    aside.all_are_back()
}

fn boot_memory_is_of_a_file() -> Result<()> {
    let dir = this_tests_dir();
    let file = dir.join("memory");
    let mib_in = |file: &Path| Ok::<_, anyhow::Error>(fs::metadata(file)?.blocks() * 512 / MIB);
    let builder = |keys: &str| {
        let zone = format!("id=mem0,size=257M,{keys}");
        Guest::builder().memory("size=0").argument("--memory-zone", &zone)
    };
    let of_file = format!("file={},shared=on", file.display());
    let refusal = builder(&of_file).expect_refusal()?;
    ensure!(refusal.message.contains("memory") && refusal.message.contains("cannot open it"));
    fs::File::create(&file)?.set_len(257 * MIB)?;
    let guest = builder(&of_file).boot()?;
    ensure!(mib_in(&file)? >= 20, "The guest's memory is not in the file");
    let mapping = &mappings(&guest, 257 * MIB)?[0];
    ensure!(mapping.name == file.display().to_string(), "The guest's memory maps {}", mapping.name);
    // A second guest should not be able to use the file.
    let refusal = builder(&of_file).expect_refusal()?;
    ensure!(refusal.message.contains("locked"), "{}", refusal.message);
    guest.reboot_from_inside()?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    // A file that is not shared is not written to, so it must be empty.
    let unshared = format!("file={}", file.display());
    let refusal = builder(&unshared).expect_refusal()?;
    ensure!(refusal.message.contains("it has data at offset"), "{}", refusal.message);
    fs::File::create(&file)?.set_len(257 * MIB)?;
    let guest = builder(&unshared).boot()?;
    guest.run("head -c 20000000 /dev/urandom > /tmp/data && md5sum /tmp/data")?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    // In a directory, the file has no name.
    let guest = builder(&format!("file={}", dir.display())).start()?;
    guest.wait_until("the VM runs", LIMIT, || {
        Ok(guest.get("vm.info").is_ok_and(|info| info["state"] == "Running"))
    })?;
    let mapping = &mappings(&guest, 257 * MIB)?[0];
    ensure!(mapping.name.contains("(deleted)"), "The guest's memory maps {}", mapping.name);
    ensure!(mapping.bytes("Rss")? == mapping.bytes("Pss")?, "The guest's memory is mapped twice");
    Ok(())
}
