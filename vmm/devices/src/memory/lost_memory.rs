//! Lost guest memory. Memory is lost if its file was truncated, if the file system is full, or if
//! the hardware reports bad memory.
//!
//! An access to a lost page raises SIGBUS at best. The result depends on the thread:
//!
//! - **A device thread of this process**: the SIGBUS handler stops the guest and then replaces the
//!   page with zeros (`pmem_volume::media`, [`GuestRange::page_lost`]). The device checks for
//!   losses before it uses data that it copied ([`super::view::MappedMemory::check_whole`]).
//! - **A vCPU, if the memory is bad**: KVM sends the vCPU's thread a SIGBUS (Linux
//!   arch/x86/kvm/mmu/mmu.c, `kvm_send_hwpoison_signal`), with the same result.
//! - **A vCPU, if there is no page**: KVM assumes that the page must be read from a disk, and
//!   fetches it asynchronously. When that fails, the vCPU retries forever (virt/kvm/async_pf.c;
//!   kvm_main.c, `hva_to_pfn` of a caller that does not wait). No exit reports this. The VMM
//!   therefore checks the lengths of all files regularly ([`LostMemory::check_files`]). If the vCPU
//!   cannot wait because its interrupts are off, KVM_RUN fails with EFAULT, and the VMM checks the
//!   lengths immediately.
//!
//! Lost memory remains lost even if the file is extended to its old length, because the guest's
//! data is gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fmt, io};

use foreshore_types::size::Size;
use parking_lot::Mutex;
use pmem_volume::media::{OnPageLost, TooManyRanges};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::backing::Reservation;
use crate::entry_inhibitor::EntryInhibitor;
use crate::file_id::FileId;
use crate::metrics::{Expose, Exposition, Family, and, one};

/// A page of guest memory was lost. Data copied from guest memory may be zeros, and data copied to
/// it may be gone.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("guest memory is lost")]
pub struct MemoryLost;

/// Flag that is raised when a page is lost.
#[derive(Clone, Debug, Default)]
pub struct LossFlag(Arc<AtomicBool>);

impl LossFlag {
    /// Raises the flag, which marks all later copies from guest memory as invalid.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[derive(Debug, Error)]
pub enum WatchError {
    #[error("cannot create the eventfd that reports lost memory")]
    Event(#[source] io::Error),
    #[error(transparent)]
    TooMany(#[from] TooManyRanges),
    #[error("cannot duplicate the descriptor of its file")]
    File(#[source] io::Error),
}

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Loss {
    #[error("its file was truncated to {}, but the guest has mapped {}", Size(*file_bytes), Size(*mapped_bytes))]
    CutShort {
        /// Length of the file when the loss was detected.
        file_bytes: u64,
        /// Length that the file must at least have, determined when it was mapped.
        mapped_bytes: u64,
    },
    #[error("a page is bad, or its file system is full")]
    Page,
}

/// Command-line flag that created a range of guest memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RangeSource {
    /// Flag with its hyphens: `--pmem`.
    pub flag: &'static str,
    /// Keys that identify the range among those of the flag: `file=/img`. Empty if there is only
    /// one.
    pub key: String,
}

impl fmt::Display for RangeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { flag, key } = self;
        if key.is_empty() { f.write_str(flag) } else { write!(f, "{flag} {key}") }
    }
}

/// Watched range of guest memory, with a record of its loss.
#[derive(Debug)]
pub struct GuestRange {
    source: RangeSource,
    /// Length that the file must at least have. 0 if there is no file.
    mapped_bytes: AtomicU64,
    /// Length to which the file was truncated, or [`WHOLE`].
    cut_to_bytes: AtomicU64,
    page_lost: AtomicBool,
    alarm: Arc<Alarm>,
}

/// Marks a file that was not truncated. No file is this long.
const WHOLE: u64 = u64::MAX;

/// Actions to take immediately when memory is lost.
#[derive(Debug)]
struct Alarm {
    loss: LossFlag,
    inhibitor: Arc<EntryInhibitor>,
    event: EventFd,
}

impl Alarm {
    /// May be called in a signal handler.
    fn raise(&self) {
        // 1. Make devices discard data that they copy from now on.
        self.loss.raise();
        // 2. Stop the guest before it can read zeros.
        self.inhibitor.stop();
        // 3. Notify the VM task. The write fails only if the counter is at its maximum, and the
        //    eventfd is then readable anyway.
        let _ = self.event.write(1);
    }
}

impl GuestRange {
    /// Loss of the range, if one was detected.
    pub fn loss(&self) -> Option<Loss> {
        match self.cut_to_bytes.load(Ordering::Acquire) {
            WHOLE => self.page_lost.load(Ordering::Acquire).then_some(Loss::Page),
            file_bytes => {
                let mapped_bytes = self.mapped_bytes.load(Ordering::Acquire);
                Some(Loss::CutShort { file_bytes, mapped_bytes })
            }
        }
    }
}

impl OnPageLost for GuestRange {
    fn page_lost(&self) {
        self.page_lost.store(true, Ordering::Release);
        self.alarm.raise();
    }
}

type Watched = (Arc<GuestRange>, Option<Arc<File>>);

/// Watches all memory of one VM that can be lost.
pub struct LostMemory {
    alarm: Arc<Alarm>,
    ranges: Mutex<Vec<Watched>>,
}

/// Watched range. Dropping it ends the watch.
pub struct WatchedRange {
    lost: Arc<LostMemory>,
    range: Arc<GuestRange>,
}

impl Drop for WatchedRange {
    fn drop(&mut self) {
        self.lost.ranges.lock().retain(|(known, _)| !Arc::ptr_eq(known, &self.range));
    }
}

impl Expose for LostMemory {
    fn expose(&self, out: &mut Exposition) {
        // Several ranges of one zone have the same source.
        let mut lost = BTreeMap::new();
        for (range, _) in &*self.ranges.lock() {
            *lost.entry(range.source.clone()).or_insert(false) |= range.loss().is_some();
        }
        let lost = lost.into_iter().map(|(RangeSource { flag, key }, is_lost)| {
            (and(&one("source", flag.trim_start_matches('-')), "key", &key), is_lost)
        });
        out.flags(Family("memory_lost", "1 when memory of the guest is lost.", None), lost);
    }
}

impl LostMemory {
    /// Creates a watch without ranges. A later loss stops the vCPUs through `inhibitor`, and raises
    /// `loss`.
    pub fn new(inhibitor: Arc<EntryInhibitor>, loss: LossFlag) -> Result<Self, WatchError> {
        let event = EventFd::new(EFD_NONBLOCK).map_err(WatchError::Event)?;
        let alarm = Arc::new(Alarm { loss, inhibitor, event });
        Ok(Self { alarm, ranges: Mutex::default() })
    }

