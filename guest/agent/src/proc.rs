//! Reads files in /proc. They are kept open and read into one buffer, so that a report needs no
//! memory allocation.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use foreshore_proto::{KernelUse, Memory, RawReport, Stall};
use thiserror::Error;

use crate::parse::{self, ParseError};

/// Initial buffer size. All texts of a small guest fit, and the buffer grows if necessary.
const FIRST_BUFFER_BYTES: usize = 32 * 1024;

/// Upper limit of a text's length. zoneinfo has 150 bytes per zone and CPU.
const MAX_BUFFER_BYTES: usize = 16 << 20;

/// Page size. The kernel fills a page with whole pieces of a text while the next piece fits
/// (seq_read_iter in fs/seq_file.c).
const PAGE_BYTES: usize = 4096;

/// Buffer size for the six numbers in dentry-state.
const UNUSED_BYTES: usize = 256;

/// Age at which the zones' watermarks and sizes are read again. They are also read when the amount
/// of memory changes.
const MAX_ZONES_AGE_MS: u64 = 1_000;

/// Allowed difference between the free memory in buddyinfo and in meminfo, which are read at
/// different times. A block of pages that is being unplugged is on the free lists but is not
/// counted as free, and has at least 2 MiB.
const FREE_SLACK_BYTES: u64 = (2 << 20) - 1;

#[derive(Debug, Error)]
pub(crate) enum ProcError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot parse a file in /proc")]
    Parse(#[from] ParseError),
}

/// File that is read many times.
#[derive(Debug)]
struct Text {
    path: PathBuf,
    file: File,
    pieces: Pieces,
}

/// Pieces in which the kernel writes a text (each call of `show` of a seq_file writes one).
#[derive(Clone, Copy, Debug)]
enum Pieces {
    One,
    /// Pieces of at most this size.
    UpTo(usize),
    /// Pieces that may be longer than a page.
    Long,
}

impl Pieces {
    /// Returns true if a read that ended before the end of the buffer has reached the end of the
    /// text.
    fn is_whole(self, count: usize) -> bool {
        match self {
            Pieces::One => true,
            Pieces::UpTo(piece_bytes) => count + piece_bytes < PAGE_BYTES,
            Pieces::Long => false,
        }
    }
}

/// Files from which a report is created.
#[derive(Debug)]
pub(crate) struct Proc {
    meminfo: Text,
    zoneinfo: Text,
    vmstat: Text,
    /// Missing on some kernels. A report can be created without it.
    buddyinfo: Option<Text>,
    /// Missing if the kernel has no pressure information.
    pressure: Option<Text>,
    /// Numbers of cached dentries and inodes. A report can be created without them.
    dentries: Option<Text>,
    inodes: Option<Text>,
    buffer: Vec<u8>,
    /// Time when the zones were last read, and the amount of memory at that time.
    zones_read: Option<(u64, u64)>,
    /// Locked and compressed pages in kernel zones at that time.
    other_user_pages: u64,
}

impl Proc {
    /// Opens the files below `root`, which is /proc outside of tests.
    pub(crate) fn open(root: &Path) -> Result<Self, ProcError> {
        Ok(Proc {
            meminfo: Text::open(root.join("meminfo"), Pieces::One)?,
            // Each piece describes one node.
            zoneinfo: Text::open(root.join("zoneinfo"), Pieces::Long)?,
            // Each piece is one line.
            vmstat: Text::open(root.join("vmstat"), Pieces::UpTo(100))?,
            // Each piece describes one node, with a line for each zone and eleven numbers per line.
            buddyinfo: Text::open(root.join("buddyinfo"), Pieces::UpTo(1024)).ok(),
            pressure: Text::open(root.join("pressure/memory"), Pieces::One).ok(),
            dentries: Text::open(root.join("sys/fs/dentry-state"), Pieces::One).ok(),
            inodes: Text::open(root.join("sys/fs/inode-nr"), Pieces::One).ok(),
            buffer: vec![0; FIRST_BUFFER_BYTES],
            zones_read: None,
            other_user_pages: 0,
        })
    }

