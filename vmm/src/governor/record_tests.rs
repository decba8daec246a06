//! Tests of recordings to files that work, are slow, or fail.

use std::sync::mpsc::{Sender, channel};
use std::thread;

use balloon::Tier;
use balloon::sim::{GuestConfig, replay};
use balloon::trace::Entry;

use super::*;
use crate::config::{BALLOON_ZONE, PressureConfig};
use crate::governor::fake::{FakeDevice, Fixture, MIB, Shown, core, fixture, zone};
use crate::vm::decision::DECISIONS_SHOWN;
use foreshore_devices::virtio::zone_device::ZoneDevice;

fn target<W>(file: W, max_bytes: u64) -> Target<W> {
    Target { path: PathBuf::from("/trace"), file, max_bytes }
}

impl Shown {
    /// Numbers of missing lines that are recorded in the trace.
    fn lost_lines(&self) -> Vec<u64> {
        let text = String::from_utf8(self.0.lock().clone()).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let lines =
            whole.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter_map(|line| line["lost_lines"].as_u64()).collect()
    }
}

/// Fake disk that blocks each write until the sender is dropped.
struct Slow(Receiver<()>, Shown);

fn slow() -> (Sender<()>, Slow, Shown) {
    let (go_on, waits) = channel();
    let shown = Shown::default();
    (go_on, Slow(waits, shown.clone()), shown)
}

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // An error means that the sender was dropped, which ends all waits.
        let _ = self.0.recv();
        self.1.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn recorded<W: Write + Send + 'static>(file: W, max_bytes: u64) -> Fixture {
    let mut f = fixture("psi", true);
    let mut distances = balloon::Distances::default();
    distances.set(0, 1, 17);
    let core = f.core.with_distances(distances);
    f.core = core.record(target(file, max_bytes), "db", TimeMs(0)).unwrap();
    f.greet();
    f
}

fn info(f: &Fixture) -> RecordingInfo {
    f.core.info(DECISIONS_SHOWN, TimeMs(0)).recording.unwrap()
}

#[test]
fn recording_holds_reports_plans_and_sizes() {
    let shown = Shown::default();
    let mut f = recorded(shown.clone(), 1 << 30);
    for available in [200, 60, 20, 20] {
        f.report(available);
    }
    let core = f.core;
    drop(core);
    let trace = shown.trace();
    assert!(!trace.cut_off);
    assert_eq!((trace.header.vm.as_str(), trace.header.boot_bytes), ("db", 384 * MIB));
    assert_eq!(trace.header.zones.len(), 2);
    assert_eq!((trace.header.distances.between(0, 1), trace.header.balloon), (17, None));
    let of =
        |wanted: fn(&Entry) -> bool| trace.entries.iter().filter(|entry| wanted(entry)).count();
    assert_eq!(of(|entry| matches!(entry, Entry::Report { .. })), 4);
    assert!(of(|entry| matches!(entry, Entry::Plan { plan, .. } if !plan.targets.is_empty())) > 0);
    // Sizes are recorded at the start and after the grow.
    assert!(of(|entry| matches!(entry, Entry::Host { .. })) >= 2);
    assert!(shown.lost_lines().is_empty());
}

#[test]
fn recording_of_balloon_guest_can_be_replayed() {
    let (shown, balloon) = (Shown::default(), FakeDevice::new(1024 * MIB, true));
    balloon.request(1024 * MIB);
    let core = core(&PressureConfig::default(), vec![zone(BALLOON_ZONE, Tier::Dram, 0, &balloon)]);
    let core = core.record(target(shown.clone(), 1 << 30), "db", TimeMs(0)).unwrap();
    let mut f = Fixture { core, dram: balloon, pm: FakeDevice::new(0, true), seq: 0 };
    f.greet();
    for pages in [0, 255, 1, 511] {
        f.seq += 99;
        f.report(300);
        // The balloon is partly inflated when the sizes are read.
        f.dram.sizes.lock().plugged_bytes -= pages * 4096;
    }
    f.report(300);
    drop(f);
    let trace = shown.trace();
    assert_eq!(trace.header.balloon, Some(balloon::ZoneId(0)));
    let is_odd = |entry: &Entry| {
        let Entry::Host { zones, .. } = entry else { return false };
        !zones[0].plugged_bytes.is_multiple_of(2 * MIB)
    };
    assert!(trace.entries.iter().any(is_odd));
    // A replay with another policy starts with the boot memory, so it ignores a partly inflated
    // block.
    let (setup, _) = replay(&mut shown.reader(), &GuestConfig::default(), 0, 0).unwrap();
    assert_eq!(setup.host.zones[0].plugged_bytes, 0);
}