    /// Watches anonymous memory. It is lost only if the hardware reports it as bad.
    pub fn watch(&self, source: RangeSource, reservation: &Reservation) -> Result<(), WatchError> {
        self.add(source, reservation, None).map(drop)
    }

    /// Watches memory that is mapped from a file or device. The first `mapped_bytes` of the file
    /// must exist.
    pub fn watch_file(
        &self,
        source: RangeSource,
        reservation: &Reservation,
        file: BorrowedFd<'_>,
        mapped_bytes: u64,
    ) -> Result<Arc<GuestRange>, WatchError> {
        let file = File::from(file.try_clone_to_owned().map_err(WatchError::File)?);
        self.add(source, reservation, Some((file, mapped_bytes)))
    }

    /// Watches a mapped file until the result is dropped.
    pub fn watch_mapped(
        self: &Arc<Self>,
        source: RangeSource,
        reservation: &Reservation,
        file: BorrowedFd<'_>,
        mapped_bytes: u64,
    ) -> Result<WatchedRange, WatchError> {
        let range = self.watch_file(source, reservation, file, mapped_bytes)?;
        Ok(WatchedRange { lost: Arc::clone(self), range })
    }

    fn add(
        &self,
        source: RangeSource,
        reservation: &Reservation,
        file: Option<(File, u64)>,
    ) -> Result<Arc<GuestRange>, WatchError> {
        let (file, mapped_bytes) = file.unzip();
        let range = Arc::new(GuestRange {
            source,
            mapped_bytes: AtomicU64::new(mapped_bytes.unwrap_or(0)),
            cut_to_bytes: AtomicU64::new(WHOLE),
            page_lost: AtomicBool::new(false),
            alarm: Arc::clone(&self.alarm),
        });
        reservation.watch(Arc::clone(&range) as Arc<dyn OnPageLost>)?;
        self.ranges.lock().push((Arc::clone(&range), file.map(Arc::new)));
        Ok(range)
    }

    /// Expects `file` to have a larger length from now on.
    pub fn file_has_grown(&self, file: BorrowedFd<'_>, mapped_bytes: u64) {
        let grown = FileId::of_open(file);
        for (range, file) in &*self.ranges.lock() {
            if file.as_ref().is_some_and(|file| FileId::of_open(file.as_fd()) == grown) {
                range.mapped_bytes.store(mapped_bytes, Ordering::Release);
            }
        }
    }

    /// Event that is raised when memory is lost.
    pub fn event(&self) -> &EventFd {
        &self.alarm.event
    }

    /// All watched ranges, for metrics.
    pub fn ranges(&self) -> Vec<Arc<GuestRange>> {
        self.ranges.lock().iter().map(|(range, _)| Arc::clone(range)).collect()
    }