    /// Fills in the parts of a report that come from /proc.
    pub(crate) fn fill(&mut self, report: &mut RawReport, now_ms: u64) -> Result<(), ProcError> {
        let (memory, kernel) = parse::meminfo(self.meminfo.read(&mut self.buffer)?)?;
        let (unused_dentries, unused_inodes) =
            (self.unused(&self.dentries), self.unused(&self.inodes));
        (report.memory, report.kernel) =
            (memory, Some(KernelUse { unused_dentries, unused_inodes, ..kernel }));
        let total_bytes = report.memory.total_bytes;
        let are_known = self.zones_read.is_some_and(|(at_ms, of_bytes)| {
            of_bytes == total_bytes && now_ms.saturating_sub(at_ms) < MAX_ZONES_AGE_MS
        });
        if !(are_known && self.fill_free_pages(report)?) {
            self.other_user_pages =
                parse::zoneinfo(self.zoneinfo.read(&mut self.buffer)?, &mut report.zones)?;
            self.zones_read = Some((now_ms, total_bytes));
            self.fill_free_blocks(report)?;
        }
        report.counters = parse::vmstat(self.vmstat.read(&mut self.buffer)?)?;
        report.stall = match &self.pressure {
            Some(pressure) => parse::pressure(pressure.read(&mut self.buffer)?)?,
            None => Stall::default(),
        };
        Ok(())
    }

    /// Locked and compressed pages in kernel zones. Read together with the sizes of the zones.
    pub(crate) fn other_user_pages(&self) -> u64 {
        self.other_user_pages
    }

    /// Number of objects on LRU lists, read from a file in /proc/sys/fs.
    fn unused(&self, text: &Option<Text>) -> Option<u64> {
        let mut buffer = [0; UNUSED_BYTES];
        parse::unused(text.as_ref()?.read_once(&mut buffer).ok()?)
    }

    /// Updates fast-changing values of the zones from buddyinfo. buddyinfo is shorter than
    /// zoneinfo, which has five lines for each zone and CPU. Returns false if the result does not
    /// match the known zones.
    fn fill_free_pages(&mut self, report: &mut RawReport) -> Result<bool, ProcError> {
        let Some(buddyinfo) = &self.buddyinfo else { return Ok(false) };
        let text = buddyinfo.read(&mut self.buffer)?;
        let free_bytes = match parse::free_pages(text, &mut report.zones) {
            Ok(Some(free_pages)) => free_pages.saturating_mul(PAGE_BYTES as u64),
            _ => return Ok(false),
        };
        let fits = free_bytes.abs_diff(report.memory.free_bytes) <= FREE_SLACK_BYTES;
        Ok(fits && parse::buddyinfo(text, &mut report.zones).is_ok())
    }

    fn fill_free_blocks(&mut self, report: &mut RawReport) -> Result<(), ProcError> {
        let Some(buddyinfo) = &self.buddyinfo else { return Ok(()) };
        let text = buddyinfo.read(&mut self.buffer)?;
        if parse::buddyinfo(text, &mut report.zones).is_err() {
            // A report without these values is still useful.
            report.zones.iter_mut().for_each(|zone| zone.largest_free_blocks = None);
            self.buddyinfo = None;
        }
        Ok(())
    }

    pub(crate) fn memory(&mut self) -> Result<(Memory, KernelUse), ProcError> {
        Ok(parse::meminfo(self.meminfo.read(&mut self.buffer)?)?)
    }
}

impl Text {
    fn open(path: PathBuf, pieces: Pieces) -> Result<Self, ProcError> {
        match File::open(&path) {
            Ok(file) => Ok(Text { path, file, pieces }),
            Err(source) => Err(ProcError::Read { path, source }),
        }
    }

