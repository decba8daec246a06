//! Watched memory: mapped memory that may lose pages, and that other code accesses without the
//! routines of [`super::guarded`].
//!
//! A VMM maps parts of a pool into its guest. The code of devices accesses these parts like any
//! other guest memory. The SIGBUS handler cannot make such an access fail, so it completes the
//! access. It notifies the watcher of the range, and then replaces the lost page with zeros. The
//! watcher must ensure that the zeros are not used as data.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use super::guarded::Guard;

/// Maximum number of watched ranges. It is small so that the handler finds a range quickly.
const MAX_RANGES: usize = 256;

const PAGE_BYTES: usize = 4096;

/// Page sizes, smallest first.
const PAGE_SIZES: [usize; 3] = [PAGE_BYTES, 2 << 20, 1 << 30];

/// Callback for lost pages.
pub trait OnPageLost: Send + Sync {
    /// Called in the SIGBUS handler when a page is lost. The thread is the one that accessed the
    /// page or received the kernel's report. Only async-signal-safe operations are allowed
    /// (signal-safety(7)): no locks and no allocation. After the return, the page reads as zeros.
    fn page_lost(&self);
}

/// The table of watched ranges is full.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{MAX_RANGES} memory ranges are already watched for lost pages, the maximum")]
pub struct TooManyRanges;

/// Watched range. Dropping it ends the watch.
pub struct Watch {
    entry: &'static Entry,
}

/// Row of the table. Handlers may read a row while it changes, so it has a version number, which is
/// odd during a change.
struct Entry {
    version: AtomicUsize,
    start: AtomicUsize,
    /// Equal to `start` if the row is free.
    end: AtomicUsize,
    on_lost: AtomicPtr<Listener>,
    /// Owner of the value that `on_lost` points to. Accessed only with `TABLE_LOCK` held.
    listener: UnsafeCell<Option<Box<Listener>>>,
}

/// Boxed to obtain a thin pointer, which can be loaded atomically.
type Listener = Arc<dyn OnPageLost>;

// SAFETY: all fields except `listener` are atomic, and `listener` is accessed only with
// `TABLE_LOCK` held.
unsafe impl Sync for Entry {}

static TABLE: [Entry; MAX_RANGES] = [const {
    Entry {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        on_lost: AtomicPtr::new(ptr::null_mut()),
        listener: UnsafeCell::new(None),
    }
}; MAX_RANGES];

/// Held during changes of the table.
static TABLE_LOCK: Mutex<()> = Mutex::new(());

fn lock_table() -> MutexGuard<'static, ()> {
    // A change consists only of stores, so it cannot panic halfway.
    TABLE_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) =
            (self.entry.start.load(Ordering::Relaxed), self.entry.end.load(Ordering::Relaxed));
        write!(f, "Watch({start:#x}..{end:#x})")
    }
}

impl Watch {
    /// Watches a range of addresses, which must start and end at page boundaries.
    ///
    /// # Safety
    /// During the watch, the range must belong to the caller, because a lost page may be replaced
    /// at any time. It must no longer be accessed when the watch is dropped.
    pub unsafe fn new(
        range: Range<usize>,
        on_lost: Arc<dyn OnPageLost>,
    ) -> Result<Self, TooManyRanges> {
        assert!(range.start < range.end, "an empty range has no pages");
        assert!(range.start.is_multiple_of(PAGE_BYTES) && range.end.is_multiple_of(PAGE_BYTES));
        Guard::new();
        let _table = lock_table();
        let entry = TABLE.iter().find(|entry| entry.is_free()).ok_or(TooManyRanges)?;
        entry.change(range, Some(Box::new(on_lost)));
        Ok(Self { entry })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _table = lock_table();
        self.entry.change(0..0, None);
    }
}

impl Entry {
    fn is_free(&self) -> bool {
        self.start.load(Ordering::Relaxed) == self.end.load(Ordering::Relaxed)
    }