    /// Returns true if another process could truncate a file of a watched range.
    pub fn has_files(&self) -> bool {
        self.ranges.lock().iter().any(|(_, file)| file.as_deref().is_some_and(is_regular))
    }

    /// Checks the length of every file. If this or an earlier check found lost memory, stops the
    /// guest and returns the reason.
    pub fn check_files(&self) -> Option<String> {
        // The checks and the wait for vCPUs run without the lock, because vCPUs also call this
        // function.
        let ranges = self.ranges.lock().clone();
        for (range, file) in &ranges {
            let mapped_bytes = range.mapped_bytes.load(Ordering::Acquire);
            if let Some(file_bytes) =
                file.as_deref().and_then(|file| cut_to_bytes(file, mapped_bytes))
            {
                // Stores only the first length that was detected.
                let _ = range.cut_to_bytes.compare_exchange(
                    WHOLE,
                    file_bytes,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
            }
        }
        let reason = reason(ranges.iter().map(|(range, _)| (&range.source, range.loss())));
        if reason.is_some() {
            self.alarm.loss.raise();
            self.alarm.inhibitor.stop();
        }
        reason
    }

    /// Checks whether lost memory caused a vCPU's access fault. If so, stops the guest and notifies
    /// the VM task.
    pub fn explains_a_fault(&self) -> bool {
        let lost = self.check_files().is_some();
        if lost {
            self.alarm.raise();
        }
        lost
    }
}

/// Other files need no checks. Devices keep their length, or report errors.
fn is_regular(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file())
}

/// Length of a file that is shorter than `mapped_bytes`. `None` if the file is not shorter, or if
/// its length cannot be read.
pub fn cut_to_bytes(file: &File, mapped_bytes: u64) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    (metadata.is_file() && metadata.len() < mapped_bytes).then_some(metadata.len())
}