    fn read<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ProcError> {
        let mut length = 0;
        loop {
            if length == buffer.len() {
                if length >= MAX_BUFFER_BYTES {
                    return Err(self.failed(io::Error::from(io::ErrorKind::FileTooLarge)));
                }
                buffer.resize(length * 2, 0);
            }
            match self.file.read_at(&mut buffer[length..], length as u64) {
                Ok(0) => return Ok(&buffer[..length]),
                Ok(count) => {
                    length += count;
                    if length < buffer.len() && self.pieces.is_whole(count) {
                        return Ok(&buffer[..length]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    /// Reads a file that fits into one read.
    fn read_once<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        let length = self.file.read_at(buffer, 0)?;
        Ok(&buffer[..length])
    }

    fn failed(&self, source: io::Error) -> ProcError {
        ProcError::Read { path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use foreshore_proto::{PROTOCOL_VERSION, Report};

    use super::*;
    use crate::tree::Tree;

    #[test]
    fn a_report_of_this_machine_passes_verification() {
        let mut report =
            RawReport { version: PROTOCOL_VERSION, monotonic_ms: 1 << 40, ..RawReport::default() };
        Proc::open(Path::new("/proc")).expect("open").fill(&mut report, 0).expect("fill");
        let report = Report::try_from(report).expect("verifies");
        assert!(report.memory().total_bytes > 0 && !report.zones().is_empty());
    }

    #[test]
    fn texts_longer_than_the_buffer_are_read_whole() {
        let tree = Tree::new(&[]);
        tree.put("long", "x".repeat(3 * FIRST_BUFFER_BYTES + 1));
        let mut buffer = vec![0; FIRST_BUFFER_BYTES];
        let text = Text::open(tree.at("long"), Pieces::Long).expect("open");
        assert_eq!(text.read(&mut buffer).expect("read").len(), 3 * FIRST_BUFFER_BYTES + 1);
        assert_eq!(text.read(&mut buffer).expect("again").len(), 3 * FIRST_BUFFER_BYTES + 1);
    }

    #[test]
    fn text_ends_if_a_further_piece_would_have_fit() {
        for (pieces, count, whole) in [
            (Pieces::One, 1, true),
            (Pieces::One, 9_000, true),
            (Pieces::UpTo(100), 3_995, true),
            (Pieces::UpTo(100), 3_996, false),
            (Pieces::Long, 1, false),
        ] {
            assert_eq!(pieces.is_whole(count), whole, "{pieces:?} {count}");
        }
        // Uses files of the machine that runs the test. A second read must find nothing, because
        // the first one read the whole text.
        let proc = Proc::open(Path::new("/proc")).expect("open");
        let texts = [
            Some(&proc.meminfo),
            Some(&proc.vmstat),
            proc.buddyinfo.as_ref(),
            proc.pressure.as_ref(),
        ];
        for text in texts.into_iter().flatten() {
            let mut buffer = vec![0; FIRST_BUFFER_BYTES];
            let length = text.read(&mut buffer).expect("read").len();
            let rest = text.file.read_at(&mut buffer, length as u64).expect("read");
            assert_eq!(rest, 0, "{:?} has more than {length} bytes", text.path);
        }
    }

    fn guest() -> Tree {
        let texts = ["6.12-swapped/vmstat", "6.12-filled/zoneinfo", "6.12-filled/buddyinfo"];
        let tree = Tree::proc(&texts);
        put_meminfo(&tree, 1_000_000, 335_488);
        tree
    }

    fn put_meminfo(tree: &Tree, total_kib: u64, free_kib: u64) {
        let text = format!(
            "MemTotal: {total_kib} kB\nMemFree: {free_kib} kB\nMemAvailable: {free_kib} kB\n"
        );
        tree.put("meminfo", text);
    }

    /// Number of free pages and low watermark of each zone.
    fn zones_at(proc: &mut Proc, report: &mut RawReport, now_ms: u64) -> Vec<(u64, u64)> {
        proc.fill(report, now_ms).expect("fill");
        report.zones.iter().map(|zone| (zone.free_pages, zone.low_pages)).collect()
    }

    #[test]
    fn sizes_of_zones_are_read_once_per_second_and_free_pages_each_time() {
        let tree = guest();
        let (mut proc, mut report) = (Proc::open(tree.path()).expect("open"), RawReport::default());
        let mut zones_at = |now_ms| {
            let zones = zones_at(&mut proc, &mut report, now_ms);
            assert_eq!(report.zones[3].largest_free_blocks, Some(71));
            zones
        };
        let by_zoneinfo = zones_at(1_000);
        let marks = by_zoneinfo.iter().map(|(_, low_pages)| *low_pages);
        let by_buddyinfo: Vec<_> = [465, 10_022, 345, 73_040].into_iter().zip(marks).collect();
        assert_ne!(by_zoneinfo, by_buddyinfo);
        assert_eq!(zones_at(1_050), by_buddyinfo);
        assert_eq!(zones_at(1_999), by_buddyinfo);
        assert_eq!(zones_at(2_000), by_zoneinfo, "a second later");
        assert_eq!(zones_at(2_050), by_buddyinfo);
        put_meminfo(&tree, 1_000_004, 335_488);
        assert_eq!(zones_at(2_100), by_zoneinfo, "memory was plugged");
        // Blocks that are being unplugged are on the free lists, which then contain 2 MiB more than
        // meminfo counts as free.
        put_meminfo(&tree, 1_000_004, 335_488 - 2_048);
        assert_eq!(zones_at(2_150), by_zoneinfo, "free memory exceeds total memory");
        put_meminfo(&tree, 1_000_004, 335_488 + 2_047);
        assert_eq!(zones_at(2_200), by_buddyinfo);
        // A zone has been added.
        let more = tree.get("buddyinfo") + "Node 2, zone Movable 0 0 0 0 0 0 0 0 0 0 0\n";
        tree.put("buddyinfo", more);
        assert_eq!(zones_at(2_250), by_zoneinfo);
    }

    #[test]
    fn report_reads_each_text_once_and_zoneinfo_once_per_second() {
        let tree = guest();
        tree.put("pressure/memory", include_str!("../tests/data/6.1-one-node/pressure"));
        tree.put("sys/fs/dentry-state", "164829\t139103\t45\t0\t93217\t0\n");
        tree.put("sys/fs/inode-nr", "120413\t507\n");
        let (mut proc, mut report) = (Proc::open(tree.path()).expect("open"), RawReport::default());
        // Counts only this thread, because other tests read files concurrently.
        let counter = Text::open("/proc/thread-self/io".into(), Pieces::One).expect("open");
        let reads = || {
            let mut buffer = [0; 256];
            let text = counter.read_once(&mut buffer).expect("read");
            let text = std::str::from_utf8(text).expect("ASCII");
            let count = text.lines().find_map(|line| line.strip_prefix("syscr: "));
            count.and_then(|count| count.parse::<u64>().ok()).expect("Linux counts them")
        };
        // All files except zoneinfo.
        const SHORT_TEXTS: u64 = 6;
        for (now_ms, of_zoneinfo) in [(1_000, 2), (1_050, 0), (1_999, 0), (2_000, 2), (2_050, 0)] {
            let before = reads();
            proc.fill(&mut report, now_ms).expect("fill");
            // The kernel counts a read when it ends, so the difference includes one read of the
            // counter file itself.
            assert_eq!(reads() - before - 1, SHORT_TEXTS + of_zoneinfo, "at {now_ms} ms");
        }
    }

    #[test]
    fn zones_are_read_each_time_without_buddyinfo() {
        let tree = guest();
        tree.remove("buddyinfo");
        let (mut proc, mut report) = (Proc::open(tree.path()).expect("open"), RawReport::default());
        let before = zones_at(&mut proc, &mut report, 1_000);
        tree.put("zoneinfo", tree.get("zoneinfo").replace("free     10002", "free     10003"));
        let after = zones_at(&mut proc, &mut report, 1_050);
        assert_eq!((before[1].0, after[1].0, &before[2..]), (10_002, 10_003, &after[2..]));
    }

    #[test]
    fn numbers_of_caches_are_reported_if_the_kernel_has_them() {
        let tree = guest();
        let unused = |proc: &mut Proc| {
            let mut report = RawReport::default();
            proc.fill(&mut report, 1_000).expect("fill");
            report.kernel.map(|kernel| (kernel.unused_dentries, kernel.unused_inodes))
        };
        assert_eq!(unused(&mut Proc::open(tree.path()).expect("open")), Some((None, None)));
        tree.put("sys/fs/dentry-state", "164829\t139103\t45\t0\t93217\t0\n");
        tree.put("sys/fs/inode-nr", "120413\t507\n");
        let mut proc = Proc::open(tree.path()).expect("open");
        assert_eq!(unused(&mut proc), Some((Some(139_103), Some(507))));
        tree.put("sys/fs/inode-nr", "120413\t508\n");
        assert_eq!(unused(&mut proc), Some((Some(139_103), Some(508))), "read for each report");
        let here = unused(&mut Proc::open(Path::new("/proc")).expect("open"));
        assert!(here.is_some_and(|(dentries, inodes)| dentries.is_some() && inodes.is_some()));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Proc::open(Path::new("/missing")).expect_err("empty");
        assert!(error.to_string().ends_with("meminfo"), "{error}");
    }
}