    /// Changes a row. The caller must hold `TABLE_LOCK`.
    fn change(&self, range: Range<usize>, listener: Option<Box<Listener>>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        let on_lost = listener.as_deref().map_or(ptr::null(), ptr::from_ref);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.on_lost.store(on_lost.cast_mut(), Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
        // SAFETY: the caller holds `TABLE_LOCK`. The previous listener is not being called, because
        // its range is no longer accessed.
        unsafe { *self.listener.get() = listener };
    }

    /// Returns the listener of an address if this row's range contains it. A row that is being
    /// changed is skipped, because its range is not in use at this moment.
    fn listener_of(&self, address: usize) -> Option<(*const Listener, Range<usize>)> {
        let version = self.version.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let on_lost = self.on_lost.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let unchanged =
            version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (unchanged && (start..end).contains(&address)).then_some((on_lost.cast_const(), start..end))
    }
}

/// Notifies the watcher of an address that the page is lost, and replaces the page with zeros.
/// Returns false if the page has no watcher or if there is no memory for the zeros. Called in a
/// signal handler.
pub(super) fn replace(address: usize) -> bool {
    let Some((on_lost, range)) = TABLE.iter().find_map(|entry| entry.listener_of(address)) else {
        return false;
    };
    // 1. Notify before the zeros are visible.
    // SAFETY: the listener lives as long as its range is in use, and an access to the range is in
    // progress.
    unsafe { (*on_lost).page_lost() };
    // 2. The lost page is no longer accessible, so the zeros overwrite no data. A part of a
    //    hugetlbfs page cannot be replaced (EINVAL; Linux mm/hugetlb.c, hugetlb_vm_op_split). Bad
    //    memory removes the whole huge page, so that page is replaced. After any other error, no
    //    larger piece is tried, because it would include good memory.
    replace_page(address, &range, map_zeros)
}

/// Replaces the page around `address`. Uses the smallest page size that `map_zeros` accepts, and
/// stays within `range`.
fn replace_page(
    address: usize,
    range: &Range<usize>,
    mut map_zeros: impl FnMut(usize, usize) -> Result<(), libc::c_int>,
) -> bool {
    for size in PAGE_SIZES {
        let start = address / size * size;
        if start < range.start || range.end - start < size {
            return false;
        }
        match map_zeros(start, size) {
            Ok(()) => return true,
            Err(libc::EINVAL) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Maps zeros over a range of addresses. The error is the errno value of the system call.
fn map_zeros(start: usize, size: usize) -> Result<(), libc::c_int> {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
    );
    // SAFETY: the range consists of whole pages within a range that the caller of `Watch::new`
    // passed. mmap is a system call, which is allowed in a handler. The thread's `errno` is
    // restored.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let zeros = libc::mmap(start as *mut _, size, protection, flags, -1, 0);
        let error = *errno;
        *errno = before;
        if zeros == libc::MAP_FAILED { Err(error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    /// Serializes tests, because one of them fills the table of the whole process.
    static TEST_LOCK: Mutex<()> = Mutex::new(());

    fn lock_test() -> MutexGuard<'static, ()> {
        TEST_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[derive(Default)]
    struct CountListener(AtomicUsize);

    impl OnPageLost for CountListener {
        fn page_lost(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts notifications, and those that arrived after the zeros were visible.
    struct OrderListener {
        address: usize,
        /// Destination for a copy of the byte. The kernel copies it only if it is readable.
        sink: File,
        notified: AtomicUsize,
        too_late: AtomicUsize,
    }

    impl OnPageLost for OrderListener {
        fn page_lost(&self) {
            self.notified.fetch_add(1, Ordering::Relaxed);
            // SAFETY: a system call that fails if the byte is not readable.
            let copied = unsafe { libc::write(self.sink.as_raw_fd(), self.address as *const _, 1) };
            self.too_late.fetch_add(usize::from(copied == 1), Ordering::Relaxed);
        }
    }

    /// Mapping of a file on tmpfs.
    struct Pages {
        file: File,
        start: usize,
        len: usize,
    }

    impl Pages {
        fn new(count: usize) -> Self {
            let (file, len) = (tempfile::tempfile_in("/dev/shm").unwrap(), count * PAGE_BYTES);
            file.set_len(len as u64).unwrap();
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let map = unsafe {
                libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
            };
            assert_ne!(map, libc::MAP_FAILED);
            Self { file, start: map as usize, len }
        }

        fn watch(&self, on_lost: &Arc<CountListener>) -> Result<Watch, TooManyRanges> {
            // SAFETY: the tests access only watched pages.
            unsafe { Watch::new(self.start..self.start + self.len, Arc::clone(on_lost) as _) }
        }

        fn byte(&self, page: usize) -> *mut u8 {
            assert!(page * PAGE_BYTES < self.len);
            (self.start + page * PAGE_BYTES + 8) as *mut u8
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: mapped in new(), and no longer used.
            unsafe { libc::munmap(self.start as *mut _, self.len) };
        }
    }

    /// Simulates the replacement of a lost page in memory with pages of `page_bytes`. Returns the
    /// calls, and true if the page was replaced.
    fn replaced_pages(
        address: usize,
        range: Range<usize>,
        page_bytes: usize,
        error: libc::c_int,
    ) -> (Vec<(usize, usize)>, bool) {
        let mut calls = Vec::new();
        let is_replaced = replace_page(address, &range, |start, size| {
            calls.push((start, size));
            if size < page_bytes { Err(error) } else { Ok(()) }
        });
        (calls, is_replaced)
    }

    #[test]
    fn smallest_whole_page_within_the_range_is_replaced() {
        let [small, huge, giant] = PAGE_SIZES;
        let (start, at) = (giant + 3 * huge, giant + 4 * huge + 5 * small + 8);
        let tries = [(at - 8, small), (giant + 4 * huge, huge), (giant, giant)];
        let range = start..start + 4 * huge;
        let replace = |range, page_bytes| replaced_pages(at, range, page_bytes, libc::EINVAL);
        assert_eq!(replace(range.clone(), small), (tries[..1].to_vec(), true));
        assert_eq!(replace(range.clone(), huge), (tries[..2].to_vec(), true));
        // The range contains only a part of the page.
        assert_eq!(replace(range.clone(), giant), (tries[..2].to_vec(), false));
        assert_eq!(replace(start..at + small, huge), (tries[..1].to_vec(), false));
        assert_eq!(
            replace(giant + 4 * huge + small..range.end, huge),
            (tries[..1].to_vec(), false)
        );
        assert_eq!(replace(giant..2 * giant, giant), (tries.to_vec(), true));
        assert_eq!(replaced_pages(at, range, huge, libc::ENOMEM), (tries[..1].to_vec(), false));
    }

    /// Maps huge pages. Returns `None` if the host has no free huge pages.
    fn huge_pages(count: usize) -> Option<usize> {
        let (protection, size) = (libc::PROT_READ | libc::PROT_WRITE, count * (2 << 20));
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
        if map == libc::MAP_FAILED {
            eprintln!("skipped: no huge pages here (vm.nr_hugepages)");
            return None;
        }
        Some(map as usize)
    }

    #[test]
    fn lost_huge_page_is_replaced_as_a_whole_and_its_neighbors_stay() {
        const HUGE: usize = 2 << 20;
        let _lock = lock_test();
        let Some(start) = huge_pages(3) else { return };
        // SAFETY: the bytes are inside the mapping of this test.
        unsafe { ptr::write_bytes(start as *mut u8, 0x5a, 3 * HUGE) };
        let count = Arc::new(CountListener::default());
        // SAFETY: only this test accesses the range, and it stops before the watch ends.
        let watch =
            unsafe { Watch::new(start..start + 3 * HUGE, Arc::clone(&count) as _) }.unwrap();
        assert!(replace(start + HUGE + 5 * PAGE_BYTES + 8));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        for (at, byte) in
            [(0, 0x5a), (HUGE - 1, 0x5a), (HUGE, 0), (2 * HUGE - 1, 0), (2 * HUGE, 0x5a)]
        {
            // SAFETY: as above.
            let found = unsafe { ptr::read_volatile((start + at) as *const u8) };
            assert_eq!(found, byte, "at {at:#x}");
        }
        drop(watch);
        // SAFETY: mapped above, and no longer used.
        unsafe { libc::munmap(start as *mut _, 3 * HUGE) };
    }

    #[test]
    fn replacement_stays_within_the_watched_range() {
        let _lock = lock_test();
        let Some(start) = huge_pages(2) else { return };
        let count = Arc::new(CountListener::default());
        // The range is half of a huge page, and the kernel replaces only whole pages of hugetlbfs.
        // SAFETY: only this test accesses the range, and it stops before the watch ends.
        let watch =
            unsafe { Watch::new(start..start + (1 << 20), Arc::clone(&count) as _) }.unwrap();
        assert!(!replace(start + PAGE_BYTES));
        drop(watch);
        // SAFETY: mapped above, and no longer used.
        unsafe { libc::munmap(start as *mut _, 4 << 20) };
    }

    #[test]
    fn watcher_is_notified_once_per_page_and_the_access_reads_zeros() {
        let _lock = lock_test();
        let (pages, others) = (Pages::new(4), Pages::new(1));
        let (lost, others_lost) =
            (Arc::<CountListener>::default(), Arc::<CountListener>::default());
        let _watches = (others.watch(&others_lost).unwrap(), pages.watch(&lost).unwrap());
        let count = || lost.0.load(Ordering::Relaxed);
        for page in 0..4 {
            // SAFETY: inside the mapping.
            unsafe { pages.byte(page).write_volatile(7) };
        }
        pages.file.set_len(PAGE_BYTES as u64).unwrap();
        assert_eq!(count(), 0, "the page has not been accessed");
        for _ in 0..2 {
            // SAFETY: inside the mapping. The handler is under test.
            assert_eq!(unsafe { pages.byte(1).read_volatile() }, 0);
            assert_eq!(count(), 1);
        }
        // SAFETY: as above.
        unsafe { pages.byte(3).write_volatile(9) };
        // SAFETY: as above.
        assert_eq!(unsafe { pages.byte(3).read_volatile() }, 9);
        assert_eq!(count(), 2);
        // SAFETY: as above.
        assert_eq!(unsafe { pages.byte(0).read_volatile() }, 7, "the page still exists");
        assert_eq!(others_lost.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn watcher_is_notified_before_zeros_are_visible() {
        let _lock = lock_test();
        let pages = Pages::new(1);
        let address = pages.byte(0) as usize;
        let sink = tempfile::tempfile_in("/dev/shm").unwrap();
        let order = Arc::new(OrderListener {
            address,
            sink,
            notified: AtomicUsize::new(0),
            too_late: AtomicUsize::new(0),
        });
        // SAFETY: the pages outlive the watch and belong to this test.
        let _watch =
            unsafe { Watch::new(pages.start..pages.start + pages.len, Arc::clone(&order) as _) };
        pages.file.set_len(0).unwrap();
        // SAFETY: inside the mapping. The handler is under test.
        assert_eq!(unsafe { pages.byte(0).read_volatile() }, 0);
        assert_eq!(
            (order.notified.load(Ordering::Relaxed), order.too_late.load(Ordering::Relaxed)),
            (1, 0)
        );
    }

    #[test]
    fn rows_of_the_table_are_reused_and_further_ranges_are_refused() {
        let _lock = lock_test();
        let (pages, lost) = (Pages::new(1), Arc::<CountListener>::default());
        for _ in 0..2 * MAX_RANGES {
            drop(pages.watch(&lost).unwrap());
        }
        let all: Vec<_> = (0..MAX_RANGES).map(|_| pages.watch(&lost).unwrap()).collect();
        let error = pages.watch(&lost).unwrap_err();
        assert!(error.to_string().contains("256"), "{error}");
        assert_eq!(Arc::strong_count(&lost), 1 + MAX_RANGES);
        drop(all);
        assert_eq!(Arc::strong_count(&lost), 1, "the watches hold no references");
    }

    #[test]
    fn address_belongs_only_to_its_range() {
        let _lock = lock_test();
        let (pages, lost) = (Pages::new(2), Arc::<CountListener>::default());
        let find = |address| TABLE.iter().any(|entry| entry.listener_of(address).is_some());
        let end = pages.start + pages.len;
        let watch = pages.watch(&lost).unwrap();
        assert_eq!(
            [pages.start - 1, pages.start, end - 1, end].map(find),
            [false, true, true, false]
        );
        // Simulates a change in progress.
        watch.entry.version.fetch_add(1, Ordering::Relaxed);
        assert!(!find(pages.start));
        watch.entry.version.fetch_sub(1, Ordering::Relaxed);
        drop(watch);
        assert!(!find(pages.start) && !find(0));
    }
}