#[test]
fn stalled_disk_delays_no_decision_and_trace_counts_lost_lines() {
    let (go_on, disk, shown) = slow();
    let mut f = recorded(disk, 1 << 30);
    let reports = 2 * QUEUE_LINES as u64;
    for _ in 0..reports {
        f.report(20);
    }
    // If decisions waited for the disk, this loop would never end.
    assert!(f.pm.sizes.lock().requested_bytes > 0);
    let lost = info(&f).lost_lines;
    assert!(lost > 0, "{:?}", info(&f));
    assert_eq!(info(&f).status, RecordingState::Recording);
    drop(go_on);
    // Once the queue has drained, the next report fits.
    while shown.lost_lines().is_empty() {
        f.report(20);
        thread::yield_now();
    }
    let all = info(&f).lost_lines;
    drop(f);
    let said: u64 = shown.lost_lines().iter().sum();
    assert!((lost..=all).contains(&said), "{lost}, {said}, {all}");
    shown.trace();
}

#[test]
fn recording_ends_at_size_limit_with_whole_lines() {
    let shown = Shown::default();
    let mut f = recorded(shown.clone(), 20_000);
    for _ in 0..100 {
        f.report(200);
    }
    assert_eq!(info(&f).status, RecordingState::Full);
    assert_eq!(info(&f).lost_lines, 0);
    drop(f);
    let bytes = shown.0.lock().len();
    assert!((15_000..=20_000).contains(&bytes), "{bytes}");
    assert!(!shown.trace().cut_off);
}

#[test]
fn failed_disk_ends_only_the_recording() {
    let mut f = recorded(Broken, 1 << 30);
    while info(&f).status == RecordingState::Recording {
        f.report(20);
    }
    let RecordingState::Failed(reason) = info(&f).status else { panic!("{:?}", info(&f)) };
    assert!(reason.contains("No space"), "{reason}");
    let before = f.core.sample(TimeMs(0)).reports_total;
    f.report(20);
    assert_eq!(f.core.sample(TimeMs(0)).reports_total, before + 1);
}

#[test]
fn each_machine_has_its_own_trace_and_none_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    assert_eq!(open(&path, 0).unwrap().0, path);
    assert_eq!(open(&path, 0).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(open(&path, 1).unwrap().0, dir.path().join("trace.2"));
    assert_eq!(open(&path, 2).unwrap().0, dir.path().join("trace.3"));
    assert_eq!(open(&path, 1).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    // A dangling symbolic link is refused too.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
    assert_eq!(open(&link, 0).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert!(open(&dir.path().join("nowhere/trace"), 0).is_err());
}

#[test]
fn pipe_needs_a_reader_and_is_shared_by_machines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert!(open(&path, 0).unwrap_err().to_string().contains("no process reads"));
    let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    for nth in 0..2 {
        assert_eq!(open(&path, nth).unwrap().0, path);
    }
    drop(reader);
    assert_eq!(open(Path::new("/dev/null"), 0).unwrap().0, Path::new("/dev/null"));
}

#[test]
fn traces_of_restarting_guest_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let mut recorded = 0;
    for nth in 0..1000 {
        let Some(bytes) = room(&path, nth, 100) else { continue };
        let (_, file) = open(&path, nth).unwrap();
        file.set_len(bytes.min(15)).unwrap();
        recorded += 1;
    }
    // 6 traces of 15 bytes, and one with the remaining 10 bytes.
    assert_eq!((recorded, std::fs::read_dir(folder.path()).unwrap().count()), (7, 7));
    assert_eq!(room(&path, 7, 100), None);
    assert_eq!(room(&path, MAX_TRACES - 1, u64::MAX), Some(u64::MAX - 100));
    assert_eq!(room(&path, MAX_TRACES, u64::MAX), None);
    assert_eq!(
        room(Path::new("/dev/null"), MAX_TRACES, 100),
        Some(100),
        "a device has no traces to count"
    );
}