/// Reason for pausing the VM, if memory is lost.
fn reason<'a>(ranges: impl Iterator<Item = (&'a RangeSource, Option<Loss>)>) -> Option<String> {
    let mut lost: Vec<_> =
        ranges.filter_map(|(source, loss)| loss.map(|loss| format!("{source}: {loss}"))).collect();
    // Several parts of one zone have the same source.
    lost.dedup();
    (!lost.is_empty()).then(|| format!("guest memory is lost: {}", lost.join("; ")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::entry_inhibitor::tests::vcpu;
    use crate::memory::backing::Access;
    use crate::metrics::Metrics;

    const MIB: u64 = 1 << 20;

    fn source(flag: &'static str) -> RangeSource {
        RangeSource { flag, key: String::new() }
    }

    /// Mapped file on tmpfs.
    fn mapped() -> (File, Reservation) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(2 * MIB).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        reservation.map_file(0, 2 * MIB, file.as_fd(), 0, Access::ReadWrite).unwrap();
        (file, reservation)
    }

    fn byte(reservation: &Reservation, offset: u64) -> *mut u8 {
        assert!(offset < reservation.len_bytes());
        (reservation.addr() + offset) as *mut u8
    }

    fn lost_memory() -> (LostMemory, Arc<EntryInhibitor>, LossFlag) {
        let (inhibitor, flag) = (Arc::<EntryInhibitor>::default(), LossFlag::default());
        (LostMemory::new(Arc::clone(&inhibitor), flag.clone()).unwrap(), inhibitor, flag)
    }

    #[test]
    fn device_access_to_a_lost_page_stops_the_guest() {
        let (file, reservation) = mapped();
        let (lost, inhibitor, flag) = lost_memory();
        // `mapped_bytes` is the length after truncation, so only an access to the page detects the
        // loss.
        lost.watch_file(source("data"), &reservation, file.as_fd(), MIB).unwrap();
        // SAFETY: mapped, and used by this test only.
        unsafe { byte(&reservation, MIB).write_volatile(7) };
        assert_eq!(lost.check_files(), None);
        assert!(!inhibitor.is_set() && !flag.is_raised() && lost.event().read().is_err());
        file.set_len(MIB).unwrap();
        // SAFETY: the page is mapped, either to the file or to the zeros that the handler put in
        // its place.
        assert_eq!(unsafe { byte(&reservation, MIB).read_volatile() }, 0);
        assert!(inhibitor.is_set() && flag.is_raised());
        assert_eq!(lost.event().read().unwrap(), 1);
        assert_eq!(lost.ranges()[0].loss(), Some(Loss::Page));
        let reason = lost.check_files().unwrap();
        assert!(reason.contains("data: a page is bad"), "{reason}");
    }

    #[test]
    fn vcpus_have_left_the_guest_when_a_device_reads_zeros() {
        let (file, reservation) = mapped();
        let inhibitor = Arc::new(EntryInhibitor::new(1));
        let lost = LostMemory::new(Arc::clone(&inhibitor), LossFlag::default()).unwrap();
        lost.watch_file(source("data"), &reservation, file.as_fd(), 0).unwrap();
        let (vcpu, entered) = vcpu(&inhibitor, 0);
        entered.recv_timeout(Duration::from_secs(20)).unwrap();
        file.set_len(0).unwrap();
        assert!(inhibitor.is_any_in_guest());
        // SAFETY: the page is mapped, either to the file or to the zeros that the handler put in
        // its place.
        assert_eq!(unsafe { byte(&reservation, 0).read_volatile() }, 0);
        assert!(!inhibitor.is_any_in_guest());
        assert_eq!(vcpu.join().unwrap(), 1);
    }

    #[test]
    fn truncated_file_is_detected_without_access_and_stays_lost() {
        let ((file, reservation), (other_file, other)) = (mapped(), mapped());
        let (lost, inhibitor, flag) = lost_memory();
        lost.watch_file(source("data"), &reservation, file.as_fd(), 2 * MIB).unwrap();
        lost.watch_file(source("other"), &other, other_file.as_fd(), 2 * MIB).unwrap();
        assert!(lost.has_files() && !lost.explains_a_fault());
        assert!(!inhibitor.is_set(), "memory without a loss inhibits entries");
        file.set_len(MIB).unwrap();
        let reason = lost.check_files().unwrap();
        assert_eq!(
            reason,
            "guest memory is lost: data: its file was truncated to 1 MiB, but the guest has mapped 2 MiB"
        );
        assert!(inhibitor.is_set() && flag.is_raised());
        // Restoring the old length does not restore the content.
        file.set_len(2 * MIB).unwrap();
        assert_eq!(lost.check_files().unwrap(), reason);
        inhibitor.release();
        assert!(lost.explains_a_fault() && inhibitor.is_set());
        assert!(lost.event().read().is_ok());
        let losses: Vec<_> = lost.ranges().iter().map(|range| range.loss()).collect();
        assert_eq!(losses, [Some(Loss::CutShort { file_bytes: MIB, mapped_bytes: 2 * MIB }), None]);
    }

    #[test]
    fn grown_file_must_keep_its_new_length() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * MIB).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        reservation.map_anonymous(0, 2 * MIB).unwrap();
        let (lost, ..) = lost_memory();
        lost.watch_file(source("data"), &reservation, file.as_fd(), 2 * MIB).unwrap();
        file.set_len(3 * MIB).unwrap();
        assert_eq!(lost.check_files(), None);
        lost.file_has_grown(tempfile::tempfile().unwrap().as_fd(), 4 * MIB);
        assert_eq!(lost.check_files(), None, "another file has grown");
        lost.file_has_grown(file.as_fd(), 4 * MIB);
        assert!(lost.check_files().unwrap().contains("truncated to 3 MiB"));
    }

    #[test]
    fn memory_without_a_file_can_be_bad_but_not_truncated() {
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        reservation.map_anonymous(0, 2 * MIB).unwrap();
        let (lost, inhibitor, _) = lost_memory();
        lost.watch(source("--memory"), &reservation).unwrap();
        assert!(!lost.has_files());
        assert_eq!(lost.check_files(), None);
        lost.ranges()[0].page_lost();
        assert!(inhibitor.is_set() && lost.check_files().unwrap().contains("--memory"));
    }

    #[test]
    fn reason_names_each_loss_once() {
        let cut = Loss::CutShort { file_bytes: 0, mapped_bytes: 4 * MIB };
        let ranges =
            [("a", None), ("b", Some(Loss::Page)), ("b", Some(Loss::Page)), ("c", Some(cut))];
        let ranges = ranges.map(|(flag, loss)| (source(flag), loss));
        let text = reason(ranges.iter().map(|(source, loss)| (source, *loss))).unwrap();
        assert_eq!(text.matches("b: ").count(), 1, "{text}");
        assert!(text.contains("c: its file was truncated to 0") && !text.contains("a: "), "{text}");
        assert_eq!(reason([(&source("a"), None)].into_iter()), None);
    }

    #[test]
    fn metric_of_a_path_with_spaces_has_the_whole_key() {
        let (lost, _, _) = lost_memory();
        let reservation = Reservation::new(4096, 4096).unwrap();
        let source = RangeSource { flag: "--pmem", key: "file=/my images/a b".to_owned() };
        assert_eq!(source.to_string(), "--pmem file=/my images/a b");
        lost.watch(source, &reservation).unwrap();
        let text = Metrics::new("a").encode(&lost).unwrap();
        let series = r#"foreshore_memory_lost{vm="a",source="pmem",key="file=/my images/a b"} 0.0"#;
        assert!(text.lines().any(|line| line == series), "{text}");
    }
}
